"""Display progress during an epoch: a tqdm bar, and a callback that receives statistics."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeAlias, final

from infeed.errors import ConfigError
from infeed.formatting import format_count
from infeed.metrics.statistics import Statistics

OnStatistics: TypeAlias = Callable[[Statistics], object]

# How often the text after the bar is updated.
_TEXT_S: Final = 0.5


@final
class ProgressDisplay:
    """Progress bar and statistics callback of one iteration over a loader."""

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
            first_step: First step of this iteration; in a resumed epoch, the number of batches delivered before.
            batch_count: Number of batches in the whole epoch, if known.
            every_s: Minimum interval between two calls of ``on_statistics``.
        """
        self._statistics = statistics
        self._on_statistics = on_statistics
        self._every_s = every_s
        self._bar: Any = _open_bar(epoch, first_step, batch_count) if is_shown else None
        self._before = statistics() if is_shown else None  # the bar shows this epoch only
        self._next_text = 0.0
        self._next_call = monotonic() + every_s

    def step(self) -> None:
        """Update the display: the training loop has finished a batch and asks for the next."""
        now = monotonic()
        bar = self._bar  # copied, because another thread may close the loader
        if bar is not None:
            if now >= self._next_text:
                self._next_text = now + _TEXT_S
                bar.set_postfix_str(self._text(), refresh=False)
            bar.update(1)
        if self._on_statistics is not None and now >= self._next_call:
            self._next_call = now + self._every_s
            self._on_statistics(self._statistics())

    def report(self) -> None:
        """Call ``on_statistics`` at the end of a complete epoch."""
        if self._on_statistics is not None:
            self._on_statistics(self._statistics())

    def close(self) -> None:
        """Close the bar: the epoch ended, the training loop left it, or the loader was closed."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.set_postfix_str(self._text(), refresh=False)
            bar.close()

    def _text(self) -> str:
        now, before = self._statistics(), self._before
        assert before is not None
        # Excludes worker start-up time, as all rates do. tqdm shows the current rate next to it.
        elapsed_s, waited_s = now.elapsed_s - before.elapsed_s, now.waited_s - before.waited_s
        rate = (now.sample_count - before.sample_count) / elapsed_s if elapsed_s > 0 else 0.0
        share = waited_s / elapsed_s if elapsed_s > 0 else 0.0
        workers = "" if now.kind == "inline" else f", {format_count(now.worker_count, 'worker')}"
        return f"{rate:,.0f} samples/s, waiting {share:.0%}{workers}"


def check_progress() -> None:
    """Check that tqdm can be imported.

    Raises:
        ConfigError: tqdm is not installed.
    """
    try:
        import tqdm.auto  # noqa: F401
    except ImportError as error:
        raise ConfigError('progress=True needs tqdm; install it with: pip install "infeed[progress]"') from error


def _open_bar(epoch: int, first_step: int, batch_count: int | None) -> Any:
    from tqdm.auto import tqdm

    return tqdm(desc=f"epoch {epoch}", total=batch_count, initial=first_step, unit="batch", dynamic_ncols=True)
