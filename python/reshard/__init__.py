"""reshard: moves any sharded tensor from any layout to any other, in memory and through checkpoints.

    Layout          says which rank holds which elements of a tensor
    Plan            lists the boxes that ranks send each other so that one layout becomes another
    reshard, bind   run a plan, once or many times
    open, save      read and write checkpoints
    convert, merge, split, verify, diff, digest     the verbs of the command
"""
from ._c import lib as _lib
from .carry import Arena, Exec, Pool, bind, reshard
from .checkpoint import Checkpoint, LazyTensor, Stored, open
from .converting import convert, merge, split
from .errors import (CancelledError, Error, ExistsError, FileError, FormatError, InvalidError, LimitError,
                     MismatchError, MissingError, MissingFileError, OutOfMemoryError, PeerError,
                     TimedOutError, UnsupportedError)
from .layout import (Array, Balanced, Box, Check, Cyclic, LocalBox, Layout, Mesh, Partial, Placement, Replicate,
                     Segmented, Shard, Strided, problem)
from .local import Local, Report
from .plan import Piece, Plan, Reduction
from .proving import Difference, diff, digest, digest_array, verify
from .saving import Saving, save, save_start
from .states import OPAQUE
from .storage import Storage, Traffic, Upload
from .transport import Transport

__version__ = _lib.rsd_version().decode()
__all__ = [
    "Arena", "Array", "Balanced", "bind", "Box", "CancelledError", "Check", "Checkpoint", "convert", "Cyclic",
    "diff", "Difference", "digest", "digest_array", "Error", "Exec", "ExistsError", "FileError",
    "FormatError", "LocalBox", "InvalidError", "Layout", "LazyTensor", "LimitError", "Local", "merge",
    "Mesh", "MismatchError", "MissingError", "MissingFileError", "OPAQUE", "open", "OutOfMemoryError",
    "Partial", "PeerError", "Piece", "Placement", "Plan", "Pool", "problem", "Reduction",
    "Replicate", "Report", "reshard", "save", "save_start", "Saving", "Segmented", "Shard", "split", "Storage",
    "Stored", "Strided", "TimedOutError", "Traffic", "Transport", "UnsupportedError", "Upload", "verify",
]
