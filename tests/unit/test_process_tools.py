"""Helpers for infeed's own processes."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import pytest

from infeed.workers.process_tools import keep_freed_memory


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the list of mallopt calls, on a machine with glibc without configuration of malloc."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: str | None) -> None:
            assert name is None

        def mallopt(self, parameter: int, value: int) -> None:
            calls.append((parameter, value))

    for name in [name for name in os.environ if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    return calls


def test_workers_configure_glibc(settings: list[tuple[int, int]]) -> None:
    """The sizes of mapped buffers, of kept memory, and of heap steps are set, each once."""
    keep_freed_memory()
    assert sorted(parameter for parameter, _ in settings) == [-3, -2, -1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("MALLOC_TOP_PAD_", "0"),
        ("MALLOC_MMAP_MAX_", "0"),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F:glibc.malloc.arena_max=1"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
        ("LD_PRELOAD", "/usr/lib/libmimalloc.so:/usr/lib/libother.so"),
        ("LD_PRELOAD", "libtcmalloc_minimal.so.4"),
    ],
)
def test_the_users_malloc_configuration_is_kept(
    settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Workers set nothing if the environment configures malloc or replaces it."""
    monkeypatch.setenv(name, value)
    keep_freed_memory()
    assert not settings


@pytest.mark.parametrize(
    ("name", "value"),
    [("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F"), ("LD_PRELOAD", "/usr/lib/libother.so"), ("MALLOC_ARENA_MAX", "2")],
)
def test_unrelated_variables_have_no_effect(
    settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Workers configure malloc despite variables that concern neither freed memory nor the allocator."""
    monkeypatch.setenv(name, value)
    keep_freed_memory()
    assert len(settings) == 3


@pytest.mark.parametrize(
    "answer", [None, "", "musl 1.2.5", OSError(errno.EINVAL, "Invalid argument"), ValueError("unknown name")]
)
def test_another_c_library_is_not_configured(
    settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, answer: str | Exception | None
) -> None:
    """musl defines the name of glibc's version, but returns no value for it."""

    def confstr(name: str) -> str | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(os, "confstr", confstr)
    keep_freed_memory()
    assert not settings
