"""A user's own tests, run by pytest-xdist in two processes."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import start_python

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_suite_that_uses_loaders_runs_in_parallel(tmp_path: Path) -> None:
    """Datasets of test modules and test functions, and a loader of a fixture that is never closed; nothing is left behind."""
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(dedent("""
        import infeed, pytest

        class Data:
            def __len__(self): return 6
            def __getitem__(self, i): return i

        @pytest.fixture(scope="session")
        def open_loader():
            loader = infeed.DataLoader(Data(), batch_size=3, num_workers=2, timeout=30)
            next(iter(loader))
            return loader
    """))  # fmt: skip
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(dedent("""
            import infeed, pytest

            class Data:
                def __len__(self): return 4
                def __getitem__(self, i): return i

            @pytest.mark.parametrize("method", ["auto", "spawn"])
            def test_own(method):
                with infeed.DataLoader(Data(), batch_size=2, num_workers=2, start_method=method, timeout=30) as loader:
                    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]

            def test_local(open_loader):
                class Local(Data):
                    def __getitem__(self, i): return 2 * i
                with infeed.DataLoader(Local(), batch_size=4, num_workers=1, timeout=30) as loader:
                    assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6]]
                assert sum(int(batch.sum()) for batch in open_loader) == 15
        """))  # fmt: skip
    arguments = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(tmp_path)]
    result = start_python(arguments, cwd=tmp_path).finish(60)
    assert result.code == 0, result.out + result.err
    assert "6 passed" in result.out
