"""Requests that arrive together are served together (app/groups.py)."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from app.groups import MOST, Groups
from readie.errors import DatabaseUnavailable


class Recorder:
    """Doubles numbers; refuses a group with a 13 in it, and an 11; the first group waits until it is let go."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.started = threading.Event()
        self.go_on = threading.Event()

    def serve(self, group: Sequence[int]) -> list[int | Exception]:
        self.groups.append(list(group))
        if len(self.groups) == 1:
            self.started.set()
            assert self.go_on.wait(10)
        if 13 in group:
            raise RuntimeError("unlucky")
        if 500 in group:
            raise DatabaseUnavailable("away")
        return [KeyError(number) if number == 11 else 2 * number for number in group]


async def ask_all(recorder: Recorder, numbers: list[int]) -> list[int | BaseException]:
    """Asks 0, which comes alone, and the numbers while that is being served."""
    groups: Groups[int, int] = Groups("test", recorder.serve)
    first = asyncio.create_task(groups.ask(0))
    await asyncio.to_thread(recorder.started.wait, 10)
    others = [asyncio.create_task(groups.ask(number)) for number in numbers]
    await asyncio.sleep(0)
    recorder.go_on.set()
    answers: list[int | BaseException] = await asyncio.gather(*others, return_exceptions=True)
    assert await first == 0
    return answers


def test_what_arrives_meanwhile_is_the_next_group() -> None:
    """Who comes alone is served at once; all who come while that takes are served together, in their order."""
    recorder = Recorder()

    assert asyncio.run(ask_all(recorder, [3, 1, 2])) == [6, 2, 4]
    assert recorder.groups == [[0], [3, 1, 2]]


def test_a_group_has_its_size() -> None:
    """Whoever is too many is in the one after."""
    recorder = Recorder()
    numbers = list(range(100, 102 + MOST))

    assert asyncio.run(ask_all(recorder, numbers)) == [2 * number for number in numbers]
    assert [len(group) for group in recorder.groups] == [1, MOST, 2]


def test_as_many_groups_as_allowed_are_served_at_once() -> None:
    """The second does not wait for the first; the third does for either."""
    both, go_on = threading.Barrier(3), threading.Event()

    def serve(group: Sequence[int]) -> Sequence[int]:
        if max(group) < 2:
            both.wait(10)
        assert go_on.wait(10)
        return group

    async def ask() -> list[int]:
        groups: Groups[int, int] = Groups("test", serve, most=1, at_once=2)
        asked = [asyncio.create_task(groups.ask(number)) for number in range(3)]
        await asyncio.to_thread(both.wait, 10)
        assert not any(task.done() for task in asked)
        go_on.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == [0, 1, 2]


def test_an_answer_may_be_an_error() -> None:
    """It is one request's; the others have their answers."""
    _, error, _ = answers = asyncio.run(ask_all(Recorder(), [1, 11, 2]))

    assert answers == [2, error, 4]
    assert isinstance(error, KeyError)


def test_a_group_that_fails_is_served_one_by_one() -> None:
    """What one request does to the transaction of all is done to that one alone."""
    recorder = Recorder()
    _, error, _ = answers = asyncio.run(ask_all(recorder, [1, 13, 2]))

    assert answers == [2, error, 4]
    assert isinstance(error, RuntimeError)
    assert recorder.groups == [[0], [1, 13, 2], [1], [13], [2]]


def test_a_database_that_is_away_is_asked_once_a_group() -> None:
    """Nobody waits for it again on behalf of each."""
    recorder = Recorder()
    answers = asyncio.run(ask_all(recorder, [500, 1]))

    assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 2
    assert len(recorder.groups) == 2


def test_who_has_gone_is_not_waited_for() -> None:
    """A request that is cancelled while its group is served hinders no other."""
    recorder = Recorder()
    groups: Groups[int, int] = Groups("test", recorder.serve)

    async def ask() -> int:
        gone = asyncio.create_task(groups.ask(0))
        await asyncio.to_thread(recorder.started.wait, 10)
        stays = asyncio.create_task(groups.ask(1))
        gone.cancel()
        recorder.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await stays

    assert asyncio.run(ask()) == 2
