"""What is saved here is loaded by torch, into DTensors and boxes of other worlds."""
import random
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard

import boxed
import reshard
import tap
import worlds
from tensors import (BY_NAME, R, S0, S1, Have, Meshes, boxes, cut, dtensor, filled, layouts, meshes,
                     name_of, same, truth)

F32 = torch.float32
SHAPES = [(), (1,), (5,), (4, 4), (7, 6), (3, 5, 4), (0, 3)]
MESHES = [mesh for nranks in range(1, 10) for mesh in meshes(nranks)]


def named(mesh):
    return "x".join(map(str, mesh))


def empty(whole, layout, device_mesh):
    """A DTensor to load into."""
    local = cut(whole, layout)[device_mesh.get_rank()]
    return dtensor(filled(local.shape, whole.dtype), whole.shape, device_mesh, layout[1])


def torch_loads(folder, nranks):
    """Loads checkpoints of other worlds into every mesh of this one, into layouts drawn by chance."""
    devices, chance, n = Meshes(), random.Random(nranks), 0
    for mesh in meshes(nranks):
        for source in chance.sample(MESHES, 4):
            state, right = {}, {}
            for shape in SHAPES:
                for layout in layouts(source, len(shape)):
                    name = name_of(shape, layout)
                    target = chance.choice(layouts(mesh, len(shape)))
                    state[name] = empty(truth(name, shape), target, devices[mesh])
                    right[name] = cut(truth(name, shape), target)[dist.get_rank()]
            dcp.load(state, checkpoint_id=folder(named(source)))
            for name, tensor in state.items():
                assert same(tensor.to_local(), right[name]), f"{name} -> {tensor.placements}"
                n += 1
    return n


def torch_loads_one(folder, name, key, shape, dtype, targets, registry=None):
    """One tensor, into each of the layouts that this world can have."""
    whole, devices = truth(key, shape, dtype), Meshes()
    for layout in targets:
        state = {key: empty(whole, layout, devices[layout[0]])}
        dcp.load(state, storage_reader=FileSystemReader(folder(name), _extension_registry=registry))
        right = cut(whole, layout)[dist.get_rank()]
        assert same(state[key].to_local(), right), f"{key} -> {layout}"


def torch_loads_boxes(folder, shape, plans):
    """Into the three kinds of tensors that are boxes."""
    whole = truth("w", shape)
    for plan in plans:
        own, right = boxed.mine(plan), boxed.mine(boxes(whole, plan))
        parts = [filled(part.shape, F32) for part in right]
        dcp.load({"w": boxed.checkpointable(shape, F32, own, parts)}, checkpoint_id=folder("boxes"))
        assert all(same(*pair) for pair in zip(parts, right, strict=True)), "checkpointable"
        if all(len(group) == 1 for group in plan):
            parts = [filled(part.shape, F32) for part in right]
            tensor = boxed.wrapped(Meshes()[(4,)], shape, own, parts)
            dcp.load({"w": tensor}, checkpoint_id=folder("boxes"))
            assert same(tensor.to_local().local_shards()[0], right[0]), "wrapped"
        tensor = boxed.enumerable(shape, plan)
        dcp.load({"w": tensor}, checkpoint_id=folder("boxes"))
        shards = [shard.tensor for shard in tensor.local_shards()]
        assert all(same(*pair) for pair in zip(shards, right, strict=True)), "enumerable"


