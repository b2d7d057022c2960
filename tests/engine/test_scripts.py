"""Real scripts in new interpreters: no main guard, no importable module, unusual places to start workers from."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import engine_params
from tests.helpers import WINDOWS, Journal, assert_clean, run_script, start_python, start_script

pytestmark = [pytest.mark.process, pytest.mark.slow]

METHODS = pytest.mark.parametrize("method", engine_params("forkserver", "spawn", "portable"))

# All of it is defined in `__main__`: dataset, sample class, exception, closure, lambda. There is no guard.
EVERYTHING_IN_MAIN = """
import sys
from dataclasses import dataclass
from tests.helpers import Journal
from pathlib import Path
import numpy as np
import infeed

Journal(Path(sys.argv[1])).write("top level")
method = sys.argv[2]
OFFSET = 100

def helper(x):
    return x + OFFSET

@dataclass
class Sample:
    x: np.ndarray
    name: str

class Bad(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code} {why}")

class Data:
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if i == 99:
            raise Bad(7, why="it is bad")
        return Sample(np.full(2, helper(i)), str(i))

class Boxed:
    def __init__(self, samples):
        self.total = sum(int(s.x[0]) for s in samples)

options = {"num_workers": 2, "start_method": method, "timeout": 30}
for batch in infeed.DataLoader(Data(4), batch_size=2, **options):
    assert type(batch) is Sample, type(batch)
    print(batch.x[:, 0].tolist(), batch.name)

factor = 2
scaled = infeed.DataLoader(range(4), batch_size=2, collate_fn=lambda s: [factor * x for x in s], **options)
print(list(scaled))
print([(type(b) is Boxed, b.total) for b in infeed.DataLoader(Data(4), batch_size=2, collate_fn=Boxed, **options)])

def gen():
    class Stream:
        def __iter__(self):
            return (helper(i) for i in range(4))
    return Stream()

print([b.tolist() for b in infeed.DataLoader(gen(), batch_size=3, **options)])
try:
    list(infeed.DataLoader(Data(4), sampler=[99], **options))
except Bad as error:
    print("caught", type(error).__name__, error)
"""
EVERYTHING_SAYS = """\
[100, 101] ['0', '1']
[102, 103] ['2', '3']
[[0, 2], [4, 6]]
[(True, 201), (True, 205)]
[[100, 101, 102], [103]]
caught Bad 7 it is bad
"""


def prepared(method: str, code: str) -> tuple[str, str]:
    """Returns the script for a start method, and the method to pass to it."""
    return (WINDOWS + code, "auto") if method == "portable" else (code, method)


@METHODS
def test_a_script_without_guard_runs_once(tmp_path: Path, method: str) -> None:
    """Classes, functions, lambdas and closures of __main__ are pickled by value; workers do not run its top level."""
    journal = Journal(tmp_path / "journal")
    code, start_method = prepared(method, EVERYTHING_IN_MAIN)
    result = run_script(tmp_path, code, str(journal.path), start_method)
    assert_clean(result)
    assert result.out == EVERYTHING_SAYS
    assert journal.lines() == ["top level"]


@METHODS
def test_code_on_the_command_line_runs_once(tmp_path: Path, method: str) -> None:
    """``python -c``: there is no file that could be imported."""
    journal = Journal(tmp_path / "journal")
    code, start_method = prepared(method, EVERYTHING_IN_MAIN)
    result = start_python(["-c", code, str(journal.path), start_method], cwd=tmp_path).finish()
    assert_clean(result)
    assert result.out == EVERYTHING_SAYS
    assert journal.lines() == ["top level"]


def test_code_from_standard_input_runs_once(tmp_path: Path) -> None:
    """``python - < script``: workers do not read the rest of the input either."""
    journal = Journal(tmp_path / "journal")
    result = start_python(["-", str(journal.path), "auto"], cwd=tmp_path, stdin=EVERYTHING_IN_MAIN).finish()
    assert_clean(result)
    assert result.out == EVERYTHING_SAYS
    assert journal.lines() == ["top level"]


def test_a_package_run_as_a_module_runs_once(tmp_path: Path) -> None:
    """``python -m package``: classes of its __main__ and of its other modules can be pickled."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("def negate(x):\n    return -x\n")
    (package / "__main__.py").write_text(EVERYTHING_IN_MAIN.replace("return x + OFFSET", "return -negate(x) + OFFSET").replace(
        "import infeed\n", "import infeed\nfrom pkg.parts import negate\n", 1
    ))  # fmt: skip
    journal = Journal(tmp_path / "journal")
    result = start_python(["-m", "pkg", str(journal.path), "auto"], cwd=tmp_path).finish()
    assert_clean(result)
    assert result.out == EVERYTHING_SAYS
    assert journal.lines() == ["top level"]


