"""A share of a running product's time in which the server's own stream and ours are compared: ``--compare 1%``.

The product never depends on it. It has connections and a thread of its own; what goes wrong in it is logged and
counted, and nobody waits for it.
"""

from __future__ import annotations

import logging
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tailrace.base.threads import CheckedThread, known_error
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import BEFORE_CHANGE_MODES, FULL_DOCUMENT_MODES
from tailrace.core.plan.profile import profile_for
from tailrace.errors import TailraceError, UsageError
from tailrace.watch.compare.comparison import ComparisonLimits, FoundDifference, StreamComparison
from tailrace.watch.compare.deployment import DeploymentComparison, Streams
from tailrace.watch.compare.pairing import KINDS, DifferenceKind

SAMPLE_S: Final = 5.0
#: Of one sample. Each side reads no more than 2,000 events and 8 MB a second, as every comparison does.
SAMPLE_LIMITS: Final = ComparisonLimits(
    duration_s=SAMPLE_S,
    events=10_000,
    bytes_max=8 << 20,
    evidence_bytes_max=16 << 20,
    resume_every_s=SAMPLE_S / 2,
    patience_s=15.0,
)
_SHARE_MIN: Final = 1e-4
_SHARE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(%?)", re.ASCII)
#: How long a stop waits for the sample that is under way.
_STOP_S: Final = 5.0
_STARTS: Final = ("resumeAfter", "startAfter", "startAtOperationTime")
_log = logging.getLogger("tailrace.compare")


def parse_share(text: str) -> float:
    """The share that "1%" or "0.01" means. Raises UsageError."""
    match = _SHARE.fullmatch(text.strip())
    hint = "Such as 1% or 0.01: of the time, from 0.01% to 100%"
    if match is None:
        raise UsageError(f"'{text}' is not a share of the time", hint=hint)
    share = float(match[1]) / (100 if match[2] else 1)
    if not match[2] and share >= 1:
        raise UsageError(f"'{text}' is not a share of the time: does it mean {text.strip()}%?", hint=hint)
    if not _SHARE_MIN <= share <= 1:
        raise UsageError(f"'{text}' cannot be kept as a share", hint=hint)
    return share


def comparable(
    stage: Mapping[str, Any], pipeline: Any = (), collation: Mapping[str, Any] | None = None
) -> tuple[Streams, list[str]]:
    """What both streams are asked for where a product's stream has the options ``stage``, by the server's names,
    wherever it starts; and the options that are left out, because no server has them (exact images)."""
    options = {name: value for name, value in stage.items() if name not in _STARTS}
    modes = {"fullDocument": FULL_DOCUMENT_MODES, "fullDocumentBeforeChange": BEFORE_CHANGE_MODES}
    images = {name: options.pop(name, None) for name in modes}
    left_out = [name for name, mode in images.items() if mode is not None and mode not in modes[name]]
    images.update(dict.fromkeys(left_out))
    streams = Streams(
        pipeline=list(pipeline),
        full_document=images["fullDocument"],
        full_document_before_change=images["fullDocumentBeforeChange"],
        show_expanded_events=bool(options.pop("showExpandedEvents", False)),
        options=options,
        collation=collation,
    )
    return streams, left_out


class SamplingPace:
    """How long to pause after a sample, so that samples take ``share`` of the time.

    A pause is between half as long and half as long again as the share asks for, at random: what an application does
    every minute would otherwise always be met, or never. The mean is exact.
    """

    def __init__(self, share: float, *, seed: int | None = None) -> None:
        self.share = share
        self._rng = random.Random(seed)

    def pause_s(self, busy_s: float, *, failed: bool) -> float:
        """``busy_s`` is how long the sample took, from the opening of both streams to their end. One that failed counts
        as a whole one: a deployment that is unwell is not asked more often."""
        counted = max(busy_s, SAMPLE_S) if failed else busy_s
        pause = counted * (1 / self.share - 1) * self._rng.uniform(0.5, 1.5)
        return max(pause, SAMPLE_S) if failed else pause


@dataclass(frozen=True)
class SamplingNumbers:
    """What all samples have come to.

    Attributes:
        comparisons: samples that came to their end
        failures: samples that failed
        gaps: moments at which both streams had to start again: what was written in between was not compared
        differences: by kind
    """

    events: int
    comparisons: int
    failures: int
    gaps: int
    seconds: float
    differences: Mapping[DifferenceKind, int]

    @property
    def total(self) -> int:
        """All differences."""
        return sum(self.differences.values())

    def __str__(self) -> str:
        text = f"{self.events:,} events in {self.comparisons:,} comparisons, differences: {self.total:,}"
        text += f", {self.failures:,} comparisons failed" if self.failures else ""
        return text + (f", {self.gaps:,} gaps" if self.gaps else "")


