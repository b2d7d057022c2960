"""Messages as bytes: decoding inverts encoding."""

import pickle
from typing import Any

import numpy as np
import pytest

from infeed.collate.layout import Layout, infer_layout
from infeed.collate.packing import Packed
from infeed.memory.arena import Block
from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import TaskId
from infeed.workers.exceptions import Failure
from infeed.workers.protocol import (
    DropTask,
    Emptied,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    MapSegment,
    Mismatched,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
    Started,
    StartFailed,
    StreamNote,
    TaskDecoder,
    TaskEncoder,
    ToWorker,
    UnmapSegment,
    Unplaced,
    decode_answer,
    dumps,
    encode_answer,
)

LAYOUT = infer_layout([{"x": np.zeros(3), "name": "a"}], [0])
BLOCK = Block(3, 1 << 40, 4096)
TASK = TaskId(1 << 50)


def layout(number: int) -> Layout:
    return infer_layout([np.zeros(number + 1)], [0])


def grains(indices: Any, **changes: Any) -> LoadGrains:
    message = LoadGrains(TASK, 5, 1 << 45, 64, 16, BLOCK, LAYOUT, False, indices)
    return message._replace(**changes)


class Pipe:
    """Both ends of one worker's pipe."""

    def __init__(self) -> None:
        self.encoder, self.decoder = TaskEncoder(), TaskDecoder()

    def send(self, message: ToWorker) -> tuple[ToWorker, int]:
        """Returns the message as the worker receives it, and the number of frames."""
        frames: list[bytes] = []
        self.encoder.encode(message, frames)
        decoded = [self.decoder.decode(frame) for frame in frames]
        assert [found is None for found in decoded] == [True] * (len(frames) - 1) + [False]
        found = decoded[-1]
        assert found is not None
        return found, len(frames)


TASKS: dict[str, ToWorker] = {
    "grains": grains(np.arange(16)),
    "grains without block": grains(np.arange(3), block=None),
    "grains without layout": grains(np.arange(3), layout=None),
    "grains, whole": grains(np.arange(3), is_whole=True, block=None, layout=None),
    "negative indices": grains(np.array([-1, -(1 << 63)])),
    "no indices": grains(np.arange(0)),
    "indices of a slice": grains(np.arange(100)[10:20]),
    "indices, strided": grains(np.arange(100)[::7]),
    "indices that are text": grains(["a", "b"]),
    "indices that are tuples": grains([(1, "x"), (2, None)]),
    "indices that are bools": grains([True, False]),
    "indices of NumPy": grains([np.int32(1), np.int32(2)]),
    "indices beyond 64 bits": grains([1 << 70]),
    "next": LoadNext(TASK, 2, 640, 64, BLOCK, LAYOUT),
    "next, nothing known": LoadNext(TASK, 2, 640, 64, None, None),
    "open": OpenStream(3, 10, 1000, {"dataset": {"shard": 3}}, True, False),
    "place": PlaceTask(TASK, BLOCK, LAYOUT),
    "place without layout": PlaceTask(TASK, BLOCK, None),
    "drop": DropTask(TASK),
    "map": MapSegment(SegmentHandle(7, 4096, 1 << 33)),
    "map by name": MapSegment(SegmentHandle(7, 4096, name="/infeed.x.7")),
    "unmap": UnmapSegment(7),
}


@pytest.mark.parametrize("message", TASKS.values(), ids=TASKS)
def test_a_message_to_a_worker_is_restored(message: ToWorker) -> None:
    """Every type, with all optional fields."""
    found, _ = Pipe().send(message)

    assert type(found) is type(message)
    if isinstance(message, LoadGrains) and isinstance(found, LoadGrains):
        assert type(found.indices) is type(message.indices)
        assert list(found.indices) == list(message.indices)
        assert list(map(type, found.indices)) == list(map(type, message.indices))
        found, message = found._replace(indices=[]), message._replace(indices=[])
    assert found == message


def test_a_layout_is_sent_once() -> None:
    """Later messages of any kind refer to its number, and the worker gets one object."""
    pipe = Pipe()

    first, frames = pipe.send(grains(np.arange(2)))
    assert frames == 2
    for message in (grains(np.arange(2)), PlaceTask(TASK, BLOCK, LAYOUT), LoadNext(TASK, 1, 0, 4, None, LAYOUT)):
        found, frames = pipe.send(message)
        assert frames == 1
        assert found.layout is first.layout  # type: ignore[union-attr]


def test_a_task_of_tiny_samples_takes_some_hundred_bytes() -> None:
    """The hot path pickles nothing."""
    frames: list[bytes] = []
    encoder = TaskEncoder()
    encoder.encode(grains(np.arange(8)), frames)
    frames.clear()
    encoder.encode(grains(np.arange(8)), frames)

    assert [len(frame) for frame in frames] == [81 + 64]


