"""Frames over connections of ``multiprocessing``, as on Windows: complete and in order, without ever blocking the engine."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from infeed.workers.transport_portable import Connection, ConnectionEnd, ConnectionLink, ConnectionPoller

if sys.platform == "win32":
    from multiprocessing.reduction import duplicate
else:
    from os import dup as duplicate

MIB = 1 << 20
FRAMES = [bytes([number % 256]) * 10_000 for number in range(300)]


class Channel:
    """A link with the worker's end of it."""

    def __init__(self) -> None:
        self.link = ConnectionLink()
        (handle,) = self.link.open()
        conn: Connection[bytes, bytes] = Connection(duplicate(handle))
        self.link.close_inherited()
        self.end = ConnectionEnd(conn)
        self.close_worker = conn.close


@pytest.fixture
def poller() -> Iterator[ConnectionPoller]:
    made = ConnectionPoller()
    yield made
    made.close()


@pytest.fixture
def channel(poller: ConnectionPoller) -> Iterator[Channel]:
    made = Channel()
    poller.add(made.link)
    yield made
    poller.remove(made.link)
    made.link.close()
    made.close_worker()


def test_frames_arrive_complete_and_in_order_in_both_directions(channel: Channel) -> None:
    frames = [b"a", b"x" * 5000, b"\0\0\0\0"]
    channel.link.send(frames)
    assert [channel.end.receive() for _ in frames] == frames

    for frame in frames:
        channel.end.send(frame)
    assert channel.link.receive() == frames


@pytest.mark.parametrize("frames", [FRAMES, [os.urandom(1024) * 5 * 1024, b"end"]], ids=["many", "5 MiB"])
def test_unsent_frames_of_a_full_pipe_are_queued(channel: Channel, poller: ConnectionPoller, frames: list[bytes]) -> None:
    """A worker that does not read delays no other, and gets everything in order once it does."""
    for frame in frames:
        channel.link.send([frame])
    assert channel.link.has_outgoing
    assert poller.wait(0.01) == []

    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(channel.end.receive() for _ in frames))
    reader.start()
    while channel.link.has_outgoing:
        poller.wait(0.01)
    reader.join()

    assert received == frames


def test_queued_frames_are_sent_during_one_wait(channel: Channel, poller: ConnectionPoller) -> None:
    """A wait without a timeout: the reply ends it."""
    channel.link.send(FRAMES)

    def work() -> None:
        received.extend(channel.end.receive() for _ in FRAMES)
        channel.end.send(b"done")

    received: list[bytes] = []
    worker = threading.Thread(target=work)
    worker.start()
    assert poller.wait(None) == [channel.link]
    worker.join()

    assert (received, channel.link.receive()) == (FRAMES, [b"done"])


def test_a_link_with_unsent_frames_closes(channel: Channel, poller: ConnectionPoller) -> None:
    """At once; later frames are dropped."""
    channel.link.send(FRAMES)
    poller.remove(channel.link)
    channel.link.close()
    channel.link.send(FRAMES)
    assert not channel.link.has_outgoing


def test_queued_frames_for_a_dead_worker_are_dropped(channel: Channel, poller: ConnectionPoller) -> None:
    channel.link.send(FRAMES)
    channel.close_worker()

    assert poller.wait(1) == [channel.link]
    assert not channel.link.has_outgoing
    with pytest.raises(EOFError):
        channel.link.receive()
    channel.link.send(FRAMES)  # Silent: receiving reports its end.


def test_several_wake_ups_count_once(poller: ConnectionPoller) -> None:
    """Also if nothing waits meanwhile: they never block."""
    for _ in range(100_000):
        poller.wake()
    assert poller.wait(None) == []

    thread = threading.Thread(target=poller.wake)
    thread.start()
    assert poller.wait(None) == []
    thread.join()
    poller.close()
    poller.wake()
