"""What is shown while a loop runs: a progress bar, and statistics for whoever wants to plot them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeAlias, final

from infeed.errors import ConfigError
from infeed.metrics.statistics import Statistics

OnStatistics: TypeAlias = Callable[[Statistics], object]

# How often the text behind the bar changes.
_TEXT_S: Final = 0.5


@final
class Show:
    """Belongs to one iteration of a loader."""

    def __init__(
        self,
        statistics: Callable[[], Statistics],
        *,
        epoch: int,
        first_step: int,
        batch_count: int | None,
        is_shown: bool,
        on_statistics: OnStatistics | None,
        every_s: float,
    ) -> None:
        """
        Args:
            first_step: where the epoch begins; of one that is resumed, behind what was had before.
            batch_count: of the whole epoch, if it is known.
        """
        self._statistics = statistics
        self._on_statistics = on_statistics
        self._every_s = every_s
        self._bar: Any = _open_bar(epoch, first_step, batch_count) if is_shown else None
        self._before = statistics() if is_shown else None  # the bar tells of this epoch alone
        self._next_text = 0.0
        self._next_call = monotonic() + every_s

    def step(self) -> None:
        """The loop is done with a batch, and asks for the next."""
        now = monotonic()
        bar = self._bar  # another thread may close the loader
        if bar is not None:
            if now >= self._next_text:
                self._next_text = now + _TEXT_S
                bar.set_postfix_str(self._text(), refresh=False)
            bar.update(1)
        if self._on_statistics is not None and now >= self._next_call:
            self._next_call = now + self._every_s
            self._on_statistics(self._statistics())

    def tell(self) -> None:
        """The epoch is complete."""
        if self._on_statistics is not None:
            self._on_statistics(self._statistics())

    def close(self) -> None:
        """The epoch is over, or was left, or its loader is closed."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.set_postfix_str(self._text(), refresh=False)
            bar.close()

    def _text(self) -> str:
        now, before = self._statistics(), self._before
        assert before is not None
        # Without the first start, as everywhere: beside it, tqdm shows how fast it goes now.
        elapsed_s, waited_s = now.elapsed_s - before.elapsed_s, now.waited_s - before.waited_s
        rate = (now.sample_count - before.sample_count) / elapsed_s if elapsed_s > 0 else 0.0
        share = waited_s / elapsed_s if elapsed_s > 0 else 0.0
        workers = "" if now.kind == "inline" else f", {now.worker_count} worker{'s' if now.worker_count != 1 else ''}"
        return f"{rate:,.0f} samples/s, waits {share:.0%}{workers}"


def check_progress() -> None:
    """
    Raises:
        ConfigError: there is no tqdm.
    """
    try:
        import tqdm.auto  # noqa: F401
    except ImportError as error:
        raise ConfigError("progress=True needs tqdm; install infeed[progress], or leave progress out") from error


def _open_bar(epoch: int, first_step: int, batch_count: int | None) -> Any:
    from tqdm.auto import tqdm

    return tqdm(desc=f"epoch {epoch}", total=batch_count, initial=first_step, unit="batch", dynamic_ncols=True)
