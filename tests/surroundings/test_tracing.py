"""Debuggers, profilers and coverage do not change how a loader works."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import ROOT, assert_clean, run_script, start_python

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_traced_or_profiled_program_loads(tmp_path: Path) -> None:
    """sys.settrace and sys.setprofile in all threads, and a stepping debugger; they stay set, and thread workers are traced."""
    result = run_script(tmp_path, dedent("""
        import bdb, sys, threading
        import infeed

        class Data:
            def __len__(self): return 4
            def __getitem__(self, i): return i

        def load(**options):
            with infeed.DataLoader(Data(), batch_size=2, num_workers=2, timeout=30, **options) as loader:
                return [batch.tolist() for batch in loader]

        seen = set()
        def watch(frame, event, argument):
            seen.add(frame.f_code.co_name)
            return watch

        KINDS = [{}, {"start_method": "spawn"}, {"worker": "thread"}]
        for setter, getter in ((sys.settrace, sys.gettrace), (sys.setprofile, sys.getprofile)):
            seen.clear()
            setter(watch)
            getattr(threading, setter.__name__)(watch)
            got = [load(**kind) for kind in KINDS]
            is_kept = getter() is watch
            setter(None)
            getattr(threading, setter.__name__)(None)
            print(got == [[[0, 1], [2, 3]]] * 3, is_kept, "__getitem__" in seen)

        class Stepper(bdb.Bdb):
            lines = 0
            def user_line(self, frame):
                self.lines += 1
                self.set_step()

        stepper = Stepper()
        stepper.runctx("got = load()", globals(), globals())
        print(got, stepper.lines > 100)
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == "True True True\n" * 2 + "[[0, 1], [2, 3]] True\n"


@pytest.mark.linux("is about the fork server")
def test_workers_are_spawned_if_python_itself_starts_threads(tmp_path: Path) -> None:
    """As under debuggers that follow every child process; the log says that no module of the dataset is the cause."""
    (tmp_path / "sitecustomize.py").write_text(dedent("""
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """))  # fmt: skip
    (tmp_path / "script.py").write_text(dedent("""
        import numpy as np
        import infeed
        class Data:
            def __len__(self): return 4
            def __getitem__(self, i): return np.sum([i])
        with infeed.DataLoader(Data(), batch_size=4, num_workers=2, timeout=30) as loader:
            print([batch.tolist() for batch in loader])
    """))  # fmt: skip
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    result = start_python(["script.py"], cwd=tmp_path, env={"PYTHONPATH": path}).finish()
    assert (result.code, result.out) == (0, "[[0, 1, 2, 3]]\n")
    assert result.err == (
        "spawning workers instead of forking them, which takes longer: code that runs at Python start-up (a debugger, "
        "sitecustomize) started threads in the fork server, and a process with threads cannot fork safely\n"
    )
