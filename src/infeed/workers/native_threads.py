"""Limit the threads that libraries start inside a worker: ``threads_per_worker``, 1 by default.

Workers already use the CPU cores. A library that starts one thread per core in each worker would oversubscribe them. Libraries
read their limit in three ways, so it is set in three ways:

* Environment variables at worker start-up. Most libraries read them when they are loaded or first used.
* A call into the library right after its import, if it has no variable or reads it too early.
* threadpoolctl, for libraries that the fork server loaded before the worker started, with the server's number of threads.

Variables of the main process (``OMP_NUM_THREADS=8``) are not passed on: they are meant for a single process.
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

# The fork server must stay single-threaded, so the libraries it loads have read this number.
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
    "RAYON_NUM_THREADS",  # tokenizers and other Rust libraries
    "BLOSC_NTHREADS",
    "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS",
    "VIPS_CONCURRENCY",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
# numexpr fixes its maximum at import, which may happen in the fork server; this is its default.
_NUMEXPR_MOST: Final = 64
# With one I/O thread, Arrow deadlocks in some calls, such as writing data while reading it.
_ARROW_LEAST_IO: Final = 2


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that limit thread pools."""
    return {
        **dict.fromkeys(_VARIABLES, str(threads)),
        "NUMEXPR_MAX_THREADS": str(max(threads, _NUMEXPR_MOST)),
        "ARROW_IO_THREADS": str(max(threads, _ARROW_LEAST_IO)),
    }


def modules_for(threads: int) -> list[str]:
    """Return the modules that ``limit_pools`` needs, so that the fork server imports them once for all workers."""
    return [] if threads == SERVER_THREADS else ["threadpoolctl"]


def limit_pools(threads: int) -> None:
    """Limit the threads of libraries in this worker, loaded now or later. Call it before any user code runs.

    Errors are ignored: the import of a library must not fail because infeed cannot set its limit.
    """
    for name, limit in _LIMITERS.items():
        when_imported(name, functools.partial(_quietly, limit, name, threads))
    if threads != SERVER_THREADS:
        import threadpoolctl  # takes some milliseconds, which workers with the default can save

        threadpoolctl.threadpool_limits(threads)


def _quietly(limit: Callable[[Any, int], None], name: str, threads: int) -> None:
    with suppress(Exception):  # another version, or a user module with the same name
        limit(sys.modules[name], threads)


def _limit_opencv(cv2: Any, threads: int) -> None:
    cv2.setNumThreads(threads)
    cv2.ocl.setUseOpenCL(False)  # OpenCL would add threads and device memory in every worker


def _limit_torch(torch: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    set_interop = torch.set_num_interop_threads
    with suppress(RuntimeError):  # the import of torch has already started the pool
        set_interop(threads)

    @functools.wraps(set_interop)
    def set_num_interop_threads(number: int) -> None:
        # torch accepts this only once, and infeed has set it. Code that works without infeed must not fail here.
        if number != torch.get_num_interop_threads():
            _LOG.warning(
                "torch.set_num_interop_threads(%s) has no effect in a worker, where it is %s; use threads_per_worker=%s",
                number,
                torch.get_num_interop_threads(),
                number,
            )

    torch.set_num_interop_threads = set_num_interop_threads


def _limit_arrow(pyarrow: Any, threads: int) -> None:
    pyarrow.set_cpu_count(threads)
    pyarrow.set_io_thread_count(max(threads, _ARROW_LEAST_IO))


def _limit_numexpr(numexpr: Any, threads: int) -> None:
    numexpr.set_num_threads(threads)


_LIMITERS: Final[dict[str, Callable[[Any, int], None]]] = {
    "cv2": _limit_opencv,
    "torch": _limit_torch,
    "pyarrow": _limit_arrow,
    "numexpr": _limit_numexpr,
}
