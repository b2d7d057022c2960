"""Python imports this when it starts, if this folder is on its path."""

import os

if os.environ.get("INFEED_WINDOWS_STAND_IN"):
    import sys

    sys.path.insert(0, os.path.dirname(__file__))
    import windows_stand_in

    sys.path.pop(0)
    windows_stand_in.install_in_child()
