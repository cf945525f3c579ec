"""What ranks saved as boxes is loaded into meshes and into other boxes, and what is cut by a mesh is
loaded into boxes."""
import itertools
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import boxed
import reshard
import tap
import worlds
from tensors import (R, S0, S1, Meshes, Want, about, boxes, boxes_of, cut, dtensor, same, sharded, truth)

F32 = torch.float32


def rows(*groups, width=None):
    """Boxes that span all columns: for each rank, pairs (first row, rows)."""
    tail = [] if width is None else [(0, width)]
    return [[[(lo, lo + n)] + tail for lo, n in group] for group in groups]


def tiles(nrows, ncols, height, width, nranks):
    """Returns the tiles of a grid, assigned to the ranks in turn."""
    found = [[] for _ in range(nranks)]
    grid = itertools.product(range(0, nrows, height), range(0, ncols, width))
    for i, (r, c) in enumerate(grid):
        found[i * 5 % nranks].append([(r, min(r + height, nrows)), (c, min(c + width, ncols))])
    return found


# torch's own plans of [16,1], two that put several boxes on a rank, and one that leaves ranks without.
UNEVEN = {
    "saved": rows([(0, 4)], [(4, 3)], [(7, 4)], [(11, 5)], width=1),
    "loaded": rows([(0, 2)], [(2, 4)], [(6, 6)], [(12, 4)], width=1),
    "wrapped": rows([(0, 6)], [(6, 2)], [(8, 1)], [(9, 7)], width=1),
    "several": rows([(0, 1), (15, 1)], [(1, 5), (9, 2)], [(6, 3)], [(11, 2), (13, 2)], width=1),
    "one": rows([], [(0, 16)], [], [], width=1),
}
GRID = (13, 10)
TILES = {"3x3": tiles(13, 10, 3, 3, 4), "13x2": tiles(13, 10, 13, 2, 4), "5x10": tiles(13, 10, 5, 10, 4)}


def save_boxes(folder):
    state = {}
    device_mesh = Meshes()[(4,)]
    for shape, plans in (((16, 1), UNEVEN), (GRID, TILES)):
        for name, plan in plans.items():
            for kind in ("checkpointable", "wrapped", "enumerable"):
                key = f"{kind}-{name}"
                whole = truth(key, shape)
                own, parts = boxed.mine(plan), boxed.mine(boxes(whole, plan))
                if kind == "checkpointable":
                    state[key] = boxed.checkpointable(shape, F32, own, parts)
                elif kind == "enumerable":
                    state[key] = boxed.enumerable(shape, plan, whole)
                elif name in ("saved", "loaded", "wrapped", "13x2"):
                    state[key] = boxed.wrapped(device_mesh, shape, own, parts)
    dcp.save(state, checkpoint_id=folder("boxes"))


def save_meshes(folder):
    devices, state = Meshes(), {}
    for mesh, placements in (((4,), (S0,)), ((4,), (S1,)), ((2, 2), (S1, S0)), ((2, 2), (R, S0))):
        key = f"{mesh}{placements}"
        state[key] = sharded(truth(key, GRID), (mesh, placements), devices[mesh])
    dcp.save(state, checkpoint_id=folder("meshes"))


SPECS = {  # of [10,20], by torch's own test of different shard plans
    "chunks": [0, 1], "twice": [0, 1, 1, 0],
    "five": rows([(0, 2), (3, 3), (9, 1)], [(2, 1), (6, 3)], width=20),
    "two": rows([(8, 2)], [(0, 8)], width=20),
}
LINES = {  # of [32]
    "chunks": [0, 1], "twice": [0, 1, 1, 0],
    "8": rows([(8, 24)], [(0, 8)]), "10": rows([(0, 10)], [(10, 22)]),
}


def save_sharded_tensors(folder):
    state = {}
    for shape, specs in (((10, 20), SPECS), ((32,), LINES)):
        for name, spec in specs.items():
            key = f"{len(shape)}d {name}"
            if isinstance(spec[0], int):
                chunks = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in spec])
                state[key] = boxed.fill(sharded_tensor.empty(chunks, *shape), truth(key, shape))
            else:
                state[key] = boxed.enumerable(shape, spec, truth(key, shape))
    columns = ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"])
    state["columns"] = boxed.fill(sharded_tensor.empty(columns, 10, 20), truth("columns", (10, 20)))
    dcp.save(state, checkpoint_id=folder("sharded"))


