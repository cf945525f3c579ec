"""Converting: from any format that can be read to DCP or safetensors, in any layout, within a memory budget.

    convert("step-1000", "step-1000.dp6", mesh="6", preset="fsdp")            8 ranks to 6
    convert("hf", "tp4", format="dcp", mesh="tp=4", place={r".*q_proj.*": "S(0)", ".*": "R"})
    merge("step-1000", "hf")                                                  safetensors for transformers
"""
from __future__ import annotations

import ctypes as C
import os
from typing import Any, Dict, List, Optional, Sequence, Union

from . import _c, local
from .carry import AnyPool, Pool
from .checkpoint import FORMATS
from .errors import InvalidError
from .layout import Mesh
from .local import Progress, Report
from .proving import Source, opened
from .rules import Cast, Choice, Names, Place, Places, Rename, choose, found, renamed
from .saving import Pathlike, compress_level

_SIDE_ENDS = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")


def convert(source: Source, out: Pathlike, *, format: Optional[str] = None,
            mesh: Union[str, Mesh, None] = None, place: Optional[Place] = None,
            preset: Optional[str] = None, default: Optional[Places] = None,
            only: Optional[Names] = None, exclude: Optional[Names] = None, rename: Optional[Rename] = None,
            cast: Optional[Cast] = None, max_shard_size: Union[str, int] = 0,
            compress: Union[str, int, bool, None] = None, every_replica: bool = False, nranks: int = 0,
            side_files: Sequence[Pathlike] = (), overwrite: bool = False, resume: bool = False,
            dry_run: bool = False, pool: AnyPool = None, max_nbytes: Union[str, int] = 0,
            progress: Optional[Progress] = None) -> Report:
    """Writes a checkpoint in another format or layout.

    format      "dcp" or "safetensors"; else safetensors if `out` ends so or the source is not DCP
    mesh        the ranks: "8", "dp=2,tp=4". Without it tensors stay whole
    place       how tensors are cut: placements for all ("S(0)"), a dict of expressions that match whole names
                and placements, the first that matches deciding, or a function of the tensor that returns
                placements, a Layout, or None (whole)
    preset      "fsdp", "hsdp", "llama-tp" or "replicate", asked after `place`
    default     placements for what nothing matches; without it that is an error
    only, exclude   expressions that are searched in names, or a function of the tensor
    rename      a dict of expressions and what takes their place, or a function of the name
    cast        a dtype that floats become; or a dict of expressions and dtypes, or a function of the tensor
    max_shard_size  safetensors of whole tensors: of one file, "5GB"
    compress    dcp: "zstd" or "zstd:LEVEL"
    every_replica   safetensors: one file a rank, with all that the rank holds
    side_files  that go into the folder too, such as a config
    resume      go on from what a stopped run of the same kind left
    dry_run     check everything, report what would be done, and do nothing
    max_nbytes  for buffers; 0: 256 MiB
    progress    called with the bytes that are done and those there are; an exception stops it
    """
    with opened(source) as checkpoint:
        if format is None:
            safe = os.fspath(out).endswith(".safetensors") or checkpoint.format != "dcp"
            format = "safetensors" if safe else "dcp"
        if format not in ("dcp", "safetensors"):
            raise InvalidError(f"format={format!r}: dcp and safetensors are written")
        if max_shard_size and (format != "safetensors" or mesh is not None):
            raise InvalidError("max_shard_size is for safetensors of whole tensors")
        chosen = choose(checkpoint, mesh=mesh, place=place, preset=preset, default=default, only=only,
                        exclude=exclude, rename=rename, cast=cast)
        call, threads = local.Call(progress), Pool.of(pool)
        files = [_c.path_bytes(path) for path in side_files]
        options = _c.ConvertOptions(
            format=FORMATS[format], pool=threads.handle, max_nbytes=local.size(max_nbytes),
            max_shard_nbytes=local.size(max_shard_size), nranks=nranks, every_replica=every_replica,
            compress=compress_level(compress), overwrite=overwrite, resume=resume, dry=dry_run,
            nside_files=len(files), side_files=(_c.Text * max(1, len(files)))(*files),
            choose=call.kept.callback(_c.MapTensor, lambda _, tensor, choice: _tell(chosen, tensor, choice)),
            **call.options)
        return call(_c.lib.rsd_convert, checkpoint.handle, _c.path_bytes(out), C.byref(options))


def _tell(chosen: Dict[str, Choice], tensor: Any, choice: Any) -> None:
    """Answers the library's question what becomes of a tensor."""
    made, wish = choice.contents, chosen.get(tensor.contents.name.decode())
    if wish is None:
        made.keep = 0
        return
    made.name, made.dtype = wish.name, wish.dtype.number
    if wish.layout is not None:
        made.layout = _c.lib.rsd_layout_share(wish.layout.handle)  # which is taken over


def merge(source: Source, out: Pathlike, *, everything: bool = False, config_from: Optional[Pathlike] = None,
          max_shard_size: Union[str, int, None] = None, rename: Optional[Rename] = None,
          only: Optional[Names] = None, **options: Any) -> Report:
    """Writes whole tensors as safetensors that transformers loads: a folder, or one file if `out` ends in
    .safetensors. Files are at most `max_shard_size` (5GB) long.

    Of a dict with a part `model` beside others, only that is taken, and its prefix taken off, unless
    `everything`. Configs and tokenizers are copied from the source's folder or from `config_from`. The other
    options are those of `convert`."""
    one_file = os.fspath(out).endswith(".safetensors")
    if max_shard_size is None:
        max_shard_size = 0 if one_file else "5GB"
    with opened(source) as checkpoint:
        part = not everything and any(_in_model(checkpoint[name].path) for name in checkpoint)

        def kept(tensor: Any) -> bool:
            inside = not part or _in_model(tensor.path)
            if only is None or not inside:
                return inside
            return found(only, tensor)

        def called(name: str) -> str:
            name = name[len("model."):] if part and name.startswith("model.") else name
            return renamed(rename, name)

        folder = os.fspath(config_from) if config_from is not None else checkpoint.path
        side = [] if one_file else _side_files(folder)
        return convert(checkpoint, out, format="safetensors", only=kept, rename=called, side_files=side,
                       max_shard_size=max_shard_size, **options)


def _in_model(path: Optional[Sequence[Union[str, int]]]) -> bool:
    return path is not None and len(path) > 1 and path[0] == "model"


def _side_files(folder: str) -> List[str]:
    """What is beside weights and is none: config.json, tokenizer.json and the like."""
    if not os.path.isdir(folder):
        return []
    names = [name for name in sorted(os.listdir(folder))
             if name.endswith(_SIDE_ENDS) and not name.startswith(".") and "reshard-" not in name
             and not name.endswith(".index.json")]
    return [path for path in (os.path.join(folder, name) for name in names) if os.path.isfile(path)]
