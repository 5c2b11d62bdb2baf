"""Listeners, clocks, store, targets and stream under one seeded scheduler.

A run has faults for a while; then they stop, and everything that is left must be handled. Every step checks what must
never happen (``servers``), and the end what must have happened. ``python -m tests.simulation --seed n`` plays one run
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.errors import LeaseDocumentError
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.listener import ListenerLogic, ListenerSettings
from tailrace.act.consumer.rules.need import Decision, HandleChange, JudgeError
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.simulation.failing import Failing
from tests.simulation.faults import NONE, Faults
from tests.simulation.operating import Operator
from tests.simulation.process import Process, fenced_handler, transactional_handler
from tests.simulation.recorded import STREAMS, RecordedEvent, recorded
from tests.simulation.schedule import Schedule
from tests.simulation.servers import BrokenPromiseError, Servers
from tests.simulation.stream import History

#: Virtual seconds: how long things go wrong, and after how long everything must be handled.
FAULTY_S = 300.0
LIMIT_S = 6000.0
RESOURCE = "orders"
#: When a handler that raised is called again. The longest waits are longer than a lease.
RETRIES = (RetrySchedule(), RetrySchedule(), RetrySchedule(0, 1.0, 3.0, 40.0), RetrySchedule(0, 0.0, 1.0, 0.0))


class Simulation:
    """One run. ``new_logic`` and ``new_servers`` are for mutants and for other kinds of listeners. ``operated``: an
    operator pauses, hands over, moves the position, has changes left out and tries to delete, again and again."""

    def __init__(
        self,
        seed: int,
        *,
        new_logic: Callable[[ListenerSettings], ListenerLogic] = ListenerLogic,
        new_servers: Callable[[Schedule], Servers] = Servers,
        operated: bool = False,
        fails: bool = True,
    ) -> None:
        self.seed = seed
        self.schedule = Schedule(seed)
        random = self.schedule.random
        events = recorded(*random.choice(STREAMS))
        first = random.randrange(max(1, len(events) - 12))
        events = events[first : first + random.randint(12, 40)]
        self.history = History(self.schedule, events, random.choice((0.0, 20.0, FAULTY_S * 1.2)))
        self.faults = Faults.drawn(random)
        self.failing = Failing.drawn(seed) if fails else Failing(seed)
        self.servers = new_servers(self.schedule)
        self.servers.first_after = self._number_after
        self.is_transactional = random.random() < 0.4
        self.handler = transactional_handler if self.is_transactional else fenced_handler
        every = random.choice((1, 1, 3, 10))
        self.settings = ListenerSettings(
            resource=RESOURCE,
            lease_seconds=random.choice((5.0, 30.0)),
            start=random.choice(("oldest", "oldest", "now")),
            on_history_lost="gap",
            on_invalidate="fail" if self.failing.ends_at_invalidates else "resume",
            commits=CommitPolicy(every, random.choice((None, 2.0)), random.choice((3.0, 30.0))),
            batch=random.choice((0, every)),
            retry=Random(f"retry {seed}").choice(RETRIES),  # its own random numbers: seeds play the same runs as before
        )
        self.must_handle: int | None = None
        #: Changes that an error policy has left out, with their fencing tokens; they are handled later.
        self.skips = self.schedule.skip_random.random() < 0.8
        self.left_out: list[RecordedEvent] = []
        #: How often the error policy was asked.
        self.retries = 0
        #: The latest time from which a listener began.
        self.began = ClusterTime(0)
        self.skips_done = 0
        self.operator = self._new_operator(Random(f"operator {seed}")) if operated else None
        count = random.randint(1, 4)
        self.processes = [Process(self, f"p{number}", self.settings, new_logic) for number in range(count)]

    def run(self) -> None:
        """Raises BrokenPromiseError, naming the seed."""
        try:
            self._run()
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"seed {self.seed}: {error}") from error
        except LeaseDocumentError as error:
            # The store refused to set the position back. Nobody edits it here, so a listener has tried to.
            raise BrokenPromiseError(f"seed {self.seed}: {error.message}") from error
        except Exception as error:
            error.add_note(f"seed {self.seed}")
            raise

    def played(self) -> Simulation:
        """The run when it is over."""
        self.run()
        return self

    def _run(self) -> None:
        random = self.schedule.random
        random_of_operator = Random(f"when {self.seed}")
        for process in self.processes:
            self.schedule.after(random.uniform(0, 5), process.start)
        self._now_and_then(self.faults.theft_every, lambda: self.servers.revoke(RESOURCE))
        self._now_and_then(self.faults.stop_every, lambda: random.choice(self.processes).stop())
        if self.operator is not None:
            self.schedule.after(10.0, lambda: self._operate(random_of_operator))
        self.schedule.after(FAULTY_S, self._heal)
        self._now_and_then(self.failing.truncates_every, self.history.truncate)
        if not self.schedule.run(self._is_over, LIMIT_S):
            raise BrokenPromiseError(
                f"not everything was handled: {self._missing()} are left, position {self._position()}"
            )
        if self._missing():
            raise BrokenPromiseError(f"never handled, though the position is behind them: {self._missing()}")

    def _now_and_then(self, every: float, action: Callable[[], None]) -> None:
        if not every:
            return

        def act() -> None:
            if self.faults is not NONE:
                action()
                self.schedule.after(self.schedule.random.uniform(0.2, 2) * every, act)

        self.schedule.after(every, act)

    def _new_operator(self, random: Random) -> Operator:
        def between() -> None:
            for _ in range(random.choice((0, 0, 1, 3, 30))):
                self.schedule.step()

        def sleep(seconds: float) -> None:
            until = self.schedule.now + seconds
            while self.schedule.now < until and self.schedule.step():
                pass

        return Operator(
            self.servers,
            random,
            RESOURCE,
            between=between,
            sleep=sleep,
            clock=lambda: self.schedule.now,
            server_time=self.schedule.server_time,
            times=lambda: self.history.times[: self.history.there + 1],
            owners=lambda: [process.owner for process in self.processes],
            parts=lambda: [RESOURCE],
        )

    def _operate(self, random: Random) -> None:
        """Only once something was committed: before that, a listener may still decide where it begins."""
        if self.operator is not None and self.faults is not NONE and self.must_handle is not None:
            self.operator.act()
        if self.faults is not NONE:
            self.schedule.after(random.uniform(1, 40), lambda: self._operate(random))
        else:
            self._resume()

    def _resume(self) -> None:
        """The operator has done all that it wanted."""
        record = self._record()
        if record is not None and self.operator is not None:
            self.servers.records[RESOURCE] = instructions.mark_skip(instructions.resume(record), None)

    def skipped(self, change: HandleChange) -> None:
        """A listener has left out what an operator wanted left out."""
        event: RecordedEvent = change.event
        self.left_out.append(event)
        # A change that is lost before its place was written down is not read again.
        first = self.history.events[0].number + self.history.lost
        self.servers.left_out = {number for number in self.servers.left_out if number >= first} | {event.number}
        if len(self.servers.left_out) > 1:
            raise BrokenPromiseError(f"for one that was to be left out, these were: {sorted(self.servers.left_out)}")
        self.skips_done += 1

    def _heal(self) -> None:
        self.faults = NONE
        self._resume()
        for process in self.processes:
            process.paused_until = min(process.paused_until, self.schedule.now + 60)

    def process_ended(self, process: Process) -> None:
        """A supervisor starts it again."""

        def start() -> None:
            if not process.alive:
                process.start()

        self.schedule.after(self.schedule.random.choice((0.1, 5.0, 40.0)), start)

    def start_time(self, start: str) -> Timestamp:
        if start == "oldest":
            return self.history.oldest()
        self.began = self.history.time().tick()
        return self.began.to_timestamp()

    def is_poison(self) -> bool:
        """Whether a handler raises at the current change, in runs in which changes are left out."""
        return self.skips and self.faults is not NONE and self.schedule.skip_random.random() < 0.2

    def judge(self, need: JudgeError) -> Decision:
        """What the error policy says. What it leaves out becomes a dead letter, which an operator replays later,
        each time that it is left out."""
        random = self.schedule.skip_random
        if self.faults is not NONE and self.failing.stops():
            return "stop"
        if not self.skips or random.random() < 0.5:
            return "retry"
        event: RecordedEvent = need.change.event
        self.left_out.append(event)
        self.schedule.after(random.uniform(0, 40), lambda: self.servers.replay(event, need.change.lease.version))
        return "skip"

    # What must have happened

    def _record(self) -> Lease | None:
        return self.servers.records.get(RESOURCE)

    def _position(self) -> StreamPosition | None:
        record = self._record()
        if record is None or record.position is None:
            return None
        return StreamPosition.from_document(record.position, RESOURCE)

    def _number_after(self, position: Mapping[str, Any]) -> int:
        return self.history.events[0].number + self.history.first_after(
            StreamPosition.from_document(position, RESOURCE)
        )

    def _is_over(self) -> bool:
        if self.servers.commits and self.must_handle is None:
            # The first commit determines what must be handled: everything from the position that it writes.
            position = self._position()
            assert position is not None
            self.must_handle = self.history.first_after(position)
            if self.settings.start == "oldest" and self.must_handle > self.history.lost:
                raise BrokenPromiseError(f"the first position lies after {self.must_handle} changes")
        if self.faults is not NONE or self.history.there < len(self.history.events) or self.must_handle is None:
            return False
        position = self._position()
        return position is not None and self.history.first_after(position) == len(self.history.events)

    def _missing(self) -> list[int]:
        first = 0 if self.must_handle is None else self.must_handle
        done = {event.number for event in self.left_out}
        position = self._position()
        gaps = () if position is None else position.gaps
        return [
            event.number
            for event in self.history.events[first:]
            if event.number not in done and not self.servers.is_settled(event.number) and not _is_in(event, gaps)
        ]


def _is_in(event: RecordedEvent, gaps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is on record that an event was not handled. A gap begins at the time of the last one that was."""
    times = ((ClusterTime.from_timestamp(gap["from"]), ClusterTime.from_timestamp(gap["to"])) for gap in gaps)
    return any(begin <= event.time < end for begin, end in times)


def simulate(seed: int, **options: Any) -> Simulation:
    """Run one seed; raises BrokenPromiseError."""
    return Simulation(seed, **options).played()
