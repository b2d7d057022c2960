"""Frames over pipes: complete and in order, however the bytes are split, without ever blocking the engine."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if sys.platform == "win32":
    pytest.skip("pipes are for Linux and macOS", allow_module_level=True)

from infeed.workers.transport_pipes import PipeEnd, PipeLink, PipePoller

MIB = 1 << 20


@dataclass
class Channel:
    """A link with the worker's end of it, and the worker's raw descriptors."""

    link: PipeLink
    end: PipeEnd
    worker_read: int
    worker_write: int

    def close_worker(self) -> None:
        for fd in (self.worker_read, self.worker_write):
            if fd >= 0:
                os.close(fd)
        self.worker_read = self.worker_write = -1


def open_channel() -> Channel:
    link = PipeLink()
    to_read, from_write = map(os.dup, link.open())
    link.close_inherited()
    return Channel(link, PipeEnd(to_read, from_write), to_read, from_write)


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = open_channel()
    yield made
    made.link.close()
    made.close_worker()


@pytest.fixture
def poller() -> Iterator[PipePoller]:
    made = PipePoller()
    yield made
    made.close()


def joined(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


FRAMES = [b"", b"a", b"x" * 5000, b"\0\0\0\0"]


def test_frames_arrive_complete_and_in_order_in_both_directions(channel: Channel) -> None:
    """Empty ones too."""
    channel.link.send(FRAMES)
    assert [channel.end.receive() for _ in FRAMES] == FRAMES

    for frame in FRAMES:
        channel.end.send(frame)
    assert channel.link.receive() == FRAMES


@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=8), cuts=st.lists(st.integers(0, 2500), max_size=12))
@settings(max_examples=100)
def test_frames_may_be_split_anywhere(frames: list[bytes], cuts: list[int]) -> None:
    """In the middle of a length, of a frame or between two; the receiver joins the pieces."""
    data = joined(frames)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    channel = open_channel()
    received: list[bytes] = []
    try:
        for begin, stop in pairwise(edges):
            os.write(channel.worker_write, data[begin:stop])
            received += channel.link.receive()
    finally:
        channel.link.close()
        channel.close_worker()

    assert received == frames


def test_a_worker_joins_split_frames_as_well(channel: Channel) -> None:
    """Its end blocks until a frame is complete."""
    data = joined([b"abc", b"defg"])
    reader = threading.Thread(target=lambda: received.extend([channel.end.receive(), channel.end.receive()]))
    received: list[bytes] = []
    reader.start()
    for number in range(len(data)):
        os.write(channel.link.write_fd, data[number : number + 1])
    reader.join()

    assert received == [b"abc", b"defg"]


def test_receiving_from_an_empty_pipe_returns_nothing(channel: Channel) -> None:
    """The engine's end never waits."""
    assert channel.link.receive() == []


def test_unsent_bytes_of_a_full_pipe_are_queued(channel: Channel, poller: PipePoller) -> None:
    """A worker that does not read delays no other, and gets everything in order once it does."""
    poller.add(channel.link)
    frames = [bytes([number % 256]) * 10_000 for number in range(300)]
    for frame in frames:
        channel.link.send([frame])
    assert channel.link.has_outgoing

    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(channel.end.receive() for _ in frames))
    reader.start()
    while channel.link.has_outgoing:
        poller.wait(1)
    reader.join()

    assert received == frames
    assert poller.wait(0) == []


@pytest.mark.linux("sets the size of a pipe")
def test_a_pipe_that_is_too_small_is_enlarged(channel: Channel) -> None:
    """Queued bytes are sent only when a batch is requested, and meanwhile the worker has nothing to do."""
    channel.link.send([b"x" * 800_000])
    assert not channel.link.has_outgoing
    assert channel.end.receive() == b"x" * 800_000

    channel.end.send(b"y" * 800_000)  # It would wait for a reader.
    received: list[bytes] = []
    while not received:
        received = channel.link.receive()
    assert received == [b"y" * 800_000]


def test_a_worker_may_wait_with_a_timeout(channel: Channel) -> None:
    for timeout_s in (0.0, 0.001):
        with pytest.raises(TimeoutError):
            channel.end.receive(timeout_s)
    channel.link.send([b"1", b"2"])
    assert [channel.end.receive(0), channel.end.receive(0)] == [b"1", b"2"]


