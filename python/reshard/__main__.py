"""The command: `reshard` and `python -m reshard`. It is a C program that replaces this process.

The command is the one of the package, else the one that make built in the source tree of this file.
"""
from __future__ import annotations

import os
import signal
import sys
from typing import List

_HERE = os.path.dirname(os.path.abspath(__file__))
_TREE = os.path.dirname(os.path.dirname(_HERE))


def command() -> str:
    """Returns the path of the command."""
    tried: List[str] = [os.path.join(_HERE, "bin", "reshard")]
    if os.path.exists(os.path.join(_TREE, "include", "reshard.h")):
        tried += [os.path.join(_TREE, "build", place, "reshard") for place in ("", "python")]
    for path in tried:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    sys.exit(f"reshard: no command at {' nor at '.join(tried)}: install the package, or run make")


def main() -> None:
    """Runs the command with the arguments of this process. Does not return."""
    path = command()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a new program inherits that
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(path, ["reshard", *sys.argv[1:]])


if __name__ == "__main__":
    main()
