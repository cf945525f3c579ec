"""Conversion of a checkpoint to DCP or safetensors, in any layout, within a memory budget.

    convert("step-1000", "step-1000.dp6", mesh="6", preset="fsdp")            8 ranks to 6
    convert("hf", "tp4", format="dcp", mesh="tp=4", place={r".*q_proj.*": "S(0)", ".*": "R"})
    merge("step-1000", "hf")                                                  safetensors for transformers
    split("hf", "tp4", mesh="tp=4", preset="llama-tp")                        one file per rank
"""
from __future__ import annotations

import ctypes as C
import os
import shutil
import warnings
from typing import List, Optional, Sequence, Union

from . import _c, local
from ._c import Pathlike
from .carry import AnyPool
from .checkpoint import FORMATS, Checkpoint
from .errors import FormatError, InvalidError
from .layout import AnyMesh
from .local import Progress, Report
from .proving import Source, opened
from .rules import Cast, Heads, Names, Place, Places, Rename, Rules
from .saving import compress_level
from .storage import Storage, handle_for, is_url, list_files, load_file
from .transport import AnyTransport

_REFLINKS = {"auto": _c.REFLINK_AUTO, "always": _c.REFLINK_ALWAYS, "never": _c.REFLINK_NEVER}
_TORCH_ENDS = (".pt", ".pth", ".bin")  # of files that torch.save writes
_MAX_CONFIG = 1 << 24
_SIDE_ENDS = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_MAX_SIDE, _MAX_SIDE_DEPTH = 1 << 26, 2