@pytest.mark.parametrize("size", [1 << 16, MIB, 5 * MIB], ids=["64 KiB", "1 MiB", "5 MiB"])
def test_a_large_frame_arrives_complete(channel: Channel, poller: PipePoller, size: int) -> None:
    """Many times the size of a pipe, while both sides work."""
    frame = os.urandom(1024) * (size // 1024)
    poller.add(channel.link)
    writer = threading.Thread(target=lambda: [channel.end.send(one) for one in (frame, b"end")])
    writer.start()
    received: list[bytes] = []
    while len(received) < 2:
        for link in poller.wait(1):
            received += link.receive()
    writer.join()

    assert received == [frame, b"end"]


def test_the_end_of_a_worker_comes_after_its_last_message(channel: Channel, poller: PipePoller) -> None:
    """Results are handled before deaths."""
    poller.add(channel.link)
    channel.end.send(b"last")
    channel.close_worker()

    assert poller.wait(1) == [channel.link]
    assert channel.link.receive() == [b"last"]
    assert poller.wait(1) == [channel.link]
    with pytest.raises(EOFError):
        channel.link.receive()
    poller.remove(channel.link)


def test_an_incomplete_frame_is_an_end(channel: Channel) -> None:
    """A worker was killed while it wrote."""
    os.write(channel.worker_write, joined([b"whole", b"half"])[:-2])
    channel.close_worker()

    assert channel.link.receive() == [b"whole"]
    with pytest.raises(EOFError):
        channel.link.receive()


def test_the_end_of_the_engine_reaches_the_worker(channel: Channel) -> None:
    """After the messages that were sent before."""
    channel.link.send([b"last"])
    channel.link.close()

    assert channel.end.receive() == b"last"
    with pytest.raises(EOFError):
        channel.end.receive()


def test_sending_to_a_dead_worker_is_silent(channel: Channel, poller: PipePoller) -> None:
    """Receiving reports its end; nothing is queued for it."""
    poller.add(channel.link)
    channel.close_worker()

    channel.link.send([b"x" * 100_000])
    channel.link.send([b"y"])

    assert not channel.link.has_outgoing
    assert poller.wait(1) == [channel.link]
    poller.remove(channel.link)


def test_queued_bytes_for_a_dead_worker_are_dropped(channel: Channel, poller: PipePoller) -> None:
    """The wait does not busy-loop on an unread pipe."""
    poller.add(channel.link)
    channel.link.send([b"x" * 3 * MIB])
    assert channel.link.has_outgoing
    channel.close_worker()
    while channel.link.has_outgoing:
        poller.wait(1)

    assert poller.wait(0) == [channel.link]
    poller.remove(channel.link)


def test_a_wake_up_ends_a_wait(poller: PipePoller) -> None:
    """From another thread or earlier; each wake-up ends one wait, and several count once."""
    for _ in range(3):
        poller.wake()
    assert poller.wait(None) == []

    thread = threading.Thread(target=poller.wake)
    thread.start()
    assert poller.wait(None) == []
    thread.join()


def test_a_wait_ends_after_its_timeout(poller: PipePoller, channel: Channel) -> None:
    """Without messages, nothing is returned. Repeated short waits must not keep a core busy."""
    poller.add(channel.link)

    assert poller.wait(0) == []
    began = time.monotonic()
    assert poller.wait(0.0005) == []
    assert time.monotonic() - began >= 0.0005
    poller.remove(channel.link)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e9], ids=["forever", "thirty years"])
def test_a_very_long_timeout_is_valid(poller: PipePoller, timeout_s: float) -> None:
    """Such a timeout works as an option; poll takes 32 bits of milliseconds."""
    poller.wake()

    assert poller.wait(timeout_s) == []


def test_wake_up_and_close_after_close_are_silent(poller: PipePoller) -> None:
    """Another thread may close a loader at any time."""
    poller.close()
    poller.wake()
    poller.close()


def test_all_links_with_messages_are_returned(poller: PipePoller) -> None:
    """No others."""
    channels = [open_channel() for _ in range(3)]
    try:
        for channel in channels:
            poller.add(channel.link)
        channels[0].end.send(b"a")
        channels[2].end.send(b"c")

        assert set(poller.wait(1)) == {channels[0].link, channels[2].link}
        poller.remove(channels[0].link)
        assert poller.wait(0) == [channels[2].link]
    finally:
        for channel in channels:
            channel.link.close()
            channel.close_worker()
