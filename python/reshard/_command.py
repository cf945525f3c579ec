"""Where the command is: in the package, or in the source tree of this file."""
from __future__ import annotations

import os
from typing import List, Optional

_HERE = os.path.dirname(os.path.abspath(__file__))
_TREE = os.path.dirname(os.path.dirname(_HERE))


def places() -> List[str]:
    """Returns the paths where the command may be."""
    tried = [os.path.join(_HERE, "bin", "reshard")]
    if os.path.exists(os.path.join(_TREE, "include", "reshard.h")):
        tried += [os.path.join(_TREE, "build", place, "reshard") for place in ("", "python")]
    return tried


def find() -> Optional[str]:
    """Returns the path of the command, or None."""
    return next((path for path in places() if os.access(path, os.X_OK) and os.path.isfile(path)), None)