def test_notebook_cells_can_redefine_the_dataset(tmp_path: Path) -> None:
    """Code runs in the namespace of __main__ without a file, cell by cell, as in IPython."""
    code = """
    import sys, types
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    cells = ['''
    import infeed
    class Data:
        def __len__(self): return 3
        def __getitem__(self, i): return i
    ''', '''
    print([b.tolist() for b in infeed.DataLoader(Data(), batch_size=3, num_workers=2, timeout=30)])
    ''', '''
    class Data(Data):
        def __getitem__(self, i): return super().__getitem__(i) * 10
    for batch in infeed.DataLoader(Data(), batch_size=3, num_workers=2, timeout=30):
        print(batch.tolist())
        break
    ''']
    for number, cell in enumerate(cells):
        exec(compile(cell, f"<cell {number}>", "exec"), main.__dict__)
    """
    result = run_script(tmp_path, dedent(code))
    assert_clean(result)
    assert result.out == "[[0, 1, 2]]\n[0, 10, 20]\n"


# Uses a loader in a process of another library's pool. `load` runs there.
IN_A_POOL = """
import multiprocessing, sys
import concurrent.futures
import infeed

class Data:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return i * 2

def load(n):
    with infeed.DataLoader(Data(n), batch_size=2, num_workers=2, timeout=30) as loader:
        return [batch.tolist() for batch in loader]

if __name__ == "__main__":
    how, method = sys.argv[1:]
    context = multiprocessing.get_context(method)
    if method == "fork":
        load(2)  # a fork server of the parent must not be used by its children
    if how == "daemon":
        queue = context.SimpleQueue()
        process = context.Process(target=lambda: queue.put(load(4)), daemon=True)
        process.start()
        print(queue.get())
        process.join()
    elif how == "pool":
        with context.Pool(2) as pool:
            print(pool.map(load, [4, 4])[0])
            pool.close()
            pool.join()
    else:
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            print(list(pool.map(load, [4, 4]))[0])
"""


@pytest.mark.parametrize(
    ("how", "method"),
    [
        *[pytest.param(how, "fork", marks=pytest.mark.linux("needs os.fork")) for how in ("daemon", "pool", "executor")],
        ("pool", "spawn"),
        ("executor", "spawn"),
    ],
)
def test_a_loader_works_in_a_process_of_another_pool(tmp_path: Path, how: str, method: str) -> None:
    """Daemonic processes may not have children of multiprocessing; infeed's are none, and end with them."""
    result = run_script(tmp_path, IN_A_POOL, how, method)
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert result.out == "[[0, 2], [4, 6]]\n"


@METHODS
@pytest.mark.torch
def test_a_worker_does_not_import_torch_unless_the_dataset_does(tmp_path: Path, method: str) -> None:
    """Importing torch in the user's process costs workers neither time nor memory."""
    code = """
    import sys
    import torch
    import numpy as np
    import infeed
    class Data:
        def __len__(self): return 4
        def __getitem__(self, i): return ("torch" in sys.modules, np.zeros(2))
    print([b[0].tolist() for b in infeed.DataLoader(Data(), batch_size=2, num_workers=2, start_method=sys.argv[1], timeout=30)])
    """
    pytest.importorskip("torch")
    code, start_method = prepared(method, dedent(code))
    result = run_script(tmp_path, code, start_method, seconds=120)  # Importing torch may take 20 s on Windows.
    assert_clean(result)
    assert result.out == "[[False, False], [False, False]]\n"


