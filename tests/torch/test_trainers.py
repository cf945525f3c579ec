"""What trainers write with torch.save: which part merge takes, and tensors that used to be left out."""
import collections
import enum
import os
import unittest
import warnings

import torch
from safetensors.torch import load_file
from torch import nn

import reshard
import tap
import worlds
from tensors import bits

warnings.simplefilter("ignore")


class Kind(enum.Enum):
    ONE = 1


class Held:
    def __init__(self):
        self.inner, self.note = {"w": torch.ones(3)}, "text"


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.inner = Deep(depth - 1) if depth else nn.Identity()
        self.above = []


def names(prefix=""):
    return collections.OrderedDict((prefix + name, torch.randn(2, 3)) for name in
                                   ("model.embed.weight", "model.layers.0.weight", "lm_head.weight"))


OPTIMIZER = {"state": {0: {"exp_avg": torch.randn(2, 3), "step": torch.tensor(1.)}},
             "param_groups": [{"lr": 0.1, "params": [0]}]}


class Trainers(unittest.TestCase):
    def merged(self, state, **options):
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pt"))
            reshard.merge(folder("x.pt"), folder("out.safetensors"), **options)
            return load_file(folder("out.safetensors"))

    def test_parts(self):
        """the model part of what trainers write, under the names that transformers knows"""
        model, lightning = names(), "pytorch-lightning_version"
        for label, state in {
                "plain": model, "model": {"model": model, "optimizer": OPTIMIZER, "epoch": 3},
                "model_state_dict": {"model_state_dict": model, "optimizer_state_dict": OPTIMIZER},
                "module": {"module": model, "optimizer": OPTIMIZER, "rng": torch.get_rng_state()},
                "tutorial": {"app": {"model": model, "optim": OPTIMIZER}},
                "torchtitan": {**model, "optimizer": OPTIMIZER, "train_state": {"step": torch.tensor(3)}},
                "averages": {"model": model, "ema": names(), "optimizer": OPTIMIZER},
                "compiled": {"model": {"_orig_mod." + name: value for name, value in model.items()}},
                "distributed": {"module." + name: value for name, value in model.items()},
                "both": {"module._orig_mod." + name: value for name, value in model.items()},
                "lightning": {"state_dict": {"net." + name: value for name, value in model.items()},
                              "optimizer_states": [OPTIMIZER], lightning: "2"}}.items():
            found = self.merged(state)
            self.assertEqual(set(found), set(model), label)
            for name, value in model.items():
                self.assertTrue(torch.equal(found[name], value), f"{label}: {name}")

    def test_unsure(self):
        """what cannot be told is refused, and what the error names does it"""
        two = {"generator": names(), "discriminator": names()}
        with self.assertRaisesRegex(reshard.Error, r"--only '\^generator\\\.' --strip-prefix generator\."):
            self.merged(two)
        found = self.merged(two, only="^generator[.]", rename={"^generator[.]": ""})
        self.assertEqual(set(found), set(two["generator"]))
        self.assertEqual(len(self.merged(two, everything=True)), 6)
        lightning = {"state_dict": {"model.a": torch.ones(1), "model.b": torch.ones(1)},
                     "pytorch-lightning_version": "2"}
        with self.assertRaisesRegex(reshard.Error, "--strip-prefix state_dict.model., or"):
            self.merged(lightning)

    def test_attributes(self):
        """tensors and parameters with attributes, buffers, and parameters in parameters"""
        marked, parameter = torch.arange(6.).reshape(2, 3), nn.Parameter(torch.ones(3))
        marked.mark, parameter.mark = "x", [1]
        state = {"marked": marked, "parameter": parameter, "buffer": nn.Buffer(torch.ones(4))}
        found = self.merged(state)
        for name, value in state.items():
            self.assertTrue(torch.equal(found[name], value.detach()), name)

    def test_modules(self):
        """a whole module has the tensors of its state dict, in both containers"""
        module = nn.Sequential(Deep(20), nn.BatchNorm1d(3))
        module[0].above.append(module[0].inner)
        for zipped in (True, False):
            with worlds.Folder() as folder:
                torch.save(module, folder("x.pt"), _use_new_zipfile_serialization=zipped)
                with reshard.open(folder("x.pt")) as checkpoint:
                    right = {name: value for name, value in module.state_dict().items()}
                    found = {name for name in checkpoint if ".above" not in name}
                    self.assertEqual(found, set(right))
                    for name, value in right.items():
                        self.assertEqual(checkpoint[name].numpy().tolist(), value.tolist(), name)

    def test_containers(self):
        """odd keys, dict subclasses and objects lose nothing"""
        nested = collections.defaultdict(dict)
        nested["x"][("a", 0)], nested[None]["y"] = torch.ones(1), torch.ones(2)
        state = {"nested": nested, True: torch.ones(3), 1.5: torch.ones(4), Kind.ONE: [torch.ones(5)],
                 frozenset([2]): torch.ones(7), "counter": collections.Counter(a=1), "object": Held()}
        state["self"] = {"w": torch.ones(6), "again": None}
        state["self"]["again"] = state["self"]
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pt"))
            with reshard.open(folder("x.pt")) as checkpoint:
                self.assertEqual(sorted(tensor.shape[0] for tensor in checkpoint.values()), [1, 2, 3, 3, 4, 5, 6, 7])
                for name in ("nested.x.('a', 0)", "nested.None.y", "True", "1.5", "__builtin__.frozenset([2],)",
                             "object.inner.w", "self.w"):
                    self.assertIn(name, checkpoint)

    def test_unreadable(self):
        """expanded tensors are read; what cannot be read is listed and refused by itself"""
        readable = {"w": torch.arange(6.).reshape(2, 3), "expanded": torch.ones(1).expand(5, 4),
                    "rows": torch.arange(3.).expand(4, 3), "windows": torch.arange(8.).unfold(0, 3, 1)}
        odd = {"conjugated": torch.randn(3, dtype=torch.complex64).conj(), "sparse": torch.eye(3).to_sparse(),
               "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)}
        for zipped in (True, False):
            with worlds.Folder() as folder:
                torch.save({**readable, **odd}, folder("x.pt"), _use_new_zipfile_serialization=zipped)
                with reshard.open(folder("x.pt")) as checkpoint:
                    self.assertEqual(set(checkpoint), set(readable))
                    for name, value in readable.items():
                        self.assertEqual(checkpoint[name].numpy().tolist(), value.tolist(), name)
                with self.assertRaisesRegex(reshard.Error, "conjugated: .* not supported; leave it out"):
                    reshard.merge(folder("x.pt"), folder("out"))
                self.assertFalse(os.path.exists(folder("out")))
                reshard.merge(folder("x.pt"), folder("out"), exclude="^(conjugated|sparse|quantized)$")
                merged = load_file(folder("out/model.safetensors"))
                for name, value in readable.items():
                    self.assertTrue(torch.equal(merged[name], value), name)


    def test_written(self):
        """torch.save files are read by torch.load with weights_only=True, with all dtypes and names"""
        state = {f"{dtype}".split(".")[1]: torch.ones(3, 5).to(dtype) for dtype in
                 (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8,
                  torch.complex64, torch.float8_e4m3fn, torch.uint16)}
        state |= {"empty": torch.ones(0, 4), "scalar": torch.tensor(2.5), "a name \u00e4'\n": torch.ones(2)}
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pt"))
            reshard.convert(folder("x.pt"), folder("one.pt"))
            reshard.convert(folder("x.pt"), folder("many"), format="torch.save", max_shard_size="100B")
            found = {"one": torch.load(folder("one.pt"), weights_only=True), "many": {}}
            for name in sorted(os.listdir(folder("many"))):
                if name.endswith(".bin"):
                    found["many"] |= torch.load(folder("many", name), weights_only=True)
            for label, tensors in found.items():
                self.assertEqual(set(tensors), set(state), label)
                for name, value in state.items():
                    self.assertEqual(tensors[name].dtype, value.dtype, name)
                    self.assertTrue(torch.equal(bits(tensors[name]), bits(value)), f"{label}: {name}")


if __name__ == "__main__":
    tap.main()
