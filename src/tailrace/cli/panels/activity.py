"""What happens in a deployment: every event counted by namespace and kind, and some shown with their values.

Counts come from the fields outside an event's documents: no document is decoded for them. A few of each second's events
are decoded and shown, together with how many there were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo.errors import PyMongoError

from tailrace.cli.panels.difference import shown_event
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError
from tailrace.read.source.uri import redact_uri

if TYPE_CHECKING:
    from tailrace.watch.client.change_stream import ChangeStream
    from tailrace.watch.client.client import Client

#: How long counts are kept, and in steps of how many seconds.
WINDOW_S: Final = 900
STEP_S: Final = 5
#: How many events of a second are shown with their values, how many of one namespace (a busy one hides no other),
#: and how many are kept for a page that is opened.
SHOWN_PER_SECOND: Final = 8
_SHOWN_OF_ONE: Final = 4
_KEPT: Final = 100
#: How many namespaces are counted by name; the others are counted together.
_NAMESPACES_MAX: Final = 500
_NAMESPACES_SHOWN: Final = 100
OTHERS: Final = "(others)"
#: Between reads, so that each finds what has come meanwhile: a read for each event would cost more than the events.
_PACE_S: Final = 0.5
#: A read that gave this many is followed by the next at once.
_FULL: Final = 1_000
#: A follower that lags by more goes on at the present.
_LAG_MAX_S: Final = 60
_RETRY_S: Final = 5.0
#: The first version that keeps images.
_IMAGES_SINCE: Final = (6, 0)
_UNAUTHORIZED: Final = 13
_log = logging.getLogger("tailrace.console")


class Activity:
    """Follows the whole deployment of ``client`` from the present on, in the thread that calls ``run``.

    ``came``    notified of each event that is shown, as JSON values
    ``images``  documents before and after a change are read, where they are kept and this user may read them
    """

    def __init__(
        self, client: Client[Any], came: Callable[[dict[str, Any]], None] = lambda event: None, *, images: bool = True
    ) -> None:
        self._client = client
        self._came = came
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        #: Counts of each step, by namespace and operation type, the oldest step first.
        self._steps: deque[tuple[int, Counter[tuple[str, str]]]] = deque()
        self._namespaces: dict[bytes, str] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        #: How many events have come.
        self.total = 0
        self._number = self._skipped = 0
        self._began = int(time.time()) // STEP_S * STEP_S
        #: The second, and how many events of each namespace were shown in it.
        self._second, self._shown = 0, Counter[str]()
        self._lag: float | None = None
        self._reads_images = images
        self._trouble: str | None = None

    # -- following --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow until ``stop``. What cannot be read is said on the panel, and tried again."""
        resume: Any = None
        while not self._stopped.is_set():
            stream = None
            try:
                with self._opened(resume) as stream:
                    self._trouble = resume = None
                    self._follow(stream)
            except (TailraceError, PyMongoError) as error:
                if self._reads_images and getattr(error, "code", None) == _UNAUTHORIZED:
                    # A user without the right to read images sees what is in the oplog, from there on.
                    self._reads_images = False
                    resume = None if stream is None else stream.resume_token
                    continue
                self._trouble = redact_uri(str(error))
                self._skipped += stream is not None  # it continues at the present: what comes until then is not counted
                self._stopped.wait(_RETRY_S)

    def stop(self) -> None:
        """End soon, from any thread."""
        self._stopped.set()

    def _opened(self, resume: Any) -> ChangeStream:
        options: dict[str, Any] = {} if resume is None else {"resume_after": resume}
        self._reads_images &= tuple(self._client.server_info()["versionArray"][:2]) >= _IMAGES_SINCE
        if self._reads_images:
            options |= {"full_document": "whenAvailable", "full_document_before_change": "whenAvailable"}
        return self._client.watch(
            document_class=RawBSONDocument, max_await_time_ms=1_000, show_expanded_events=True, **options
        )

    def _follow(self, stream: ChangeStream) -> None:
        while not self._stopped.is_set() and stream.alive:
            event, raw = stream.try_next(), b""
            taken = 0
            while event is not None:
                raw = raw_bson.bytes_of(event)
                self._take(raw)
                taken += 1
                event = stream.try_next() if stream.has_next else None
            self._lag = _age(raw) if raw else 0.0
            if self._lag > _LAG_MAX_S:
                self._skipped += 1
                _log.warning("the console lags by %d s and goes on at the present", self._lag)
                return
            if taken < _FULL:
                self._stopped.wait(_PACE_S)

    def _take(self, raw: bytes) -> None:
        operation, namespace = self._outline(raw)
        now = time.time()
        step = int(now) // STEP_S * STEP_S
        with self._lock:
            if not self._steps or self._steps[-1][0] != step:
                self._steps.append((step, Counter()))
                while self._steps[0][0] <= step - WINDOW_S:
                    self._steps.popleft()
            self._steps[-1][1][namespace, operation] += 1
            self.total += 1
        if int(now) != self._second:
            self._second, self._shown = int(now), Counter()
        if self._shown[namespace] < _SHOWN_OF_ONE and self._shown.total() < SHOWN_PER_SECOND:
            self._shown[namespace] += 1
            self._show(raw, operation, namespace, now)

    def _outline(self, raw: bytes) -> tuple[str, str]:
        """Operation type and namespace, without a look into documents."""
        operation, namespace = raw_bson.find(raw, b"operationType"), raw_bson.find(raw, b"ns")
        return (
            "" if operation is None else raw_bson.read_string(raw, operation.value_start).decode(),
            "" if namespace is None else self._name_of(raw_bson.value(raw, namespace)),
        )

    def _name_of(self, document: bytes) -> str:
        found = self._namespaces.get(document)
        if found is None:
            parts = [raw_bson.read_string(document, one.value_start) for one in raw_bson.elements(document)]
            found = b".".join(parts[:2]).decode(errors="backslashreplace")
            if len(self._namespaces) >= _NAMESPACES_MAX:
                return OTHERS
            self._namespaces[document] = found
        return found

    def _show(self, raw: bytes, operation: str, namespace: str, now: float) -> None:
        self._number += 1
        shown = {"number": self._number, "at": round(now, 1), "operation": operation, "namespace": namespace}
        shown |= shown_event(raw)
        self._recent.append(shown)
        self._came(shown)

    # -- what is shown ----------------------------------------------------------------------------------------------

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The events that were shown last, oldest first."""
        return list(self._recent)

    def read(self) -> dict[str, Any]:
        """The counts of the last quarter of an hour. Raises nothing: where the deployment cannot be read ``trouble``
        says why."""
        now = int(time.time()) // STEP_S * STEP_S
        with self._lock:
            steps = [(at, dict(counts)) for at, counts in self._steps if at > now - WINDOW_S]
            lag, total = self._lag, self.total
        kinds: dict[str, dict[int, int]] = {}
        names: dict[str, Counter[str]] = {}
        for at, counts in steps:
            for (namespace, operation), count in counts.items():
                series = kinds.setdefault(operation, {})
                series[at] = series.get(at, 0) + count
                names.setdefault(namespace, Counter())[operation] += count
        busiest = sorted(names.items(), key=lambda item: (-item[1].total(), item[0]))
        whole = [sum(counts.values()) for at, counts in steps if now - 2 * STEP_S <= at < now]
        return {
            "step": STEP_S,
            "since": self._began,
            "until": now,
            "steps": WINDOW_S // STEP_S,
            "perSecond": round(sum(whole) / (2 * STEP_S), 1),
            "total": total,
            "lag": None if lag is None else round(lag, 1),
            "kinds": {kind: sorted(series.items()) for kind, series in kinds.items()},
            "namespaces": [[name, dict(counts)] for name, counts in busiest[:_NAMESPACES_SHOWN]],
            "more": max(0, len(busiest) - _NAMESPACES_SHOWN),
            "shownPerSecond": SHOWN_PER_SECOND,
            "skipped": self._skipped,
            "images": self._reads_images,
            "trouble": self._trouble,
        }


def _age(raw: bytes) -> float:
    """How long ago an event was made, by this machine's clock."""
    element = raw_bson.find(raw, b"clusterTime")
    if element is None:
        return 0.0
    return max(0.0, time.time() - ClusterTime.from_bytes_le(raw_bson.value(raw, element)).seconds)
