"""The Python stack of a worker, taken from outside: also of one that is in native code and answers nobody.

On Linux a worker lets ``faulthandler`` write its stack into an anonymous file when a signal of its own arrives: the handler is
C and needs no interpreter lock. The engine sends the signal and reads the file through ``/proc``. Elsewhere the thread that
reads the worker's pipe is asked, which works unless native code holds the interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Final

# Which signal asks for the stack. A real-time one: nobody else has a meaning for it.
_SIGNAL: Final = 50
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FILE: Final = "infeed-stack"
_TAKE_S: Final = 1.0
_SETTLE_S: Final = 0.05
_LOOK_S: Final = 0.005
_MOST_BYTES: Final = 8192
_armed: Final[list[int]] = []


def arm() -> int | None:
    """In a worker, when it starts: be ready to be asked. The descriptor of where the stack will be, if there is one."""
    if _armed:
        return _armed[0]  # a worker that works for another loader now
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    import faulthandler

    try:
        fd = os.memfd_create(_FILE)
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)
    except (OSError, RuntimeError, ValueError):  # no descriptor left, or a kernel that refuses: then there is no stack
        return None
    _armed.append(fd)
    return fd


def take(pid: int, fd: int) -> str | None:
    """The stack of a worker that is armed; ``None`` if it cannot be had."""
    if sys.platform != "linux":
        return None
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Looked at before the signal is sent: by now the number may be another process's, which the signal would end.
        if _FILE not in os.readlink(path):
            return None
        with open(path, "rb", buffering=0) as file:
            begin = os.fstat(file.fileno()).st_size
            os.kill(pid, _SIGNAL)
            end = _written(file.fileno(), begin)
            # The writer's own place in the file is another one: opened anew, this begins at 0.
            data = os.pread(file.fileno(), min(end - begin, _MOST_BYTES), begin)
    except OSError:
        return None
    return _theirs(data.decode(errors="replace"))


def _theirs(text: str) -> str | None:
    """Without the frames that are ours and the same every time; all of it if there are no others."""
    lines = [line for line in text.splitlines() if line.startswith("  File")]
    theirs = [line for line in lines if f'"{_PACKAGE}' not in line and '"<string>"' not in line]
    return "\n".join(theirs or lines) or None


def _written(fd: int, begin: int) -> int:
    """Where the file ends when the stack is all in it."""
    deadline = time.monotonic() + _TAKE_S
    end, quiet_since = begin, time.monotonic()
    while (now := time.monotonic()) < deadline:
        size = os.fstat(fd).st_size
        if size != end:
            end, quiet_since = size, now
        elif end > begin and now - quiet_since > _SETTLE_S:
            break
        time.sleep(_LOOK_S)
    return end


def thread_stack(ident: int | None) -> str | None:
    """The stack of a thread of this process."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return None
    found = reversed(traceback.extract_stack(frame))
    return _theirs("\n".join(f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found))


def main_stack() -> str | None:
    """The stack of this process's main thread, for a thread that is asked for it."""
    return thread_stack(threading.main_thread().ident)
