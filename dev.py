"""Everything a contributor runs, in one script that needs nothing but Python 3.11 or newer.

    python dev.py demo  [options]       see infeed work, on pictures that it makes itself
    python dev.py test  [pytest args]   lint, format, types, then the tests: what CI runs
    python dev.py test --quick [pytest args]
                                        the tests that start no process and need no torch: about a minute
    python dev.py test --windows [--python 3.13] [pytest args]
                                        the tests on Windows' Python, under Wine: see tools/windows.py
    python dev.py test --libraries [pytest args]
                                        the tests with third-party libraries: see tools/libraries.py
    python dev.py check                 lint, format, layers and types only
    python dev.py bench [options]       run benchmarks/run.py

The first call makes `.venv` beside this file and installs infeed into it, editable. Later calls install again only when
the requirements in pyproject.toml changed. The exit code is that of the first step that fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

MIN_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# Inside the environment, so that removing .venv also removes the memory of what was installed there.
STAMP = VENV / "infeed-installed.json"

# Which extra each command needs.
EXTRAS = {"demo": "demo", "test": "dev", "check": "dev", "bench": "dev"}
# Tests that have an environment of their own, and need none here.
TIERS = {"--windows": "tools/windows.py", "--libraries": "tools/libraries.py"}
# `test --quick`: pure code, loading in the main process and threads.
QUICK = ["tests/unit", "tests/engine", "tests/metrics"]
QUICK_MARKERS = "not (long or libraries or process or torch or slow or stress)"
INTERRUPTED = 130


def check_steps() -> list[list[str]]:
    """Give the static checks, each as arguments to Python."""
    # One cache for each platform: mypy throws a cache away when the platform differs, and reading torch is slow.
    types = [
        ["-m", "mypy", "--platform", platform, "--cache-dir", f".mypy_cache/{platform}"] for platform in ("win32", "darwin")
    ]
    layers = ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"]
    return [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."], layers, ["-m", "mypy"], *types]


def steps(command: str, arguments: list[str]) -> list[list[list[str]]]:
    """Give what `command` runs, in order, as arguments to the environment's Python; what is listed together runs together."""
    if command == "demo":
        return [[["-m", "infeed", "demo", *arguments]]]
    if command == "bench":
        return [[["benchmarks/run.py", *arguments]]]
    if command == "test" and "--quick" in arguments:
        rest = [word for word in arguments if word != "--quick"]
        chosen = [] if any((ROOT / word.partition("::")[0]).exists() for word in rest) else QUICK
        return [[["-m", "pytest", "-n", str(os.cpu_count() or 1), "-m", QUICK_MARKERS, *chosen, *rest]]]
    if command == "test":
        # One more than there are cores: tests wait for processes for half of their time.
        tests = ["-m", "pytest", "-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal", *arguments]
        return [check_steps(), [tests]]
    return [check_steps()]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Give the variables for the steps: the user's own, but for the one that has every interpreter compile infeed anew."""
    return {name: value for name, value in given.items() if name != "PYTHONDONTWRITEBYTECODE"}


def requirement_hash(pyproject: dict, extra: str) -> str:
    """Give a digest of all that decides what installing `.[extra]` brings."""
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    parts = [
        pyproject["build-system"],
        project.get("dependencies", []),
        extras[extra],
        [extras[name] for name in extras if f"infeed[{name}]" in extras[extra]],  # an extra may name another
        project.get("scripts", {}),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_stamp(path: Path) -> dict[str, str]:
    """Give the digest of each extra that is installed; nothing when the file is absent or was cut short."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_installed(stamp: dict[str, str], pyproject: dict, extra: str) -> bool:
    return stamp.get(extra) == requirement_hash(pyproject, extra)


def call(command: list[str]) -> int:
    """Run one command from the repository root, after printing it; give its exit code."""
    print("+", shlex.join(command), flush=True)
    return end_of(subprocess.Popen(command, cwd=ROOT, env=environment(os.environ)))


def call_together(commands: list[list[str]]) -> int:
    """Run commands at the same time, and print what each has to say when its turn comes; give the first code that is not 0."""
    if len(commands) == 1:
        return call(commands[0])  # a program that may want the terminal
    codes = []
    with ExitStack() as files:
        running = []
        for command in commands:
            said = files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            process = subprocess.Popen(command, cwd=ROOT, env=environment(os.environ), stdout=said, stderr=subprocess.STDOUT)
            running.append((command, process, said))
        for command, process, said in running:
            print("+", shlex.join(command), flush=True)
            codes.append(end_of(process))
            said.seek(0)
            print(said.read(), end="", flush=True)
    return next((code for code in codes if code), 0)


def end_of(process: subprocess.Popen) -> int:
    """Wait for the end of a process; give its exit code, as a shell does."""
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal sends Ctrl+C to the child as well; it cleans up and ends by itself, and is waited for.
            continue
        return code if code >= 0 else 128 - code  # a negative code is a signal; shells say 128 + signal


def prepare(extra: str) -> int:
    """Make the environment hold `extra`; give 0, or the exit code of the step that failed."""
    import tomllib  # not at the head: older Pythons lack it, and must get as far as the sentence in main

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    stamp = read_stamp(STAMP) if VENV_PYTHON.exists() else {}
    if is_installed(stamp, pyproject, extra):
        return 0
    if not stamp:
        absent = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
        if absent:
            print(
                f"dev.py: this Python ({sys.executable}) has no {' and no '.join(absent)}, so it cannot make .venv; "
                "on Debian and Ubuntu install the package python3-venv, elsewhere use a Python from python.org"
            )
            return 2
        # Without --clear: this also repairs an environment whose making was interrupted, and spares one made by hand.
        if code := call([sys.executable, "-m", "venv", str(VENV)]):
            return code
    pip = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check"]
    if code := call([*pip, "install", "-e", f".[{extra}]"]):
        return code
    stamp[extra] = requirement_hash(pyproject, extra)
    STAMP.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str]) -> int:
    if sys.version_info < MIN_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"dev.py: this is Python {found}, infeed needs {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer; use another one")
        return 2
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    command, arguments = argv[0], argv[1:]
    if command not in EXTRAS:
        print(f"dev.py: command={command!r} is unknown; use one of {', '.join(EXTRAS)}")
        return 2
    if command == "check" and arguments:
        print(f"dev.py: arguments={arguments!r} mean nothing to check; use test to pass arguments on to pytest")
        return 2
    try:
        for option, script in TIERS.items():
            if command == "test" and option in arguments:
                return call([sys.executable, script, *(word for word in arguments if word != option)])
        if code := prepare(EXTRAS[command]):
            return code
        for together in steps(command, arguments):
            if code := call_together([[str(VENV_PYTHON), *step] for step in together]):
                return code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
