"""safetensors as they are met: by the safetensors library, by torch's Hugging Face writer, sharded and
consolidated, and by transformers."""
import os
import unittest

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import llama
import reshard
import tap
import worlds
from tensors import BY_NAME, DTYPES, R, S0, S1, Meshes, about, check_loads, layouts, meshes, name_of, sharded, truth

SHAPES = [(), (1,), (16,), (4, 4), (7, 6), (3, 5, 4)]


def save_hf(folder, mesh, options):
    """Every layout of every shape, by torch's writer."""
    state = {}
    for shape in SHAPES:
        for layout in layouts(mesh, len(shape)):
            name = name_of(shape, layout)
            state[name] = sharded(truth(name, shape), layout, Meshes()[mesh])
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(
        folder("x".join(map(str, mesh))), save_distributed=True, **options))


def save_mapped(folder):
    """Rows and columns, each to the file that a mapping names."""
    state = {name: sharded(truth(name, (9, 8)), ((3,), (kind,)), Meshes()[(3,)])
             for name, kind in (("a", S0), ("b", S1), ("c", R))}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(
        folder("mapped"), {"a": 1, "b": 2, "c": 2}, save_distributed=True,
        enable_consolidation=True))


class LoadSafetensors(unittest.TestCase):
    targets = [((1,), (R,)), ((3,), (S0,)), ((2, 2), (S1, S0)), ((5,), (S1,))]

    def equal(self, path, tensors):
        with reshard.open(path) as checkpoint:
            self.assertEqual(checkpoint.format, "safetensors")
            found = about(checkpoint)
            self.assertEqual({name: about[:2] for name, about in found.items()},
                             {name: (DTYPES[whole.dtype], tuple(whole.shape))
                              for name, whole in tensors.items()})
            for name, whole in tensors.items():
                check_loads(checkpoint, name, whole, self.targets)

    def test_dtypes(self):
        """a file of the safetensors library, with every dtype that it has"""
        state = {name: truth(name, (3, 4), dtype) for name, dtype in BY_NAME.items()
                 if name not in ("c128", "c32")}
        with worlds.Folder() as folder:
            save_file(state, folder("x.safetensors"), metadata={"format": "pt", "note": "\u00e9"})
            self.equal(folder("x.safetensors"), state)
            self.equal(folder(), state)

    def test_torch_shards(self):
        """what each rank of torch's writer wrote, of every layout"""
        with worlds.Folder() as folder:
            for nranks in (1, 4, 6):
                for mesh in meshes(nranks):
                    worlds.run(nranks, save_hf, folder, mesh, {})
                    tensors = {name_of(shape, layout): truth(name_of(shape, layout), shape)
                               for shape in SHAPES for layout in layouts(mesh, len(shape))}
                    self.equal(folder("x".join(map(str, mesh))), tensors)

    def test_torch_consolidated(self):
        """what torch consolidated, and the shards that it made it from"""
        tensors = {name: truth(name, (9, 8)) for name in "abc"}
        with worlds.Folder() as folder:
            worlds.run(3, save_mapped, folder)
            self.equal(folder("mapped"), tensors)
            self.equal(folder("mapped", "sharded"), tensors)

    def test_torch_rank_0(self):
        """torch's writer from one rank, with a mapping to files and an index"""
        tensors = {"tensor_0": truth("0", (4,)), "tensor_1": truth("1", (10, 3), torch.bfloat16)}
        with worlds.Folder() as folder:
            dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(
                folder("x"), {"tensor_0": 1, "tensor_1": 2}), no_dist=True)
            self.equal(folder("x"), tensors)

    def test_transformers(self):
        """what transformers saves, in one file and in several"""
        model = llama.tiny()
        with worlds.Folder() as folder:
            for name, limit in (("one", "1GB"), ("several", "20KB")):
                model.save_pretrained(folder(name), max_shard_size=limit)
                files = [file for file in os.listdir(folder(name)) if file.endswith(".safetensors")]
                self.assertEqual(len(files) > 1, name == "several")
                self.equal(folder(name), llama.state(model))


if __name__ == "__main__":
    tap.main()
