"""Object storage: where s3:// and https:// paths lead, with which credentials, and within which limits.

    reshard.open("s3://bucket/step-1000")                          the AWS_... variables and files of this process
    minio = Storage(endpoint="https://minio:9000", access_key="...", secret_key="...")
    reshard.open("s3://bucket/step-1000", storage=minio)

Paths without a storage share one, which is made of the environment as it is then.
"""
from __future__ import annotations

import ctypes as C
import os
import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from . import _c, local
from .errors import InvalidError, MissingFileError

_SCHEMES = ("s3://", "https://", "http://")
_STYLES = {None: 0, "path": 1, "host": 2}


class Traffic(NamedTuple):
    """What went over the network so far. `nrequests` counts attempts, `nretries` those that were repetitions.
    `nbytes_received` and `nbytes_sent` are those of bodies."""

    nrequests: int
    nretries: int
    nbytes_received: int
    nbytes_sent: int


class Upload(NamedTuple):
    """An upload to `path` that was begun at the time `begun`, and neither finished nor removed. The service knows it
    by `identifier`."""

    path: str
    begun: str
    identifier: str


class Storage(_c.Handle):
    """Credentials, limits and connections for URLs. Several checkpoints and threads may use one.

    environment   a mapping with AWS_ACCESS_KEY_ID and the other AWS_... variables, which also name files of
                  credentials; what no other option sets comes from there. Default: os.environ; {}: nothing
    endpoint      URL of an S3 service. Default: Amazon's
    region, profile, access_key, secret_key, session_token, ca_file, proxy
                  as the variables and settings of the same names
    credentials   a function that returns a dict with access_key, secret_key and perhaps session_token and
                  expires (seconds since 1970). It is called again before they expire
    bearer_token  sent to the host of an https:// path
    anonymous     do not sign requests
    style         where the bucket's name is: "path" or "host". Default: "path" if there is an endpoint
    max_requests  at a time. Default: 32
    max_attempts  of one request. Default: 8
    max_nbytes    for data read ahead and parts being uploaded. Default: 256 MB
    timeout       seconds without data. Default: 30
    """

    _free = "rsd_storage_free"

    def __init__(self, *, environment: Optional[Mapping[str, str]] = None, endpoint: Optional[str] = None,
                 region: Optional[str] = None, profile: Optional[str] = None, access_key: Optional[str] = None,
                 secret_key: Optional[str] = None, session_token: Optional[str] = None,
                 credentials: Optional[Callable[[], Dict[str, Any]]] = None,
                 bearer_token: Optional[str] = None, ca_file: Optional[_c.Pathlike] = None,
                 proxy: Optional[str] = None, anonymous: bool = False, style: Optional[str] = None,
                 max_requests: int = 0, max_attempts: int = 0, max_nbytes: Union[str, int] = 0,
                 timeout: float = 0) -> None:
        if style not in _STYLES:
            raise InvalidError(f"style={style!r} is not 'path' or 'host'")
        variables = os.environ if environment is None else environment
        lines = [f"{name}={value}".encode(errors="surrogateescape") for name, value in variables.items()]
        texts = dict(endpoint=endpoint, region=region, profile=profile, access_key=access_key,
                     secret_key=secret_key, session_token=session_token, bearer_token=bearer_token, proxy=proxy)
        options = _c.StorageOptions(
            environment=(_c.Text * (len(lines) + 1))(*lines, None),
            ca_file=None if ca_file is None else _c.path_bytes(ca_file), anonymous=anonymous,
            path_style=_STYLES[style], max_requests=max_requests, max_attempts=max_attempts,
            max_nbytes=local.size(max_nbytes), timeout=timeout,
            **{name: None if text is None else _c.text_bytes(text, name) for name, text in texts.items()})
        self._kept, self._texts = _c.Kept(), []  # type: ignore[var-annotated]
        if credentials is not None:
            options.load = self._kept.callback(_c.LoadCredentials, self._loader(credentials))
        handle = _c.Address()
        _c.lib.rsd_storage_new(C.byref(options), C.byref(handle))
        self._handle = handle.value

    def _loader(self, credentials: Callable[[], Dict[str, Any]]) -> Callable[[Any, Any], None]:
        """Returns the function that the library calls for new credentials."""
        texts: List[bytes] = self._texts

        def load(_: Any, out: Any) -> None:
            found = dict(credentials())
            texts[:] = [str(found.get(name) or "").encode() for name in ("access_key", "secret_key", "session_token")]
            into = C.cast(out, C.POINTER(_c.Credentials)).contents
            into.access_key, into.secret_key = texts[0], texts[1]
            into.session_token = texts[2] or None
            into.expires = int(found.get("expires") or 0)
        return load

    @property
    def traffic(self) -> Traffic:
        """What went over the network so far."""
        found = _c.Traffic()
        _c.lib.rsd_storage_traffic(self.handle, C.byref(found))
        return Traffic(found.nrequests, found.nretries, found.nbytes_received, found.nbytes_sent)

    def uploads(self, path: str, *, remove: bool = False) -> List[Upload]:
        """Returns the uploads below `path`, s3://BUCKET/PREFIX, that killed runs left. With `remove`, removes them; not
        those of a run in progress."""
        found: List[Upload] = []
        kept, count = _c.Kept(), _c.Int64()

        def add(_: Any, *texts: bytes) -> None:
            found.append(Upload(*(text.decode(errors="replace") for text in texts)))

        with kept:
            _c.lib.rsd_storage_uploads(self.handle, _c.text_bytes(path, "path"), remove,
                                       kept.callback(_c.OnUpload, add), None, C.byref(count))
        return found


_lock = threading.Lock()
_shared: Optional[Tuple[Any, Storage]] = None


def is_url(path: Any) -> bool:
    """Whether a path leads to a storage."""
    return isinstance(path, str) and path.startswith(_SCHEMES)


def list_files(path: str, storage: Optional[Storage]) -> List[str]:
    """The names of the files that are directly in a directory or below a prefix; none if there is no such place."""
    found: List[str] = []
    kept = _c.Kept()
    with kept:
        try:
            _c.lib.rsd_storage_list(handle_for(path, storage), _c.path_bytes(path),
                                    kept.callback(_c.OnFile, lambda _, name: found.append(os.fsdecode(name))), None)
        except (MissingFileError, InvalidError):
            pass
    return found


def load_file(path: str, storage: Optional[Storage], max_nbytes: int) -> Optional[bytes]:
    """The bytes of a file; None if it does not exist."""
    data, nbytes = _c.Address(), _c.Int64()
    try:
        _c.lib.rsd_storage_load(handle_for(path, storage), _c.path_bytes(path), max_nbytes, C.byref(data),
                                C.byref(nbytes))
    except MissingFileError:
        return None
    try:
        return C.string_at(data.value, nbytes.value)
    finally:
        _c.lib.rsd_free(data)


def handle_for(path: Any, storage: Optional[Storage]) -> Optional[int]:
    """The handle for a path; None if it is a local one. A storage that is not given is made of the environment,
    and kept as long as that stays the same."""
    global _shared
    if storage is not None:
        return storage.handle
    if not is_url(path):
        return None
    now = (os.getpid(), tuple(sorted(os.environ.items())))
    with _lock:
        if _shared is None or _shared[0] != now:
            _shared = (now, Storage())
        return _shared[1].handle
