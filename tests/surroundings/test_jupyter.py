"""A real Jupyter kernel: definitions of cells are pickled, a cell can be interrupted, and a restart leaves no worker behind."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import run_script

# Unix sockets instead of ports, so that the test needs no network.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.linux("starts a kernel over Unix sockets")]

# Acts as a notebook server. It talks to the kernel from its own process, because its library leaves threads running.
NOTEBOOK = """
import os, sys, time
import psutil
from jupyter_client import KernelManager

def wait_until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)

def connected():
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    return client

def run(cell):
    said = []
    def hear(message):
        content = message["content"]
        said.append(content.get("text") or content.get("ename") or "")
    reply = client.execute_interactive(cell, output_hook=hear, timeout=60)
    assert reply["content"]["status"] == "ok", (reply["content"], said)
    return "".join(said).strip()

def workers():
    return [p for p in kernel.children(recursive=True) if p.name().startswith("infeed:worker")]

# --- a kernel and its cells
manager = KernelManager(kernel_name="python3", transport="ipc", ip=os.path.abspath("kernel"))
manager.start_kernel()
kernel = psutil.Process(manager.provisioner.pid)
client = connected()

define = '''
import os, time
import infeed
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): return i * FACTOR
FACTOR = {factor}
loader = infeed.DataLoader(Data(), batch_size=2, num_workers=2, timeout=30)
'''
use = '''
shifted = infeed.DataLoader(Data(), batch_size=2, num_workers=2, collate_fn=lambda s: [x + 1 for x in s], timeout=30)
print([b.tolist() for b in loader], list(shifted))
'''
for factor in (1, 10):
    run(define.format(factor=factor))
    print("used:", run(use))
    print("again:", run(use))

# --- a cell interrupted in mid-epoch
client.execute('''
class Slow(Data):
    def __getitem__(self, i):
        open("loading", "w").close()
        time.sleep(60)
slow = infeed.DataLoader(Slow(), batch_size=2, num_workers=2)
for batch in slow:
    pass
''', stop_on_error=False)
wait_until(lambda: os.path.exists("loading"), "a worker at work")
manager.interrupt_kernel()
while True:
    answer = client.get_shell_msg(timeout=30)
    if answer["content"].get("status") == "error":
        break
print("interrupted:", answer["content"]["ename"])
print("after it:", run(use))

# --- a restart while workers load
print("at work:", run('''
class FirstQuick(Data):
    def __getitem__(self, i):
        return i if i == 0 else time.sleep(60)
batches = iter(infeed.DataLoader(FirstQuick(), num_workers=2))
print(next(batches))
'''))
before = [*workers(), *kernel.children()]
print("has workers:", len(workers()) >= 2)
client.stop_channels()
manager.restart_kernel(now=True)
kernel = psutil.Process(manager.provisioner.pid)
wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in before), "the end of the old workers")
client = connected()
run(define.format(factor=3))
print("restarted:", run(use))

# --- shutdown by the notebook server
before = [*workers(), *kernel.children()]
client.stop_channels()
manager.shutdown_kernel()
wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in before), "the end of all workers")
print("shut down")
"""
SAYS = """\
used: [[0, 1], [2, 3]] [[1, 2], [3, 4]]
again: [[0, 1], [2, 3]] [[1, 2], [3, 4]]
used: [[0, 10], [20, 30]] [[1, 11], [21, 31]]
again: [[0, 10], [20, 30]] [[1, 11], [21, 31]]
interrupted: KeyboardInterrupt
after it: [[0, 10], [20, 30]] [[1, 11], [21, 31]]
at work: [0]
has workers: True
restarted: [[0, 3], [6, 9]] [[1, 4], [7, 10]]
shut down
"""


def test_a_notebook_is_run_interrupted_and_restarted(tmp_path: Path) -> None:
    """Classes and lambdas of cells, redefined and reused; Ctrl+C ends only the cell; nothing outlives the kernel (P5)."""
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    result = run_script(tmp_path, dedent(NOTEBOOK), seconds=120)
    assert result.code == 0, result.out + result.err
    assert result.out == SAYS