def save_uneven_and_empty(folder):
    device_mesh, rank = Meshes()[(4,)], torch.distributed.get_rank()
    whole = torch.arange(14, dtype=F32).view(14, 1)
    state = {"uneven": dtensor(whole[4 * rank:4 * rank + 4].clone(), (14, 1), device_mesh, [S0]),
             "one": sharded(truth("one", (1,)), ((4,), (S0,)), device_mesh)}
    dcp.save(state, checkpoint_id=folder("uneven"))


class LoadBoxes(unittest.TestCase):
    def load(self, checkpoint, name, shape, groups):
        """Into explicit boxes; ranks without boxes hold nothing."""
        want = Want(name, shape, F32, boxes_of(shape, F32, groups))
        checkpoint.load([want.local])
        right = [part for group in boxes(truth(name, shape), groups) for part in group]
        for got, part in zip(want.arrays, right, strict=True):
            self.assertTrue(same(got, part), f"{name} -> {want.text}")

    def cut(self, checkpoint, name, whole, layout):
        want = Want(name, whole.shape, F32, layout)
        checkpoint.load([want.local])
        for got, right in zip(want.arrays, cut(whole, layout), strict=True):
            self.assertTrue(same(got, right), f"{name} -> {want.text}")

    def test_boxes(self):
        """Checkpointable, LocalShardsWrapper and ShardedTensor, one and several boxes a rank"""
        with worlds.Folder() as folder:
            worlds.run(4, save_boxes, folder)
            with reshard.open(folder("boxes")) as checkpoint:
                names = about(checkpoint)
                self.assertEqual(len(names), 2 * (len(UNEVEN) + len(TILES)) + 4)
                for name, (_, shape, _) in names.items():
                    plans = UNEVEN if shape == (16, 1) else TILES
                    for groups in plans.values():
                        self.load(checkpoint, name, shape, groups)
                    for layout in (((1,), (R,)), ((3,), (S0,)), ((2, 3), (S0, S1)), ((7,), (S1,))):
                        self.cut(checkpoint, name, truth(name, shape), layout)

    def test_into_boxes(self):
        """layouts of meshes into boxes"""
        with worlds.Folder() as folder:
            worlds.run(4, save_meshes, folder)
            with reshard.open(folder("meshes")) as checkpoint:
                for name in checkpoint:
                    for groups in TILES.values():
                        self.load(checkpoint, name, GRID, groups)

    def test_sharded_tensors(self):
        """ShardedTensor by chunks and by lists, into each other and into whole tensors"""
        groups = {2: [rows([(0, 5)], [(5, 5)], width=20), SPECS["five"], SPECS["two"],
                      [[[(0, 10), (0, 10)]], [[(0, 10), (10, 20)]]]],
                  1: [rows([(0, 16)], [(16, 16)]), LINES["8"], LINES["10"], rows([(0, 32)])]}
        with worlds.Folder() as folder:
            worlds.run(2, save_sharded_tensors, folder)
            with reshard.open(folder("sharded")) as checkpoint:
                self.assertEqual(len(checkpoint), len(SPECS) + len(LINES) + 1)
                for name, (_, shape, _) in about(checkpoint).items():
                    for group in groups[len(shape)]:
                        self.load(checkpoint, name, shape, group)

    def test_uneven_and_empty(self):
        """a short last shard into a whole tensor, and one element over four ranks into 2x2"""
        with worlds.Folder() as folder:
            worlds.run(4, save_uneven_and_empty, folder)
            with reshard.open(folder("uneven")) as checkpoint:
                whole = torch.arange(14, dtype=F32).view(14, 1)
                self.cut(checkpoint, "uneven", whole, ((1,), (R,)))
                self.cut(checkpoint, "uneven", whole, ((3,), (S0,)))
                self.cut(checkpoint, "one", truth("one", (1,)), ((2, 2), (S0, S0)))
                self.cut(checkpoint, "one", truth("one", (1,)), ((4,), (R,)))


if __name__ == "__main__":
    tap.main()
