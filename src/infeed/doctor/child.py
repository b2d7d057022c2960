"""The child process in which the doctor runs a program: ``python -m infeed.doctor.child OPTIONS PROGRAM ...``.

A separate process lets the doctor survive whatever the program does, and each observation is written to a journal at once.
When the program ends, or requests a batch after its time is up, this process probes its datasets. A stopped program never
continues: it waits for the doctor to kill it and all its processes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from infeed.doctor.evidence import Ending, Journal
from infeed.doctor.monitor import Watcher
from infeed.doctor.targets import load_dataset
from infeed.errors import ConfigError
from infeed.programs.children import install_when_imported
from infeed.programs.script import describe_error, exit_code_of, run_module, run_script, show_error

_PROBE_S: Final = 2.0
_PAUSE_S: Final = 0.5
_MOST_PROBES: Final = 3
_FAILED: Final = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """Options that the doctor passes to its child process."""

    journal: str
    kind: Literal["script", "module", "dataset"]
    seconds: float
    with_infeed: bool = False
    num_workers: int = 2  # for kind="dataset", like batch_size
    batch_size: int = 32

    def text(self) -> str:
        return json.dumps(asdict(self))


def stop_signal() -> int | None:
    """Return the signal for a program that no longer requests batches: a real-time signal that programs do not use."""
    if sys.platform != "linux":
        return None
    return signal.SIGRTMIN + 9


@final
class _Child:
    def __init__(self, orders: ChildOptions) -> None:
        self._orders = orders
        self._journal = Journal(Path(orders.journal))
        self._watcher = Watcher(self._journal, orders.seconds, self._stop)
        self._is_over = False
        self._doctor = os.getppid()

    def run(self, program: list[str]) -> int:
        self._watcher.install()
        if self._orders.with_infeed:
            install_when_imported()
        number = stop_signal()
        if number is not None:
            signal.signal(number, lambda *_: self._stop("stuck"))
        ending: Ending = "finished"
        code, message = 0, ""
        try:
            self._run(program)
        except SystemExit as leaving:
            ending, code = "exit", exit_code_of(leaving)
        except ConfigError as error:
            ending, code, message = "error", _FAILED, str(error)
        except BaseException as error:
            ending, code, message = "error", _FAILED, describe_error(error)
            show_error(error, [__file__])
        sys.stdout.flush()
        self._finish(ending, code, message)
        self._journal.close()
        return code

    def _run(self, program: list[str]) -> None:
        if self._orders.kind == "script":
            run_script(program)
        elif self._orders.kind == "module":
            run_module(program)
        else:
            self._iterate(load_dataset(program[0]))

    def _iterate(self, dataset: Any) -> None:
        """Iterate the dataset in epochs until time is up."""
        options: dict[str, Any] = {"batch_size": self._orders.batch_size, "num_workers": self._orders.num_workers}
        if "torch" in sys.modules:
            loader: Any = importlib.import_module("torch.utils.data").DataLoader(
                dataset, persistent_workers=self._orders.num_workers > 0, **options
            )
        else:
            loader = importlib.import_module("infeed").DataLoader(dataset, **options)
        end = time.monotonic() + self._orders.seconds
        while time.monotonic() < end:
            batches = 0
            for _ in loader:
                batches += 1
            if not batches:
                raise ConfigError(f"the dataset {type(dataset).__qualname__} is empty; pass one with samples")

    def _stop(self, ending: Ending = "time") -> None:
        if self._is_over:
            return  # the probes are running
        self._watcher.note_waiting()
        self._finish(ending, None, "")
        # The program must not continue. Wait for the doctor to kill this process, and exit if the doctor is gone.
        while os.getppid() == self._doctor:
            time.sleep(_PAUSE_S)
        os._exit(_FAILED)

    def _finish(self, ending: Ending, code: int | None, message: str) -> None:
        # Import late: this loads NumPy, and the program may set its number of threads first.
        import threadpoolctl

        from infeed.doctor.probe import probe
        from infeed.workers.native_threads import limit_pools

        self._is_over = True
        at = time.monotonic()
        self._watcher.flush()
        # Write "end" before the probes, in case a probe hangs; "done" follows after them.
        self._journal.write("end", at=at, ending=ending, exit_code=code, error=message)
        torch: Any = sys.modules.get("torch")
        has_gpu = bool(torch is not None and torch.cuda.is_available())
        has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._journal.write("machine", has_gpu=has_gpu, is_fork_default=_is_fork_default(), has_gil=has_gil)
        # One thread per library, as in workers. Only the program's exit handlers still run after this.
        limit_pools(1)
        threadpoolctl.threadpool_limits(1)
        for watched in self._watcher.loaders[:_MOST_PROBES]:
            probe(watched, self._journal, min(_PROBE_S, self._orders.seconds / 2))
        self._journal.write("done")


def _is_fork_default() -> bool:
    return sys.platform == "linux" and sys.version_info < (3, 14)


if __name__ == "__main__":
    sys.exit(_Child(ChildOptions(**json.loads(sys.argv[1]))).run(sys.argv[2:]))
