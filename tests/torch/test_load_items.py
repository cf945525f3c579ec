"""Every way in which torch puts an item into a file: dtypes, strides, compression, threads, values."""
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

import reshard
import tap
import worlds
from tensors import BY_NAME, DTYPES, R, S0, S1, Meshes, about, check_loads, sharded, truth

LAYOUTS = [((3,), (S0,)), ((2, 2), (S1, S0)), ((1,), (R,))]


def save_dtypes(folder):
    device_mesh, state = Meshes()[(3,)], {}
    for dtype in DTYPES:
        name = str(dtype)
        state[f"plain {name}"] = truth(f"plain {name}", (5, 6), dtype)
        state[f"rows {name}"] = sharded(truth(f"rows {name}", (5, 6), dtype), LAYOUTS[0], device_mesh)
        state[f"scalar {name}"] = truth(f"scalar {name}", (), dtype)
        state[f"empty {name}"] = truth(f"empty {name}", (0, 2), dtype)
    dcp.save(state, checkpoint_id=folder("dtypes"))


def tensors_of(prefix, device_mesh):
    """A small state dict with rows, columns, a copy on every rank, and something that compresses."""
    state = {}
    for i in range(5):
        for kind, layout in (("rows", ((3,), (S0,))), ("cols", ((3,), (S1,))), ("all", ((3,), (R,)))):
            name = f"{prefix} {kind} {i}"
            state[name] = sharded(truth(name, (7 + i, 9)), layout, device_mesh)
    return state


def save_with(folder, name, options):
    state = tensors_of(name, Meshes()[(3,)])
    state["zeros"] = sharded(torch.zeros(256, 256), ((3,), (S0,)), Meshes()[(3,)])
    state["step"] = 7
    dcp.save(state, storage_writer=FileSystemWriter(folder(name), **options))


WRITERS = {
    "plain": {},
    "threads": {"thread_count": 3},
    "files": {"single_file_per_rank": False},
    "zstd": {"_extensions": [ZStandard()]},
    "zstd files": {"_extensions": [ZStandard()], "single_file_per_rank": False, "thread_count": 2},
}


def save_alone(folder, state, name, options=None):
    """By one process without a world."""
    dcp.save(state, storage_writer=FileSystemWriter(folder(name), **(options or {})), no_dist=True)


def save_without_collectives(folder):
    dcp.save(tensors_of("apart", Meshes()[(3,)]), checkpoint_id=folder("apart"),
             use_collectives=False)


