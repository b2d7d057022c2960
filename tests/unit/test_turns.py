"""The order in which a worker handles messages: in sequence, except that held samples are placed first."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from infeed.memory.arena import Block
from infeed.scheduler.messages import TaskId
from infeed.workers.loop import Placing, Turns
from infeed.workers.protocol import DropTask, PlaceTask
from tests.helpers import DEADLINE_S, wait_until

PLACE = PlaceTask(TaskId(1), Block(0, 0, 8), None)
DROP = DropTask(TaskId(2))


class Desk:
    """A worker's inbox and held samples."""

    def __init__(self, *messages: object) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        for message in messages:
            self.inbox.put(message)
        self.held = 0
        self.placed: list[Placing] = []
        self.turns: Turns[Any] = Turns(self.receive, lambda: self.held, self.place)

    def receive(self, timeout_s: float | None) -> object:
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(message, Exception):
            raise message
        return message

    def place(self, message: Placing) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        self.placed.append(message)
        self.held -= 1
        return True


def placing_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "infeed:placing"]


def test_messages_are_handled_in_sequence() -> None:
    desk = Desk("a", PLACE, "b")
    assert [desk.turns.next() for _ in range(3)] == ["a", PLACE, "b"]


def test_held_samples_are_placed_before_queued_tasks() -> None:
    """Then everything else, in order."""
    desk = Desk("a", "b", DROP, "c", PLACE, "d")
    desk.held = 2
    assert [desk.turns.next(), desk.turns.next()] == [DROP, PLACE]
    desk.held = 0
    assert [desk.turns.next() for _ in range(4)] == ["a", "b", "c", "d"]


def test_a_thread_places_held_samples_while_the_worker_is_busy() -> None:
    """It stops when no samples are held, and other messages it received are handled in order."""
    desk = Desk("a", "b")
    desk.held = 1
    assert desk.turns.next() == "a"
    desk.inbox.put("c")
    desk.inbox.put(PLACE)
    wait_until(lambda: desk.placed == [PLACE], "the thread")
    desk.inbox.put("d")
    desk.turns.done()
    assert [desk.turns.next() for _ in range(3)] == ["b", "c", "d"]
    desk.turns.close()
    wait_until(lambda: not placing_threads(), "its end")


def test_a_read_error_of_the_thread_is_raised_in_order() -> None:
    desk = Desk("a")
    desk.held = 1
    assert desk.turns.next() == "a"
    for message in (ValueError("unreadable"), PLACE):
        desk.inbox.put(message)
    wait_until(lambda: desk.placed == [PLACE], "the thread")
    desk.turns.done()
    with pytest.raises(ValueError, match="unreadable"):
        desk.turns.next()
    desk.turns.close()


def test_the_thread_leaves_the_end_of_the_channel_to_the_worker() -> None:
    desk = Desk("a")
    desk.held = 1
    assert desk.turns.next() == "a"
    desk.inbox.put(EOFError())
    wait_until(desk.inbox.empty, "the thread")
    desk.turns.close()
    wait_until(lambda: not placing_threads(), "its end")


def test_the_thread_is_not_used_for_short_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infeed.workers.loop.LONG_S", DEADLINE_S)
    desk = Desk("a", "b", "c")
    desk.held = 1
    for message in ("a", "b", "c"):
        assert desk.turns.next() == message
        desk.inbox.put(message)
        desk.turns.done()
    assert desk.turns.next() == "a"
    desk.inbox.put(PLACE)
    desk.turns.done()
    assert desk.turns.next() == PLACE
    assert desk.placed == []
    desk.turns.close()
    wait_until(lambda: not placing_threads(), "its end")
