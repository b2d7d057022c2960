"""User exceptions keep their type and traceback (P7); errors of infeed name the problem and the fix."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.collate.arrays import ArrayTable
from infeed.delivery.host import HostDelivery
from infeed.testing import FaultyDataset
from infeed.workers.pool import News
from infeed.workers.process import ProcessPool
from infeed.workers.protocol import StartFailed
from tests.conftest import make_portable
from tests.helpers import (
    Blocking,
    Journal,
    Tree,
    assert_faster_than,
    collected,
    flat,
    kill_process,
    patient_next,
    plain,
    wait_until,
    worker_processes,
)


class NeedsThree(Exception):
    """An exception that cannot be created from its message alone."""

    def __init__(self, code: int, *, reason: str, where: str) -> None:
        super().__init__(f"{code}: {reason} in {where}")
        self.code, self.reason, self.where = code, reason, where


class HoldsALock(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def outcomes(loader: infeed.DataLoader) -> list[Any]:
    """Returns everything that an iteration yields, with exceptions in their places."""
    got: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            got.append(plain(next(batches)))
        except StopIteration:
            return got
        except infeed.LoadTimeoutError:
            raise
        except Exception as error:
            got.append(error)
        assert len(got) < 1000


def raising(error: Callable[[], BaseException], at: int = 3, length: int = 8) -> Tree:
    def load(index: int) -> int:
        if index == at:
            raise error()
        return index

    return Tree(length, load)


def test_an_exception_has_its_type_message_and_location(every_engine: dict[str, Any]) -> None:
    """Type and message are as without workers; notes have index, position and worker; the traceback has the user's line."""
    dataset = raising(lambda: KeyError("image_17.jpg"), at=5)
    with infeed.DataLoader(dataset, batch_size=2, sampler=[1, 2, 3, 5, 0, 6], **every_engine) as loader:
        batches = iter(loader)
        assert plain(next(batches)) == [1, 2]
        with pytest.raises(KeyError, match=r"image_17\.jpg") as caught:
            next(batches)
        assert type(caught.value) is KeyError
        (note,) = caught.value.__notes__
        assert "index=5" in note
        assert "position 3 of epoch 0" in note
        assert ("main process" if every_engine["num_workers"] == 0 else "worker ") in note
        shown = "".join(traceback.format_exception(caught.value))
        assert "raise error()" in shown
        assert "in load" in shown


def test_one_bad_batch_does_not_end_the_iteration(engine: dict[str, Any]) -> None:
    """All other batches arrive in order, and the error is raised in place of the bad one; epoch after epoch."""
    with infeed.DataLoader(FaultyDataset(12, bad=[4]), batch_size=2, **engine) as loader:
        for _ in range(2):
            got = outcomes(loader)
            assert [part if isinstance(part, list) else str(part) for part in got] == [
                [0, 1], [2, 3], "sample 4 is bad", [6, 7], [8, 9], [10, 11],
            ]  # fmt: skip


def test_every_bad_batch_is_reported_once(engine: dict[str, Any]) -> None:
    """41 bad samples in batches of 2: 21 errors, then the end of the epoch (torch hangs or dies here)."""
    with infeed.DataLoader(
        FaultyDataset(41, bad=range(41)), batch_size=2, **{**engine, "num_workers": 4 * bool(engine["num_workers"])}
    ) as loader:
        got = outcomes(loader)
    assert [str(error) for error in got] == [f"sample {index} is bad" for index in range(0, 41, 2)]


def test_of_several_bad_samples_in_a_batch_the_first_is_reported(engine: dict[str, Any]) -> None:
    """The error does not depend on which worker was faster: it is the one that a plain loop raises first (P2)."""
    with infeed.DataLoader(FaultyDataset(16, bad=[9, 11, 15]), batch_size=16, grain_size=1, **engine) as loader:
        for _ in range(5):
            assert [str(error) for error in outcomes(loader)] == ["sample 9 is bad"]