class SampledComparison:
    """``with SampledComparison(uri, scope, streams, share) as sampled:`` compares while the block runs.

    Args:
        uri: the URI of a replica set, or of a cluster's mongos; the comparison opens connections of its own
        scope: what the product watches
        streams: the options of its stream; newer events (``show_expanded_events``) are left out before 6.0
        report: where the report is written if something differs: readable by this user alone, all values and names
            masked. ``None``: a file with a random name in the directory for temporary files
        tell: called once for each kind of difference, and for failures; by default they are logged as warnings
        clock: for tests
        seed: for tests
        limits: for tests

    Entering it raises TailraceError if the comparison is not possible, for example because a right is missing, so that
    nobody believes that something is compared when it is not.
    """

    def __init__(
        self,
        uri: Any,
        scope: Scope | str | None,
        streams: Streams,
        share: float,
        *,
        report: Path | None = None,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: ComparisonLimits = SAMPLE_LIMITS,
        seed: int | None = None,
    ) -> None:
        self._deployment = DeploymentComparison(uri, scope, streams)
        self._limits, self._report, self._clock = limits, report, clock
        self._tell = tell or (lambda text: _log.warning("%s", text))
        self._pace = SamplingPace(share, seed=seed)
        self._comparison: StreamComparison | None = None
        self._comparisons = self._failures = 0
        self._last_failure = ""
        self._has_written = False
        self._told = 0
        self._stopped = threading.Event()
        self._thread = CheckedThread(self._sample, "compare samples", failed=self._failed)

    @property
    def numbers(self) -> SamplingNumbers:
        """The present numbers. From any thread."""
        compared = None if self._comparison is None else self._comparison.compared
        differences: Counter[DifferenceKind] = Counter()
        for found in [] if compared is None else list(compared.differences):
            differences[found.difference.kind] += found.count
        return SamplingNumbers(
            events=0 if compared is None else compared.events,
            comparisons=self._comparisons,
            failures=self._failures,
            gaps=0 if compared is None else sum(dict(compared.gaps).values()),
            seconds=0.0 if compared is None else compared.seconds,
            differences=differences,
        )

    @property
    def share(self) -> float:
        """The share of the time."""
        return self._pace.share

    def __enter__(self) -> Self:
        try:
            self._settle()
        except BaseException:
            self._deployment.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the sample that is under way: what it has read but not compared is dropped."""
        self._stopped.set()
        if self._comparison is not None:
            self._comparison.abandon()
        self._thread.join(_STOP_S)
        self._deployment.close()

    def _settle(self) -> None:
        """Both streams are opened once, before anything depends on it."""
        deployment = self._deployment
        if deployment.streams.show_expanded_events:
            has_them = profile_for(deployment.server_version).expanded_events_and_images
            deployment.streams = replace(deployment.streams, show_expanded_events=has_them)
        deployment.try_to_open()
        self._comparison = deployment.prepare(self._limits)

    def _sample(self) -> None:
        while not self._stopped.is_set():
            begun = self._clock()
            failed = not self._compare_once()
            self._stopped.wait(self._pace.pause_s(self._clock() - begun, failed=failed))

    def _compare_once(self) -> bool:
        """Whether a sample came to its end."""
        comparison = self._comparison
        assert comparison is not None
        before = comparison.compared.total
        try:
            self._deployment.look_at_version()
            comparison.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is told, and the product goes on
            if not self._stopped.is_set():
                self._failed(known_error(error, "a comparison with the server's own stream"))
            return False
        finally:
            if comparison.compared.total > before:
                self._tell_differences(comparison.compared.differences)
        if not self._stopped.is_set():
            self._comparisons += 1
            self._last_failure = ""
        return True

    def _failed(self, error: TailraceError) -> None:
        self._failures += 1
        text = str(error)
        if text != self._last_failure:
            self._last_failure = text
            self._tell(f"a comparison with the server's own stream has failed, and is tried again later: {text}")

    def _tell_differences(self, differences: list[FoundDifference]) -> None:
        where = self._written()
        for found in differences[self._told :]:
            difference = found.difference
            # A field or an operation that stages of the user's have made may be a value of theirs.
            names = [] if self._deployment.streams.pipeline else [difference.operation, difference.place]
            at = ", ".join(name for name in names if name)
            self._tell(
                f"Tailrace and the server's own stream differ: {KINDS[difference.kind]}"
                + (f" ({at})" if at else "")
                + f". {where}"
            )
        self._told = len(differences)

    def _written(self) -> str:
        """Write the report, and say where it is."""
        try:
            path = self._path()
            self._deployment.write_report(path)
        except (OSError, TailraceError) as error:
            return f"The report cannot be written: {error}"
        self._has_written = True
        return f"Please report it, with the masked evidence in {path}"

    def _path(self) -> Path:
        if self._report is None:
            descriptor, name = tempfile.mkstemp(prefix="tailrace-compare-", suffix=".json")
            open(descriptor).close()
            self._report = Path(name)
        elif not self._has_written and self._report.exists():
            # It is an earlier run's, and has found what this one may not.
            self._report.replace(self._report.with_name(f"{self._report.stem}.before{self._report.suffix}"))
        return self._report
