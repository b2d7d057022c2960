"""All commands for contributors. Needs only Python 3.11 or newer.

    python dev.py demo  [options]       run a demo on generated images
    python dev.py test  [pytest args]   lint, format and type checks, then the tests: the same as CI
    python dev.py test --quick [pytest args]
                                        the tests that start no processes and need no torch: about a minute
    python dev.py test --windows [--python 3.13] [pytest args]
                                        the tests with a Windows build of Python, under Wine: see tools/windows.py
    python dev.py test --libraries [pytest args]
                                        the tests with third-party libraries: see tools/libraries.py
    python dev.py test --python 3.13 [pytest args]
                                        the tests that need no torch, with another Python (a version or a path)
    python dev.py check                 lint, format, layers and types only
    python dev.py docs  [serve]         build the documentation into site/; with serve: serve it and rebuild on changes
    python dev.py build                 build the wheel and sdist into dist/ and check their metadata
    python dev.py bench [options]       run benchmarks/run.py

The first call creates `.venv` beside this file and installs infeed into it in editable mode. Later calls install again only if
the requirements in pyproject.toml changed. Each other Python has its own environment, such as `.venv-3.13`. The exit code is
that of the first step that fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

MIN_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
# The stamp is inside the environment, so removing .venv also removes it.
STAMP = "infeed-installed.json"

# The extra that each command needs.
EXTRAS = {"demo": "demo", "test": "dev", "check": "dev", "docs": "docs", "build": "build", "bench": "dev"}
# These tests have their own environments and do not need .venv.
TIERS = {"--windows": "tools/windows.py", "--libraries": "tools/libraries.py"}
# `test --quick`: pure functions, and loading in the main process and in threads.
QUICK = ["tests/unit", "tests/engine", "tests/metrics"]
QUICK_MARKERS = "not (long or libraries or process or torch or slow or stress)"
# `test --python`: all tests that need neither torch nor the tools of the `dev` extra.
OTHER_PYTHON = "--python"
OTHER_EXTRA = "test"
OTHER_MARKERS = "not (long or libraries or torch)"
INTERRUPTED = 130


def check_steps() -> list[list[str]]:
    """Return the static checks, each as arguments to Python."""
    # One cache per platform: mypy discards a cache of another platform, and analyzing torch is slow.
    types = [
        ["-m", "mypy", "--platform", platform, "--cache-dir", f".mypy_cache/{platform}"] for platform in ("win32", "darwin")
    ]
    layers = ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"]
    return [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."], layers, ["-m", "mypy"], *types]


def steps(command: str, arguments: list[str]) -> list[list[list[str]]]:
    """Return the steps of `command` as arguments to the environment's Python; commands within one step run in parallel."""
    if command == "demo":
        return [[["-m", "infeed", "demo", *arguments]]]
    if command == "bench":
        return [[["benchmarks/run.py", *arguments]]]
    if command == "build":
        return [[["-m", "build", "--outdir", "dist"]], [["-m", "twine", "check", "--strict", "dist/*"]]]
    if command == "docs":
        return [[["-m", "mkdocs", *(arguments or ["build", "--strict"])]]]
    if command == "test" and "--quick" in arguments:
        rest = [word for word in arguments if word != "--quick"]
        chosen = [] if any((ROOT / word.partition("::")[0]).exists() for word in rest) else QUICK
        return [[["-m", "pytest", "-n", str(os.cpu_count() or 1), "-m", QUICK_MARKERS, *chosen, *rest]]]
    if command == "test":
        return [check_steps(), [pytest_step(arguments)]]
    return [check_steps()]


def pytest_step(arguments: list[str]) -> list[str]:
    # Two more than the CPU cores: tests spend much of their time waiting for processes.
    return ["-m", "pytest", "-n", str((os.cpu_count() or 1) + 2), "--dist", "worksteal", *arguments]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the steps, without the variable that makes each interpreter recompile infeed."""
    return {name: value for name, value in given.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"NO_MKDOCS_2_WARNING": "1"}


def requirement_hash(pyproject: dict, extra: str) -> str:
    """Return a digest of everything that determines what `.[extra]` installs."""
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
    """Return the digest of each installed extra; empty if the file is missing or truncated."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_installed(stamp: dict[str, str], pyproject: dict, extra: str) -> bool:
    return stamp.get(extra) == requirement_hash(pyproject, extra)


