"""A whole training state saved here, with nested names and plain values, is what torch gets back."""
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import reshard
import tap
import worlds
from tensors import R, S0, S1, Have, Meshes, Want, cut, dtensor, filled, same, truth

# Where each thing is in the state dict: its tensor or value, and the way to it.
TENSORS = [(("model", "layers", 0, "w"), (6, 4), ((2, 2), (S0, S1))),
           (("model", "layers", 1, "w"), (5,), ((4,), (S0,))),
           (("model", "norm.weight"), (3,), ((4,), (R,))),
           (("optim", "state", "w", "exp_avg"), (6, 4), ((4,), (S1,))),
           (("scalar",), (), ((1,), (R,)))]
VALUES = [(("step",), 2**40), (("lr",), 1e-3), (("name",), "r\u00e9sum\u00e9 \u4e2d"), (("flag",), True),
          (("none",), None), (("optim", "param_groups", 0, "betas"), [0.9, 0.999]),
          (("optim", "param_groups", 0, "params"), ["w", "b"]),
          (("model", "layers", 0, "n"), -7), (("deep",), [[1, [2.5, "x"]], []]), (("huge",), 2**62)]


def dotted(path):
    return ".".join(map(str, path))


def nested():
    """The state dict that all of this is."""
    state = {"model": {"layers": [{}, {}]}, "optim": {"state": {"w": {}}, "param_groups": [{}]}}
    for path, shape, _ in TENSORS:
        put(state, path, truth(dotted(path), shape))
    for path, value in VALUES:
        put(state, path, value)
    return state


def put(state, path, value):
    for step in path[:-1]:
        state = state[step]
    state[path[-1]] = value


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def saved(path, **options):
    haves = [Have(dotted(at), truth(dotted(at), shape), layout, path=list(at))
             for at, shape, layout in TENSORS]
    values = [(dotted(at), value, list(at)) for at, value in VALUES]
    return reshard.save(path, [have.local for have in haves], values=values, **options)


def torch_loads(path):
    """Into a nested state dict of DTensors, with other values in it."""
    state, device_mesh = nested(), Meshes()[(3,)]
    for at, shape, _ in TENSORS:
        placement = S0 if shape else R
        local = cut(truth(dotted(at), shape), ((3,), (placement,)))[dist.get_rank()]
        put(state, at, dtensor(filled(local.shape, local.dtype), shape, device_mesh, [placement]))
    for at, _ in VALUES:
        put(state, at, "other")
    dcp.load(state, checkpoint_id=path)
    for at, shape, _ in TENSORS:
        inner = state
        for step in at:
            inner = inner[step]
        right = cut(truth(dotted(at), shape), ((3,), (inner.placements[0],)))[dist.get_rank()]
        assert same(inner.to_local(), right), at
        put(state, at, truth(dotted(at), shape))
    assert equal(state, nested()), f"{state}"


class SaveState(unittest.TestCase):
    def test_nested(self):
        """torch loads tensors and values where they belong"""
        for compress in (0, 3):
            with worlds.Folder() as folder:
                saved(folder("x"), compress=compress)
                worlds.run(3, torch_loads, folder("x"))

    def test_to_torch_save(self):
        """dcp_to_torch_save makes the whole nested state of it"""
        with worlds.Folder() as folder:
            saved(folder("x"))
            dcp_to_torch_save(folder("x"), folder("x.pt"))
            state = torch.load(folder("x.pt"), weights_only=False)
            self.assertTrue(equal(state, nested()), f"{state}")

    def test_flat(self):
        """without paths, names are names, dots and all"""
        with worlds.Folder() as folder:
            have = Have("model.w", truth("w", (4, 2)), ((2,), (S0,)))
            reshard.save(folder("x"), [have.local], values=[("opt.step", 5)])
            dcp_to_torch_save(folder("x"), folder("x.pt"))
            state = torch.load(folder("x.pt"), weights_only=False)
            self.assertTrue(equal(state, {"model.w": truth("w", (4, 2)), "opt.step": 5}), f"{state}")

    def test_many(self):
        """thousands of tensors, values and boxes"""
        n = 1500
        with worlds.Folder() as folder:
            haves = [Have(f"w.{i}", truth(f"w.{i}", (3,)), ((2,), (S0,)), path=["w", i]) for i in range(n)]
            boxes = [[[(i, i + 1)] for i in range(r, 2 * n, 2)] for r in range(2)]
            haves.append(Have("boxes", truth("boxes", (2 * n,)), boxes))
            reshard.save(folder("x"), [have.local for have in haves],
                         values=[(f"v.{i}", i, ["v", str(i)]) for i in range(n)])
            dcp_to_torch_save(folder("x"), folder("x.pt"))
            state = torch.load(folder("x.pt"), weights_only=False)
            self.assertTrue(equal(state, {"w": [truth(f"w.{i}", (3,)) for i in range(n)],
                                          "boxes": truth("boxes", (2 * n,)),
                                          "v": {str(i): i for i in range(n)}}))

    def test_back(self):
        """what torch made of it is loaded here again"""
        with worlds.Folder() as folder:
            saved(folder("x"))
            dcp_to_torch_save(folder("x"), folder("x.pt"))
            torch_save_to_dcp(folder("x.pt"), folder("again"))
            for name in ("x", "x.pt", "again"):
                with reshard.open(folder(name)) as checkpoint:
                    for at, shape, _ in TENSORS:
                        want = Want(dotted(at), shape, torch.float32, ((1,), (R,)))
                        checkpoint.load([want.local])
                        self.assertTrue(same(want.arrays[0], truth(dotted(at), shape)), (name, at))
                    found = dict(checkpoint.plain_values)
                    self.assertEqual(found, {dotted(at): value for at, value in VALUES}, name)

    def test_in_two_halves(self):
        """the arrays may change once the save has started"""
        whole = truth("w", (1000, 64))
        with worlds.Folder() as folder:
            have = Have("w", whole.clone(), ((4,), (S0,)))
            saving = reshard.save_start(folder("x"), [have.local])
            for array in have.arrays:
                array.fill_(0)
            saving.wait()
            state = {"w": filled(whole.shape, whole.dtype)}
            dcp.load(state, checkpoint_id=folder("x"), no_dist=True)
            self.assertTrue(same(state["w"], whole))


if __name__ == "__main__":
    tap.main()
