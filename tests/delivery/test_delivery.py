"""Pinned batches and batches on a device, against a simulated device: order, leases, registrations."""

from __future__ import annotations

import random
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.delivery.backend import map_leaves
from tests.delivery.fake import FakeBackend
from tests.helpers import Tree, wait_until


def coded(index: int) -> dict[str, Any]:
    return {"x": np.full(5000, index, dtype=np.float32), "y": index, "name": f"sample {index}"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return _install(monkeypatch, FakeBackend())


def _install(monkeypatch: pytest.MonkeyPatch, fake: FakeBackend) -> FakeBackend:
    monkeypatch.setattr("infeed.engine.build.find_backend", lambda: fake)
    monkeypatch.setattr(
        "infeed.engine.epoch_iterator.open_stage", lambda _output, device, convert: fake.open_stage(device, convert)
    )
    return fake


def _check(batch: Any, first: int) -> None:
    expected = np.arange(first, first + len(batch["name"]))
    assert (batch["x"] == expected[:, None]).all(), f"batch from {first} on"
    assert batch["y"].tolist() == expected.tolist()
    assert batch["name"] == [f"sample {index}" for index in expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_segments_are_registered_once_while_in_use_and_unregistered_afterwards(fake: FakeBackend, workers: int) -> None:
    with infeed.DataLoader(Tree(64, coded), batch_size=8, num_workers=workers, pin_memory=True) as loader:
        for _ in range(3):
            for number, batch in enumerate(loader):
                _check(batch, 8 * number)
        wait_until(lambda: fake.registered, "a registration")
        wait_until(lambda: fake.ever_registered == len(fake.registered), "all to be registered")
        assert fake.ever_registered <= 4
        kept = next(iter(loader))
    assert fake.registered == {}
    _check(kept, 0)


def test_a_refused_registration_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _install(monkeypatch, FakeBackend(refuses=True))
    with infeed.DataLoader(Tree(64, coded), batch_size=8, pin_memory=True) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                _check(batch, 8 * number)
        wait_until(lambda: caplog.messages, "the word of why")
    assert caplog.messages == [
        "cannot page-lock the memory of batches, so they are copied into pinned memory: the limit of locked memory is reached"
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slot_is_not_reused_while_the_device_reads_it(fake: FakeBackend, workers: int) -> None:
    """The user drops the batch after requesting the copy; the device reads it later, or when it has to."""
    rng = random.Random(0)
    with infeed.DataLoader(Tree(400, coded), batch_size=8, num_workers=workers, pin_memory=True, prefetch=4) as loader:
        for _ in range(2):
            asked: list[tuple[int, np.ndarray]] = []
            for number, batch in enumerate(loader):
                asked.append((8 * number, fake.copy_later(batch["x"])))
                del batch
                if rng.random() < 0.3:
                    fake.user.run(rng.randrange(3))
            fake.user.run()
            for first, copied in asked:
                assert (copied == np.arange(first, first + 8)[:, None]).all(), f"batch from {first} on"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_on_the_device_are_in_order_and_bit_identical(fake: FakeBackend, workers: int, depth: int) -> None:
    """Batches are right whichever are kept or dropped, and however late the device is."""
    rng = random.Random(1)
    options: dict[str, Any] = {"device": infeed.Device("fake", prefetch=depth), "num_workers": workers}
    with infeed.DataLoader(Tree(400, coded), batch_size=8, **options) as loader:
        for _ in range(2):
            kept: deque[tuple[int, Any]] = deque()
            for number, batch in enumerate(loader):
                kept.append((8 * number, batch))
                fake.copies.run(rng.randrange(2))
                while len(kept) > rng.randrange(1, 5):
                    first, done = kept.popleft()
                    _check(done, first)
            assert number == 49
            for first, done in kept:
                _check(done, first)


def test_prefetch_sets_the_number_of_batches_in_transfer(fake: FakeBackend) -> None:
    options: dict[str, Any] = {"device": "fake"}
    with infeed.DataLoader(Tree(64, lambda index: np.float32(index)), batch_size=8, **options) as loader:
        batches = iter(loader)
        next(batches)
        assert fake.copies.asked_count == 3


def test_convert_receives_the_batch_on_the_device(fake: FakeBackend) -> None:
    def convert(batch: Any) -> Any:
        return {"sizes": batch["x"].shape}

    with infeed.DataLoader(Tree(8, coded), batch_size=4, device=infeed.Device("fake", convert=convert)) as loader:
        assert list(loader) == [{"sizes": (4, 5000)}] * 2


def test_states_count_only_delivered_batches(fake: FakeBackend) -> None:
    """A batch in transfer to the device is not counted."""
    options: dict[str, Any] = {"batch_size": 8, "seed": 0, "shuffle": True}
    plain = infeed.DataLoader(Tree(64, coded), **options)
    loader = infeed.DataLoader(Tree(64, coded), device="fake", num_workers=2, **options)
    with plain, loader:
        expected = [batch["y"].tolist() for batch in plain]
        batches = iter(loader)
        got = [next(batches)["y"].tolist() for _ in range(3)]
        state = loader.state_dict()
        assert (state["step"], state["position"]) == (3, 24)
        del batches
        loader.load_state_dict(state)
        assert got + [batch["y"].tolist() for batch in loader] == expected
        assert loader.state_dict()["epoch"] == 1


def test_an_error_is_raised_in_order_after_earlier_batches(fake: FakeBackend) -> None:
    def load(index: int) -> Any:
        if index == 20:
            raise ValueError("sample 20 is broken")
        return coded(index)

    with infeed.DataLoader(Tree(32, load), batch_size=8, device=infeed.Device("fake", prefetch=3), num_workers=2) as loader:
        batches = iter(loader)
        _check(next(batches), 0)
        _check(next(batches), 8)
        with pytest.raises(ValueError, match="sample 20 is broken"):
            next(batches)
        _check(next(batches), 24)
        assert next(batches, None) is None


def test_leaving_the_training_loop_leaves_no_transfer_behind(fake: FakeBackend) -> None:
    with infeed.DataLoader(Tree(64, coded), batch_size=8, device="fake", num_workers=2) as loader:
        for _ in range(3):
            for number, batch in enumerate(loader):
                _check(batch, 8 * number)
                break
    assert fake.registered == {}
    assert fake.copies.done_count == fake.copies.asked_count


def test_an_unavailable_device_raises_a_clear_error() -> None:
    pytest.importorskip("torch")
    loader = infeed.DataLoader(Tree(8, coded), device="cuda:7")
    with loader, pytest.raises(infeed.ConfigError, match="device='cuda:7' cannot be used"):
        next(iter(loader))


def test_the_cpu_is_a_device_too() -> None:
    torch = pytest.importorskip("torch")
    with infeed.DataLoader(
        Tree(8, coded), batch_size=4, device=infeed.Device(torch.device("cpu"), convert=lambda batch: batch)
    ) as loader:
        batch = next(iter(loader))
    assert type(batch["x"]) is torch.Tensor
    assert batch["x"].shape == (4, 5000)
    assert batch["name"] == ["sample 0", "sample 1", "sample 2", "sample 3"]


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_gpu_is_not_touched_if_another_device_is_requested(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Checking for a GPU opens it, and pinning memory for it takes some of the GPU's own memory."""
    torch = pytest.importorskip("torch")

    def ask() -> bool:
        raise AssertionError("a GPU was requested")

    monkeypatch.setattr(torch.cuda, "is_available", ask)
    with infeed.DataLoader(Tree(8, coded), batch_size=4, num_workers=1, worker="thread", device=device) as loader:
        assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_without_an_accelerator_pin_memory_changes_nothing() -> None:
    with infeed.DataLoader(Tree(8, coded), batch_size=4, pin_memory=True) as loader:
        assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_arguments_are_checked() -> None:
    for options, words in (
        ({"prefetch": -1}, "prefetch=-1 must be at least 0"),
        ({"output": "tensorflow"}, "output='tensorflow' is not supported; use 'jax'"),
        ({"target": None, "convert": len}, "target=None is only supported with output='jax'"),
        ({"convert": 3}, "convert=3 must be callable"),
    ):
        with pytest.raises(infeed.ConfigError, match=words):
            infeed.Device(**{"target": "cpu", **options})  # type: ignore[arg-type]
    with pytest.raises(infeed.ConfigError, match="pin_memory=1 must be a bool"):
        infeed.DataLoader([1, 2], pin_memory=1)  # type: ignore[arg-type]


def test_trees_of_any_shape_keep_their_types() -> None:
    from collections import OrderedDict, defaultdict, namedtuple
    from dataclasses import dataclass

    Point = namedtuple("Point", "x y")  # As users write it.

    @dataclass
    class Box:
        size: int
        name: str

    tree = {"a": [1, (2, Point(3, 4))], "b": OrderedDict(c=5), "d": defaultdict(list, e=6), "f": Box(7, "box")}
    changed = map_leaves(tree, lambda leaf: leaf * 10 if isinstance(leaf, int) else leaf)
    assert changed == {
        "a": [10, (20, Point(30, 40))], "b": OrderedDict(c=50), "d": defaultdict(list, e=60), "f": Box(70, "box"),
    }  # fmt: skip
    assert type(changed["d"]) is defaultdict
    assert changed["d"].default_factory is list
    assert tree["f"].size == 7


def test_a_pending_error_does_not_keep_the_engine_busy() -> None:
    """If the training loop is left while an error is pending, its engine is released at once."""
    pytest.importorskip("torch")

    def load(index: int) -> int:
        if index == 9:
            raise ValueError(index)
        return index

    with infeed.DataLoader(Tree(40, load), batch_size=4, device="cpu") as loader:
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            ended = weakref.ref(batches)
            del batches
            assert ended() is None


def test_an_exception_of_convert_is_raised_in_order() -> None:
    pytest.importorskip("torch")

    def convert(batch: Any) -> Any:
        if batch[0] == 8:
            raise ValueError("the third")
        return batch

    with infeed.DataLoader(list(range(20)), batch_size=4, device=infeed.Device("cpu", convert=convert)) as loader:
        batches = iter(loader)
        assert [next(batches)[0].item() for _ in range(2)] == [0, 4]
        with pytest.raises(ValueError, match="the third"):
            next(batches)
        assert [batch[0].item() for batch in batches] == [12, 16]


def test_arrays_that_torch_cannot_wrap_are_delivered() -> None:
    torch = pytest.importorskip("torch")
    with infeed.DataLoader(Tree(4, lambda index: np.full(2, index, dtype=">f4")), batch_size=4, device="cpu") as loader:
        (batch,) = loader
    assert torch.equal(batch, torch.arange(4.0)[:, None].expand(4, 2))
