"""Parses and loads ``module:dataset`` targets of the command line."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from infeed.errors import ConfigError


def names_dataset(text: str) -> bool:
    """Whether the text has the form ``module:name``."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def load_dataset(target: str) -> Any:
    """Return the dataset named by ``module:name``: an instance, or the result of calling it without arguments.

    Inserts the working directory at the front of ``sys.path`` if it is not on it.

    Raises:
        ConfigError: the module or name does not exist, or is not a dataset.
    """
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports is missing
        raise ConfigError(f"{target}: no module {module_name!r} in sys.path or in {os.getcwd()}") from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
            raise ConfigError(f"{target}: module {module_name!r} has no {name!r}; it defines {there}")
        found = getattr(found, part)
    if _is_dataset(found):
        return found
    if callable(found):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(
                f"{target}() cannot be called: {error}; pass the name of a function without arguments that returns the dataset"
            ) from None
        except ValueError:
            pass  # some built-ins have no signature
        found = found()
    if not _is_dataset(found):
        raise ConfigError(
            f"{target} is a {type(found).__qualname__}, not a dataset; pass the name of an object with __getitem__ or "
            "__iter__, or of a function without arguments that returns one"
        )
    return found


def _is_dataset(value: Any) -> bool:
    return not isinstance(value, type) and (hasattr(value, "__getitem__") or hasattr(value, "__iter__"))
