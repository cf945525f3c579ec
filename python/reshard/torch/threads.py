"""Threads for a rank: its share of those that the machine has."""
from __future__ import annotations

import os
import threading
from typing import Optional, Tuple

from ..carry import AnyPool, Pool

_lock = threading.Lock()
_own: Optional[Tuple[int, Pool]] = None


def pool_of(pool: AnyPool) -> Pool:
    """The pool that is meant. None: one for this process; where torchrun says how many ranks are on this
    machine, with their share of the CPUs."""
    global _own
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        ranks = 1
    if pool is not None or ranks <= 1:
        return Pool.of(pool)
    with _lock:
        if _own is None or _own[0] != os.getpid():  # a forked child has no threads in it
            _own = (os.getpid(), Pool(max(1, len(os.sched_getaffinity(0)) // ranks)))
        return _own[1]
