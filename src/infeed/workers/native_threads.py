"""How many threads libraries use inside a worker: as many as the user says, and one unless they do.

There are as many workers as the user wants cores at work; a library that starts a thread for every core in each of them makes
them stand in each other's way. Libraries are told in three ways, because they listen in three ways:

* by the environment, in which a worker is born, and which most read when they are loaded or first used;
* by a call of their own, as soon as they are imported, if there is no variable, or one that is read too early;
* by threadpoolctl, if the fork server had loaded them before the worker was born, when they read the server's number.

What the environment of the user's process says (``OMP_NUM_THREADS=8``) is meant for that process, where there is one of it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from infeed.import_hooks import when_imported

_LOG: Final = logging.getLogger("infeed")

# The fork server must stay a process of one thread, so libraries that it loads have read this number.
SERVER_THREADS: Final = 1
_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",  # Accelerate, macOS
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",  # tokenizers and others that are written in Rust
    "BLOSC_NTHREADS",
    "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS",
    "VIPS_CONCURRENCY",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
# numexpr reads the most that it will ever take when it is imported, which may be in the server; this is its own default.
_NUMEXPR_MOST: Final = 64
# With one thread for reading, Arrow waits for itself for ever in some calls, such as writing what is being read.
_ARROW_LEAST_IO: Final = 2


def thread_variables(threads: int) -> dict[str, str]:
    """What the environment of a process of ours says about thread pools."""
    return {
        **dict.fromkeys(_VARIABLES, str(threads)),
        "NUMEXPR_MAX_THREADS": str(max(threads, _NUMEXPR_MOST)),
        "ARROW_IO_THREADS": str(max(threads, _ARROW_LEAST_IO)),
    }


def modules_for(threads: int) -> list[str]:
    """What ``limit_pools`` needs, for a fork server to import once instead of each worker."""
    return [] if threads == SERVER_THREADS else ["threadpoolctl"]


def limit_pools(threads: int) -> None:
    """Let libraries use so many threads in this worker, those that are here and those that come. Before any user code runs.

    A library of the user's choice must not fail to be imported because of us: what it does not know, it is not told.
    """
    for name, tell in _TELL.items():
        when_imported(name, functools.partial(_quietly, tell, name, threads))
    if threads != SERVER_THREADS:
        import threadpoolctl  # some milliseconds, which the usual worker need not spend

        threadpoolctl.threadpool_limits(threads)


def _quietly(tell: Callable[[Any, int], None], name: str, threads: int) -> None:
    with suppress(Exception):  # another version of it, or a module of the user's with the same name
        tell(sys.modules[name], threads)


def _tell_opencv(cv2: Any, threads: int) -> None:
    cv2.setNumThreads(threads)
    cv2.ocl.setUseOpenCL(False)  # which has threads of its own, and memory on a device, in every worker


def _tell_torch(torch: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    set_interop = torch.set_num_interop_threads
    with suppress(RuntimeError):  # this thread's import of torch has used its pool already
        set_interop(threads)

    @functools.wraps(set_interop)
    def set_num_interop_threads(number: int) -> None:
        # torch takes this once, and that was ours. Programs that run without infeed must not fail here.
        if number != torch.get_num_interop_threads():
            _LOG.warning(
                "torch.set_num_interop_threads(%s) has no effect in a worker, which has %s; use threads_per_worker=%s",
                number,
                torch.get_num_interop_threads(),
                number,
            )

    torch.set_num_interop_threads = set_num_interop_threads


def _tell_arrow(pyarrow: Any, threads: int) -> None:
    pyarrow.set_cpu_count(threads)
    pyarrow.set_io_thread_count(max(threads, _ARROW_LEAST_IO))


def _tell_numexpr(numexpr: Any, threads: int) -> None:
    numexpr.set_num_threads(threads)


_TELL: Final[dict[str, Callable[[Any, int], None]]] = {
    "cv2": _tell_opencv,
    "torch": _tell_torch,
    "pyarrow": _tell_arrow,
    "numexpr": _tell_numexpr,
}
