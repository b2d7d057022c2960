"""Loaders in threads, in processes of other libraries, in forked children: they work, end, and leave nothing behind (P5)."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import assert_clean, run_script

pytestmark = [pytest.mark.process, pytest.mark.slow]

LOAD = """
import infeed

class Data:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return i * 2

def load(n, **options):
    with infeed.DataLoader(Data(n), batch_size=2, num_workers=2, timeout=30, **options) as loader:
        return [x for _ in range(2) for batch in loader for x in batch.tolist()]

def expected(n):
    return [2 * i for i in range(n)] * 2
"""


def test_many_threads_use_loaders_at_once(tmp_path: Path) -> None:
    """Their own, in plain threads and in a pool; and several threads iterate one loader, each with its own epoch."""
    result = run_script(tmp_path, LOAD + dedent("""
        import threading
        from concurrent.futures import ThreadPoolExecutor

        if __name__ == "__main__":
            said = []
            thread = threading.Thread(target=lambda: said.append(load(4) == expected(4)))
            thread.start()
            thread.join()
            with ThreadPoolExecutor(6) as pool:
                methods = ["auto", "spawn", "auto", "auto", "spawn", "auto"] * 2
                got = list(pool.map(lambda job: load(job[0], start_method=job[1]), enumerate(methods, 4)))
                said.append(got == [expected(n) for n in range(4, 16)])

                shared = infeed.DataLoader(Data(40), batch_size=4, num_workers=2, timeout=30)
                one_epoch = lambda _: [x for batch in shared for x in batch.tolist()]
                said.append(list(pool.map(one_epoch, range(4))) == [[2 * i for i in range(40)]] * 4)
            print(said, threading.active_count())
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == "[True, True, True] 1\n"


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.linux("a start method of POSIX"))])
def test_a_process_of_multiprocessing_uses_a_loader(tmp_path: Path, method: str) -> None:
    """In an executor's process and in a daemon process, which must not have children of multiprocessing."""
    result = run_script(tmp_path, LOAD + dedent("""
        import concurrent.futures, multiprocessing, sys

        def put(queue):
            queue.put(load(5))

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[1])
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                print(list(pool.map(load, [4, 5])) == [expected(4), expected(5)])
            queue = context.SimpleQueue()
            process = context.Process(target=put, args=(queue,), daemon=True)
            process.start()
            print(queue.get() == expected(5))
            process.join()
            print(process.exitcode)
    """), method)  # fmt: skip
    assert_clean(result)
    assert result.out == "True\nTrue\n0\n"


@pytest.mark.linux("needs os.fork")
def test_a_terminated_daemon_process_ends_its_workers(tmp_path: Path) -> None:
    """multiprocessing ends daemon processes with SIGTERM when the program ends, in mid-epoch."""
    result = run_script(tmp_path, LOAD + dedent("""
        import multiprocessing

        def forever(queue):
            while True:
                for batch in infeed.DataLoader(Data(100), num_workers=2):
                    queue.put(None)

        if __name__ == "__main__":
            queue = multiprocessing.get_context("fork").SimpleQueue()
            process = multiprocessing.get_context("fork").Process(target=forever, args=(queue,), daemon=True)
            process.start()
            for _ in range(10):
                queue.get()
    """))  # fmt: skip
    assert_clean(result)


@pytest.mark.linux("needs os.fork")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forked_child_and_its_parent_load_in_parallel(tmp_path: Path, when: str) -> None:
    """Forked before the parent has used a loader, or in mid-epoch; the child ends like a script."""
    result = run_script(tmp_path, LOAD + dedent("""
        import os, sys
        import psutil

        class Parents(Data):
            def __getitem__(self, i): return os.getppid()

        if sys.argv[1] == "after":
            load(4)
            open_loader = infeed.DataLoader(Data(40), num_workers=2, timeout=30)
            batches = iter(open_loader)
            next(batches)
        child = os.fork()
        got = load(20) == expected(20) and load(6, start_method="spawn") == expected(6)
        with infeed.DataLoader(Parents(1), num_workers=1, timeout=30) as loader:
            (server,) = (int(batch[0]) for batch in loader)
        got = got and psutil.Process(server).ppid() == os.getpid()  # each has a fork server of its own
        if child == 0:
            sys.exit(0 if got else 1)
        _, status = os.waitpid(child, 0)
        print(got, os.waitstatus_to_exitcode(status))
        if sys.argv[1] == "after":
            print([int(x[0]) for x in batches] == [2 * i for i in range(1, 40)])
    """), when)  # fmt: skip
    assert_clean(result)
    assert result.out == ("True 0\n" if when == "before" else "True 0\nTrue\n")


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_shared_memory_outlives_the_workers_that_attach_to_it(tmp_path: Path, method: str) -> None:
    """Whether the dataset holds it or a worker opens it by name. The program removes it, and there is no warning."""
    result = run_script(tmp_path, dedent(f"""
        from multiprocessing.shared_memory import SharedMemory
        import infeed

        class Held:
            def __init__(self, memory): self.memory = memory
            def __len__(self): return 4
            def __getitem__(self, index): return self.memory.buf[index]

        class Named(Held):
            def __init__(self, memory): self.name = memory.name
            def __getitem__(self, index):
                if "memory" not in self.__dict__:
                    self.memory = SharedMemory(name=self.name)
                return self.memory.buf[index]

        if __name__ == "__main__":
            memory = SharedMemory(create=True, size=4)
            memory.buf[:4] = bytes(range(4))
            for dataset in (Held(memory), Named(memory), Held(memory)):
                with infeed.DataLoader(dataset, batch_size=4, num_workers=2, timeout=30, start_method={method!r}) as loader:
                    print([batch.tolist() for batch in loader])
            other = SharedMemory(name=memory.name)
            other.close()
            memory.close()
            memory.unlink()
    """))  # fmt: skip
    assert_clean(result)
    assert result.out == "[[0, 1, 2, 3]]\n" * 3