# Exceptions of a dataset: how each is created, and the type and message that must arrive.
EXCEPTIONS: list[tuple[str, Callable[[], BaseException], type[BaseException], str]] = [
    ("plain", lambda: ValueError("text"), ValueError, "text"),
    ("without text", lambda: ValueError(), ValueError, ""),
    ("several arguments", lambda: OSError(2, "No such file", "a.jpg"), FileNotFoundError, "[Errno 2] No such file: 'a.jpg'"),
    ("required keywords", lambda: NeedsThree(7, reason="bad", where="x"), NeedsThree, "7: bad in x"),
    ("not picklable", lambda: HoldsALock("locked"), HoldsALock, "locked"),
    ("unicode", lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, "'utf-8' codec"),
    ("json", lambda: json.JSONDecodeError("bad", "{", 1), json.JSONDecodeError, "bad: line 1"),
    ("of NumPy", lambda: np.linalg.LinAlgError("singular"), np.linalg.LinAlgError, "singular"),
    ("stop iteration", lambda: StopIteration("early"), RuntimeError, "StopIteration"),
    ("of infeed", lambda: infeed.ConfigError("x=1 is wrong; y"), infeed.ConfigError, "x=1 is wrong"),
    ("group", lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]), ExceptionGroup, "two"),
]


@pytest.mark.parametrize(("make", "kind", "text"), [case[1:] for case in EXCEPTIONS], ids=[case[0] for case in EXCEPTIONS])
@pytest.mark.parametrize("kind_of_worker", ["inline", "thread", pytest.param("process", marks=pytest.mark.process)])
def test_every_exception_can_be_caught_by_its_class(
    kind_of_worker: str, make: Callable[[], BaseException], kind: type[BaseException], text: str
) -> None:
    """``except`` works as without workers, whatever the constructor needs and whether or not the exception can be pickled."""
    options: dict[str, Any] = {} if kind_of_worker == "inline" else {"num_workers": 1, "worker": kind_of_worker, "timeout": 30}
    with infeed.DataLoader(raising(make), batch_size=8, **options) as loader:
        with pytest.raises(kind) as caught:
            next(iter(loader))
        assert text in str(caught.value)
        assert "index=3" in "".join(caught.value.__notes__)


def test_a_local_exception_class_can_be_caught(engine: dict[str, Any]) -> None:
    """A class that no worker can import is pickled by value, and the error is an instance of the original class."""

    class Corrupt(Exception):
        def __init__(self, path: str, *, size: int) -> None:
            super().__init__(path)
            self.path, self.size = path, size

    loader = infeed.DataLoader(raising(lambda: Corrupt("a.jpg", size=3)), batch_size=8, **engine)
    with loader, pytest.raises(Corrupt, match=r"a\.jpg"):
        next(iter(loader))


def test_the_cause_of_an_error_is_shown(engine: dict[str, Any]) -> None:
    """The user sees both exceptions of ``raise ... from ...`` in the dataset."""

    def load(index: int) -> int:
        try:
            return {}[index]
        except KeyError as error:
            raise RuntimeError("no such sample") from error

    with infeed.DataLoader(Tree(4, load), **engine) as loader:
        with pytest.raises(RuntimeError, match="no such sample") as caught:
            next(iter(loader))
        shown = "".join(traceback.format_exception(caught.value))
        assert "KeyError: 0" in shown
        assert "direct cause" in shown


def test_notes_of_the_user_are_kept(engine: dict[str, Any]) -> None:
    """Notes added with add_note come before those of infeed."""

    def make() -> ValueError:
        error = ValueError("bad")
        error.add_note("file 17 of 20")
        return error

    with infeed.DataLoader(raising(make, at=0), **engine) as loader:
        with pytest.raises(ValueError, match="bad") as caught:
            next(iter(loader))
        assert caught.value.__notes__[0] == "file 17 of 20"
        assert "index=0" in caught.value.__notes__[1]


# Ways for user code to raise StopIteration, which must never look like the end of the epoch.
def stop(*_: Any) -> Any:
    return next(iter([]))


class StopsTogether:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        raise StopIteration


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dataset": Tree(4, stop)}, id="__getitem__"),
        pytest.param({"dataset": StopsTogether()}, id="__getitems__"),
        pytest.param({"dataset": range(4), "collate_fn": stop}, id="collate_fn"),
        pytest.param({"dataset": range(4), "worker_init_fn": stop}, id="worker_init_fn"),
        pytest.param({"dataset": Tree(4, stop), "batch_size": None}, id="single samples"),
    ],
)
def test_stop_iteration_of_user_code_is_an_error_and_not_the_end(light_engine: dict[str, Any], options: dict[str, Any]) -> None:
    """It becomes a RuntimeError, as in a generator (PEP 479): an epoch never ends early without an error."""
    if "worker_init_fn" in options and light_engine["num_workers"] == 0:
        pytest.skip("there is no worker to initialize")
    loader = infeed.DataLoader(**{"batch_size": 2, **options}, **light_engine)
    with loader, pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit], ids=lambda cls: cls.__name__)