def call(command: list[str]) -> int:
    """Print a command, run it in the repository root and return its exit code."""
    print("+", shlex.join(command), flush=True)
    return end_of(subprocess.Popen(command, cwd=ROOT, env=environment(os.environ)))


def call_together(commands: list[list[str]]) -> int:
    """Run commands in parallel, print their output in order, and return the first nonzero exit code."""
    if len(commands) == 1:
        return call(commands[0])  # the command may need the terminal
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
    """Wait for a process to exit and return its exit code as a shell does."""
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal sends Ctrl+C to the child too. Wait until the child has cleaned up and exited.
            continue
        return code if code >= 0 else 128 - code  # a negative code is a signal; shells say 128 + signal


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def find_python(wanted: str) -> str | None:
    """Return the path of the interpreter `wanted`, a version such as 3.13 or a path; None if it does not exist."""
    if not re.fullmatch(r"3\.\d+", wanted):
        return shutil.which(wanted)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    newest = sorted(pyenv.glob(f"{wanted}.*"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    for candidate in [f"python{wanted}", *(str(path / "bin" / "python") for path in reversed(newest))]:
        if (path := shutil.which(candidate)) and version_of([path]) == wanted:  # pyenv's shims exist for all versions
            return path
    if (launcher := shutil.which("py")) and version_of([launcher, f"-{wanted}"]) == wanted:
        found = subprocess.run(
            [launcher, f"-{wanted}", "-c", "import sys; print(sys.executable)"], stdout=subprocess.PIPE, text=True
        )
        return found.stdout.strip()
    return None


def version_of(command: list[str]) -> str | None:
    """Return the version of an interpreter, such as 3.13; None if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([*command, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def test_other_python(arguments: list[str]) -> int:
    """Run the tests that need no torch with another interpreter and return the exit code."""
    at = arguments.index(OTHER_PYTHON)
    rest = arguments[:at] + arguments[at + 2 :]
    if at + 1 == len(arguments):
        print(f"dev.py: {OTHER_PYTHON} needs a version such as 3.13, or a path")
        return 2
    wanted = arguments[at + 1]
    python = find_python(wanted)
    if python is None:
        print(f"dev.py: {OTHER_PYTHON}={wanted!r} was not found; install that Python, or pass the path of its executable")
        return 2
    venv = ROOT / f".venv-{version_of([python])}"
    if code := prepare(OTHER_EXTRA, venv, python):
        return code
    return call([str(python_of(venv)), *pytest_step(["-m", OTHER_MARKERS, *rest])])


def prepare(extra: str, venv: Path = VENV, python: str = sys.executable) -> int:
    """Install `extra` into the environment; return 0 or the exit code of the failed step."""
    import tomllib  # imported here: older Pythons lack it, and must reach the version check in main

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    stamp = read_stamp(venv / STAMP) if python_of(venv).exists() else {}
    if is_installed(stamp, pyproject, extra):
        return 0
    if not stamp:
        absent = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
        if absent and python == sys.executable:
            print(
                f"dev.py: this Python ({sys.executable}) has no {' and no '.join(absent)}, so it cannot make .venv; "
                "on Debian and Ubuntu install the package python3-venv, elsewhere use a Python from python.org"
            )
            return 2
        # Without --clear: this repairs an incomplete environment and keeps one that was created manually.
        if code := call([python, "-m", "venv", str(venv)]):
            return code
    pip = [str(python_of(venv)), "-m", "pip", "--disable-pip-version-check"]
    if code := call([*pip, "install", "-e", f".[{extra}]"]):
        return code
    stamp[extra] = requirement_hash(pyproject, extra)
    (venv / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
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
    if command == "docs" and arguments not in ([], ["serve"]):
        print(f"dev.py: arguments={arguments!r} are not supported; use `docs` or `docs serve`")
        return 2
    if command in ("check", "build") and arguments:
        hint = "; to pass arguments to pytest, use test" if command == "check" else ""
        print(f"dev.py: arguments={arguments!r} are not supported by {command}{hint}")
        return 2
    try:
        for option, script in TIERS.items():
            if command == "test" and option in arguments:
                return call([sys.executable, script, *(word for word in arguments if word != option)])
        if command == "test" and OTHER_PYTHON in arguments:
            return test_other_python(arguments)
        if code := prepare(EXTRAS[command]):
            return code
        for together in steps(command, arguments):
            if code := call_together([[str(python_of(VENV)), *step] for step in together]):
                return code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
