"""Whether the OOM killer has struck, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from infeed.memory.limits import OomWatch


def _watchdog(folder: Path) -> OomWatch:
    return OomWatch(root=str(folder / "cgroup"), own=str(folder / "own"), vmstat=str(folder / "vmstat"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_oom_kill_in_a_container_is_reported_with_the_limit(tmp_path: Path) -> None:
    _write(tmp_path / "cgroup/memory.events", "low 0\noom 1\noom_kill 1\n")
    _write(tmp_path / "cgroup/memory.max", f"{4 << 30}\n")
    watchdog = _watchdog(tmp_path)
    assert watchdog.diagnosis() is None
    _write(tmp_path / "cgroup/memory.events", "low 0\noom 2\noom_kill 2\n")
    assert watchdog.diagnosis() == "the OOM killer killed it: the container reached its memory limit of 4.0 GiB"
    assert watchdog.diagnosis() is None  # Reported once.


def test_the_group_of_this_process_is_examined(tmp_path: Path) -> None:
    """Outside of a container the root has no counters; the kernel says which group this process belongs to."""
    _write(tmp_path / "own", "0::/user.slice/job-7\n")
    counters = tmp_path / "cgroup/user.slice/job-7/memory.events"
    _write(counters, "oom_kill 0\n")
    _write(counters.with_name("memory.max"), "max\n")
    watchdog = _watchdog(tmp_path)
    _write(counters, "oom_kill 3\n")
    assert watchdog.diagnosis() == "the OOM killer killed it: the container reached its memory limit"


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    _write(tmp_path / "own", "9:memory:/docker/abc\n4:cpu:/docker/abc\n")
    counters = tmp_path / "cgroup/memory/docker/abc/memory.oom_control"
    _write(counters, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    _write(counters.with_name("memory.limit_in_bytes"), f"{64 << 20}\n")
    watchdog = _watchdog(tmp_path)
    _write(counters, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert "memory limit of 64.0 MiB" in (watchdog.diagnosis() or "")


def test_an_oom_kill_of_the_machine_is_reported(tmp_path: Path) -> None:
    _write(tmp_path / "vmstat", "nr_free_pages 1\noom_kill 5\n")
    watchdog = _watchdog(tmp_path)
    _write(tmp_path / "vmstat", "nr_free_pages 1\noom_kill 6\n")
    assert watchdog.diagnosis() == "the OOM killer killed it: the machine ran out of memory"


def test_without_counters_there_is_no_diagnosis(tmp_path: Path) -> None:
    assert _watchdog(tmp_path).diagnosis() is None