def test_system_exit_reaches_the_training_loop(engine: dict[str, Any], error: type[BaseException]) -> None:
    """A worker does not swallow sys.exit() and its like in a dataset."""
    with infeed.DataLoader(raising(lambda: error("over")), batch_size=2, **engine) as loader, pytest.raises(error):
        list(loader)


def test_an_error_in_collate_fn_names_the_indices(engine: dict[str, Any]) -> None:
    """The user's own exception, with the indices of its batch."""

    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise TypeError("cannot collate five")
        return samples

    with infeed.DataLoader(range(8), batch_size=2, collate_fn=collate, **engine) as loader:
        got = outcomes(loader)
    assert [part for part in got if isinstance(part, list)] == [[0, 1], [2, 3], [6, 7]]
    assert type(got[2]) is TypeError
    assert "collate_fn" in got[2].__notes__[-1]
    assert "[4, 5]" in got[2].__notes__[-1]


def test_a_wrong_number_of_samples_from_getitems_is_an_error(engine: dict[str, Any]) -> None:
    """A batch never silently has the wrong size."""

    class Short:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    loader = infeed.DataLoader(Short(), batch_size=4, **engine)
    with loader, pytest.raises(RuntimeError, match="returned 3 samples for 4 indices"):
        list(loader)


@pytest.mark.parametrize("error", [ValueError, AttributeError, ImportError], ids=lambda cls: cls.__name__)
def test_an_error_in_worker_init_fn_keeps_its_type(engine: dict[str, Any], error: type[Exception]) -> None:
    """A note says that it came from starting a worker, and no sample is blamed."""
    if engine["num_workers"] == 0:
        pytest.skip("there is no worker to initialize")

    def fail(number: int) -> None:
        raise error("no database")

    with infeed.DataLoader(range(4), worker_init_fn=fail, **engine) as loader:
        with pytest.raises((error, infeed.WorkerStartError), match="no database") as caught:
            next(iter(loader))
        assert "build the dataset" not in str(caught.value)
        assert "worker" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.process
