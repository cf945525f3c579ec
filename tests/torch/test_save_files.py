"""The files that are saved are those that torch writes for the same tensors, byte for byte.

Only .metadata cannot be: it holds a random id and a path. What it says is compared instead.
"""
import os
import pickle
import unittest

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import reshard
import reshard.torch
import tap
import worlds
from tensors import (BY_NAME, R, S0, S1, Have, Meshes, layouts, meshes, name_of, sharded, truth)

SHAPES = [(), (1,), (5,), (4, 4), (7, 6), (3, 5, 4)]
EMPTY = [(0,), (4, 0), (0, 3)]
NUMBERS = [("step", 1234567890123), ("lr", 3.5e-4), ("flag", True), ("off", False), ("none", None),
           ("small", -1), ("byte", 255), ("short", 256), ("wide", 70000), ("zero", 0.0),
           ("best", float("inf")), ("worst", -float("inf"))]


def tensors(mesh, shapes=SHAPES):
    """Names, wholes and layouts of a state dict, in its order."""
    found = []
    for shape in shapes:
        for layout in layouts(mesh, len(shape)):
            name = name_of(shape, layout)
            found.append((name, truth(name, shape), layout))
    return found


def dtypes():
    return [(f"{name} {kind}", truth(f"{name} {kind}", (5, 6), dtype), ((3,), (kind,)))
            for name, dtype in BY_NAME.items() for kind in (S0, S1, R)]


def named(mesh):
    return "x".join(map(str, mesh))


def torch_saves(folder, nranks, lowest):
    devices = Meshes()
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    for mesh in meshes(nranks):
        state = {name: sharded(whole, layout, devices[mesh]) for name, whole, layout in tensors(mesh)}
        dcp.save(state, checkpoint_id=folder("torch", named(mesh)), planner=planner)


def torch_saves_empty(folder):
    state = {name: sharded(whole, layout, Meshes()[(3,)]) for name, whole, layout in tensors((3,), EMPTY)}
    dcp.save(state, checkpoint_id=folder("torch"))


def torch_saves_dtypes(folder):
    state = {name: sharded(whole, layout, Meshes()[(3,)]) for name, whole, layout in dtypes()}
    dcp.save(state, checkpoint_id=folder("torch"))


def torch_saves_values(folder):
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    state = {"w": sharded(truth("w", (5, 2)), ((2,), (S0,)), Meshes()[(2,)]), **dict(NUMBERS)}
    dcp.save(state, checkpoint_id=folder("torch"), planner=planner)


def one_rank_saves(folder, mesh):
    haves = [Have(name, whole, layout, rank=dist.get_rank()) for name, whole, layout in tensors(mesh)]
    reshard.save(folder("apart"), [have.local for have in haves], transport=reshard.torch.Group(),
                 overwrite=True)


class SaveFiles(unittest.TestCase):
    def same_files(self, ours, theirs):
        """Every data file is equal, and .metadata says the same."""
        self.assertEqual(sorted(os.listdir(ours)), sorted(os.listdir(theirs)))
        for name in sorted(os.listdir(ours)):
            if name != ".metadata":
                with open(os.path.join(ours, name), "rb") as a, open(os.path.join(theirs, name), "rb") as b:
                    mine, right = a.read(), b.read()
                at = next((i for i, (x, y) in enumerate(zip(mine, right)) if x != y), None)
                self.assertTrue(mine == right, f"{ours}/{name}: {len(mine)} bytes, {len(right)} of "
                                f"torch, the first that differs is {at}")
        metadata = []
        for path in (ours, theirs):
            with open(os.path.join(path, ".metadata"), "rb") as file:
                metadata.append(pickle.load(file))
        a, b = metadata
        self.assertEqual(a.state_dict_metadata, b.state_dict_metadata)
        self.assertEqual(a.storage_data, b.storage_data)
        indexes = [{(key.fqn, key.offset): key.index for key in each.storage_data} for each in metadata]
        self.assertEqual(*indexes)
        self.assertEqual(a.planner_data, b.planner_data)

    def save(self, path, parts, **options):
        haves = [Have(name, whole, layout) for name, whole, layout in parts]
        return reshard.save(path, [have.local for have in haves], **options)

    def every_mesh(self, lowest):
        for nranks in (1, 2, 3, 4, 6, 8):
            with worlds.Folder() as folder:
                worlds.run(nranks, torch_saves, folder, nranks, bool(lowest))
                for mesh in meshes(nranks):
                    self.save(folder("ours"), tensors(mesh), to_lowest_rank=lowest, overwrite=1)
                    self.same_files(folder("ours"), folder("torch", named(mesh)))

    def test_meshes(self):
        """every layout of worlds of 1 to 8 ranks, replicas assigned to their holders"""
        self.every_mesh(0)

    def test_lowest_rank(self):
        """the same with replicas written by the lowest rank"""
        self.every_mesh(1)

    def test_empty(self):
        """tensors without elements, which count as one byte when they are assigned"""
        with worlds.Folder() as folder:
            worlds.run(3, torch_saves_empty, folder)
            self.save(folder("ours"), tensors((3,), EMPTY))
            self.same_files(folder("ours"), folder("torch"))

    def test_dtypes(self):
        """all dtypes"""
        with worlds.Folder() as folder:
            worlds.run(3, torch_saves_dtypes, folder)
            self.save(folder("ours"), dtypes())
            self.same_files(folder("ours"), folder("torch"))

    def test_values(self):
        """numbers beside tensors, as torch pickles them"""
        have = Have("w", truth("w", (5, 2)), ((2,), (S0,)))
        with worlds.Folder() as folder:
            worlds.run(2, torch_saves_values, folder)
            reshard.save(folder("ours"), [have.local], values=NUMBERS, to_lowest_rank=True)
            self.same_files(folder("ours"), folder("torch"))

    def test_one_rank_each(self):
        """ranks that save their own arrays make the same files as one process for all"""
        with worlds.Folder() as folder:
            for mesh in ((4,), (2, 3)):
                nranks = len(Have("", truth("", ()), (mesh, (R,) * len(mesh))).arrays)
                worlds.run(nranks, one_rank_saves, folder, mesh)
                self.save(folder("ours"), tensors(mesh), overwrite=1)
                self.same_files(folder("apart"), folder("ours"))


if __name__ == "__main__":
    tap.main()
