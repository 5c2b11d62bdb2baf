"""A command that waits for its end, and a signal at any moment of that."""

from __future__ import annotations

import signal

from tailrace.cli.console import SignalEvent

ROUNDS = 2000


def test_a_signal_at_any_moment_of_a_wait_sets_it() -> None:
    """``tailrace top`` once went on for ever after Ctrl-C: the handler waited for the lock of the event that the same
    thread was just waiting for."""
    ended: list[SignalEvent] = [SignalEvent()]
    ended[0].close()
    before = signal.signal(signal.SIGALRM, lambda *_: ended[0].set())
    try:
        for number in range(ROUNDS):
            ended[0] = SignalEvent()
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 200))
            while not ended[0].wait(1e-5):
                pass
            ended[0].close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_it_is_not_set_before() -> None:
    event = SignalEvent()
    assert not event.wait(0)
    assert not event.wait(0.001)
    event.set()
    assert event.wait()
    assert event.wait(0)
    event.close()
