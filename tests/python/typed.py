"""A script of a user, which mypy checks in its strictest mode: every public call, with its types."""
from __future__ import annotations

from typing import Dict, List

import reshard
import reshard.torch as rt
from reshard import Layout, Mesh, Plan, Shard


def layouts() -> Layout:
    mesh = Mesh("dp=2,tp=4")
    rows = Layout("float32[8,8] @ 8 : Shard(0)")
    tiles = Layout.on("f32", (8, 8), mesh, [Shard(0), reshard.Shard(1)])
    same = Layout.on("f32", (8, 8), 8, "S0")
    by_axis = Layout.by_dim("f32", (8, 8), {"dp": 2, "tp": 4}, [["dp"], []])
    shapes: List[reshard.Array] = tiles.arrays(rank=3)
    assert rows == same and by_axis.nranks == mesh.nranks and shapes[0].nbytes
    partial: reshard.Placement = reshard.Partial("mean")
    return tiles if partial else rows


def plans(tiles: Layout) -> int:
    plan = Plan(Layout("f32[8,8] @ 8:S0"), tiles)
    totals: Dict[str, int] = plan.totals
    pieces: List[reshard.Piece] = list(plan.pieces(rank=0))
    text: str = plan.explain(pairs=True)
    bound = reshard.bind(plan, pool=2)
    bound.run([], [])
    return totals["npieces"] + len(pieces) + len(text)


def checkpoints(path: str) -> int:
    with reshard.open(path, like="torch", follow_links=True) as checkpoint:
        tensor: reshard.LazyTensor = checkpoint["w"]
        names: List[str] = list(checkpoint) + checkpoint.presets(mesh="dp=2,tp=4")
        report: reshard.Report = checkpoint.load({}, threads=2, max_memory="1GB", strict=False)
        shape: tuple[int, ...] = tensor.shape
        stored: List[reshard.Stored] = tensor.boxes
        tensor.read(slice(0, 2), dtype="f32", like="numpy")
    report = reshard.save(path, {}, force=True, compress="zstd")
    report = reshard.save_start(path, {}, overwrite=True, layouts={"w": "f32[8] @ 8 : S0"}).wait()
    report = reshard.convert(path, "out", mesh=8, preset="fsdp", force=True, threads=4, verify=True)
    report = reshard.merge(path, "hf", all=True, max_shard_size="5GB", max_memory="1GB")
    report = reshard.split(path, "tp4", mesh="tp=4", preset="llama-tp")
    digests: Dict[str, str] = reshard.digest(path, only="w")
    found: List[reshard.Difference] = reshard.diff(path, "out")
    damage: List[str] = reshard.verify("out", storage=reshard.Storage(anonymous=True))
    return report.nbytes_written + len(names) + len(digests) + len(found) + len(damage) + len(shape) + len(stored)


def pictures(tiles: Layout, checkpoint: reshard.Checkpoint) -> str:
    return (tiles._repr_svg_() or "") + checkpoint._repr_html_()


def storage(path: str) -> None:
    rt.Writer(path, thread_count=2, compress="zstd")
    rt.Reader(path, pool=2)
    rt.HuggingFaceStorageWriter(path, {"w": 1}, save_distributed=True, enable_consolidation=True)
    rt.HuggingFaceStorageReader(path, thread_count=2)
    rt.QuantizedHuggingFaceStorageReader(path, block_size=64)


def errors() -> str:
    try:
        layouts()
    except reshard.MismatchError as error:
        return f"{error.status}: {error}"
    except reshard.Error:
        raise
    return ""
