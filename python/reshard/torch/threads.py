"""The number of threads of a rank."""
from __future__ import annotations

import os
import threading
from typing import Optional, Tuple

from ..carry import AnyPool, Pool

_lock = threading.Lock()
_own: Optional[Tuple[int, Pool]] = None


def pool_of(pool: AnyPool) -> Pool:
    """Returns the pool for an argument `pool`. None: the pool of this process. Under torchrun it has an equal part
    of the CPUs of the machine."""
    global _own
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        ranks = 1
    if pool is not None or ranks <= 1:
        return Pool.of(pool)
    with _lock:
        if _own is None or _own[0] != os.getpid():  # a forked child does not have its threads
            _own = (os.getpid(), Pool(max(1, len(os.sched_getaffinity(0)) // ranks)))
        return _own[1]
