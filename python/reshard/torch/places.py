"""Where checkpoints of torch.distributed.checkpoint are: a directory, or s3://BUCKET/PREFIX."""
from __future__ import annotations

import os
import stat
from typing import Any, BinaryIO, Dict, List, Optional, Sequence

from torch.distributed.checkpoint.filesystem import FileSystem

from .. import _c
from ..carry import AnyPool, Pool
from ..errors import FormatError, UnsupportedError
from ..storage import Storage, handle_for, is_url


class UrlFileSystem(FileSystem):
    """What FileSystem of torch is for directories, for URLs: names are joined, and nothing has to be created."""

    def __init__(self, storage: Optional[Storage] = None) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        if self.storage is not None:
            raise TypeError("a reshard.Storage cannot be sent to another process; set the AWS_... variables instead")
        return UrlFileSystem, ()

    def init_path(self, path: Any) -> str:
        """Returns the URL as it is."""
        return os.fspath(path)

    def concat_path(self, path: Any, suffix: str) -> str:
        """Returns the URL of a name below another one."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def mkdir(self, path: Any) -> None:
        """Does nothing: a bucket has no directories."""

    def exists(self, path: Any) -> bool:
        """Returns whether an object exists."""
        directory, _, name = os.fspath(path).rpartition("/")
        return name in self.ls(directory)

    def rm_file(self, path: Any) -> None:
        """Removes an object."""
        directory, _, name = os.fspath(path).rpartition("/")
        remove_files(directory, self.storage, [name])

    def ls(self, path: Any) -> List[str]:
        """Returns the names of the objects below a URL."""
        return list_files(os.fspath(path), self.storage)


def file_system(path: Any, storage: Optional[Storage]) -> FileSystem:
    """Returns the file system of a path."""
    return UrlFileSystem(storage) if is_url(path) else FileSystem()


class UrlPaths:
    """What Reader and Writer add to the classes of torch in the same way: paths that are URLs, and copies for other
    processes."""

    fs: Any
    path: Any
    _pool: AnyPool
    _storage: Optional[Storage]

    def _take_path(self, path: Any) -> None:
        """Sets the path and its file system, if it is a URL or the last one was."""
        if is_url(path) or isinstance(self.fs, UrlFileSystem):
            self.fs = file_system(path, self._storage)
            self.path = self.fs.init_path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Starts another load or save, at another path if `checkpoint_id` is one."""
        super().reset(checkpoint_id)  # type: ignore[misc]
        if checkpoint_id:
            self._take_path(checkpoint_id)

    def __getstate__(self) -> Dict[str, Any]:
        state = dict(self.__dict__)  # for async_save in a process
        state["_pool"] = state["_pool"].nthreads if isinstance(state["_pool"], Pool) else state["_pool"]
        return state


def check_file_system(storage: Any) -> None:
    """Raises UnsupportedError if the file system of a reader or writer was replaced: the library opens files itself."""
    if type(storage.fs) not in (FileSystem, UrlFileSystem):
        raise UnsupportedError(f"{type(storage).__name__} opens files itself, and does not use the file system "
                               f"{type(storage.fs).__name__}; use the reader or writer of torch with it")


def list_files(path: str, storage: Optional[Storage] = None) -> List[str]:
    """Returns the names of the files in a directory, or of the objects below a URL. They need not exist."""
    found: List[str] = []
    kept = _c.Kept()
    with kept:
        _c.lib.rsd_dcp_list_files(_c.path_bytes(path), handle_for(path, storage), kept.callback(
            _c.OnName, lambda _, name: found.append(os.fsdecode(name))), None)
    return found


def remove_files(path: str, storage: Optional[Storage], names: Sequence[str]) -> None:
    """Removes files of a directory, or objects. Those that do not exist are ignored."""
    texts = [os.fsencode(name) for name in names]
    _c.lib.rsd_dcp_remove_files(_c.path_bytes(path), handle_for(path, storage), len(texts),
                                (_c.Text * max(1, len(texts)))(*texts))


def open_regular(path: str, folder: str) -> BinaryIO:
    """Opens a file of a checkpoint. A file that is not regular could block, and a link could lead anywhere: it may lead
    out of the directory only to a blob of the same cache of downloads."""
    real, inside = os.path.realpath(path), os.path.realpath(folder)
    cache, snapshots, _ = inside.rpartition("/snapshots/")
    blob = bool(snapshots) and os.path.dirname(real) == os.path.join(cache, "blobs")
    if not blob and os.path.commonpath([real, inside]) != inside:
        raise FormatError(f"{path}: a link that leads out of the directory")
    fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path}: not a regular file")
    return os.fdopen(fd, "rb")


def open_here(path: str, flags: int) -> int:
    """Opens a file for writing: the `opener` of open(). A link is not followed, and a FIFO does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
