"""Code blocks of the README and the documentation run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# On a busy machine, a run that takes this long may log a warning that a worker hangs.
HANG_S = 10.0

RUN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_BLOCKS = [(path.relative_to(ROOT).as_posix(), block) for path in RUN_PAGES for block in python_blocks(path)]


@pytest.mark.process
@pytest.mark.parametrize(("name", "code"), RUN_BLOCKS, ids=[name for name, _ in RUN_BLOCKS])
def test_a_python_block_runs(name: str, code: str, tmp_path: Path) -> None:
    """A block that is copied into a file runs, and prints nothing but the documented output."""
    if "torch" in code:
        pytest.importorskip("torch")
    for needed, module in ((".report(", "plotly"), (".svg", "matplotlib"), ("progress=True", "tqdm"), ("from PIL", "PIL")):
        if needed in code:
            pytest.importorskip(module)
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}

    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90
    )

    is_slow = time.monotonic() - began >= HANG_S

    said = [] if "progress=True" in code else done.stderr.splitlines()[:1]  # The progress bar is on standard error.
    expected = ["epoch 0 had 2 bad samples:"] if name == "docs/guides/failures.md" else []
    assert done.returncode == 0, done.stderr
    assert said == expected or is_slow, done.stderr
