"""DeepSpeed's universal checkpoints: a directory with a file for each parameter and state, which an engine with any
number of ranks loads.

    write_universal("checkpoint-500", "checkpoint-500/global_step500_universal")
    engine.load_checkpoint("checkpoint-500")          # with {"checkpoint": {"load_universal": true}} in its config
"""
from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any, Dict, List, Optional, Tuple

import torch

from .._c import Pathlike
from ..checkpoint import Checkpoint
from ..checkpoint import open as open_checkpoint
from ..errors import ExistsError, FormatError
from .places import open_regular

_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."


def _groups(checkpoint: Checkpoint) -> List[Dict[str, Any]]:
    """The parameter groups, with names of parameters."""
    groups: Dict[int, Dict[str, Any]] = {}
    for name, value in checkpoint.plain_values.items():
        number, _, key = name[len(_GROUPS):].partition(".")
        if not name.startswith(_GROUPS) or not number.isdecimal() or len(number) > 9:
            continue
        if key == "betas" and not isinstance(value, list):
            raise FormatError(f"{checkpoint.path}: {name} is {value!r}, expected a list")
        groups.setdefault(int(number), {})[key] = tuple(value) if key == "betas" else value
    found = [group for _, group in sorted(groups.items())]
    lists = [group.get("params") for group in found]
    params = [name for one in lists if isinstance(one, list) for name in one]
    if not params or not all(isinstance(one, list) for one in lists) or not all(isinstance(one, str) for one in params):
        raise FormatError(f"{checkpoint.path}: no values {_GROUPS}0 with the names of parameters, which a universal "
                          "checkpoint needs")
    if len(set(params)) < len(params):
        raise FormatError(f"{checkpoint.path}: {_GROUPS[:-1]} names a parameter twice")
    return found


def _model_files(checkpoint: Checkpoint, model_from: Optional[Pathlike]) -> List[str]:
    """The files of a run that have the model and its configuration."""
    directory = checkpoint.path if model_from is None else os.fsdecode(model_from)
    found = [name for name in (checkpoint.files if model_from is None else sorted(os.listdir(directory)))
             if name.endswith("_model_states.pt")]
    if not found:
        raise FormatError(f"{directory}: no file *_model_states.pt, which an engine loads first; pass model_from, the "
                          "directory of a tag of the same model")
    return [os.path.join(directory, name) for name in found]


def _states(checkpoint: Checkpoint, param: str) -> Tuple[List[str], Any]:
    """The names of the states of a parameter with an element for each of its own, and its step."""
    prefix = f"{_STATE}{param}."
    step = checkpoint.plain_values.get(prefix + "step")
    if step is None and prefix + "step" in checkpoint:
        step = checkpoint[prefix + "step"].torch().item()
    keys = [name[len(prefix):] for name in checkpoint if name.startswith(prefix) and "." not in name[len(prefix):]]
    return [key for key in keys if checkpoint[prefix + key].shape == checkpoint[param].shape and key != "step"], step


def _check_file_name(checkpoint: Checkpoint, name: str) -> None:
    """FormatError if a name from a file cannot be that of a new file or directory, or leads elsewhere."""
    if "/" in name or "\0" in name or name in ("", ".", "..") or len(os.fsencode(name)) > 250:
        raise FormatError(f"{checkpoint.path}: {name}: not the name of a file or directory")


def _number(checkpoint: Checkpoint, param: str, step: Any) -> torch.Tensor:
    """The step of a parameter as DeepSpeed has it."""
    try:
        return torch.tensor(float(step or 0))
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"{checkpoint.path}: the step of {param} is not a number") from None


def _write(path: str, value: Any) -> None:
    with open(path, "xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _write_param(checkpoint: Checkpoint, param: str, directory: str) -> Any:
    """Writes the files of a parameter, one tensor at a time. Returns its step."""
    os.mkdir(directory)
    _write(os.path.join(directory, "fp32.pt"), {"param": checkpoint[param].torch().to(torch.float32)})
    keys, step = _states(checkpoint, param)
    for key in keys:
        _check_file_name(checkpoint, key)
        _write(os.path.join(directory, f"{key}.pt"), {"param": checkpoint[f"{_STATE}{param}.{key}"].torch()})
    if step is not None:
        _write(os.path.join(directory, "step.pt"), _number(checkpoint, param, step))
    return step


def _write_all(checkpoint: Checkpoint, staging: str, files: List[str]) -> None:
    groups, step = _groups(checkpoint), None
    zero = os.path.join(staging, "zero")
    os.mkdir(zero)
    for group in groups:
        for param in group["params"]:
            if param not in checkpoint:
                raise FormatError(f"{checkpoint.path}: parameter {param} of {_GROUPS[:-1]} is not there")
            _check_file_name(checkpoint, param)
            step = _write_param(checkpoint, param, os.path.join(zero, param))
    numbered = [{**group, "params": [i]} for i, group in enumerate(groups)]
    version = checkpoint.plain_values.get("ds_version", "0.19.8")
    _write(os.path.join(zero, "optimizer_state.pt"), {
        "ds_version": version, "param_groups": numbered,
        "optimizer_state_dict": {"state": {0: {"step": _number(checkpoint, "the optimizer", step)}},
                                 "param_groups": numbered}})
    for path in files:
        with open_regular(path, os.path.dirname(path)) as file, \
                open(os.path.join(staging, os.path.basename(path)), "xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)


def write_universal(source: Pathlike, out: Pathlike, *, model_from: Optional[Pathlike] = None) -> None:
    """Writes a checkpoint with fp32 weights and optimizer state as a universal checkpoint of DeepSpeed.

    The files of the model (`mp_rank_00_model_states.pt`, of ZeRO-3 one per rank) are copied from the source, or from
    the directory `model_from`. The name of `out` is written to `latest_universal` beside it, as DeepSpeed's converter
    does. Tensors are written one after the other. Nothing is at `out` before all of it is complete. EEXIST: something
    is there."""
    path = os.path.abspath(os.fsdecode(out))
    if os.path.lexists(path):
        raise ExistsError(f"{path} already exists")
    with open_checkpoint(source, like="torch") as checkpoint:
        files = _model_files(checkpoint, model_from)
        staging = tempfile.mkdtemp(prefix=os.path.basename(path) + ".reshard-", dir=os.path.dirname(path))
        try:
            _write_all(checkpoint, staging, files)
            os.chmod(staging, 0o755)
            os.rename(staging, path)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path), encoding="utf-8", delete=False) as file:
        file.write(os.path.basename(path))
    os.chmod(file.name, 0o644)
    os.replace(file.name, os.path.join(os.path.dirname(path), "latest_universal"))  # also in place of a link