def test_any_number_of_layouts_can_be_sent() -> None:
    """A full table is cleared at both ends, and no number is mistaken for an old one."""
    pipe = Pipe()
    layouts = [layout(number) for number in range(150)]
    for _ in range(2):
        for one in layouts:
            found, _ = pipe.send(grains(np.arange(1), layout=one))
            assert isinstance(found, LoadGrains)
            assert found.layout == one


def test_a_dropped_layout_is_not_mistaken_for_a_new_one_at_its_address() -> None:
    """Layouts are compared by identity, so those in the table are kept alive."""
    pipe = Pipe()
    for number in range(500):
        found, _ = pipe.send(grains(np.arange(1), layout=layout(number % 70)))
        assert isinstance(found, LoadGrains)
        assert found.layout == layout(number % 70)


def test_two_workers_have_separate_tables() -> None:
    """Sending to one worker does not fill the table of the other."""
    first, second = Pipe(), Pipe()
    first.send(grains(np.arange(1)))

    _, frames = second.send(grains(np.arange(1)))

    assert frames == 2


FAILURE = Failure.of(ValueError("bad"), "loading sample", index=13, position=5).packed()
ANSWERS: dict[str, FromWorker] = {
    "started": Started(),
    "start failed": StartFailed(FAILURE),
    "rows": RowsLoaded(TASK, 1 << 40, 64, None, []),
    "rows of an iterable dataset": RowsLoaded(TASK, 5, 64, None, [], StreamNote(shards_itself=True)),
    "rows with a layout": RowsLoaded(TASK, 5, 64, LAYOUT, []),
    "rows with objects beside": RowsLoaded(TASK, 5, 2, None, [["a", None], [b"x", {1}]]),
    "rows with empty columns beside": RowsLoaded(TASK, 5, 0, None, [[], []]),
    "packed": PackedLoaded(TASK, 5, 64, Packed(b"data", [0, 64], [10, 20]), StreamNote(True, {"at": 3})),
    "unplaced": Unplaced(TASK, 1 << 40, LAYOUT),
    "unplaced, any tree": Unplaced(TASK, 100, None),
    "mismatched": Mismatched(TASK),
    "emptied": Emptied(TASK, StreamNote(True, bad=((3, FAILURE),))),
    "failed": LoadFailed(TASK, FAILURE),
    "failed in a share": LoadFailed(TASK, FAILURE, StreamNote(shards_itself=True), ((2, FAILURE),)),
}


@pytest.mark.parametrize("message", ANSWERS.values(), ids=ANSWERS)
def test_a_message_from_a_worker_is_restored(message: FromWorker) -> None:
    """Every type, with all optional fields."""
    found = decode_answer(encode_answer(message))

    assert type(found) is type(message)
    assert found == message


def test_the_usual_message_from_a_worker_takes_some_dozen_bytes() -> None:
    """Rows that fit the expected layout need no pickle."""
    assert len(encode_answer(RowsLoaded(TASK, 5, 64, None, []))) < 40


class Unwilling:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise RuntimeError("not in this process")


@pytest.mark.parametrize(
    "message",
    [RowsLoaded(TASK, 5, 1, None, [[Unwilling()]]), PackedLoaded(TASK, 5, 1, Unwilling())],  # type: ignore[arg-type]
    ids=["beside", "packed"],
)
def test_an_object_that_cannot_be_unpickled_fails_its_own_batch(message: FromWorker) -> None:
    """The message is still attributed to its task, and the user gets the error of the object."""
    found = decode_answer(encode_answer(message))

    assert isinstance(found, LoadFailed)
    assert found.task == TASK
    error = found.failure.exception("here")
    assert isinstance(error, RuntimeError)
    assert str(error) == "not in this process"


def test_objects_of_local_classes_are_pickled_by_value() -> None:
    """Samples may contain objects that only the user's script defines."""

    class Local:
        value = 3

    found = decode_answer(encode_answer(RowsLoaded(TASK, 5, 1, None, [[Local()]])))

    assert isinstance(found, RowsLoaded)
    assert found.beside[0][0].value == 3
    assert pickle.loads(dumps(Local())).value == 3


def test_a_message_that_cannot_be_pickled_becomes_a_failure_of_its_task() -> None:
    found = decode_answer(encode_answer(RowsLoaded(TASK, 5, 1, None, [[(n for n in range(3))]])))

    assert isinstance(found, LoadFailed)
    assert found.task == TASK
    assert isinstance(found.failure.exception("here"), TypeError)