def convert(source: Source, out: Pathlike, *, format: Optional[str] = None, mesh: AnyMesh = None,
            place: Optional[Place] = None, rules: Optional[Pathlike] = None, preset: Optional[str] = None,
            default: Optional[Places] = None, heads: Heads = 0, replicate_kv_heads: bool = False,
            part: Optional[str] = "",
            only: Optional[Names] = None, exclude: Optional[Names] = None, rename: Optional[Rename] = None,
            strip_prefix: Union[str, Sequence[str]] = (), cast: Optional[Cast] = None,
            max_shard_size: Union[str, int] = 0, compress: Union[str, int, bool, None] = None,
            every_replica: bool = False, nranks: int = 0, side_files: Sequence[Pathlike] = (), adapter: bool = False,
            overwrite: bool = False,
            force: bool = False, resume: bool = False, dry_run: bool = False, verify: bool = False,
            pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
            max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
            transport: Optional[AnyTransport] = None, timeout: float = 0.0, storage: Optional[Storage] = None,
            reflink: str = "auto", unchecked: bool = False, torch_places: bool = False) -> Report:
    """Writes a checkpoint in another format or layout. `source` is a path, or an open Checkpoint, for which
    `reshard.open` has more options.

    format      "dcp", "safetensors", "torch.save" or "fsdp". Default: torch.save if `out` ends in .pt, .pth or .bin,
                safetensors if it ends in .safetensors or the source is not DCP, else DCP
    mesh        the ranks to write for: 8, "2x4", "dp=2,tp=4" or {"dp": 2, "tp": 4}. Default: tensors stay whole
    place       how tensors are sharded: placements of all ("S(0)"); a dict of expressions that match whole names
                and placements, of which the first match applies; or a function of the tensor that returns
                placements, a Layout, or None (whole)
    rules       a file of such rules, one expression and its placements per line; `place` comes first
    preset      "fsdp", "hsdp", "llama-tp", "qwen-tp", "moe-tp", "gpt2-tp", "bert-tp", "replicate", or "fsdp+llama-tp"
                and so on for both; `place` and `rules` come first. Those for tensor parallelism do not cut attention
                heads, whose numbers are in the config.json of `side_files`, of the source, or beside it. "moe-tp"
                distributes experts over the mesh axis named ep
    heads       number of attention heads, or a pair with that of keys and values, for presets, instead of the config's
    replicate_kv_heads  presets let ranks share a KV head, if there are more ranks than KV heads
    default     placements of tensors that nothing matches. Default: such a tensor is an error
    part        a key of a nested state dict: keep only tensors below it, and remove it from their names. None:
                keep only the model of what a trainer wrote, under the names that it has without the trainer
    only        keep tensors whose name contains a match: an expression or several, or a function of the tensor
    exclude     leave out tensors, given in the same ways
    rename      a dict of expressions and replacements, a function of the name, or "s/A/B/" or several of these, as in
                the command
    strip_prefix    a text, or several, to remove from the start of names
    cast        a dtype of all floating-point tensors; a dict of expressions that match whole names and dtypes;
                or a function of the tensor
    max_shard_size  size limit of a safetensors file with whole tensors, such as "5GB"
    compress    "zstd" or "zstd:LEVEL", for DCP. Default: none
    every_replica   write one safetensors file per rank, with everything that rank holds
    nranks      number of ranks to make DCP files for. Default: as many as the layouts have
    side_files  files to copy into the directory, such as a config
    adapter     write whole tensors to one file, named as PEFT names that of an adapter
    overwrite, force    replace an existing checkpoint; two words for one option
    resume      continue a run of the same kind that was stopped
    dry_run     check everything and report what would be done, but write nothing
    verify      read the result again before it appears at its path, and compare it with the source
    pool        a Pool, or a number of threads. Default: one thread per CPU of the process
    threads     the same as a number, as in the command
    max_nbytes, max_memory  limit of the buffers; two words for one option. Default: 256 MB
    progress    called with the bytes done and the bytes in total; an exception stops the conversion
    transport   the ranks that convert together: each makes the same call, reads and writes a part, and rank 0
                publishes. Default: this process alone
    timeout     seconds without a heartbeat after which a rank counts as lost. Default: 300
    storage     credentials and limits of s3:// and https:// paths. Default: those of the environment
    reflink     share extents with the source on file systems that can: "auto", "always" or "never"
    unchecked   do not read shared data of safetensors output to check its CRCs
    torch_places    place data as torch does, not at multiples of 4096 bytes
    """
    with opened(source, storage) as checkpoint:
        if format is None:
            safe = os.fsdecode(out).endswith(".safetensors") or checkpoint.format != "dcp"
            format = "torch.save" if os.fsdecode(out).endswith(_TORCH_ENDS) else "safetensors" if safe else "dcp"
        if format not in ("dcp", "safetensors", "torch.save", "fsdp"):
            raise InvalidError(f"format={format!r} cannot be written; use 'dcp', 'safetensors', 'torch.save' or 'fsdp'")
        if reflink not in _REFLINKS:
            raise InvalidError(f"reflink={reflink!r} must be 'auto', 'always' or 'never'")
        if max_shard_size and (format == "dcp" or mesh is not None):
            raise InvalidError("max_shard_size applies to output of whole tensors only, not to DCP")
        made = Rules(checkpoint, mesh=mesh, place=place, file=rules, preset=preset, default=default, only=only,
                     exclude=exclude, rename=rename, strip_prefix=strip_prefix, cast=cast, part=part,
                     config=_config(checkpoint, side_files, storage), heads=heads,
                     replicate_kv_heads=replicate_kv_heads, adapter=adapter)
        made.check()
        call = local.Call(progress, local.either("pool", pool, "threads", threads),
                          local.either("max_nbytes", max_nbytes, "max_memory", max_memory), transport, timeout)
        urls = [path for path in map(os.fsdecode, (out, *side_files)) if is_url(path)]
        call.io.contents.storage = handle_for(urls[0] if urls else out, storage)
        files = [_c.path_bytes(path) for path in side_files]
        options = _c.ConvertOptions(
            format=FORMATS[format], max_shard_nbytes=local.size(max_shard_size), nranks=nranks,
            every_replica=every_replica, compress=compress_level(compress), overwrite=overwrite or force, resume=resume,
            dry=dry_run, nside_files=len(files), side_files=(_c.Text * max(1, len(files)))(*files),
            map=C.cast(_c.lib.rsd_rules_map, _c.MapTensor), map_context=made.handle, io=call.io,
            adapter=adapter, reflink=_REFLINKS[reflink], unchecked=unchecked, torch_places=torch_places)
        if verify:
            options.check = call.kept.callback(_c.CheckOutput, made.compare(call.io))
        with made.kept:
            return call(_c.lib.rsd_convert, checkpoint.handle, _c.path_bytes(out), C.byref(options))