@pytest.mark.linux("lists names in /dev/shm")
def test_a_worker_that_cannot_start_does_not_break_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers are starting too, and would fail without a server before the engine has received the reason."""
    make_portable(monkeypatch)
    receive, names = ProcessPool.receive, []

    def receive_late(pool: ProcessPool, timeout_s: float | None) -> list[News]:
        news = receive(pool, timeout_s)
        if any(isinstance(message, StartFailed) for _, message in news):
            wait_until(lambda: not worker_processes(), "it to end")
            names.extend(Path("/dev/shm").glob(f"infeed.{os.getpid()}.*"))
        return news

    def fail(number: int) -> None:
        raise ValueError("no database")

    monkeypatch.setattr(ProcessPool, "receive", receive_late)
    with infeed.DataLoader(range(4), worker_init_fn=fail, num_workers=1) as loader:
        with pytest.raises(ValueError, match="no database"):
            next(iter(loader))
        assert names
    assert not [name for name in names if name.exists()]


@pytest.mark.process
def test_a_dataset_that_cannot_be_built_in_a_worker_is_a_start_error(process_engine: dict[str, Any], tmp_path: Path) -> None:
    """It pickles but does not unpickle in the worker: WorkerStartError with the reason, and no endless retries."""
    journal = Journal(tmp_path / "tries")

    def rebuild() -> Any:
        journal.write("try")
        raise ImportError("libmissing.so: cannot open shared object file")

    class Unbuildable:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

        def __reduce__(self) -> Any:
            return rebuild, ()

    loader = infeed.DataLoader(Unbuildable(), **process_engine)
    with loader, pytest.raises(infeed.WorkerStartError, match=r"could not build the dataset: ImportError: libmissing\.so"):
        next(iter(loader))
    assert len(journal.lines()) <= 2


class Holder:
    """A dataset with an object deep inside."""

    def __init__(self, thing: Any) -> None:
        self.reader = Inner(thing)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Inner:
    def __init__(self, thing: Any) -> None:
        self.options = {"handle": thing}


def _open_file(mode: str) -> Any:
    return open(__file__, mode)  # The test closes it.


def _open_socket() -> Any:
    import socket

    return socket.socket()


# Objects that cannot be pickled, and their names in the message.
UNSENDABLE: list[tuple[str, Callable[[], Any], str]] = [
    ("lock", threading.Lock, "_thread.lock"),
    ("open file", lambda: _open_file("rb"), "BufferedReader"),
    ("open text file", lambda: _open_file("r"), "TextIOWrapper"),
    ("database", lambda: sqlite3.connect(":memory:"), "sqlite3.Connection"),
    ("generator", lambda: (i for i in range(3)), "generator"),
    ("socket", _open_socket, "socket"),
]


@pytest.mark.process
@pytest.mark.parametrize(("make", "kind"), [case[1:] for case in UNSENDABLE], ids=[case[0] for case in UNSENDABLE])
def test_an_object_that_cannot_be_pickled_is_named_with_its_path(make: Callable[[], Any], kind: str) -> None:
    """WorkerStartError shows the path, the type and the fixes; a thread worker accepts the object."""
    thing = make()
    try:
        with infeed.DataLoader(Holder(thing), num_workers=2) as loader:
            with pytest.raises(infeed.WorkerStartError) as caught:
                next(iter(loader))
            text = str(caught.value)
            assert "dataset.reader.options['handle']" in text
            assert kind in text
            assert "worker_init_fn" in text
            assert "__getstate__" in text
            assert "worker='thread'" in text
        with infeed.DataLoader(Holder(thing), batch_size=4, num_workers=2, worker="thread") as loader:
            assert collected(loader) == [[0, 1, 2, 3]]
    finally:
        getattr(thing, "close", lambda: None)()


@pytest.mark.process
@pytest.mark.parametrize("option", ["collate_fn", "worker_init_fn"])
def test_an_object_that_cannot_be_pickled_in_a_function_is_named(option: str) -> None:
    """A lock in a closure is found as well."""
    lock = threading.Lock()

    def function(argument: Any) -> Any:
        with lock:
            return argument

    options: dict[str, Any] = {option: function}
    loader = infeed.DataLoader(range(4), num_workers=1, **options)
    with loader, pytest.raises(infeed.WorkerStartError, match=rf"{option} -> lock \(closed over\) is a _thread\.lock"):
        next(iter(loader))


def test_a_sample_that_cannot_be_pickled_fails_its_batch(process_engine: dict[str, Any]) -> None:
    """That batch raises a clear error; the others are delivered."""
    dataset = Tree(8, lambda i: threading.Lock() if i == 3 else str(i))
    with infeed.DataLoader(dataset, batch_size=2, **process_engine) as loader:
        got = outcomes(loader)
    assert [part for part in got if isinstance(part, list)] == [["0", "1"], ["4", "5"], ["6", "7"]]
    assert isinstance(got[1], TypeError)
    assert "pickle" in str(got[1]) + "".join(got[1].__notes__)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_an_index_that_cannot_be_pickled_fails_its_batch(process_engine: dict[str, Any], prefetch: int) -> None:
    """Its batch raises the error with index and position, in its turn; all other batches are delivered."""
    keys = [0, 1, 2, 3, threading.Lock(), 5, 6, 7]
    dataset = Tree(8, lambda i: i)
    with infeed.DataLoader(dataset, batch_size=2, sampler=keys, prefetch=prefetch, **process_engine) as loader:
        for epoch in range(2):
            got = outcomes(loader)
            assert [plain(part) for part in got if not isinstance(part, Exception)] == [[0, 1], [2, 3], [6, 7]]
            assert isinstance(got[2], TypeError)
            (note,) = got[2].__notes__
            assert note.startswith("while pickling index=<unlocked _th")
            assert f"(position 4 of epoch {epoch}, worker " in note


def test_an_index_that_cannot_be_pickled_is_skipped_as_a_bad_sample(process_engine: dict[str, Any]) -> None:
    """``on_error="skip"`` leaves out this index only."""
    dataset = Tree(8, lambda i: i)
    keys = [0, 1, 2, 3, threading.Lock(), 5, 6, 7]
    with infeed.DataLoader(dataset, batch_size=2, sampler=keys, on_error="skip", **process_engine) as loader:
        assert collected(loader) == [[0, 1], [2, 3], [5], [6, 7]]
        (bad,) = loader.bad_samples
        assert bad.position == 4


def test_an_error_within_the_engine_ends_the_epoch_and_not_the_loader(
    light_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lost actions, so the iterator ends instead of waiting forever; the next epoch has a new engine."""
    with infeed.DataLoader(Tree(8, lambda i: i), batch_size=2, **light_engine) as loader:
        batches = iter(loader)
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(HostDelivery, "rows", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        assert collected(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("collate_fn", [None, list], ids=["rows", "collated"])
def test_a_sample_that_cannot_be_unpickled_fails_its_batch(process_engine: dict[str, Any], collate_fn: Any) -> None:
    """It pickles in the worker and fails in the main process: that batch fails, others are delivered, nothing hangs (P4)."""

    def explode() -> Any:
        raise ArithmeticError("cannot be built")

    class OneWay:
        def __reduce__(self) -> Any:
            return explode, ()

    dataset = Tree(24, lambda i: OneWay() if i == 3 else str(i))
    with infeed.DataLoader(dataset, batch_size=2, collate_fn=collate_fn, **process_engine) as loader:
        for _ in range(2):
            got = outcomes(loader)
            assert [part for part in got if isinstance(part, list)] == [[str(i), str(i + 1)] for i in range(0, 24, 2) if i != 2]
            assert isinstance(got[1], ArithmeticError)


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])
def test_a_timeout_names_the_worker_and_the_position(kind: Any, tmp_path: Path) -> None:
    """LoadTimeoutError, a TimeoutError, says which worker loads what; the epoch can continue."""
    dataset = Blocking(8, 2, tmp_path)
    with infeed.DataLoader(dataset, batch_size=2, num_workers=2, worker=kind, timeout=1.0) as loader:
        batches = iter(loader)
        assert plain(patient_next(batches)) == [0, 1]
        with (
            assert_faster_than(20),
            pytest.raises(
                infeed.LoadTimeoutError,
                match=r"timeout=1 .*\n.*worker \d has been loading index=2 \(position 2 of",
            ) as caught,
        ):
            next(batches)
        assert isinstance(caught.value, TimeoutError)
        assert re.search(r"helpers\.py\", line \d+ in __getitem__", str(caught.value))  # Where it is.
        dataset.let_go()
        assert [plain(patient_next(batches)) for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]


