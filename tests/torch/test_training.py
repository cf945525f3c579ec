"""Models and optimizers of FSDP2, HSDP and FSDP2 with tensor parallelism, from one mesh to another."""
import unittest

import torch

import reshard
import tap
import training
import worlds
from tensors import BY_NAME, R, S0, S1, Want, about, cut, same

# Where each kind of training is saved, and where it goes on.
MOVES = [("fsdp", (4,), (3,)), ("fsdp", (2,), (5,)), ("hsdp", (2, 2), (3, 2)),
         ("fsdp+tp", (2, 2), (3, 2)), ("fsdp+tp", (4, 2), (2, 3)), ("fsdp+tp", (1, 4), (4, 1))]


def count(mesh):
    n = 1
    for extent in mesh:
        n *= extent
    return n


def target(mesh):
    """Every tensor cut over the mesh in turn, dim by dim, as far as it has dims."""
    def place(tensor):
        return ",".join(f"S({axis % tensor.ndim})" if tensor.ndim else "R" for axis in range(len(mesh)))
    return {"mesh": "x".join(map(str, mesh)), "place": place}


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.saved = {(kind, counts): cls.enterClassContext(worlds.Folder())
                     for kind, counts, _ in MOVES}
        for (kind, counts), folder in cls.saved.items():
            worlds.run(count(counts), training.train_and_save, kind, counts, folder("torch"),
                       folder("truth.pt"))

    def test_load(self):
        """parameters, buffers and moments are loaded into any layout"""
        for kind, counts, other in MOVES:
            folder = self.saved[kind, counts]
            truth = torch.load(folder("truth.pt"))
            with reshard.open(folder("torch")) as checkpoint:
                self.assertEqual(set(checkpoint), set(truth))
                self.assertEqual(checkpoint.plain_values["step"], 3)
                for name, whole in truth.items():
                    layouts = [((5,), (R,))]
                    if whole.ndim:
                        layouts += [((5,), (S0,)), (other, (S0,) * len(other))]
                    if whole.ndim > 1:
                        layouts += [((3, 2), (S1, S0)), ((2, 3), (R, S1))]
                    for layout in layouts:
                        want = Want(name, whole.shape, whole.dtype, layout)
                        checkpoint.load([want.local])
                        for got, right in zip(want.arrays, cut(whole, layout), strict=True):
                            self.assertTrue(same(got, right), f"{kind} {name} -> {want.text}")

    def test_convert(self):
        """converted for another mesh, torch takes the state over and goes on"""
        for kind, counts, other in MOVES:
            folder = self.saved[kind, counts]
            truth = torch.load(folder("truth.pt"))
            with reshard.open(folder("torch")) as checkpoint:
                report = reshard.convert(checkpoint, folder("ours"), nranks=count(other), **target(other))
                self.assertEqual(report.ntensors, len(truth))
                self.assertEqual(report.nleft_out, 0)
                self.same(checkpoint, folder("ours"))
            answers = worlds.run(count(other), training.load_and_compare, kind, other,
                                 folder("ours"), folder("truth.pt"))
            self.assertEqual(answers[0], len(truth))

    def same(self, checkpoint, path):
        """By digests and by comparing, where the library can."""
        with reshard.open(path) as other:
            self.assertEqual(reshard.digest(checkpoint), reshard.digest(other))
            self.assertEqual(reshard.diff(checkpoint, other), [])
            self.assertEqual(reshard.verify(other), [])

    def test_convert_to_bf16(self):
        """with floats made bf16 on the way, and the optimizer left out"""
        folder = self.saved["fsdp", (4,)]
        right = {name[len("model."):]: whole for name, whole in torch.load(folder("truth.pt")).items()
                 if name.startswith("model.")}
        reshard.convert(folder("torch"), folder("bf16"), only=r"^model\.", rename={r"^model\.": ""},
                        cast="bf16")
        with reshard.open(folder("bf16")) as checkpoint:
            self.assertEqual(set(checkpoint), set(right))
            for name, (dtype, shape, _) in about(checkpoint).items():
                want = Want(name, shape, BY_NAME[dtype], ((1,), (R,)))
                checkpoint.load([want.local])
                whole = right[name]
                whole = whole.to(torch.bfloat16) if whole.is_floating_point() else whole
                self.assertTrue(same(want.arrays[0], whole), name)


if __name__ == "__main__":
    tap.main()
