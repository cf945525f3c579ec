"""The command: `reshard` and `python -m reshard`. It is a C program that replaces this process.

The command is the one of the package, else the one that make built in the source tree of this file.
"""
from __future__ import annotations

import os
import signal
import sys

from ._command import find, places


def command() -> str:
    """Returns the path of the command, or ends the process with an error."""
    return find() or sys.exit(f"reshard: no command at {' nor at '.join(places())}: install the package, or run make")


def main() -> None:
    """Runs the command with the arguments of this process. Does not return."""
    path = command()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a new program inherits that
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(path, ["reshard", *sys.argv[1:]])


if __name__ == "__main__":
    main()
