"""Chaos: workers and their fork server are killed at random during an epoch; every bit is the same as without kills (P1, P2).

Which process is killed, and when, is random; the number of kills is fixed, and each case runs as many epochs as they take.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, Final

import numpy as np
import psutil
import pytest

import infeed
from tests.helpers import close_fork_server, is_fork_server, plain, worker_processes

pytestmark = [pytest.mark.process, pytest.mark.linux("SIGSTOP, SIGKILL and the fork server"), pytest.mark.stress]

KILLS: Final = 30  # In one case.
LONG_KILLS: Final = 200  # Not more: with some more within a minute, a loader reports that workers keep dying.
_LONG_SEEDS: Final = 8
# Minimum number of batches between two kills. A batch that is hit by four of them rightly fails.
_APART: Final = 6
_PREFETCH: Final = 2
_STOPPED_S: Final = 0.02


class Draws:
    """Sample ``i`` is ``i`` and random numbers. In a worker it takes long enough to be killed."""

    def __init__(self, length: int = 600) -> None:
        self.length, self.owner_pid = length, os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if os.getpid() != self.owner_pid:
            time.sleep(0.0003)
        return {"index": index, "python": random.random(), "numpy": np.random.random(3)}


class Flow:
    """The same as an iterable dataset. A replacement worker reads it from the beginning, so it is short."""

    def __init__(self) -> None:
        self.samples = Draws(200)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.samples.__getitem__, range(len(self.samples)))


class Shares(Flow):
    """Each worker reads a shard."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = infeed.get_worker_info()
        assert info is not None
        return map(self.samples.__getitem__, range(info.id, len(self.samples), info.num_workers))


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sum": sum(sample["python"] for sample in samples), "random": random.random(), "all": samples}


class Killer:
    """Kills from its own thread while the training loop runs."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.kills = 0
        self._came = 0
        self._next = _APART
        self._condition = threading.Condition()
        self.truce = threading.Lock()  # The process that holds it is spared.
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="killer")

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._is_stopped = True
            self._condition.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def batch_came(self) -> None:
        with self._condition:
            self._came += 1
            if self._came >= self._next:
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_stopped or self._came >= self._next)
                if self._is_stopped:
                    return
                self._next = self._came + self._rng.randint(_APART, 2 * _APART)
            time.sleep(self._rng.random() * 0.005)  # Anywhere in what the training loop does then.
            with self.truce, suppress(psutil.NoSuchProcess):  # It died with its server, or has been replaced.
                self._strike()

    def _strike(self) -> None:
        kind = self._rng.random()
        if kind < 0.1:
            for process in psutil.Process().children():
                if is_fork_server(process):
                    self._end(process)
            return
        workers = worker_processes()
        if not workers:
            return
        victim = self._rng.choice(workers)
        if kind < 0.25:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(_STOPPED_S)
        self._end(victim)

    def _end(self, process: psutil.Process) -> None:
        process.kill()
        self.kills += 1


def infeed_loader(**options: Any) -> Any:
    return infeed.DataLoader(**{"dataset": Draws(), "shuffle": True, "prefetch": _PREFETCH, **options})


def torch_loader(**options: Any) -> Any:
    import infeed.torch

    if options["num_workers"]:
        options |= {"persistent_workers": True, "prefetch_factor": 1}
    return infeed.torch.DataLoader(Draws(), shuffle=True, **options)


CASES: Final[dict[str, Callable[..., Any]]] = {
    "indexed": infeed_loader,
    "collated": lambda **options: infeed_loader(collate_fn=collate, **options),
    "stream": lambda **options: infeed_loader(dataset=Flow(), shuffle=False, **options),
    "shares": lambda **options: infeed_loader(dataset=Shares(), shuffle=False, **options),
    "torch": torch_loader,
}


def check_case(case: str, seed: int, kills: int) -> None:
    """Compares two loaders epoch by epoch, one of them without kills."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "timeout": 60}
    workers = {"num_workers": 2 if case == "torch" else 4}  # torch warns about more workers than cores.
    # The draws of a shard depend on its worker; everything else would be the same without workers.
    calm = CASES[case](**options, **(workers if case == "shares" else {"num_workers": 0}))
    disturbed = CASES[case](**options, **workers)
    with closing(calm), closing(disturbed), Killer(seed) as killer:
        while killer.kills < kills:
            assert killer.is_alive
            with killer.truce:
                expected = [plain(batch) for batch in calm]
            got = []
            for batch in disturbed:
                got.append(plain(batch))
                killer.batch_came()
            assert got == expected
    close_fork_server()  # It may have been killed last.


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kills_do_not_change_batches(case: str) -> None:
    if case == "torch":
        pytest.importorskip("torch")
    check_case(case, seed=0, kills=KILLS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, _LONG_SEEDS + 1))
@pytest.mark.parametrize("case", CASES)
def test_thousands_of_kills_do_not_change_batches(case: str, seed: int) -> None:
    check_case(case, seed, kills=LONG_KILLS)
