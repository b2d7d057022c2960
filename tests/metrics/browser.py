"""A real headless browser: opens a page, reports its errors, and evaluates expressions.

Chromium is driven through the two pipes of ``--remote-debugging-pipe``: messages are JSON that ends in a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PHONE_PX = 390
DESK_PX = 1180
LONGEST_S = 90  # Only so that a hung browser does not hang the tests.

# The browser expects its pipes at these two descriptors.
_EXEC = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Returns the path of a browser that can be controlled, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one open page."""

    def __init__(self) -> None:
        program = find_browser()
        assert program is not None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._session: str | None = None
        self._count = 0
        self._rest = b""
        self._events: list[str] = []
        self._closing = contextlib.ExitStack()
        profile = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True))
        theirs_in, self._out = self._pipe()
        self._in, theirs_out = self._pipe()
        command = [
            sys.executable,
            "-c",
            _EXEC,
            str(theirs_in),
            str(theirs_out),
            program,
            *_OPTIONS,
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def _pipe(self) -> tuple[int, int]:
        """Creates a pipe whose descriptors differ from those that the browser needs."""
        ends = os.pipe()
        high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        for end in ends:
            os.close(end)
        return high[0], high[1]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        # The browser ends when its pipe closes; a profile can be removed only afterwards.
        try:
            self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._closing.close()

    def open(self, path: Path, *, is_dark: bool = False, is_phone: bool = False) -> None:
        """Opens a file as a page, and waits until it is loaded and its charts are drawn."""
        self.requests.clear()
        self.complaints.clear()
        width, height = (PHONE_PX, 844) if is_phone else (DESK_PX, 900)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=is_phone)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.turn(is_dark=is_dark)
        self._events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()
        drawn = """new Promise(done => {
            const root = document.documentElement;
            const look = () => document.querySelector("figure.chart") && !root.dataset.charts
                ? requestAnimationFrame(look) : requestAnimationFrame(() => requestAnimationFrame(done));
            look();
        })"""
        self.ask("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def turn(self, *, is_dark: bool) -> None:
        """Switches the page to dark or light."""
        scheme = "dark" if is_dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; awaits a promise."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, *, is_whole: bool = True) -> bytes:
        """Returns a PNG screenshot of the whole page, or of the visible part."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        return base64.b64decode(answer["data"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._out, sent) :]
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        """Reads on, and records the messages."""
        until = time.monotonic() + LONGEST_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {LONGEST_S} s"
            read = os.read(self._in, 1 << 20)
            assert read, f"the browser ended with status {self._process.wait()}"
            self._rest += read
        *said, self._rest = self._rest.split(b"\0")
        for one in map(json.loads, said):
            if "id" in one:
                self._answers[one["id"]] = one
            else:
                self._note(one["method"], one["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value", one.get("description")) for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
