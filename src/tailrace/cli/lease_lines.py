"""What ``tailrace leases`` shows about leases: a line for each, with every lane's lag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.output import say
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import InvalidResumeToken, TailraceError

if TYPE_CHECKING:
    from tailrace.act.consumer.lease import Lease

_PART: Final = re.compile(r"(?P<whole>.+)/(?P<generation>\d+)\.(?P<lane>\d+)", re.DOTALL)
#: The parts of a line that belong to ``show``.
_DETAILS: Final = ("token", "committed", "lost")


@dataclass(frozen=True)
class LeaseLine:
    """One lease as it is shown. Ages and lags are in seconds; ``trouble`` says why a record cannot be read.

    ``state``     held, expired, free; paused, or pausing while its owner still has it; sealed, of a lane of an earlier
                  number of lanes. Of a resource with lanes: held, free, or partly held
    ``paused``    since when
    ``reserved``  for whom an operator keeps it, and until when
    ``skip``      the next change is to be left out
    ``lost``      the gaps: the times of changes that were not handled
    """

    resource: str
    owner: str | None = None
    version: int | None = None
    state: str = ""
    age: float | None = None
    position: ClusterTime | str | None = None
    lag: int | None = None
    gaps: int = 0
    trouble: str | None = None
    paused: str | None = None
    reserved: str | None = None
    skip: bool = False
    token: str | None = None
    committed: str | None = None
    lost: Sequence[tuple[ClusterTime, ClusterTime]] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        position = self.position
        return {
            **asdict(self),
            "position": position.for_programs() if isinstance(position, ClusterTime) else position,
            "lost": [[time.for_programs() for time in gap] for gap in self.lost],
        }


def lease_lines(
    records: Sequence[tuple[str, Lease | TailraceError]], now: datetime, newest: ClusterTime
) -> list[LeaseLine]:
    """What is shown of all records, at the store's time ``now`` in a deployment that has come to ``newest``. Lanes that
    nobody has worked on yet are there too: they lag behind as well."""
    from tailrace.act.consumer.rules.lanes import LanePlan, lane_resource  # noqa: PLC0415  so that --help does not load it

    lines = {name: lease_line(name, found, now, newest) for name, found in records}
    for name, found in records:
        plan = None
        if not isinstance(found, TailraceError) and LanePlan.is_plan(found.position):
            try:
                plan = LanePlan.from_document(found.position or {}, name)
            except TailraceError as error:
                lines[name] = LeaseLine(name, state="unreadable", trouble=str(error))
        if plan is None:
            continue
        start = position_time(plan.start.to_document())
        lanes = [lane_resource(name, plan, lane) for lane in range(plan.lanes)]
        for lane in lanes:
            line = lines.get(lane, LeaseLine(lane, state="free"))
            if line.position is None and line.trouble is None and start is not None:
                line = replace(line, position=start, lag=_lag(newest, start))
            lines[lane] = line
        lines[name] = _line_of_lanes(lines[name], [lines[lane] for lane in lanes])
    return [lines[name] for name in sorted(lines)]


def _line_of_lanes(line: LeaseLine, lanes: Sequence[LeaseLine]) -> LeaseLine:
    """The line of a resource with lanes: the greatest lag of them, and whether somebody works on all."""
    lags = [lane.lag for lane in lanes if lane.lag is not None]
    held = sum(lane.state in ("held", "pausing") for lane in lanes)
    state = "held" if held == len(lanes) else "partly held" if held else "free"
    if line.paused is not None:
        state = "pausing" if held else "paused"
    gaps = line.gaps + sum(lane.gaps for lane in lanes)
    return replace(line, state=state, lag=max(lags, default=None), gaps=gaps)


def lease_line(resource: str, found: Lease | TailraceError, now: datetime, newest: ClusterTime) -> LeaseLine:
    """What is shown of one record."""
    if isinstance(found, TailraceError):
        return LeaseLine(resource, state="unreadable", trouble=str(found))
    state = "free" if found.owner is None else "expired" if found.is_free(now) else "held"
    age = None if found.acquired_at is None or found.owner is None else (now - found.acquired_at).total_seconds()
    if found.paused_at is not None:
        state = "pausing" if state == "held" else "paused"
    position = found.position
    if position is not None and "sealed" in position:
        state, position = "sealed", position["sealed"]  # a lane of an earlier number of lanes
    time = position_time(position)
    lanes = None if position is None else position.get("lanes")
    gaps = (position or {}).get("gaps", ())
    until = "" if found.reserved_until is None else f" until {_shown(found.reserved_until)}"
    return LeaseLine(
        resource,
        found.owner,
        found.version,
        state,
        None if age is None else round(age, 1),
        None if time is None and lanes is None else f"{lanes} lanes" if time is None else time,
        None if time is None else _lag(newest, time),
        len(gaps),
        paused=None if found.paused_at is None else _shown(found.paused_at),
        reserved=f"{found.reserved_for}{until}" if found.is_reserved(now) else None,
        skip=found.skip is not None,
        token=((position or {}).get("token") or {}).get("_data"),
        committed=None if found.committed_at is None else _shown(found.committed_at),
        lost=[(ClusterTime.from_timestamp(gap["from"]), ClusterTime.from_timestamp(gap["to"])) for gap in gaps],
    )


def position_time(position: Mapping[str, Any] | None) -> ClusterTime | None:
    """The cluster time that a committed position stands at; ``None`` where it has none."""
    if position is None:
        return None
    try:
        if position.get("token") is not None:
            return ResumeToken.parse(position["token"]).cluster_time
        return None if position.get("at") is None else ClusterTime.from_timestamp(position["at"])
    except (InvalidResumeToken, AttributeError, TypeError, ValueError):
        return None


def belongs(line: LeaseLine, resource: str) -> bool:
    """Whether a line is shown for ``resource``."""
    return line.resource == resource or line.resource.rpartition("/")[0] == resource


def without_sealed(lines: Sequence[LeaseLine]) -> list[LeaseLine]:
    """Without the lanes of earlier generations: they are done, and stay so that nobody who wakes up late works on
    them."""
    return [line for line in lines if line.state != "sealed"]


def say_json(lines: Sequence[LeaseLine], *, details: bool) -> None:
    """As JSON."""
    shown = [line.to_json() for line in lines]
    for one in () if details else shown:
        for name in _DETAILS:
            del one[name]
    say(json.dumps(shown, indent=2, ensure_ascii=False), lines=True)


def say_lines(lines: Sequence[LeaseLine], hidden: int) -> None:
    """As a table, with a sentence for what an operator has asked for."""
    rows = [("RESOURCE", "STATE", "VERSION", "AGE", "LAG", "POSITION", "OWNER")]
    for line in lines:
        rows.append(
            (
                line.resource,
                line.state,
                _text(line.version),
                _text(line.age, " s"),
                _text(line.lag, " s"),
                _position_text(line),
                _text(line.owner),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in lines:
        for sentence in _sentences(line):
            say(f"{line.resource}: {sentence}")
    if hidden:
        say(f"{hidden} sealed lanes, left from an earlier number of lanes, are not shown; --sealed shows them")


def say_details(line: LeaseLine) -> None:
    """What the table has no room for."""
    if line.token is not None:
        say(f"{line.resource}: token {line.token}")
    if line.committed is not None:
        say(f"{line.resource}: committed {line.committed}")
    for begin, end in line.lost:
        say(f"{line.resource}: changes from {begin} to {end} were not handled")


def _sentences(line: LeaseLine) -> list[str]:
    said = [] if line.trouble is None else [line.trouble]
    if line.paused is not None:
        said.append(f"paused since {line.paused}; tailrace leases resume lets it go on")
    if line.reserved is not None:
        said.append(f"reserved for {line.reserved}")
    if line.skip:
        said.append("the next change will be left out")
    return said


def _lag(newest: ClusterTime, time: ClusterTime) -> int:
    return max(0, newest.seconds - time.seconds)


def _shown(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(value: object, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _position_text(line: LeaseLine) -> str:
    return _text(line.position) + (f" ({line.gaps} gaps)" if line.gaps else "")
