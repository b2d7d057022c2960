"""A real S3 server (s3rver, of npm) for tests, and a proxy before it that makes it fail.

npm installs s3rver once into the user's cache folder. ``INFEED_S3RVER`` is a folder that already contains it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

BUCKET: Final = "data"
_INSTALL_S: Final = 40.0
_PROGRAM: Final = """
const S3rver = require("s3rver");
const options = {port: 0, address: "127.0.0.1", silent: true, directory: process.argv[1], configureBuckets: [{name: "data"}]};
new S3rver(options).run().then((address) => console.log(address.port));
process.stdin.resume();
process.stdin.on("end", () => process.exit());
"""


def _modules() -> Path:
    """Returns the folder of s3rver's modules; skips the test if it cannot be installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm for the S3 server")
    folder = Path(os.environ.get("INFEED_S3RVER") or Path.home() / ".cache" / "infeed-tests" / "s3rver")
    from infeed.data.locks import file_lock

    with file_lock(folder / ".lock"):  # Processes of xdist start at the same time.
        if not (folder / "node_modules" / "s3rver").is_dir():
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "s3rver@3"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip("npm cannot install the S3 server in time")
            if done.returncode:
                pytest.skip(f"npm cannot install the S3 server: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules"


class Server:
    """An S3 server with one bucket."""

    def __init__(self, port: int) -> None:
        self.port = port

    def options(self, port: int | None = None, **more: Any) -> dict[str, Any]:
        """Returns the storage options to reach it, or a proxy for it."""
        return {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "access_key_id": "S3RVER",
            "secret_access_key": "S3RVER",
            "region": "us-east-1",
            **more,
        }

    def put(self, name: str, data: bytes) -> str:
        import obstore

        obstore.put(self._store(), name, data)
        return f"s3://{BUCKET}/{name}"

    def names(self, prefix: str) -> list[str]:
        import obstore

        return sorted(meta["path"] for page in obstore.list(self._store(), prefix) for meta in page)

    def _store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(BUCKET, client_options={"allow_http": True}, **self.options())


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    environ = {**os.environ, "NODE_PATH": str(_modules())}
    with subprocess.Popen(
        ["node", "-e", _PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.strip().isdigit():
                pytest.skip("the S3 server does not start")
            yield Server(int(line))
        finally:
            process.kill()


# How a proxy treats a connection: the request's first bytes and the number of the request decide.
Fault = Callable[[bytes, int], str | None]


class Proxy:
    """Forwards connections, one request each, and lets some fail.

    ``fault`` returns ``None`` to forward, ``"drop"`` to close without a response, ``"cut"`` to stop within the body,
    ``"503"`` to respond with it, or ``"slow"`` to respond after a second.
    """

    def __init__(self, target: int, fault: Fault) -> None:
        self._target, self._fault = target, fault
        self.request_count = 0
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request)

        class Connections(socketserver.ThreadingTCPServer):
            daemon_threads = False
            request_queue_size = 128

        self._server = Connections(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            got = client.recv(65536)
            if not got:
                return
            head += got
        with self._lock:
            self.request_count += 1
            number = self.request_count
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._answer(client, head, self._fault(head, number))
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, client: socket.socket, head: bytes, fault: str | None) -> None:
        if fault == "drop":
            return
        if fault == "503":
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        if fault == "slow":
            time.sleep(1.0)
        first, _, rest = head.partition(b"\r\n")
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            server.sendall(first + b"\r\nConnection: close\r\n" + rest)
            sent = 0
            with contextlib.suppress(OSError):
                while data := server.recv(65536):
                    if fault == "cut" and sent + len(data) > 600:
                        client.sendall(data[: max(0, 600 - sent)])
                        return
                    client.sendall(data)
                    sent += len(data)
