"""Installs infeed in every Python that starts under ``infeed run``, which puts this folder first in ``PYTHONPATH``."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _run_hidden():
    # type: () -> None
    """Run the sitecustomize module that this one shadows, if there is one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _install():
    # type: () -> None
    if "INFEED_RUN" in os.environ:  # infeed's workers inherit the path, but not this variable
        try:
            from infeed.programs.children import install_when_imported
        except ImportError:
            return  # another Python installation, without infeed
        install_when_imported()


_install()
_run_hidden()
