"""``RayWorkers`` without Ray: which values are rejected."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import infeed

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cpus": math.inf}, "cpus=inf must be a finite number, at least 0"),
    ({"cpus": math.nan}, "cpus=nan must be a finite number, at least 0"),
    ({"cpus": -1}, "cpus=-1 must be a finite number, at least 0"),
    ({"cpus": True}, "cpus=True must be a finite number, at least 0"),
    ({"memory": 1e9}, "memory=1000000000.0 must be an int, at least 0"),
    ({"local": 1.0}, "local=1.0 must be an int, at least 0"),
    ({"resources": ["a"]}, "resources=['a'] must be a dict"),
    ({"runtime_env": 3}, "runtime_env=3 must be a dict"),
    ({"resources": {"a": "1"}}, "resources['a']='1' must be a finite number, at least 0"),
    ({"resources": {"a": -1}}, "resources['a']=-1 must be a finite number, at least 0"),
    ({"resources": {"a": math.inf}}, "resources['a']=inf must be a finite number, at least 0"),
    ({"resources": {"CPU": 1}}, "resources has 'CPU', which is not a custom resource; use cpus="),
    ({"resources": {"memory": 1}}, "resources has 'memory', which is not a custom resource"),
    ({"resources": {1: 1}}, "resources has 1, which is not a custom resource"),
    ({"resources": {"": 1}}, "resources has '', which is not a custom resource"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[text.partition(";")[0] for _, text in REFUSED])
def test_an_invalid_value_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(infeed.ConfigError, match=re.escape(text)):
        infeed.RayWorkers(**options)


def test_fractions_and_zero_are_accepted() -> None:
    workers = infeed.RayWorkers(cpus=0.5, memory=0, resources={"cpu_node": 0.25, "none": 0}, local=2)

    assert workers.resources == {"cpu_node": 0.25, "none": 0}
