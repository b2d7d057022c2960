"""Stateful datasets and samplers of all kinds; each is well defined at every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class Counting:
    """A map-style dataset with a state."""

    seen = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return index, self.seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


# --- samplers


class Turning:
    """Continues from epoch to epoch: its state, a live dict, is where the next epoch begins."""

    def __init__(self) -> None:
        self.live = {"epoch": 0, "at": 0}

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        while self.live["at"] < 7:
            self.live["at"] += 1
            yield (3 * self.live["at"] + self.live["epoch"]) % 7
        self.live["at"] = 0
        self.live["epoch"] += 1

    def state_dict(self) -> dict[str, int]:
        return self.live

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.live = state


class TurningBatches(Turning):
    def __iter__(self) -> Iterator[Any]:
        while self.live["at"] < 3:
            self.live["at"] += 1
            yield [self.live["epoch"] % 7, 5, 6][: 4 - self.live["at"]]
        self.live["at"] = 0
        self.live["epoch"] += 1


class TurningInside:
    """Batches without a state, of a stateful sampler."""

    def __init__(self) -> None:
        self.sampler = Turning()

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch = []
        yield batch


class Pending:
    """Like torchdata's ``StatefulDistributedSampler``: a loaded state is for the next iteration, which may be empty."""

    at = 0
    pending: int | None = None

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        self.at, self.pending = self.pending or 0, None
        while self.at < 7:
            self.at += 1
            yield 7 - self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.pending = state["at"]


class PendingAtOnce(Pending):
    """``iter`` uses the loaded state, not the first ``next``."""

    def __iter__(self) -> Iterator[int]:
        self.at, self.pending = self.pending or 0, None
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.at < 7:
            self.at += 1
            yield 7 - self.at


class PermutedIterator:
    """The state belongs to the iterator, and cannot be derived from the sampler."""

    def __init__(self, sampler: Permuted) -> None:
        self.sampler = sampler
        self.rest = [(sampler.count + 3 * number) % 7 for number in range(7)]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.rest:
            raise StopIteration
        if len(self.rest) == 1:
            self.sampler.count += 1
        return self.rest.pop()

    def state_dict(self) -> dict[str, list[int]]:
        return {"rest": self.rest}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.rest = state["rest"]


class Permuted:
    """A stateful sampler with a stateful iterator."""

    count = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return PermutedIterator(self)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Shuffled:
    """Stateless; the state of its iterator says what the next iterator begins with."""

    seed = 3

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return ShuffledIterator(self)


class ShuffledIterator:
    def __init__(self, sampler: Shuffled) -> None:
        self.sampler, self.at = sampler, 0
        self._draw(sampler.seed)

    def _draw(self, seed: int) -> None:
        self.seed, self.sampler.seed = seed, seed + 1
        self.order = random.Random(seed).sample(range(7), 7)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == 7:
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
        self._draw(state["seed"])


# --- iterable datasets


class Log:
    """A cursor that advances: an epoch is the next seven records."""

    at = 0
    is_open = False

    def __iter__(self) -> Iterator[Any]:
        if not self.is_open:
            self.is_open = True
            self.until = self.at + 7
        while self.at < self.until:
            self.at += 1
            yield self.at
        self.is_open = False

    def state_dict(self) -> dict[str, int]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)


class ResetLog(Log):
    """Starts from the beginning in every epoch."""

    def __iter__(self) -> Iterator[int]:
        while self.at < 7:
            self.at += 1
            yield self.at
        self.at = 0


class LogIterator:
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.at = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == 7:
            raise StopIteration
        self.at += 1
        self.dataset.at += 1
        return self.dataset.at, self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "total": self.dataset.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.dataset.at = state["at"], state["total"]


class Both(Log):
    """The dataset has a state, and so has its iterator."""

    def __iter__(self) -> Iterator[Any]:
        return LogIterator(self)


class IteratorOnly:
    """Only the iterator has a state."""

    def __iter__(self) -> Iterator[Any]:
        return LogIterator(Log())


class OnItsOwn:
    """The dataset is its own iterator, and can be continued after its end."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at % 8 == 0:
            raise StopIteration
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
