"""The messages between the fork server and its client. Linux only.

`infeed run` starts a server before the program. This module must therefore import nothing that is slow, or that the program may
configure before importing it.
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
MAX_FDS: Final = 200  # descriptors per message; the kernel limit is 253


class Preload(NamedTuple):
    """Import modules before the next fork."""

    modules: list[str]
    argv: list[str]  # of the program: modules may read it at import
    environ: dict[str, str]  # of the program: modules may read it at import


class Guess(NamedTuple):
    """Import modules while the server is idle: the program imports them, so its datasets probably need them."""

    modules: list[str]
    argv: list[str]


class Hold(NamedTuple):
    """Keep the attached descriptors for the next worker, which needs more than one message can carry."""


class Fork(NamedTuple):
    """Fork a worker. Attached are its pipe ends, the segment store's descriptor and those that the dataset needs."""


class Kill(NamedTuple):
    pid: int


class Forked(NamedTuple):
    pid: int


class Refused(NamedTuple):
    """The server cannot fork, or not safely."""

    why: str
    is_final: bool  # another server of the same process would refuse as well


class Exited(NamedTuple):
    pid: int
    code: int  # as in subprocess: negative for a signal


ToServer: TypeAlias = Preload | Guess | Hold | Fork | Kill


def send(sock: socket.socket, message: object, fds: list[int] | None = None) -> None:
    body = pickle.dumps(message, 5)
    data = _HEAD.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive one message and the descriptors attached to it.

    Raises:
        EOFError: the other process has closed the socket.
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
