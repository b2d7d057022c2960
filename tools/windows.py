"""Runs infeed's tests on a real Windows build of CPython, under Wine on Debian or Ubuntu.

    python dev.py test --windows [--python 3.13] [pytest args]      the tests that CI runs: about ten minutes on two cores
    python dev.py test --windows tests/unit tests/engine            these tests, as with pytest

The first run builds `.windows/<version>`: a Wine prefix with CPython at C:\\py, NumPy, torch and the other test requirements.
If Wine or mingw-w64 is missing, it installs them with apt-get (as root only). Later runs copy the sources and start the tests.

It does not use the installer of python.org, because many build machines can reach only package registries:

* the DLLs and extension modules, built with MSVC, come from panda3d's Windows wheel, which contains them to freeze programs;
* the standard library comes from an interpreter of exactly the same version on this machine: the running one or one of pyenv;
* `python.exe` and `python3.dll` (the stable ABI, for psutil) are small C files that this tool compiles;
* Wine 8 lacks some complex-number functions of the C runtime; `mathshim.dll` provides them, and NumPy's modules import it.

A pass does not prove that infeed works on Windows, and a failure may be caused by Wine.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".windows"
COMPILER = "x86_64-w64-mingw32-gcc"
DEBIAN = ("wine", "wine64", "gcc-mingw-w64-x86-64-win32", "mingw-w64-tools")
COMMANDS = ("wine", "wineboot", "wineserver", "gendef", COMPILER)
TESTED = ("src", "tests", "docs", "examples", "benchmarks", "tools", "dev.py", "pyproject.toml", "README.md")


# The default tests: everything that depends on the platform.
DEFAULT = (
    "tests/unit",
    "tests/engine",
    *(f"tests/shards/test_{name}.py" for name in ("cache", "index", "storage", "patterns", "reopening", "tar")),
    *(f"tests/cli/test_{name}.py" for name in ("arguments", "terminal")),
    "tests/surroundings/test_interpreters.py::test_a_zip_file_in_a_folder_with_a_strange_name_runs",
    "tests/examples/test_code_blocks.py",
    "tests/torch/test_no_main_guard.py",
)


# Left out of the default tests, which must end within ten minutes on two cores. Pass their paths to run them. A name stands for
# all tests whose names begin with it.
LEFT_OUT = (
    # Importing torch takes 20 s in each process under Wine. The first two import it when pytest collects them.
    *(f"tests/engine/test_{name}.py" for name in ("batches", "torch_datasets")),
    "tests/engine/test_memory.py::test_a_kept_tensor_keeps_its_batch",
    "tests/engine/test_program_state.py::test_settings_of_torch_reach_workers",
    "tests/engine/test_seeds.py::test_draws_from_torch_do_not_depend_on_the_workers",
    "tests/engine/test_sharing.py::test_shared_tensors_in_workers",
    "tests/engine/test_thread_counts.py::test_torch_uses_the_configured_number_of_threads",
    "tests/engine/test_thread_counts.py::test_the_torch_loader_has_the_option_too",
    *(
        f"tests/examples/test_code_blocks.py::test_a_python_block_runs[docs/{name}"
        for name in ("guides/doctor.md0", "guides/gpu.md")
    ),
    "tests/examples/test_code_blocks.py::test_a_python_block_runs[docs/how-to/",
    # What the tuner decides does not depend on the platform; tests/unit/test_tuner.py and test_autoscaler.py run.
    "tests/engine/test_auto.py",
    # replay loads in the main process. test_state.py resumes with every kind of worker.
    *(f"tests/engine/test_{name}.py" for name in ("lineage", "resuming")),
    # These start dozens of workers or loaders. Other tests of the same file do the same with fewer.
    "tests/engine/test_bad_samples.py::test_exceeding_the_error_budget_is_an_error",
    "tests/engine/test_close.py::test_many_loaders_in_sequence_leave_nothing_behind",
    "tests/engine/test_deaths.py::test_deaths_with_many_workers_and_both_orders",
    "tests/engine/test_deaths.py::test_many_deaths_are_logged_in_summary",
    "tests/engine/test_errors.py::test_every_exception_can_be_caught_by_its_class",
    "tests/engine/test_memory.py::test_twenty_thousand_batches_leak_nothing",
    "tests/engine/test_rng.py::test_shards_of_an_iterable_dataset_draw_differently",
    "tests/engine/test_scaling.py::test_batches_do_not_depend_on_added_and_removed_workers",
    "tests/engine/test_scaling.py::test_batches_do_not_depend_on_workers_killed_during_scaling",
    "tests/engine/test_seeds.py::test_draws_do_not_depend_on_how_batches_are_collated",
    "tests/engine/test_set_epoch.py::test_threads_do_not_set_an_abandoned_epoch",
    "tests/engine/test_sharing.py::test_a_loader_logs_the_advice_once",
)


class Version(NamedTuple):
    full: str
    panda3d: str
    wheels: tuple[str, ...]


# Includes dependencies, because pip would resolve them for this platform.
_PACKAGES = (
    *("numpy", "cloudpickle", "threadpoolctl", "psutil", "tqdm", "colorama", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("pytest", "pluggy", "iniconfig", "packaging", "hypothesis", "sortedcontainers", "pytest-xdist", "execnet", "pillow"),
)
_TORCH = (
    *("torch==2.13.0", "filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
    "setuptools",
)
VERSIONS = {
    "3.11": Version("3.11.7", "panda3d==1.10.14", _PACKAGES + _TORCH),
    "3.13": Version("3.13.0", "panda3d==1.10.15", _PACKAGES),
}


# Exit codes; pytest uses 0 to 5.
SOME_FAILED = 1  # of pytest
SETUP_FAILED = 70
ENDED_EARLY = 71
TOOK_TOO_LONG = 75
CANNOT_RUN = 77  # Wine, or the Python whose standard library is used, is missing and cannot be installed here

DOWNLOADS = 3
DOWNLOAD_PAUSE_S = 10.0
# For the default tests and the repetition of those that failed: more than twice what they take on two idle cores.
TESTS_LIMIT_S = 1500.0
# For the commands that build the prefix; each takes seconds.
COMMAND_LIMIT_S = 300.0


class MissingError(Exception):
    """The machine lacks a requirement; the message names it and how to install it."""


class SetupError(Exception):
    """The machine has what is needed, but the set-up failed."""


class Prefix:
    """A Wine prefix that contains a Windows build of CPython."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, VERSIONS[name]
        self.folder = HOME / name
        self.root = self.folder / "prefix"
        self.drive = self.root / "drive_c"
        self.python = self.drive / "py"
        self._stamp = self.folder / "complete"

    def is_complete(self) -> bool:
        return self._stamp.exists() and self._stamp.read_text() == _digest(self.version)

    def build(self) -> None:
        """Build the prefix, which takes a few minutes. Raises `MissingError`."""
        library = _find_library(self.version.full)
        _install_wine()
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.python / "DLLs", self.folder / "wheels", self.folder / "build"):
            folder.mkdir(parents=True)
        self.wine("wineboot", "-i")
        self.wine("wine", "winecfg", "-v", "win10")
        self._server("-w")
        self._add_python(library)
        self._add_packages()
        # Without this, /proc, /sys and /dev of this machine are folders of the current drive.
        (self.root / "dosdevices/z:").unlink(missing_ok=True)
        modules = "sys, ctypes, mmap, _multiprocessing, socket, ssl, numpy, psutil, pytest"
        code = f"import {modules}; print(sys.version, sys.platform, numpy.__version__)"
        if self.run(["-c", code], limit_s=COMMAND_LIMIT_S):
            raise SetupError(f"the Windows build of Python {self.version.full} does not start under this Wine")
        self._stamp.write_text(_digest(self.version))

    def _add_python(self, library: Path) -> None:
        wheel = self._download(self.version.panda3d)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                name = entry.removeprefix("deploy_libs/")
                # Wine 8 cannot answer WMI queries: they end the process. Without _wmi, `platform` asks in other ways.
                if name != entry and not name.startswith(("api-ms-win-crt-", "_wmi.")):
                    folder = self.python / "DLLs" if name.endswith(".pyd") else self.python
                    (folder / name).write_bytes(archive.read(entry))
        wheel.unlink()
        unwanted = ("site-packages", "lib-dynload", "test", "idlelib", "__pycache__", "config-*", "_sysconfigdata*")
        shutil.copytree(library, self.python / "Lib", ignore=shutil.ignore_patterns(*unwanted))
        (self.python / "Lib/site-packages").mkdir()

        number = self.name.replace(".", "")
        exports = _output("gendef", "-", self.python / f"python{number}.dll")
        self._write("python.def", exports)
        self._write(
            "main.c",
            "#include <wchar.h>\n__declspec(dllimport) int Py_Main(int, wchar_t **);\n"
            "int wmain(int c, wchar_t **v) { return Py_Main(c, v); }\n",
        )
        names = re.findall(r"^([A-Za-z_]\w*)( DATA)?", exports.partition("EXPORTS")[2], re.MULTILINE)
        forwards = [f"  {name} = python{number}.{name}{data}" for name, data in names]
        self._write("python3.def", "\n".join(["LIBRARY python3.dll", "EXPORTS", *forwards, ""]))
        self._write("python3.c", "int unused;\n")
        self._compile("x86_64-w64-mingw32-dlltool", "-d", "python.def", "-D", f"python{number}.dll", "-l", "libpython.a")
        self._compile(COMPILER, "-O2", "-municode", "-o", self.python / "python.exe", "main.c", "-L.", "-lpython")
        flags = ("-shared", "-nostdlib", "-Wl,--entry=0")
        self._compile(COMPILER, *flags, "-o", self.python / "python3.dll", "python3.c", "python3.def")

    def _add_packages(self) -> None:
        for name in self.version.wheels:
            with zipfile.ZipFile(self._download(name)) as archive:
                archive.extractall(self.python / "Lib/site-packages")
        self._add_complex_functions()

    def _download(self, requirement: str) -> Path:
        folder = self.folder / "wheels" / re.split("[=<>]", requirement)[0]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", str(folder)]
        target = ["--platform", "win_amd64", "--only-binary=:all:", "--python-version", self.name]
        for attempt in range(1, DOWNLOADS + 1):
            done = subprocess.run([*pip, *target, requirement], capture_output=True, text=True)
            if not done.returncode:
                break
            if attempt == DOWNLOADS:
                raise SetupError(
                    f"the wheel of {requirement} for Windows could not be downloaded in {DOWNLOADS} attempts; "
                    f"check the network and the package index of pip, and run this again:\n{done.stderr.strip()}"
                )
            time.sleep(DOWNLOAD_PAUSE_S)
        (wheel,) = folder.glob("*.whl")
        return wheel

    def _add_complex_functions(self) -> None:
        """Build mathshim.dll and replace the DLL name that extension modules import; both names have the same length."""
        library = b"api-ms-win-crt-math-l1-1-0.dll"
        needed: set[str] = set()
        for path in (self.python / "Lib/site-packages/numpy").rglob("*.pyd"):
            data = path.read_bytes()
            if library in data:
                needed |= _imported(path, library.decode())
                path.write_bytes(data.replace(library, b"mathshim.dll".ljust(len(library), b"\0")))
        own = {name: code for name, code in _complex_functions().items() if name in needed}
        self._write("shim.c", "\n".join([_COMPLEX_HEAD, *own.values(), ""]))
        exports = [f"  {name} = {f'my_{name}' if name in own else f'ucrtbase.{name}'}" for name in sorted(needed)]
        self._write("shim.def", "\n".join(["LIBRARY mathshim.dll", "EXPORTS", *exports, ""]))
        flags = ("-O2", "-fno-builtin", "-shared", "-static-libgcc")
        self._compile(COMPILER, *flags, "-o", self.python / "mathshim.dll", "shim.c", "shim.def")

    def _write(self, name: str, text: str) -> None:
        (self.folder / "build" / name).write_text(text)

    def _compile(self, *command: object) -> None:
        _output(*command, folder=self.folder / "build")

    def copy_sources(self) -> None:
        """Replace the copy of this checkout on drive C: with its current state."""
        target = self.drive / "infeed"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        for name in TESTED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, target / name)

    def run(self, arguments: list[str], *, folder: str = "", limit_s: float | None, lines: list[str] | None = None) -> int:
        """Run the Windows Python with these arguments in a folder of drive C:, and print its output; return its exit code.

        Args:
            limit_s: all processes of the prefix are killed after this time; the exit code is then `TOOK_TOO_LONG`.
            lines: gets the lines of the output.
        """
        environ = self._environ() | {"PYTHONPATH": r"C:\infeed\src"}
        process = subprocess.Popen(
            ["wine", r"C:\py\python.exe", *arguments],
            cwd=self.drive / folder,
            env=environ,
            # Use pipes: for files and terminals, Wine creates a console and waits for it.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()
            self.close()  # other processes hold the pipe too

        timer = threading.Timer(limit_s or 0, end)
        if limit_s is not None:
            timer.start()
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.replace(b"\r\n", b"\n")
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if lines is not None:
                lines.append(line.decode(errors="replace").rstrip())
        process.stdout.close()
        code = process.wait()
        timer.cancel()
        if is_late.is_set():
            print(f"killed: it had not ended after {limit_s:.0f} s", flush=True)
            return TOOK_TOO_LONG
        return code

    def wine(self, *command: str) -> None:
        try:
            done = subprocess.run(
                command,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise SetupError(f"{' '.join(command)} had not ended after {COMMAND_LIMIT_S:.0f} s") from None
        if done.returncode:
            raise SetupError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def close(self) -> None:
        """Terminate all processes of this prefix."""
        self._server("-k")

    def _server(self, option: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["wineserver", option], env=self._environ(), timeout=60, check=False, capture_output=True)

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {
            "WINEPREFIX": str(self.root),
            "WINEARCH": "win64",
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": "mscoree,mshtml=,winedbg.exe=",
            "KMP_AFFINITY": "disabled",  # torch's OpenMP asks Wine for a topology that it does not have
        }


def _digest(version: Version) -> str:
    """Return a digest of everything that determines the content of the prefix."""
    sources = "".join(inspect.getsource(part) for part in (Prefix, _imported, _complex_functions))
    return hashlib.sha256(f"{sources}{_COMPLEX_HEAD}{version}".encode()).hexdigest()


def _find_library(full: str) -> Path:
    """Return the standard library folder of exactly this Python version."""
    name = ".".join(full.split(".")[:2])
    candidates = [Path.home() / f".pyenv/versions/{full}/lib/python{name}"]
    if sys.version.split()[0] == full:
        candidates.insert(0, Path(os.__file__).parent)
    for path in candidates:
        if (path / "os.py").exists():
            return path
    raise MissingError(f"Python {full}, whose standard library is used, is missing; install it with `pyenv install {full}`")


def _install_wine() -> None:
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if not missing:
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        cure = (
            f"run `apt-get install {' '.join(DEBIAN)}` as root"
            if apt
            else "use Debian or Ubuntu, or install Wine and mingw-w64"
        )
        raise MissingError(f"Wine is not complete: {', '.join(missing)} missing; {cure}")
    print(f"+ apt-get install {' '.join(DEBIAN)}", flush=True)
    for command in (["update"], ["install", "-y", "--no-install-recommends", *DEBIAN]):
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        retrying = f"Acquire::Retries={DOWNLOADS}"
        done = subprocess.run([apt, "-qq", "-o", retrying, *command], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise MissingError(f"Wine cannot be installed: apt-get {' '.join(command)} failed: {done.stderr.strip()}")


def _output(*command: object, folder: Path | None = None) -> str:
    """Run a command of the tool chain and return its output. Raises `SetupError`."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMMAND_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{shlex.join(words)} had not ended after {COMMAND_LIMIT_S:.0f} s") from None
    except OSError as error:
        raise SetupError(f"{shlex.join(words)} cannot be started: {error}") from None
    if done.returncode:
        raise SetupError(f"{shlex.join(words)} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _imported(path: Path, library: str) -> set[str]:
    """Return the names that a 64-bit DLL imports from a library. objdump of binutils 2.40 misses libraries of some DLLs."""
    data = path.read_bytes()

    def read(format: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{format}", data, offset)

    (header,) = read("I", 0x3C)
    (count,), (optional_size,) = read("H", header + 6), read("H", header + 20)
    optional = header + 24
    sections = [read("4I", optional + optional_size + 40 * number + 8) for number in range(count)]

    def offset_of(address: int) -> int:
        return next(raw + address - begin for _, begin, size, raw in sections if begin <= address < begin + size)

    def text(address: int) -> str:
        begin = offset_of(address)
        return data[begin : data.index(b"\0", begin)].decode()

    names: set[str] = set()
    (imports,) = read("I", optional + 120)  # the second entry of the data directory; 0: the DLL imports nothing
    entry = offset_of(imports) if imports else None
    while entry is not None:
        lookup, _, _, name, _ = read("5I", entry)
        if not name:
            break
        if text(name) == library:
            at = offset_of(lookup)
            while (value := read("Q", at)[0]) != 0:
                if not value >> 63:  # otherwise it is imported by number
                    names.add(text(value + 2))
                at += 8
        entry += 20
    return names


_COMPLEX_HEAD = """\
#include <complex.h>
#include <math.h>
typedef struct { float r, i; } F;
typedef struct { double r, i; } D;"""


def _complex_functions() -> dict[str, str]:
    """Return C code of the complex functions with MSVC's ABI: numbers are structs of two, and `long double` is double."""
    found = {}
    unary = [
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "exp",
        "log",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
    for kind, number, c_type, suffix, real in (
        ("F", "float", "float _Complex", "f", "f"),
        ("D", "double", "double _Complex", "", ""),
        ("D", "double", "double _Complex", "l", ""),
    ):
        for name in (*unary, "pow"):
            given = ("a", "b") if name == "pow" else ("a",)
            parameters = ", ".join(f"{kind} {one}" for one in given)
            values = ", ".join(f"__builtin_complex({one}.r, {one}.i)" for one in given)
            found[f"c{name}{suffix}"] = (
                f"{kind} my_c{name}{suffix}({parameters}) {{ {c_type} w = c{name}{real}({values}); "
                f"{kind} o = {{ creal{real}(w), cimag{real}(w) }}; return o; }}"
            )
        for name, code in (
            ("real", "a.r"),
            ("imag", "a.i"),
            ("arg", f"atan2{real}(a.i, a.r)"),
            ("abs", f"hypot{real}(a.r, a.i)"),
        ):
            found[f"c{name}{suffix}"] = f"{number} my_c{name}{suffix}({kind} a) {{ return {code}; }}"
    return found


def run_tests(prefix: Prefix, arguments: list[str]) -> int:
    """Run pytest; repeat the tests that failed, one after another. Return an exit code of pytest, or `TOOK_TOO_LONG`."""
    # One more than the CPU cores: tests spend half of their time waiting for processes.
    count = (os.cpu_count() or 1) + 1
    workers = [] if "-n" in arguments else ["-n", str(count), "--dist", "worksteal"]
    chosen = [] if any((ROOT / word.partition("::")[0]).exists() for word in arguments) else default_tests()
    # Under Wine, importing torch takes 20 s in each process.
    tests = ["-m", "pytest", "-q", "-rfE", "-o", "faulthandler_timeout=400", *chosen, *arguments]
    # Tests that somebody chose may be any number, and that person can interrupt them.
    deadline = time.monotonic() + TESTS_LIMIT_S if chosen else None
    first: list[str] = []
    code = run(prefix, [*tests, "--cache-clear", *workers], _left_s(deadline), first)
    if code != SOME_FAILED:
        return code
    # Starting a process takes seconds under Wine, so time limits may be too short when several tests run in parallel.
    print("repeating the tests that failed, one after another:", flush=True)
    second: list[str] = []
    code = run(prefix, [*tests, "--last-failed", "-n", "0"], _left_s(deadline), second)
    if code in (0, SOME_FAILED):
        if not any(re.search(r"\b\d+ (passed|failed)\b.* in [\d.]+s", line) for line in second):
            print("pytest ended without a summary: a test has ended its process", flush=True)
            return ENDED_EARLY
        passed = [name for name in failed_tests(first) if name not in failed_tests(second)]
        print(f"passed when repeated: {len(passed)}", *passed, sep="\n  ", flush=True)
    return code


def default_tests() -> list[str]:
    """Return the arguments for pytest that select the default tests."""
    return [*DEFAULT, *(f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in LEFT_OUT)]


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(1.0, deadline - time.monotonic())


def failed_tests(lines: list[str]) -> list[str]:
    """Return the tests that the summary of pytest lists as failed."""
    found = (re.match(r"(?:FAILED|ERROR) (.*?::.*?)(?: - |$)", line) for line in lines)
    return list(dict.fromkeys(match[1] for match in found if match))


def run(prefix: Prefix, arguments: list[str], limit_s: float | None, lines: list[str] | None = None) -> int:
    print("+ wine python.exe", *arguments, flush=True)
    return prefix.run(arguments, folder="infeed", limit_s=limit_s, lines=lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py test --windows", description="Run the tests on Windows' Python, under Wine.")
    parser.add_argument("--python", choices=VERSIONS, default="3.11", help="version of the Windows Python (default: 3.11)")
    parser.add_argument("--run", action="store_true", help="run Python with the arguments instead of pytest")
    options, arguments = parser.parse_known_args(argv)
    prefix = Prefix(options.python)
    try:
        if not prefix.is_complete():
            began = time.monotonic()
            print(f"+ building {prefix.folder.relative_to(ROOT)}", flush=True)
            prefix.build()
            print(f"  took {time.monotonic() - began:.0f} s", flush=True)
        prefix.copy_sources()
        if options.run:
            return run(prefix, arguments, None)
        return run_tests(prefix, arguments)
    except SetupError as error:
        print(f"tools/windows.py: {error}")
        return SETUP_FAILED
    except MissingError as error:
        print(f"tools/windows.py: {error}")
        return CANNOT_RUN
    finally:
        if prefix.root.exists() and shutil.which("wineserver"):
            prefix.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
