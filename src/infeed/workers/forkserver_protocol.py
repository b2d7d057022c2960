"""What is asked of the fork server, and what it answers.

Imports nothing that takes long or that a program may want to configure first: `infeed run` starts a server before the program.
Linux only.
"""

from __future__ import annotations

import array
import pickle
import socket
import struct
import sys
from typing import Any, Final, NamedTuple, TypeAlias

assert sys.platform == "linux"

_HEAD: Final = struct.Struct("<I")
MAX_FDS: Final = 200  # of one message; the kernel takes 253


class Preload(NamedTuple):
    """Import modules before the next fork."""

    modules: list[str]
    argv: list[str]  # of the program: modules may read it when they are imported
    environ: dict[str, str]  # likewise


class Guess(NamedTuple):
    """Import modules while nothing else is asked: the program imports them, and its datasets probably need them."""

    modules: list[str]
    argv: list[str]


class Hold(NamedTuple):
    """Keep the descriptors that come along for the next worker: it gets more than one message can carry."""


class Fork(NamedTuple):
    """Fork a worker; its pipe ends, the store's descriptor and those that the dataset needs come along."""


class Kill(NamedTuple):
    pid: int


class Forked(NamedTuple):
    pid: int


class Refused(NamedTuple):
    """It is not safe to fork, or not possible."""

    why: str
    is_final: bool  # another server of the same process would say the same


class Exited(NamedTuple):
    pid: int
    code: int  # as subprocess gives it: negative for a signal


ToServer: TypeAlias = Preload | Guess | Hold | Fork | Kill
FromServer: TypeAlias = Forked | Refused | Exited


def send(sock: socket.socket, message: object, fds: list[int] | None = None) -> None:
    body = pickle.dumps(message, 5)
    data = _HEAD.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """One message and the descriptors that came with it.

    Raises:
        EOFError: the other side is gone.
    """
    head, fds = b"", array.array("i")
    while len(head) < _HEAD.size:
        data, found, _, _ = socket.recv_fds(sock, _HEAD.size - len(head), MAX_FDS)
        if not data:
            raise EOFError
        head += data
        fds.extend(found)
    (size,) = _HEAD.unpack(head)
    body = b""
    while len(body) < size:
        data = sock.recv(size - len(body))
        if not data:
            raise EOFError
        body += data
    return pickle.loads(body), list(fds)