def test_importing_infeed_does_not_import_torch(tmp_path: Path) -> None:
    """Nor does loading arrays with it."""
    result = run_script(tmp_path, dedent("""
        import sys, infeed, numpy as np
        list(infeed.DataLoader(np.arange(10), batch_size=2, num_workers=2))
        list(infeed.DataLoader(range(10), batch_size=2))
        print("torch" in sys.modules, "multiprocessing.pool" in sys.modules)
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == "False False\n"


@METHODS
def test_output_of_workers_appears(tmp_path: Path, method: str) -> None:
    """Each printed line is complete, also if it is printed just before the end."""
    code = """
    import sys
    import infeed
    class Data:
        def __len__(self): return 6
        def __getitem__(self, i):
            print("loading", i)
            print("warning", i, file=sys.stderr)
            return i
    with infeed.DataLoader(Data(), batch_size=1, num_workers=2, start_method=sys.argv[1], prefetch=1, timeout=30) as loader:
        for epoch in range(1):
            batches = iter(loader)
            for _ in range(6):
                next(batches)
    """
    code, start_method = prepared(method, dedent(code))
    result = run_script(tmp_path, code, start_method)
    assert result.code == 0, result.err
    assert {f"loading {i}" for i in range(6)} <= set(result.out.splitlines())
    assert {f"warning {i}" for i in range(6)} <= set(result.err.splitlines())


@pytest.mark.parametrize("flags", [["-I"], ["-W", "error"], ["-X", "dev"], ["-OO"]], ids=" ".join)
def test_interpreter_flags_work(tmp_path: Path, flags: list[str]) -> None:
    """Isolated mode, warnings as errors, development mode, optimization: workers start without output."""
    code = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}\n" + dedent("""
        import infeed
        class Data:
            def __len__(self): return 4
            def __getitem__(self, i): return i
        for method in ("auto", "spawn"):
            with infeed.DataLoader(Data(), batch_size=2, num_workers=2, start_method=method, timeout=30) as loader:
                print([b.tolist() for b in loader])
    """)
    (tmp_path / "script.py").write_text(code)
    result = start_python([*flags, str(tmp_path / "script.py")], cwd=tmp_path).finish()
    assert_clean(result)
    assert result.out == "[[0, 1], [2, 3]]\n" * 2


def test_workers_find_modules_beside_the_script(tmp_path: Path) -> None:
    """Workers import from the script's folder, and from folders that it adds to sys.path."""
    (tmp_path / "beside.py").write_text(dedent("""
        class Data:
            def __len__(self): return 2
            def __getitem__(self, i): return i + 1
    """))  # fmt: skip
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "added.py").write_text("def double(samples):\n    return [2 * s for s in samples]\n")
    result = run_script(tmp_path, dedent("""
        import os, sys
        sys.path.append(os.path.join(os.path.dirname(__file__), "extra"))
        import infeed
        from beside import Data
        from added import double
        for method in ("auto", "spawn"):
            options = {"num_workers": 1, "start_method": method, "timeout": 30}
            print(list(infeed.DataLoader(Data(), batch_size=2, collate_fn=double, **options)))
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == "[[2, 4]]\n[[2, 4]]\n"


@pytest.mark.parametrize("is_installed", [False, True], ids=["beside", "installed"])
def test_modules_that_read_sys_argv_on_import_find_it_in_workers(tmp_path: Path, is_installed: bool) -> None:
    """As with torch's workers: a module that parses the program's options, imported by the module of the dataset.

    The fork server imports installed modules before any worker starts.
    """
    installed = Path(sysconfig.get_path("purelib", f"{os.name}_user", vars={"userbase": str(tmp_path / "base")}))
    folder = installed if is_installed else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.py").write_text(dedent("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, default=2)
        options = parser.parse_args()
    """))  # fmt: skip
    (folder / "data.py").write_text(dedent("""
        from options import options
        class Data:
            def __len__(self): return options.size
            def __getitem__(self, i): return options.size
    """))  # fmt: skip
    code = dedent("""
        import site, sys
        sys.path.append(site.getusersitepackages())
        import infeed
        from data import Data
        for method in ("auto", "spawn"):
            with infeed.DataLoader(Data(), 2, num_workers=1, start_method=method, timeout=30) as loader:
                print([batch.tolist() for batch in loader])
    """)
    environ = {"PYTHONUSERBASE": str(tmp_path / "base")}
    result = start_script(tmp_path, code, "--size", "3", env=environ).finish()
    assert_clean(result)
    assert result.out == "[[3, 3], [3]]\n" * 2


QUEUEING = """
import multiprocessing, sys, time
import infeed

class Slow:  # to be pickled, which queues do in a thread
    def __init__(self, index):
        self.index = index
    def __reduce__(self):
        time.sleep(0.01)
        return int, (self.index,)

class Data:
    def __init__(self, large):
        self.queue, self.large = multiprocessing.get_context("spawn").Queue(), large
    def __len__(self):
        return 4
    def __getitem__(self, index):
        self.queue.put(bytes(1 << 20) if self.large else Slow(index))
        sys.stdout.write(f"printed {index}\\n")
        return index

data = Data(sys.argv[2] == "large")
with infeed.DataLoader(data, 2, num_workers=2, start_method=sys.argv[1], timeout=30) as loader:
    iterator = iter(loader)
    print([next(iterator).tolist() for _ in range(2)])
"""


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_items_in_a_queue_arrive_although_workers_end(tmp_path: Path, method: str) -> None:
    """As with torch's workers, which end with every epoch: they flush queues as processes of multiprocessing do."""
    arrived = dedent("""
        missing = {0, 1, 2, 3}
        while missing:  # some come twice: the next epoch was begun
            missing.discard(data.queue.get(timeout=20))
    """)
    result = run_script(tmp_path, QUEUEING + arrived, method, "small")
    assert_clean(result)


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_an_unread_queue_does_not_delay_the_end_of_workers(tmp_path: Path, method: str) -> None:
    """A pipe holds 64 KiB, and the thread that writes to it blocks forever."""
    result = run_script(tmp_path, QUEUEING, method, "large")
    assert_clean(result)
    for text in ("[[0, 1], [2, 3]]", *(f"printed {index}" for index in range(4))):
        assert text in result.out  # Printed text is still seen.


TRAINING = """
import sys
from pathlib import Path
import infeed
from tests.helpers import Journal

Journal(Path(sys.argv[1])).write("body")

class Sample:
    def __init__(self, value):
        self.value = value

def double(value):
    return 2 * value

class Data:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Sample(double(i))

data = Data()

def run():
    total = 0
    with infeed.DataLoader(data, 2, num_workers=2, collate_fn=list, start_method=sys.argv[2], timeout=30) as loader:
        for batch in loader:
            assert all(type(sample) is Sample for sample in batch)
            total += sum(sample.value for sample in batch)
    return total

total = run()
"""


@METHODS
def test_workers_do_not_run_a_module_that_iterates_a_loader_when_it_is_imported(tmp_path: Path, method: str) -> None:
    """Its functions and classes are pickled by value, as those of the script; also for loaders after its import."""
    journal = Journal(tmp_path / "journal")
    (tmp_path / "training.py").write_text(TRAINING)
    code, start_method = prepared(method, "import training\nprint(training.total, training.run())")

    result = run_script(tmp_path, code, str(journal.path), start_method)

    assert_clean(result)
    assert result.out == "12 12\n"
    assert journal.lines() == ["body"]


def test_nobody_runs_an_installed_module_that_iterates_a_loader_when_it_is_imported(tmp_path: Path) -> None:
    """Neither workers nor the fork server, which imports other installed modules as soon as a loader is created."""
    journal = Journal(tmp_path / "journal")
    installed = Path(sysconfig.get_path("purelib", f"{os.name}_user", vars={"userbase": str(tmp_path / "base")}))
    installed.mkdir(parents=True)
    (installed / "training.py").write_text(TRAINING)
    code = "import site, sys\nsys.path.append(site.getusersitepackages())\nimport training\nprint(training.total)"

    environ = {"PYTHONUSERBASE": str(tmp_path / "base")}
    result = start_script(tmp_path, code, str(journal.path), "auto", env=environ).finish()

    assert_clean(result)
    assert result.out == "12\n"
    assert journal.lines() == ["body"]


def test_workers_import_the_rest_of_a_package_whose_modules_iterate_a_loader(tmp_path: Path) -> None:
    """The package itself is being imported, and so is the module that iterates; the module of the dataset is complete."""
    journal = Journal(tmp_path / "journal")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from . import launch")
    (package / "launch.py").write_text("from . import training")
    (package / "parts.py").write_text("class Base:\n    def __len__(self):\n        return 4\n")
    (package / "training.py").write_text(TRAINING.replace("class Data:", "from . import parts\nclass Data(parts.Base):"))

    result = start_python(["-m", "pkg.training", str(journal.path), "auto"], cwd=tmp_path).finish()
    other = start_python(["-c", "import pkg", str(journal.path), "auto"], cwd=tmp_path).finish()

    assert result.code == 0, result.err
    assert_clean(other)
    assert journal.lines() == ["body"] * 3  # `python -m` runs the module once as part of the package, and once as the script


def test_a_module_that_needs_one_that_iterates_a_loader_says_why_it_cannot_be_imported_in_workers(tmp_path: Path) -> None:
    """Its names are missing there; an import must not start the training again."""
    journal = Journal(tmp_path / "journal")
    (tmp_path / "parts.py").write_text("from training import double\nclass Part:\n    pass\n")
    late = "import parts\ndata.part = parts.Part()\ntotal = run()"
    (tmp_path / "training.py").write_text(TRAINING.replace("total = run()", late))

    result = run_script(tmp_path, "import training", str(journal.path), "auto")

    assert "cannot import name 'double' from 'training' (not imported: workers do not run training, which" in result.err
    assert journal.lines() == ["body"]


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_a_module_that_only_workers_import_starts_no_workers(tmp_path: Path, method: str) -> None:
    """What iterates a loader there loads in the worker itself; the log says so."""
    (tmp_path / "data.py").write_text(dedent(f"""
        import infeed
        class Data:
            def __len__(self): return 4
            def __getitem__(self, i): return self.total
            def __getstate__(self): return "something"
            def __setstate__(self, state):
                import inner
                self.total = inner.total
        def total():
            loader = infeed.DataLoader(Data(), 2, num_workers=2, start_method="{method}", timeout=30)
            return sum(int(batch.sum()) for batch in loader)
    """))  # fmt: skip
    (tmp_path / "inner.py").write_text(
        dedent(f"""
        import infeed
        loader = infeed.DataLoader([0, 1, 2, 3], 2, num_workers=2, start_method="{method}", timeout=30)
        total = sum(int(batch.sum()) for batch in loader)
    """)
    )
    result = run_script(tmp_path, "import data; print(data.total())")
    assert (result.code, result.out) == (0, "24\n"), result.err
    assert "a loader runs without workers, because a module that workers import iterates it" in result.err
    (warning,) = set(result.err.splitlines())
    assert warning.startswith("a loader runs without workers, because a module that workers import iterates it")


@pytest.mark.linux("needs os.fork")
def test_two_shutdown_paths_of_a_worker_do_not_race(tmp_path: Path) -> None:
    """Its pipe closes and its parent is gone: the second path lets the first flush the queues."""
    result = run_script(tmp_path, dedent("""
        import multiprocessing, os, threading, time
        from infeed.workers.main import leave

        class Slow:
            def __reduce__(self):
                time.sleep(0.02)
                return int, (7,)

        queue = multiprocessing.get_context("spawn").Queue()
        if not os.fork():
            for _ in range(4):
                queue.put(Slow())
            threading.Thread(target=leave).start()
            leave()
        print([queue.get(timeout=20) for _ in range(4)])
    """))  # fmt: skip
    assert (result.code, result.out) == (0, "[7, 7, 7, 7]\n")
