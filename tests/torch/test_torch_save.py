"""Files that torch.save writes: nested dicts, shared storages, views, old and new formats, and parts with
an index."""
import json
import unittest

import torch

import reshard
import tap
import worlds
from tensors import BY_NAME, DTYPES, R, S0, S1, about, check_loads, truth

LAYOUTS = [((1,), (R,)), ((3,), (S0,)), ((2, 2), (S0, S1)), ((2,), (R,))]


def flat(value, path=()):
    """Returns the tensors of a nested state by their names in the library."""
    if isinstance(value, torch.Tensor):
        return {".".join(path) or "tensor": value.detach()}
    items = (value.items() if isinstance(value, dict) else
             enumerate(value) if isinstance(value, (list, tuple)) else ())
    return {name: tensor for key, inner in items
            for name, tensor in flat(inner, (*path, str(key))).items()}


class TorchSave(unittest.TestCase):
    def equal(self, path, tensors):
        with reshard.open(path) as checkpoint:
            self.assertEqual(checkpoint.format, "torch.save")
            self.assertEqual({name: found[:2] for name, found in about(checkpoint).items()},
                             {name: (DTYPES[tensor.dtype], tuple(tensor.shape))
                              for name, tensor in tensors.items()})
            for name, tensor in tensors.items():
                check_loads(checkpoint, name, tensor.contiguous(), LAYOUTS)
            return dict(checkpoint.plain_values)

    def both(self, state, values=None):
        """In the zip format and in the one before it."""
        with worlds.Folder() as folder:
            for zipped in (True, False):
                torch.save(state, folder("x.pt"), _use_new_zipfile_serialization=zipped)
                found = self.equal(folder("x.pt"), flat(state))
                if values is not None:
                    self.assertEqual(found, values)

    def test_dtypes(self):
        """all dtypes"""
        state = {name: truth(name, (5, 6), dtype) for name, dtype in BY_NAME.items()}
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pt"))
            self.equal(folder("x.pt"), state)
        old = {name: tensor for name, tensor in state.items()
               if name in "f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool c64 c128".split()}
        self.both(old)

    def test_training_state(self):
        """a model, its optimizer and what belongs to a run"""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4),
                                    torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3,
                 "rng": torch.get_rng_state(), "best": 0.5, "note": None}
        with worlds.Folder() as folder:
            torch.save(state, folder("x.pth"))
            values = self.equal(folder("x.pth"), flat(state))
        self.assertEqual(values["optim.param_groups.0.lr"], 0.25)
        self.assertEqual(values["optim.param_groups.0.params"], list(range(6)))
        self.assertEqual((values["epoch"], values["best"], values["note"]), (3, 0.5, None))

    def test_nested(self):
        """dicts in lists in dicts, int keys, tuples, parameters"""
        state = {"a": [{"b": truth("b", (4, 3))}, (truth("c", (2,)), 7)], 5: truth("5", ()),
                 "p": torch.nn.Parameter(truth("p", (6, 2))), "e": {}, "n": [1, "x", None]}
        self.both(state)

    def test_shared(self):
        """tied weights, views of one storage, strides of all sorts"""
        big = truth("big", (9, 8, 7))
        state = {"tied": big, "tied.again": big, "row": big[3], "slab": big[2:5], "column": big[:, 4],
                 "t": big[0].t(), "permuted": big.permute(1, 2, 0), "every other": big[::2, 1::3],
                 "diagonal": big[0].diagonal(), "one": big[8, 7, 6], "none": big[4:4],
                 "flat": big.view(-1)[10:20], "one row": big[0, 0].expand(1, 7)}
        self.both(state)

    def test_alone(self):
        """a file that is one tensor, or a list of them"""
        self.both(truth("x", (3, 4)))
        self.both([truth("x", (3, 4)), truth("y", ())])

    def test_refused(self):
        """lazy conjugation, and strides by which a few bytes claim a lot, are refused by name"""
        for status, tensor in (("EUNSUPPORTED", truth("z", (3,), torch.complex64).conj()),
                               ("EUNSUPPORTED", torch._neg_view(truth("n", (3,)))),
                               ("EUNSUPPORTED", truth("e", (1, 7)).expand(1 << 40, 7))):
            with worlds.Folder() as folder:
                torch.save({"odd one": tensor}, folder("x.pt"))
                with self.assertRaises(reshard.Error) as raised:
                    self.equal(folder("x.pt"), {})
                self.assertEqual(raised.exception.status, status)
                self.assertIn("odd one", str(raised.exception))

    def test_nothing_runs(self):
        """a pickle that would run something is read as data"""
        class Trap:
            def __reduce__(self):
                return print, ("the pickle was run",)

        with worlds.Folder() as folder:
            torch.save({"w": torch.ones(3), "trap": Trap()}, folder("x.pt"))
            self.assertEqual(self.equal(folder("x.pt"), {"w": torch.ones(3)}), {"trap": reshard.OPAQUE})

    def test_opaque(self):
        """an object that is asked for is refused by name before anything is read, or left as it is"""
        with worlds.Folder() as folder:
            torch.save({"w": torch.ones(3), "step": 5, "odd": complex, "also": print}, folder("x.pt"))
            with reshard.open(folder("x.pt")) as checkpoint:
                state = {"w": torch.zeros(3), "step": 0, "odd": None}
                with self.assertRaises(reshard.UnsupportedError) as raised:
                    checkpoint.load(state)
                self.assertIn("odd", str(raised.exception))
                self.assertEqual((state["step"], state["w"].any().item()), (0, False))
                checkpoint.load(state, strict=False)
                self.assertEqual((state["step"], state["odd"], state["w"].sum().item()), (5, None, 3))
                checkpoint.load({"w": torch.zeros(3), "step": 0})  # what nobody asks for does no harm

    def test_parts(self):
        """pytorch_model.bin in parts, found through their index"""
        parts = [{f"layer.{i}.w": truth(f"{i}", (4, 5), torch.bfloat16),
                  f"layer.{i}.b": truth(f"b{i}", (5,))} for i in range(3)]
        with worlds.Folder() as folder:
            index = {}
            for i, part in enumerate(parts, 1):
                name = f"pytorch_model-{i:05d}-of-00003.bin"
                torch.save(part, folder(name))
                index |= {key: name for key in part}
            with open(folder("pytorch_model.bin.index.json"), "w") as file:
                json.dump({"metadata": {"total_size": 1}, "weight_map": index}, file)
            self.equal(folder(), {key: value for part in parts for key, value in part.items()})


if __name__ == "__main__":
    tap.main()