def merge(source: Source, out: Pathlike, *, all: bool = False, everything: bool = False,  # noqa: A002 (the command's)
          config_from: Optional[Pathlike] = None, max_shard_size: Union[str, int, None] = None,
          only: Optional[Names] = None, exclude: Optional[Names] = None, rename: Optional[Rename] = None,
          strip_prefix: Union[str, Sequence[str]] = (), cast: Optional[Cast] = None, overwrite: bool = False,
          force: bool = False, resume: bool = False, dry_run: bool = False, verify: bool = False, pool: AnyPool = None,
          threads: Optional[int] = None, max_nbytes: Union[str, int] = 0, max_memory: Union[str, int] = 0,
          progress: Optional[Progress] = None, transport: Optional[AnyTransport] = None, timeout: float = 0.0,
          storage: Optional[Storage] = None, reflink: str = "auto", unchecked: bool = False,
          torch_places: bool = False) -> Report:
    """Writes whole tensors as safetensors that transformers loads: a directory, or one file if `out` ends in
    .safetensors. If it ends in .pt, .pth or .bin, it is one file for `torch.load`.

    all, everything write every tensor under its own name; two words for one option. Default: only the model of what
                    a trainer wrote, under the names that it has without the trainer
    config_from     directory to copy configs, tokenizers, README.md and licenses from, also those of its
                    subdirectories unless one side is a URL. Default: configs and tokenizers of the source, or of
                    `huggingface` in it. With an adapter_config.json the output has the names of PEFT; without a config
                    there is a warning
    max_shard_size  size limit of a file. Default: 5GB

    The other keywords are those of `convert`: only, exclude, rename, strip_prefix, cast, overwrite, force, resume,
    dry_run, verify, pool, threads, max_nbytes, max_memory, progress, transport, timeout, storage, reflink, unchecked,
    torch_places."""
    torch_file = os.fsdecode(out).endswith(_TORCH_ENDS)
    one_file = torch_file or os.fsdecode(out).endswith(".safetensors")
    if max_shard_size is None:
        max_shard_size = 0 if one_file else "5GB"
    with opened(source, storage) as checkpoint:
        files = [] if one_file else _configs(checkpoint, config_from, storage)
        names = {os.path.basename(path) for path in files}
        if not one_file and not names & {"config.json", "adapter_config.json"}:
            warnings.warn(f"{os.fsdecode(out)} has no config.json, without which transformers builds a default model; "
                          "copy that of the model with config_from", stacklevel=2)
        report = convert(
            checkpoint, out, format="torch.save" if torch_file else "safetensors",
            part="" if all or everything else None, side_files=files,
            adapter="adapter_config.json" in names and "config.json" not in names, max_shard_size=max_shard_size,
            only=only, exclude=exclude, rename=rename, strip_prefix=strip_prefix, cast=cast, overwrite=overwrite,
            force=force, resume=resume, dry_run=dry_run, verify=verify, pool=pool, threads=threads,
            max_nbytes=max_nbytes, max_memory=max_memory, progress=progress, transport=transport, timeout=timeout,
            storage=storage, reflink=reflink, unchecked=unchecked, torch_places=torch_places)
    if not one_file and not dry_run:
        _copy_below(config_from, out, transport)
    return report


def split(source: Source, out: Pathlike, *, mesh: AnyMesh = None, place: Optional[Place] = None,
          rules: Optional[Pathlike] = None, preset: Optional[str] = None, default: Optional[Places] = None,
          heads: Heads = 0, replicate_kv_heads: bool = False, config_from: Optional[Pathlike] = None,
          only: Optional[Names] = None, exclude: Optional[Names] = None, rename: Optional[Rename] = None,
          strip_prefix: Union[str, Sequence[str]] = (), cast: Optional[Cast] = None,
          overwrite: bool = False, force: bool = False, resume: bool = False, dry_run: bool = False,
          verify: bool = False, pool: AnyPool = None, threads: Optional[int] = None, max_nbytes: Union[str, int] = 0,
          max_memory: Union[str, int] = 0, progress: Optional[Progress] = None,
          transport: Optional[AnyTransport] = None, timeout: float = 0.0, storage: Optional[Storage] = None,
          reflink: str = "auto", unchecked: bool = False, torch_places: bool = False) -> Report:
    """Writes `source`, a path or an open Checkpoint, as one safetensors file per rank of a mesh to `out`:
    rank-00000-of-00004.safetensors and so on, with every tensor or shard that the rank needs. Replicated tensors are in
    every file.

    mesh            the ranks to write for: 8, "2x4", "dp=2,tp=4" or {"dp": 2, "tp": 4}
    config_from     as in `merge`

    The other keywords are those of `convert`: place, rules, preset, default, heads, replicate_kv_heads, only, exclude,
    rename, strip_prefix, cast, overwrite, force, resume, dry_run, verify, pool, threads, max_nbytes, max_memory,
    progress, transport, timeout, storage, reflink, unchecked, torch_places."""
    if mesh is None:
        raise InvalidError("split needs a mesh, such as mesh='tp=4'")
    with opened(source, storage) as checkpoint:
        report = convert(
            checkpoint, out, format="safetensors", every_replica=True, mesh=mesh, place=place, rules=rules,
            preset=preset, default=default, heads=heads, replicate_kv_heads=replicate_kv_heads,
            side_files=_configs(checkpoint, config_from, storage), only=only, exclude=exclude,
            rename=rename, strip_prefix=strip_prefix, cast=cast, overwrite=overwrite, force=force, resume=resume,
            dry_run=dry_run, verify=verify, pool=pool, threads=threads, max_nbytes=max_nbytes, max_memory=max_memory,
            progress=progress, transport=transport, timeout=timeout, storage=storage, reflink=reflink,
            unchecked=unchecked, torch_places=torch_places)
    if not dry_run:
        _copy_below(config_from, out, transport)
    return report