def save_safetensors_items(folder):
    writer = FileSystemWriter(folder("items"), serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(tensors_of("items", Meshes()[(3,)]), storage_writer=writer)


class Blob:
    """A Stateful that holds bytes."""

    def state_dict(self):
        return {"blob": b"SomeBlobForTesting"}

    def load_state_dict(self, _):
        raise NotImplementedError


class Module(torch.nn.Module):
    def __init__(self, device_mesh):
        super().__init__()
        self.sdt = torch.nn.Parameter(sharded(torch.arange(4.0), ((4,), (S0,)), device_mesh))
        self.rdt = torch.nn.Parameter(sharded(torch.arange(4.0) + 4, ((4,), (R,)), device_mesh))

    def get_extra_state(self):
        return {"extra": 1, "tensor": torch.zeros(1)}

    def set_extra_state(self, _):
        raise NotImplementedError


def save_module(folder):
    dcp.save(Module(Meshes()[(4,)]).state_dict(), checkpoint_id=folder("module"))


class LoadItems(unittest.TestCase):
    def sound(self, checkpoint):
        """What torch wrote has nothing wrong with it."""
        self.assertEqual(reshard.verify(checkpoint), [])

    def test_dtypes(self):
        """all dtypes, as whole tensors and as shards"""
        with worlds.Folder() as folder:
            worlds.run(3, save_dtypes, folder)
            with reshard.open(folder("dtypes")) as checkpoint:
                found = about(checkpoint)
                self.assertEqual(len(found), 4 * len(DTYPES))
                self.sound(checkpoint)
                for name, (dtype, shape, _) in found.items():
                    self.assertEqual(f"{BY_NAME[dtype]}", name.split()[1])
                    check_loads(checkpoint, name, truth(name, shape, BY_NAME[dtype]), LAYOUTS)

    def test_writers(self):
        """one file or many, threads, zstd"""
        with worlds.Folder() as folder:
            for name, options in WRITERS.items():
                worlds.run(3, save_with, folder, name, options)
                with reshard.open(folder(name)) as checkpoint:
                    self.assertEqual(dict(checkpoint.plain_values), {"step": 7})
                    self.sound(checkpoint)
                    check_loads(checkpoint, "zeros", torch.zeros(256, 256), LAYOUTS)
                    for key, (_, shape, _) in about(checkpoint).items():
                        if key != "zeros":
                            check_loads(checkpoint, key, truth(key, shape), LAYOUTS)

    def test_other_extension(self):
        """a transform that is not known is refused by name"""
        with worlds.Folder() as folder:
            worlds.run(1, save_alone, folder, {"w": torch.ones(3)}, "rot13",
                       {"_extensions": [Rot13Example()]})
            with self.assertRaises(reshard.Error) as raised:
                with reshard.open(folder("rot13")) as checkpoint:
                    check_loads(checkpoint, "w", torch.ones(3), LAYOUTS)
            self.assertEqual(raised.exception.status, "EUNSUPPORTED")
            self.assertIn("rot13", str(raised.exception))

    def test_without_collectives(self):
        """ranks that saved without talking to each other"""
        with worlds.Folder() as folder:
            worlds.run(3, save_without_collectives, folder)
            with reshard.open(folder("apart")) as checkpoint:
                self.assertEqual(len(checkpoint), 15)
                self.sound(checkpoint)
                for name, (_, shape, _) in about(checkpoint).items():
                    check_loads(checkpoint, name, truth(name, shape), LAYOUTS)

    def test_safetensors_items(self):
        """safetensors blobs inside a distributed checkpoint"""
        with worlds.Folder() as folder:
            worlds.run(3, save_safetensors_items, folder)
            with reshard.open(folder("items")) as checkpoint:
                for name, (_, shape, _) in about(checkpoint).items():
                    check_loads(checkpoint, name, truth(name, shape), LAYOUTS)

    def test_strides(self):
        """tensors that are not dense rows: transposed, channels last, sliced, expanded, parameters"""
        a, b = truth("a", (5, 6, 7)), truth("b", (2, 3, 4, 5))
        state = {"t": a[0].t(), "permuted": a.permute(2, 0, 1), "sliced": a[1:, ::2, 3:],
                 "last": b.to(memory_format=torch.channels_last), "wide": a[:1].expand(4, 6, 7),
                 "parameter": torch.nn.Parameter(a), "column": a[:, 0, 0], "flipped": a.flip(0),
                 "row of a big storage": truth("big", (1000, 50))[7]}
        with worlds.Folder() as folder:
            worlds.run(1, save_alone, folder, state, "strides")
            with reshard.open(folder("strides")) as checkpoint:
                self.assertEqual(set(checkpoint), set(state))
                for name, whole in state.items():
                    check_loads(checkpoint, name, whole.detach().contiguous(), LAYOUTS)

    def test_module(self):
        """the state of a module, with extra state"""
        with worlds.Folder() as folder:
            worlds.run(4, save_module, folder)
            with reshard.open(folder("module")) as checkpoint:
                check_loads(checkpoint, "sdt", torch.arange(4.0), LAYOUTS)
                check_loads(checkpoint, "rdt", torch.arange(4.0) + 4, LAYOUTS)
                check_loads(checkpoint, "_extra_state.tensor", torch.zeros(1), LAYOUTS)
                self.assertEqual(dict(checkpoint.plain_values), {"_extra_state.extra": 1})

    def test_values(self):
        """values beside tensors, nested and plain; zstd changes none of them"""
        state = {"bytes0": [1], "bytes1": "string", "step": 2**40, "lr": 3.5e-4, "name": "r\u00e9",
                 "flag": True, "none": None, "deep": {"list": [1, 2, [3]], "x": {"y": -1}},
                 "layers": [{"w": torch.ones(2), "n": 5}, {"w": torch.zeros(3), "n": 6}],
                 "negative": -2**63, "empty": [], "blob": Blob()}
        right = {"bytes0": [1], "bytes1": "string", "step": 2**40, "lr": 3.5e-4, "name": "r\u00e9",
                 "flag": True, "none": None, "deep.list": [1, 2, [3]], "deep.x.y": -1,
                 "layers.0.n": 5, "layers.1.n": 6, "negative": -2**63, "empty": []}
        with worlds.Folder() as folder:
            for name, options in (("values", {}), ("values zstd", {"_extensions": [ZStandard()]})):
                worlds.run(1, save_alone, folder, state, name, options)
                with reshard.open(folder(name)) as checkpoint:
                    found = dict(checkpoint.plain_values)
                    blob = found.pop("blob.blob")
                    self.assertEqual(blob, b"SomeBlobForTesting")
                    self.assertEqual(found, right)
                    check_loads(checkpoint, "layers.1.w", torch.zeros(3), LAYOUTS)


if __name__ == "__main__":
    tap.main()
