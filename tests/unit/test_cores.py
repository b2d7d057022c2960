"""Processors: what this process may use of them, with made-up machines, containers and launchers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infeed.memory.limits import available_cores, local_ranks

Machine = Callable[..., float]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What is available on a machine that is described by files."""

    def ask(
        allowed: int = 8, total: int = 8, files: dict[str, str] | None = None, own: str = "0::/\n", **environ: str
    ) -> float:
        monkeypatch.setattr(os, "process_cpu_count", lambda: allowed, raising=False)  # new in Python 3.13
        monkeypatch.setattr(os, "cpu_count", lambda: total)
        (tmp_path / "own").write_text(own)
        for name, text in (files or {}).items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_cores(environ, root=str(tmp_path / "groups"), own=str(tmp_path / "own"))

    return ask


def test_without_limits_it_is_what_the_system_allows(machine: Machine) -> None:
    """A machine without groups, quota and launcher."""
    assert machine(allowed=6, total=8) == 6


def test_this_very_process_has_some() -> None:
    """And no more than there are."""
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
def test_a_container_gives_no_more_than_its_quota(machine: Machine, files: dict[str, str], own: str) -> None:
    """Of this group or of any above it, in both versions of control groups."""
    assert machine(allowed=8, files=files, own=own) == 1.5


@pytest.mark.parametrize("text", ["max 100000\n", "", "nonsense\n", "100000\n"])
def test_a_quota_that_is_none_or_not_understood_does_not_count(machine: Machine, text: str) -> None:
    """A loader must start all the same."""
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
    """Each launcher says in its own words how many there are."""
    assert machine(allowed=8, total=8, **environ) == 2


@pytest.mark.parametrize("text", ["", "0", "many", "-2", "4(x"])
def test_a_launcher_that_says_nothing_of_use_is_not_listened_to(text: str) -> None:
    """Then this process counts as alone."""
    assert local_ranks({"LOCAL_WORLD_SIZE": text}) == 1


def test_ranks_with_processors_of_their_own_do_not_share_them(machine: Machine) -> None:
    """A launcher that binds each rank has divided already."""
    assert machine(allowed=2, total=8, LOCAL_WORLD_SIZE="4") == 2


def test_ranks_in_a_container_share_what_it_may_run_on(machine: Machine) -> None:
    """A container that is limited to some cores of a large machine does not bind processes to specific cores."""
    files = {"cpuset.cpus.effective": "0-3,8-11\n"}

    assert machine(allowed=8, total=64, files=files, LOCAL_WORLD_SIZE="4") == 2


def test_ranks_share_a_quota_even_if_each_has_its_own_processors(machine: Machine) -> None:
    """The quota is the container's."""
    assert machine(allowed=2, total=8, files={"cpu.max": "400000 100000\n"}, LOCAL_WORLD_SIZE="4") == 1
