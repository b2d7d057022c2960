"""Unneeded modules are not imported."""

import pytest

from tests.unit.fresh import run_fresh

pytestmark = pytest.mark.process


def imported_after(statement: str, *names: str) -> list[str]:
    """Returns which of these modules a new interpreter has imported after a statement."""
    return run_fresh(f"import sys\n{statement}\nprint(*[name for name in {names!r} if name in sys.modules])").split()


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    """A script that may never load data pays nothing."""
    assert imported_after("import infeed", "torch", "numpy", "psutil", "cloudpickle", "multiprocessing", "infeed.loader") == []


def test_loading_without_workers_does_not_import_torch() -> None:
    """Unless the dataset imports it."""
    code = "import infeed; list(infeed.DataLoader([1.0, 2.0], batch_size=2))"

    assert imported_after(code, "numpy", "torch", "multiprocessing", "tqdm", "rich", "PIL") == ["numpy"]


@pytest.mark.linux("is about the fork server")
def test_the_fork_server_imports_only_what_workers_need() -> None:
    """Every import delays the first batch."""
    assert imported_after("import infeed.workers.server", "torch", "psutil", "multiprocessing", "subprocess", "asyncio") == []


def test_a_spawned_worker_imports_only_what_workers_need() -> None:
    """It is a new interpreter, so each one pays: the code that starts and watches processes is imported only by the parent."""
    names = ("torch", "psutil", "multiprocessing", "subprocess", "asyncio", "infeed.workers.process", "infeed.workers.launcher")

    assert imported_after("import infeed.workers.main", *names) == []