def test_an_index_outside_of_the_dataset_raises_the_datasets_error(engine: dict[str, Any]) -> None:
    """A sampler that exceeds the dataset gets its IndexError, also when arrays are gathered."""
    for dataset in ([1, 2, 3], np.arange(3), (np.arange(3), np.arange(3))):
        with infeed.DataLoader(dataset, batch_size=2, sampler=[0, 1, 3], **engine) as loader, pytest.raises(IndexError):
            list(loader)


def test_no_batch_is_lost_if_arrays_cannot_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, the rows are then loaded one by one, as from any dataset."""
    real = ArrayTable.gather
    calls = []

    def gather(self: ArrayTable, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise MemoryError
        real(self, *arguments)

    monkeypatch.setattr(ArrayTable, "gather", gather)
    assert flat(collected(infeed.DataLoader(np.arange(40), batch_size=4))) == list(range(40))


@pytest.mark.process
def test_a_failed_start_can_be_retried(tmp_path: Path) -> None:
    """After an error at the start, the next iteration starts new workers, because the cause may be gone."""
    flag = tmp_path / "ready"

    def init(number: int) -> None:
        if not flag.exists():
            raise OSError("not ready")

    with infeed.DataLoader(range(4), batch_size=2, num_workers=2, worker_init_fn=init, timeout=30) as loader:
        with pytest.raises(OSError, match="not ready"):
            list(loader)
        flag.touch()
        assert collected(loader) == [[0, 1], [2, 3]]


class Fragile:
    """The fifth sample raises, once armed, until it is repaired."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_mended = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4 and not self.is_mended:
            self.go.wait()
            raise ValueError("sample 4 is bad")
        return index