class SaveLoad(unittest.TestCase):
    def save(self, path, parts, **options):
        haves = [Have(name, whole, layout) for name, whole, layout in parts]
        return reshard.save(path, [have.local for have in haves], **options)

    def test_meshes(self):
        """every layout of worlds of 1 to 9 ranks, into layouts of worlds of 1 to 9 ranks"""
        with worlds.Folder() as folder:
            for mesh in MESHES:
                self.save(folder(named(mesh)), [
                    (name_of(shape, layout), truth(name_of(shape, layout), shape), layout)
                    for shape in SHAPES for layout in layouts(mesh, len(shape))])
            self.assertGreater(sum(worlds.run(nranks, torch_loads, folder, nranks)[0]
                                   for nranks in range(1, 10)), 2000)

    def test_dtypes(self):
        """all dtypes"""
        with worlds.Folder() as folder:
            parts = [(name, truth(name, (5, 6), dtype), ((3,), (S1,))) for name, dtype in BY_NAME.items()]
            self.save(folder("dtypes"), parts)
            worlds.run(1, self.whole, folder("dtypes"), parts)

    @staticmethod
    def whole(path, parts):
        """Plain tensors, which can be loaded of any dtype."""
        state = {name: filled(whole.shape, whole.dtype) for name, whole, _ in parts}
        dcp.load(state, checkpoint_id=path)
        for name, whole, _ in parts:
            assert same(state[name], whole), name

    def test_boxes(self):
        """boxes that do not form a mesh, several a rank, into other boxes"""
        first = [[[(0, 3), (0, 6)], [(9, 12), (0, 6)]], [[(3, 9), (0, 2)]], [[(3, 9), (2, 6)]], []]
        rows = [[[(0, 6), (0, 6)]], [[(6, 8), (0, 6)]], [[(8, 9), (0, 6)]], [[(9, 12), (0, 6)]]]
        tiles = [[[(r, r + 6), (c, c + 3)]] for r in (0, 6) for c in (0, 3)]
        with worlds.Folder() as folder:
            for plan in (first, rows, tiles):
                self.save(folder("boxes"), [("w", truth("w", (12, 6)), plan)], overwrite=1)
                worlds.run(4, torch_loads_boxes, folder, (12, 6), [first, rows, tiles])

    def test_strided(self):
        """strided shards that do not come out even, and that torch cannot save"""
        targets = [((4,), (S0,)), ((2, 2), (S1, S0)), ((4,), (R,))]
        with worlds.Folder() as folder:
            for n in (7, 12, 13, 19):
                layout = (3, 2), (_StridedShard(0, split_factor=2), S0)
                self.save(folder("s"), [("w", truth("w", (n, 2)), layout)], overwrite=1)
                worlds.run(4, torch_loads_one, folder, "s", "w", (n, 2), F32, targets)

    def test_zstd(self):
        """compressed, and read through torch's extension"""
        targets = [((3,), (S0,)), ((3,), (S1,)), ((3,), (R,))]
        with worlds.Folder() as folder:
            for level in (1, 3):
                self.save(folder("z"), [("w", truth("w", (64, 9)), ((2, 2), (S0, S1)))],
                          compress=level, overwrite=1)
                worlds.run(3, torch_loads_one, folder, "z", "w", (64, 9), F32, targets,
                           ExtensionRegistry())

    def test_strides(self):
        """arrays that are not dense rows are saved by their values"""
        big = truth("w", (12, 10))
        whole = big[::2, 1::2].contiguous()
        apart = [big[0:6:2, 1::2], big[6::2, 1::2]]
        columns = [part.t().contiguous().t() for part in (whole[:3], whole[3:])]
        with worlds.Folder() as folder:
            for name, parts in (("a", apart), ("b", columns)):
                reshard.save(folder(name), {"w": parts}, layouts={"w": "f32[6,5] @ 2 : S0"})
            for name in "ab":
                worlds.run(1, self.whole, folder(name), [("w", whole, None)])

    def test_partial(self):
        """Partial is refused, and nothing is left"""
        with worlds.Folder() as folder:
            with self.assertRaises(reshard.Error) as raised:
                self.save(folder("p"), [("w", truth("w", (4,)), ((2,), (Partial(),)))])
            self.assertEqual(raised.exception.status, "EINVAL")
            self.assertRaises(reshard.Error, reshard.open, folder("p"))


if __name__ == "__main__":
    tap.main()
