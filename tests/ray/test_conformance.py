"""The tests of every kind of worker, with workers on a Ray cluster, which the fixtures of ``conftest.py`` beside it choose."""

from __future__ import annotations

import pytest

from tests.engine import test_conformance as suite

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Functions and fixtures of the module, collected here again.
globals().update({name: value for name, value in vars(suite).items() if not name.startswith("__")})
