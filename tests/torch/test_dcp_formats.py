"""dcp.load with Reader from what others wrote: torch's Hugging Face writer, sharded and consolidated, the
safetensors library, torch.save, and checkpoints of older versions of torch."""
import glob
import json
import os
import unittest

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import tap
import worlds
from reshard.torch import LoadPlanner, Reader
from tensors import R, S0, Meshes, check_mesh_loads, filled, mesh_state, same, sharded, truth

SHAPES = [(1,), (5,), (4, 4), (7, 6)]
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")


def save_hf(folder, mesh):
    dcp.save(mesh_state(SHAPES, mesh),
             storage_writer=dcp.HuggingFaceStorageWriter(folder(str(mesh)), save_distributed=True))


def load_hf(folder, mesh, into):
    """Into every layout of another mesh."""
    check_mesh_loads(SHAPES, mesh, into, lambda state, k: dcp.load(
        state, storage_reader=Reader(folder(str(mesh))), planner=LoadPlanner() if k % 2 else None))


def save_rows(folder):
    state = {"a": sharded(truth("a", (9, 4)), ((3,), (S0,)), Meshes()[(3,)]),
             "b": sharded(truth("b", (6,)), ((3,), (R,)), Meshes()[(3,)])}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder("rows"), save_distributed=True))


def load(path, state, **options):
    dcp.load(state, storage_reader=Reader(path), no_dist=True, **options)
    return state


class DcpFormats(unittest.TestCase):
    def test_hugging_face(self):
        """every layout that torch's Hugging Face writer wrote, into every other"""
        with worlds.Folder() as folder:
            for mesh in ((4,), (2, 2)):
                worlds.run(4, save_hf, folder, mesh)
                worlds.run(4, load_hf, folder, mesh, (4,))
                worlds.run(3, load_hf, folder, mesh, (3,))
            worlds.run(4, load_hf, folder, (4,), (2, 2))

    def test_one_file(self):
        """a file of the safetensors library, a directory of two with an index, in part and cast"""
        state = {"a": truth("a", (5, 3)), "b": truth("b", (7,), torch.bfloat16)}
        with worlds.Folder() as folder:
            save_file(state, folder("x.safetensors"))
            os.mkdir(folder("two"))
            for number, (name, tensor) in enumerate(state.items(), 1):
                save_file({name: tensor}, folder("two", f"model-0000{number}-of-00002.safetensors"))
            with open(folder("two", "model.safetensors.index.json"), "w") as file:
                json.dump({"metadata": {}, "weight_map": {
                    name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(state, 1)}},
                    file)
            for path in (folder("x.safetensors"), folder("two")):
                got = load(path, {"a": torch.zeros(5, 3), "b": torch.zeros(7)})
                self.assertTrue(same(got["a"], state["a"]) and torch.equal(
                    got["b"].nan_to_num(1), state["b"].float().nan_to_num(1)))

    def test_missing_shard(self):
        """a directory without one of its shards is refused, or has the other shards; torch has no error"""
        with worlds.Folder() as folder:
            worlds.run(3, save_rows, folder)
            shards = sorted(glob.glob(folder("rows", "*.safetensors")))
            self.assertEqual(len(shards), 3)
            os.unlink(shards[1])
            state = {"a": filled((9, 4), torch.float32)}
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder("rows")), no_dist=True)
            self.assertTrue(same(state["a"][3:6], filled((3, 4), torch.float32)))
            with self.assertRaises(dcp.CheckpointException) as raised:
                load(folder("rows"), {"a": filled((9, 4), torch.float32)})
            self.assertRegex(str(raised.exception), r"3:6")

    def test_torch_save(self):
        """a nested state dict in a file of torch.save"""
        state = {"model": {"w": truth("w", (4, 6)), "layers": [truth("l", (3,))], "about": {"lr": 0.5}},
                 "step": 12, "name": "run"}
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pt"))
            got = load(folder("x.pt"), {"model": {"w": torch.zeros(4, 6), "layers": [torch.zeros(3)]}, "step": 0,
                                        "name": ""}, planner=LoadPlanner())
            self.assertTrue(same(got["model"]["w"], state["model"]["w"]))
            self.assertTrue(same(got["model"]["layers"][0], state["model"]["layers"][0]))
            self.assertEqual((got["step"], got["name"]), (12, "run"))
            got = {}
            _load_state_dict(got, storage_reader=Reader(folder("x.pt")), no_dist=True,
                             planner=_EmptyStateDictLoadPlanner())
            self.assertTrue(same(got["model"]["layers"][0], state["model"]["layers"][0]))
            self.assertEqual(got["model"]["about"], {"lr": 0.5})

    def test_golden(self):
        """checkpoints of other versions of torch, tensor by tensor"""
        found = 0
        for truth_file in sorted(glob.glob(os.path.join(GOLDEN, "*", "truth.safetensors"))):
            folder = os.path.dirname(truth_file)
            for metadata in glob.glob(os.path.join(folder, "**", ".metadata"), recursive=True):
                path, right = os.path.dirname(metadata), load_file(truth_file)
                known = Reader(path).read_metadata().state_dict_metadata
                state = {name: filled(tensor.shape, tensor.dtype) for name, tensor in right.items()
                         if name in known}
                if not state:
                    continue
                planner = LoadPlanner(flatten_state_dict=False)
                dcp.load(state, storage_reader=Reader(path), planner=planner, no_dist=True)
                for name, tensor in state.items():
                    self.assertTrue(same(tensor, right[name]), f"{path}: {name}")
                found += 1
        self.assertGreater(found, 3)


if __name__ == "__main__":
    tap.main()
