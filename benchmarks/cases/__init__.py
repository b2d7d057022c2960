"""Imports cases by name on demand: workers import this package too and must not import Pillow."""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.spec import Case

_MODULES: Final = {
    "big": "big",
    "tiny": "tiny",
    "tiny256": "tiny",
    "arrays": "arrays",
    "jpeg": "jpeg",
    "opencv": "opencv",
    "waiting1": "waiting",
    "waiting4": "waiting",
    "waiting16": "waiting",
    "waiting64": "waiting",
    "uneven": "uneven",
    "first_cold": "first_batch",
    "first_warm": "first_batch",
    "memory": "memory",
    "memory_strings": "memory",
    "memory_plain": "memory",
    "memory_strings_plain": "memory",
    "freed_memory": "freed_memory",
    "freed_memory_mixed": "freed_memory",
    "shuffle_billion": "shuffle_billion",
    "main_cpu": "main_cpu",
    "state": "state",
    "observing": "observing",
    "auto_computing": "auto",
    "auto_decoding": "auto",
    "auto_waiting": "auto",
    "auto_uneven": "auto",
}

NAMES: Final = tuple(_MODULES)


def load(name: str) -> Case:
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    cases: tuple[Case, ...] = module.CASES
    return next(case for case in cases if case.name == name)