def _configs(checkpoint: Checkpoint, config_from: Optional[Pathlike], storage: Optional[Storage]) -> List[str]:
    """Returns the files to copy beside the weights."""
    if config_from is not None:
        return _side_files(os.fsdecode(config_from), storage, card=True)
    return _side_files(os.path.join(checkpoint.path, "huggingface"), storage) or _side_files(checkpoint.path, storage)


def _config(checkpoint: Checkpoint, side_files: Sequence[Pathlike], storage: Optional[Storage]) -> Optional[Pathlike]:
    """Finds the config.json of the model. Returns its path, or the text of one behind a URL."""
    given = [os.fsdecode(one) for one in side_files if os.path.basename(os.fsdecode(one)) == "config.json"]
    if is_url(checkpoint.path):
        beside = [f"{checkpoint.path.rstrip('/')}/{inner}config.json" for inner in ("", "huggingface/")]
    else:
        directory = checkpoint.path if os.path.isdir(checkpoint.path) else os.path.dirname(checkpoint.path)
        parent = os.path.dirname(os.path.abspath(directory))
        beside = [os.path.join(one, inner, "config.json") for one in (directory, parent)
                  for inner in ("", "huggingface")]
    for path in (*given, *beside):
        text = load_file(path, storage, _MAX_CONFIG) if is_url(path) else None
        if text is not None:
            return text.decode(errors="replace").strip()
        if os.path.isfile(path):
            return path
    return None


def _is_side_file(name: str, card: bool) -> bool:
    """Whether a file is copied along with the weights: config.json, tokenizer.json and the like, with `card` also
    README.md, LICENSE and NOTICE. Files that say how the source is stored are not."""
    if name.startswith((".", "_", "latest_")) or name.endswith(".index.json") or "reshard-" in name or \
            name in ("metadata.json", "commit_success.txt", "zero_to_fp32.py"):
        return False
    return name.endswith(_SIDE_ENDS) or (card and (name.endswith(".md") or name.startswith(("LICENSE", "NOTICE"))))


def _side_files(directory: str, storage: Optional[Storage], card: bool = False) -> List[str]:
    """Returns the files to copy from a directory. A checkpoint of one file has none."""
    if not is_url(directory) and not os.path.isdir(directory):
        return []
    return [f"{directory.rstrip('/')}/{name}" for name in list_files(directory, storage) if _is_side_file(name, card)]


def _copy_below(config_from: Optional[Pathlike], out: Pathlike, transport: Optional[AnyTransport]) -> None:
    """Copies such files of the subdirectories of config_from to the output, which is in its place, on rank 0."""
    if config_from is None or (transport and transport.rank > 0) or is_url(out) or is_url(config_from):
        return
    top = os.fsdecode(config_from)
    for directory, below, names in os.walk(top):
        inner = os.path.relpath(directory, top)
        depth = 0 if inner == "." else inner.count(os.sep) + 1
        below[:] = [name for name in below if not name.startswith(".") and depth < _MAX_SIDE_DEPTH]
        for name in names:
            path = os.path.join(directory, name)
            if depth > 0 and _is_side_file(name, True) and os.path.isfile(path) and os.path.getsize(path) <= _MAX_SIDE:
                _copy_file(_resolve_inside(path, top), os.fsdecode(out), inner, name)


def _resolve_inside(path: str, top: str) -> str:
    """Returns what a path leads to. A link may lead to a blob of the same cache of Hugging Face, and not elsewhere."""
    found, directory = os.path.realpath(path), os.path.realpath(top)
    snapshots = os.path.dirname(directory)
    cache = os.path.dirname(snapshots) if os.path.basename(snapshots) == "snapshots" else None
    if not found.startswith(directory + os.sep) and not (cache and found.startswith(os.path.join(cache, "blobs", ""))):
        raise FormatError(f"{path}: link leads out of {top}; not followed")
    return found


def _copy_file(source: str, out: str, inner: str, name: str) -> None:
    """Copies a file to a directory below the output, which is made. Links there are not followed: the output may have
    had some before, and others may change it."""
    staged = name + ".reshard-part"
    at = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in inner.split(os.sep):
            try:
                os.mkdir(part, dir_fd=at)
            except FileExistsError:
                pass
            above, at = at, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(above)
        with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            target = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=at)
            try:
                with open(target, "wb") as copy:
                    shutil.copyfileobj(file, copy)
                os.rename(staged, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                os.unlink(staged, dir_fd=at)
                raise
    finally:
        os.close(at)
