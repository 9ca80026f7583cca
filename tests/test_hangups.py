"""SIGHUP: the action runs again for each signal, off the main thread, and none is lost."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from app.hangups import Hangups


@pytest.fixture
def hangups() -> Iterator[Hangups]:
    """The hangups of this process, taken while a test runs."""
    taken = Hangups()
    with taken.received():
        yield taken


def hang_up(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGHUP)


class Slow:
    """An action that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        self.begun.release()
        assert self.may_end.acquire(timeout=30)


def test_a_signal_runs_the_action_in_another_thread(hangups: Hangups) -> None:
    """The main thread, which serves, goes on."""
    action = Slow()
    with hangups.answered(action):
        hang_up()
        assert action.begun.acquire(timeout=30)
        action.may_end.release()

    assert len(action.threads) == 1
    assert action.threads[0] is not threading.main_thread()


def test_signals_during_the_action_run_it_once_more(hangups: Hangups) -> None:
    """What came after it began may be about what it has not seen; a hundred signals are one then."""
    action = Slow()
    with hangups.answered(action):
        hang_up()
        assert action.begun.acquire(timeout=30)
        hang_up(100)
        action.may_end.release()
        assert action.begun.acquire(timeout=30)
        action.may_end.release()

    assert len(action.threads) == 2


def test_a_signal_before_anybody_answers_is_kept(hangups: Hangups) -> None:
    """A router that is still starting does not end by it."""
    action = Slow()
    hang_up()
    with hangups.answered(action):
        assert action.begun.acquire(timeout=30)
        action.may_end.release()

    assert len(action.threads) == 1


def test_the_signal_is_given_back(hangups: Hangups) -> None:
    """Whoever had it before has it again."""
    before = signal.getsignal(signal.SIGHUP)
    with Hangups().received():
        assert signal.getsignal(signal.SIGHUP) is not before

    assert signal.getsignal(signal.SIGHUP) is before
