"""Lists the tested versions in the header of the run."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tools.libraries import LIBRARIES


def pytest_report_header() -> str:
    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library.name} {version(library.name)}")
        except PackageNotFoundError:
            continue
    return f"libraries: {', '.join(found)}"