@pytest.mark.parametrize("options", [{"timeout": 0.2}, {"device": "cpu"}], ids=["after a time-out", "on a device"])
def test_an_error_during_the_training_step_is_raised_only_in_place_of_its_batch(options: dict[str, Any]) -> None:
    if "device" in options:
        pytest.importorskip("torch")
    dataset = Fragile()
    with infeed.DataLoader(dataset, 1, num_workers=2, worker="thread", prefetch=4, **options) as loader:
        got: list[int] = []
        iterator = iter(loader)

        def go_on(iterator: Iterator[Any]) -> None:
            while True:
                try:
                    got.append(int(next(iterator)[0]))
                except infeed.LoadTimeoutError:
                    dataset.go.set()
                if got[-1] == 3 and "device" in options:
                    dataset.go.set()
                time.sleep(0.02)  # A step, in which everything that fits is loaded.

        with pytest.raises(ValueError, match="sample 4 is bad"):
            go_on(iterator)
        assert got == [0, 1, 2, 3]
        assert loader.state_dict()["step"] == 4
        del iterator
        dataset.is_mended = True
        for _ in range(2):
            assert [int(batch[0]) for batch in loader] == list(range(8))


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_worker_init_fn_that_fails_in_one_worker_fails_a_short_epoch(
    light_engine: dict[str, Any], tmp_path: Path, how: str
) -> None:
    """The other worker has loaded everything before, and some or all of it may be delivered before the error."""
    if light_engine["num_workers"] == 0:
        pytest.skip("there is no worker to initialize")
    if how == "exit" and light_engine.get("worker") == "thread":
        pytest.skip("a thread cannot die")
    journal = Journal(tmp_path / "loaded")

    def load(index: int) -> int:
        journal.write(index)
        return index

    def init(worker: int) -> None:
        if worker:
            wait_until(lambda: len(journal.lines()) >= 4, "all samples")
            if how == "exit":
                os._exit(3)
            raise ValueError("no database")

    got: list[Any] = []
    expected = infeed.WorkerDiedError if how == "exit" else ValueError
    with infeed.DataLoader(Tree(4, load), batch_size=2, worker_init_fn=init, **light_engine) as loader:
        iterator = iter(loader)
        with pytest.raises(expected):
            got.extend(map(plain, iterator))
        assert got == [[0, 1], [2, 3]][: len(got)]
        assert list(iterator) == []


@pytest.mark.process
def test_a_worker_that_cannot_be_replaced_ends_the_epoch_after_its_ready_batches(
    forkserver: dict[str, Any], tmp_path: Path
) -> None:
    """The state counts exactly the delivered batches, so a resumed run misses none."""

    def init(worker: int) -> None:
        if (tmp_path / "no more").exists():
            raise RuntimeError("no license is left")

    with infeed.DataLoader(Tree(40, lambda i: i), 1, prefetch=8, worker_init_fn=init, **forkserver) as loader:
        iterator = iter(loader)
        got = [plain(next(iterator)) for _ in range(4)]
        (tmp_path / "no more").touch()
        kill_process(iterator.worker_pids()[1])  # type: ignore[attr-defined]

        def go_on() -> None:
            for batch in iterator:
                got.append(plain(batch))
                time.sleep(0.05)  # A step, in which workers are started.

        with pytest.raises(RuntimeError, match="no license is left"):
            go_on()
        assert flat(got) == list(range(len(got)))
        assert loader.state_dict()["step"] == len(got)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_exception_that_cannot_be_printed_keeps_its_type(engine: dict[str, Any], on_error: Any) -> None:
    """It counts as a bad sample like any other."""

    def load(index: int) -> int:
        if index == 4:
            raise Unprintable
        return index

    with infeed.DataLoader(Tree(8, load), batch_size=2, on_error=on_error, **engine) as loader:
        batches = iter(loader)
        got = [plain(next(batches)) for _ in range(2)]
        if on_error == "raise":
            with pytest.raises(Unprintable):
                next(batches)
        else:
            got.append(plain(next(batches)))
        got.append(plain(next(batches)))
    assert flat(got) == [0, 1, 2, 3, *([5] if on_error == "skip" else []), 6, 7]


def test_system_exit_is_not_a_bad_sample(light_engine: dict[str, Any]) -> None:
    """``sys.exit()`` in a dataset ends the training loop as it would without a loader, whatever ``on_error`` is."""

    def load(index: int) -> int:
        if index == 4:
            raise SystemExit(3)
        return index

    with infeed.DataLoader(Tree(8, load), batch_size=2, on_error="skip", **light_engine) as loader:
        with pytest.raises(SystemExit):
            collected(loader)
        assert loader.bad_samples == []
