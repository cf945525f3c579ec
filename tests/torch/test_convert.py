"""Converted checkpoints are read by those they are for: safetensors, transformers, torch."""
import json
import os
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaForCausalLM

import llama
import reshard
import tap
import worlds
from tensors import BY_NAME, R, S0, S1, Meshes, cut, dtensor, filled, same, sharded, truth

MODEL = llama.state(llama.tiny())


def over(mesh, *words):
    """Every tensor in one layout; placements of dims that it does not have become R."""
    def place(tensor):
        return ",".join(word if word == "R" or int(word[1]) < tensor.ndim else "R" for word in words)
    return {"mesh": mesh, "place": place}


def save_model(path, mesh, placements):
    """The model, cut by what of the placements each tensor has dims for."""
    device_mesh, state = Meshes()[mesh], {}
    for name, whole in MODEL.items():
        fitting = tuple(p if p == R or p.dim < whole.ndim else R for p in placements)
        state[name] = sharded(whole, (mesh, fitting), device_mesh)
    dcp.save(state, checkpoint_id=path)


def save_hf(path, mesh):
    state = {name: sharded(whole, (mesh, (S0,)), Meshes()[mesh]) for name, whole in MODEL.items()}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))


def load_dtensors(reader, tensors):
    """Into rows of this world, with the given reader."""
    nranks, state = dist.get_world_size(), {}
    device_mesh = Meshes()[(nranks,)]
    placement = {name: S0 if whole.ndim else R for name, whole in tensors.items()}
    for name, whole in tensors.items():
        local = cut(whole, ((nranks,), (placement[name],)))[dist.get_rank()]
        state[name] = dtensor(filled(local.shape, whole.dtype), whole.shape, device_mesh,
                              [placement[name]])
    dcp.load(state, storage_reader=reader)
    for name, whole in tensors.items():
        right = cut(whole, ((nranks,), (placement[name],)))[dist.get_rank()]
        assert same(state[name].to_local(), right), name


