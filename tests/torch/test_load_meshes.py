"""What torch saves from any mesh of 1 to 9 ranks is loaded into any other."""
import random
import unittest

import torch
import torch.distributed.checkpoint as dcp

import reshard
import tap
import worlds
from tensors import (R, S0, Meshes, Want, about, cut, layouts, meshes, name_of, of, same, sharded, truth)

SHAPES = [(), (1,), (5,), (16,), (4, 4), (7, 6), (1, 9), (13, 2), (3, 5, 4), (6, 1, 2)]
EMPTY = [(0,), (0, 3), (4, 0)]


def save_all(folder, nranks):
    """One checkpoint per mesh, with every layout of every shape in it."""
    devices = Meshes()
    for mesh in meshes(nranks):
        state = {}
        for shape in SHAPES + EMPTY:
            for layout in layouts(mesh, len(shape)):
                name = name_of(shape, layout)
                state[name] = sharded(truth(name, shape), layout, devices[mesh])
        dcp.save(state, checkpoint_id=folder("x".join(map(str, mesh))))


class LoadMeshes(unittest.TestCase):
    def load(self, checkpoint, pairs, rank=None):
        """Loads (name, shape, layout) into the layouts and compares with what torch would hold."""
        wants = [Want(name, shape, torch.float32, layout, rank) for name, shape, layout in pairs]
        report = checkpoint.load([want.local for want in wants])
        for (name, shape, layout), want in zip(pairs, wants):
            expected = cut(truth(name, shape), layout)
            if rank != None:
                expected = expected[rank:rank + 1]
            self.assertEqual(len(want.arrays), len(expected), want.text)
            for holder, (got, right) in enumerate(zip(want.arrays, expected)):
                self.assertTrue(same(got, right), f"{name} -> {want.text}: rank {holder}")
        return report

    def test_every_mesh(self):
        """every layout of worlds of 1 to 9 ranks, into layouts of worlds of 1 to 9 ranks"""
        chance = random.Random(1)
        targets = [mesh for nranks in range(1, 10) for mesh in meshes(nranks)]
        nloads = 0
        with worlds.Folder() as folder:
            for nranks in range(1, 10):
                worlds.run(nranks, save_all, folder, nranks)
            for mesh in targets:
                with reshard.open(folder("x".join(map(str, mesh)))) as checkpoint:
                    self.assertEqual(checkpoint.format, "dcp")
                    found = about(checkpoint)
                    pairs = []
                    for shape in SHAPES + EMPTY:
                        for layout in layouts(mesh, len(shape)):
                            name = name_of(shape, layout)
                            self.assertEqual(found[name][:2], ("f32", shape))
                            for _ in range(4):
                                other = chance.choice(targets)
                                pairs.append((name, shape,
                                              chance.choice(layouts(other, len(shape)))))
                    self.load(checkpoint, pairs)
                    nloads += len(pairs)
        self.assertGreater(nloads, 4000)

    def test_every_rank_by_itself(self):
        """each rank of the new world loads its own part"""
        with worlds.Folder() as folder:
            worlds.run(6, save_all, folder, 6)
            with reshard.open(folder("2x3")) as checkpoint:
                for rank in range(8):
                    pairs = [(name_of(shape, source), shape, target)
                             for shape in SHAPES
                             for source in layouts((2, 3), len(shape))[::3]
                             for target in layouts((2, 2, 2), len(shape))[::5]]
                    self.load(checkpoint, pairs, rank)


def save_upstream(folder):
    devices = Meshes()
    for mesh in ((4,), (2, 2)):
        for layout in UPSTREAM[mesh]:
            whole = torch.arange(16, dtype=torch.float32).view(4, 4)
            dcp.save({"dtensor": sharded(whole, layout, devices[mesh])},
                     checkpoint_id=folder(of((4, 4), torch.float32, layout)))


UPSTREAM = {(4,): [((4,), (S0,)), ((4,), (R,))],
            (2, 2): [((2, 2), pair) for pair in ((R, R), (R, S0), (S0, R), (S0, S0))]}


class Upstream(unittest.TestCase):
    """The pairs of torch's own test_dtensor_resharding.py."""

    def test_pairs(self):
        """torch's own 1-d and 2-d pairs of layouts, each way"""
        every = UPSTREAM[(4,)] + UPSTREAM[(2, 2)]
        whole = torch.arange(16, dtype=torch.float32).view(4, 4)
        with worlds.Folder() as folder:
            worlds.run(4, save_upstream, folder)
            for source in every:
                with reshard.open(folder(of((4, 4), torch.float32, source))) as checkpoint:
                    for target in every:
                        want = Want("dtensor", (4, 4), torch.float32, target)
                        checkpoint.load([want.local])
                        for got, right in zip(want.arrays, cut(whole, target), strict=True):
                            self.assertTrue(same(got, right), f"{source} -> {target}")


if __name__ == "__main__":
    tap.main()
