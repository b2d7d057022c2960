"""CPU cores that this process may use, with simulated machines, containers and launchers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infeed.memory.limits import available_cores, local_ranks

Machine = Callable[..., float]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Returns the cores available on a machine that is described by files."""

    def ask(
        allowed: int = 8, total: int = 8, files: dict[str, str] | None = None, own: str = "0::/\n", **environ: str
    ) -> float:
        monkeypatch.setattr(os, "process_cpu_count", lambda: allowed, raising=False)  # New in Python 3.13.
        monkeypatch.setattr(os, "cpu_count", lambda: total)
        (tmp_path / "own").write_text(own)
        for name, text in (files or {}).items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_cores(environ, root=str(tmp_path / "groups"), own=str(tmp_path / "own"))

    return ask


def test_without_limits_the_number_is_that_of_the_system(machine: Machine) -> None:
    """A machine without control groups, quota and launcher."""
    assert machine(allowed=6, total=8) == 6


def test_this_process_has_at_least_one_core() -> None:
    """And no more than exist."""
    assert 0 < available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n"),
        ({"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "a/b/cpu.max": "400000 100000\n"}, "0::/a/b\n"),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n"),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "cpu/x/cpu.cfs_quota_us": "75000\n",
                "cpu/x/cpu.cfs_period_us": "50000\n",
            },
            "4:cpuacct,cpu:/x\n0::/\n",
        ),
    ],
    ids=["v2", "v2 above", "v1", "v1 below"],
)
def test_a_container_is_limited_by_its_quota(machine: Machine, files: dict[str, str], own: str) -> None:
    """The quota of this group or of any parent, in both versions of control groups."""
    assert machine(allowed=8, files=files, own=own) == 1.5


@pytest.mark.parametrize("text", ["max 100000\n", "", "nonsense\n", "100000\n"])
def test_a_missing_or_invalid_quota_does_not_count(machine: Machine, text: str) -> None:
    """A loader must still start."""
    assert machine(allowed=8, files={"cpu.max": text}) == 8


@pytest.mark.parametrize(
    "environ",
    [
        {"LOCAL_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        {"MPI_LOCALNRANKS": "4"},
        {"SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_NODEID": "1"},
    ],
    ids=lambda environ: " ".join(environ),
)
def test_ranks_share_the_machine(machine: Machine, environ: dict[str, str]) -> None:
    """Each launcher has its own variable for the number of ranks."""
    assert machine(allowed=8, total=8, **environ) == 2


@pytest.mark.parametrize("text", ["", "0", "many", "-2", "4(x"])
def test_an_invalid_launcher_variable_is_ignored(text: str) -> None:
    """Then this process counts as a single rank."""
    assert local_ranks({"LOCAL_WORLD_SIZE": text}) == 1


def test_ranks_with_their_own_cores_do_not_share_them(machine: Machine) -> None:
    """A launcher that pins each rank has already divided the cores."""
    assert machine(allowed=2, total=8, LOCAL_WORLD_SIZE="4") == 2


def test_ranks_in_a_container_share_its_cores(machine: Machine) -> None:
    """A container that is limited to some cores of a large machine does not pin processes to cores."""
    files = {"cpuset.cpus.effective": "0-3,8-11\n"}

    assert machine(allowed=8, total=64, files=files, LOCAL_WORLD_SIZE="4") == 2


def test_ranks_share_a_quota_even_if_each_has_its_own_cores(machine: Machine) -> None:
    """The quota is the container's."""
    assert machine(allowed=2, total=8, files={"cpu.max": "400000 100000\n"}, LOCAL_WORLD_SIZE="4") == 1