class Convert(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(worlds.Folder())
        worlds.run(4, save_model, cls.folder("dcp"), (2, 2), (S1, S0))

    def equal(self, found, tensors):
        self.assertEqual(set(found), set(tensors))
        for name, whole in tensors.items():
            self.assertTrue(same(found[name], whole), name)

    def test_one_file(self):
        """a distributed checkpoint as one file, by the safetensors library"""
        out = self.folder("one.safetensors")
        reshard.convert(self.folder("dcp"), out)
        self.equal(load_file(out), MODEL)
        with safe_open(out, "pt") as file:
            self.assertEqual((file.metadata() or {}).get("format"), "pt")
            rows = file.get_slice("lm_head.weight")[3:9, 5:]
            self.assertTrue(same(rows.contiguous(), MODEL["lm_head.weight"][3:9, 5:].contiguous()))

    def test_transformers(self):
        """one file or several with an index, by transformers' from_pretrained"""
        ids = torch.arange(10).reshape(1, 10)
        right = llama.tiny()(ids).logits
        llama.config().save_pretrained(self.folder())
        for limit in (0, 20000):
            out = self.folder(f"pretrained {limit}")
            reshard.convert(self.folder("dcp"), out, format="safetensors", max_shard_size=limit,
                            side_files=[self.folder("config.json")])
            files = [name for name in os.listdir(out) if name.endswith(".safetensors")]
            self.assertEqual(len(files) > 1, limit > 0)
            model, about = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16,
                                                            output_loading_info=True)
            self.assertFalse(about["missing_keys"] or about["unexpected_keys"], about)
            self.equal(llama.state(model), MODEL)
            self.assertTrue(torch.equal(model(ids).logits, right))
            if limit:
                with open(os.path.join(out, "model.safetensors.index.json")) as file:
                    index = json.load(file)
                self.assertEqual(set(index["weight_map"]), set(MODEL))
                self.assertEqual(index["metadata"]["total_size"],
                                 sum(whole.nbytes for whole in MODEL.values()))
                for name in files:
                    self.assertEqual(set(load_file(os.path.join(out, name))), {
                        tensor for tensor, where in index["weight_map"].items() if where == name})

    def test_dtypes(self):
        """every dtype that safetensors has, zero and no dims"""
        state = {}
        for name, dtype in BY_NAME.items():
            if name not in ("c128", "c32"):
                state |= {name: truth(name, (3, 4), dtype), f"{name} none": truth(name, (0, 4), dtype)}
                if name != "f4x2":  # pairs of halves of a byte need a dim
                    state[f"{name} one"] = truth(name, (), dtype)
        torch.save(state, self.folder("dtypes.pt"))
        out = self.folder("dtypes.safetensors")
        reshard.convert(self.folder("dtypes.pt"), out)
        self.equal(load_file(out), state)

    def test_shards(self):
        """one file a rank, by torch's own Hugging Face reader, on other worlds"""
        for mesh, words in (("4", ("S0",)), ("2x2", ("S1", "S0")), ("2x2", ("R", "S0"))):
            out = self.folder(f"shards {mesh} {words}")
            reshard.convert(self.folder("dcp"), out, format="safetensors", **over(mesh, *words))
            files = sorted(name for name in os.listdir(out) if name.endswith(".safetensors"))
            self.assertTrue(all(name.startswith("shard-") for name in files), files)
            for nranks in (1, 3):
                worlds.run(nranks, load_dtensors, dcp.HuggingFaceStorageReader(out), MODEL)

    def test_every_replica(self):
        """a file for each rank with all that it holds, by the safetensors library and by torch"""
        out = self.folder("replicas")
        reshard.convert(self.folder("dcp"), out, format="safetensors", every_replica=True,
                        **over("2x2", "R", "S0"))
        files = sorted(name for name in os.listdir(out) if name.endswith(".safetensors"))
        self.assertEqual(len(files), 4)
        for rank, name in enumerate(files):
            self.equal(load_file(os.path.join(out, name)),
                       {tensor: cut(whole, ((2, 2), (R, S0)))[rank] for tensor, whole in MODEL.items()})
        worlds.run(3, load_dtensors, dcp.HuggingFaceStorageReader(out), MODEL)

    def test_consolidate(self):
        """torch's consolidation takes the shards too"""
        out = self.folder("to consolidate")
        reshard.convert(self.folder("dcp"), out, format="safetensors", **over("3", "S0"))
        os.mkdir(self.folder("consolidated"))
        consolidate_safetensors_files(out, self.folder("consolidated"), dict.fromkeys(MODEL, 1))
        self.equal(load_file(self.folder("consolidated", "model-00001-of-00001.safetensors")), MODEL)

    def test_from_shards(self):
        """torch's Hugging Face shards as one file and as a distributed checkpoint"""
        worlds.run(3, save_hf, self.folder("hf"), (3,))
        reshard.convert(self.folder("hf"), self.folder("hf.safetensors"))
        self.equal(load_file(self.folder("hf.safetensors")), MODEL)
        reshard.convert(self.folder("hf"), self.folder("hf dcp"), format="dcp", **over("2x2", "S0", "S1"))
        worlds.run(3, load_dtensors, FileSystemReader(self.folder("hf dcp")), MODEL)

    def test_to_dcp(self):
        """another distributed checkpoint, plain and with zstd, nesting and values kept"""
        nested = {"model": {"layers": [{"w": truth("w", (6, 4))}, {"w": truth("v", (3,))}]}, "step": 5}
        dcp.save(nested, checkpoint_id=self.folder("nested"), no_dist=True)
        reshard.convert(self.folder("nested"), self.folder("cut"), format="dcp", **over("3", "S0"))
        dcp_to_torch_save(self.folder("cut"), self.folder("back.pt"))
        back = torch.load(self.folder("back.pt"))
        self.assertEqual((set(back), back["step"]), ({"model", "step"}, 5))
        for i, layer in enumerate(nested["model"]["layers"]):
            self.assertTrue(same(back["model"]["layers"][i]["w"], layer["w"]))
        for compress in (0, 3):
            out = self.folder(f"to dcp {compress}")
            reshard.convert(self.folder("dcp"), out, format="dcp",
                         compress=compress, nranks=6, **over("5", "S1"))
            self.assertTrue(os.path.exists(os.path.join(out, "__5_0.distcp")))
            reader = FileSystemReader(out, _extension_registry=ExtensionRegistry())
            worlds.run(2, load_dtensors, reader, MODEL)

    def test_from_torch_save(self):
        """a torch.save file as a distributed checkpoint, which torch loads into the nested state"""
        nested = {"model": {"layers": [{"w": truth("w", (6, 4))}, {"w": truth("v", (3,))}]}, "step": 5}
        torch.save(nested, self.folder("nested.pt"))
        reshard.convert(self.folder("nested.pt"), self.folder("from pt"), format="dcp", **over("3", "S0"))
        state = {"model": {"layers": [{"w": filled((6, 4), torch.float32)},
                                      {"w": filled((3,), torch.float32)}]}, "step": 0}
        dcp.load(state, checkpoint_id=self.folder("from pt"), no_dist=True)
        self.assertEqual(state["step"], 5)
        for got, right in zip(state["model"]["layers"], nested["model"]["layers"]):
            self.assertTrue(same(got["w"], right["w"]))

    def test_dtype(self):
        """bf16 made f32 is what transformers makes of it"""
        out = self.folder("f32.safetensors")
        reshard.convert(self.folder("dcp"), out, cast="f32")
        self.equal(load_file(out), {name: whole.float() for name, whole in MODEL.items()})


if __name__ == "__main__":
    tap.main()
