"""In-memory servers that list and answer as S3, GCS, Azure and HTTP do, for responses that the real S3 server never gives."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

DATE: Final = "Thu, 01 Jan 2026 00:00:00 GMT"
_NO_REUSE: Final = {"pool_max_idle_per_host": "0"}


class Fake:
    """Objects by name, and the response to a request for a missing one."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.missing = 404
        self.has_etags = True
        self.port = 0
        self.read: list[str] = []  # Names of objects whose content was requested.
        self.sizes: list[int] = []  # Sizes of the ranges that were requested.
        self.not_found: list[str] = []  # Names of missing objects that were requested.
        self.tunnels: list[str] = []  # Hosts to which clients of this proxy wanted to connect.

    def s3(self) -> dict[str, Any]:
        """Return the storage options for ``s3://bucket/...``."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
            "client_options": _NO_REUSE,
            "retry_config": {"max_retries": 0},
        }

    def azure(self) -> dict[str, Any]:
        """Return the storage options for ``az://container/...``."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "account_name": "account",
            "account_key": "a2V5",
            "client_options": _NO_REUSE,
            "retry_config": {"max_retries": 0},
        }

    def gcs(self) -> dict[str, Any]:
        """Return the storage options for ``gs://bucket/...``, whose listing is that of S3."""
        key = {"gcs_base_url": f"http://127.0.0.1:{self.port}", "disable_oauth": True}
        secrets = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {
            "service_account_key": json.dumps({**key, **secrets}),
            "client_options": _NO_REUSE,
            "retry_config": {"max_retries": 0},
        }


@contextlib.contextmanager
def fake() -> Iterator[Fake]:
    found = Fake()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            if query.get("list-type") == "2":
                self._answer(200, _listed_by_s3(found.objects, query.get("prefix", "")))
            elif query.get("comp") == "list":
                self._answer(200, _listed_by_azure(found.objects, query.get("prefix", "")))
            else:
                self._answer_object(urllib.parse.unquote(url.path).lstrip("/").partition("/")[2])

        def do_CONNECT(self) -> None:
            found.tunnels.append(self.path)
            self._answer(502, b"")

        def do_PUT(self) -> None:
            name = urllib.parse.unquote(self.path).lstrip("/").partition("/")[2]
            found.objects[name] = data = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"", {"ETag": f'"{_etag(data)}"'})

        def _answer_object(self, name: str) -> None:
            data = found.objects.get(name)
            if data is None:
                found.not_found.append(name)
                self._answer(found.missing, b"")
                return
            headers = {"Last-Modified": DATE} | ({"ETag": f'"{_etag(data)}"'} if found.has_etags else {})
            if self.command == "GET":
                found.read.append(name)
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or self.headers.get("x-ms-range") or "")
            if wanted is None:
                self._answer(200, data, headers)
                return
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            found.sizes.append(last + 1 - first)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._answer(206, data[first : last + 1], headers)

        def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _listed_by_s3(objects: dict[str, bytes], prefix: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{name}</Key><Size>{len(data)}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{_etag(data)}&quot;</ETag></Contents>"
        for name, data in sorted(objects.items())
        if name.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()


def _listed_by_azure(objects: dict[str, bytes], prefix: str) -> bytes:
    """Like Azure: ETags without quotes, which the headers of GET and HEAD have."""
    entries = "".join(
        f"<Blob><Name>{name}</Name><Properties><Last-Modified>{DATE}</Last-Modified><Etag>{_etag(data)}</Etag>"
        f"<Content-Length>{len(data)}</Content-Length><Content-Type>a/b</Content-Type></Properties></Blob>"
        for name, data in sorted(objects.items())
        if name.startswith(prefix)
    )
    return f"<EnumerationResults><Prefix>x</Prefix><Blobs>{entries}</Blobs><NextMarker/></EnumerationResults>".encode()
