"""What state dicts hold, through Writer and Reader: modules, values, Statefuls, ShardedTensors, several threads
and files, saves in the background, without collectives and by some of the ranks."""
import itertools
import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

import boxed
import tap
import worlds
from reshard.torch import LoadPlanner, Reader, SavePlanner, Writer
from tensors import DTYPES, R, S0, Meshes, filled, same, sharded, truth

# The four ways to cut [10, 20] of torch's own tests: chunks of two ranks, chunks in another order, rows.
CHUNKS = [("chunk", [0, 1]), ("chunk", [0, 1, 1, 0]),
          ("rows", [[(0, 2), (3, 6), (9, 10)], [(2, 3), (6, 9)]]), ("rows", [[(8, 10)], [(0, 8)]])]
LINES = [("chunk", [0, 1]), ("chunk", [0, 1, 1, 0]), ("rows", [[(8, 32)], [(0, 8)]]),
         ("rows", [[(0, 10)], [(10, 32)]])]


def cut_as(kind, ranks, shape, whole=None, dim=0):
    """A ShardedTensor, filled from the whole, or with what could not be taken for it."""
    if kind == "rows":
        rest = [(0, extent) for extent in shape[1:]]
        plan = [[[edge, *rest] for edge in edges] for edges in ranks]
        made = boxed.enumerable(shape, plan, whole)
    else:
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])
        made = boxed.fill(sharded_tensor.empty(spec, *shape), whole)
    if whole is None:
        for shard in made.local_shards():
            shard.tensor.fill_(-1)
    return made


def is_filled(tensor, whole):
    for shard in tensor.local_shards():
        lo, extents = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        assert same(shard.tensor, whole[tuple(slice(a, a + n) for a, n in zip(lo, extents))].contiguous())


def sharded_tensors(folder, threads):
    """Every way into every other, rows into columns, and plain tensors both ways."""
    whole, line = truth("whole", (10, 20)), truth("line", (32,))
    for number, (kind, ranks) in enumerate(CHUNKS):
        dcp.save({"w": cut_as(kind, ranks, (10, 20), whole), "plain": line},
                 storage_writer=Writer(folder(f"w{number}"), thread_count=threads))
        for other in CHUNKS:
            state = {"w": cut_as(*other, (10, 20))}
            dcp.load(state, storage_reader=Reader(folder(f"w{number}")))
            is_filled(state["w"], whole)
        state = {"w": cut_as("chunk", [1, 0], (10, 20), dim=1)}
        dcp.load(state, storage_reader=Reader(folder(f"w{number}")))
        is_filled(state["w"], whole)
    for number, (kind, ranks) in enumerate(LINES):
        path = folder(f"line{number}")
        dcp.save({"cut": cut_as(kind, ranks, (32,), line), "plain": line},
                 storage_writer=Writer(path, thread_count=threads))
        for other in LINES:
            state = {"cut": filled((32,), torch.float32), "plain": cut_as(*other, (32,))}
            dcp.load(state, storage_reader=Reader(path), planner=LoadPlanner())
            assert same(state["cut"], line)
            is_filled(state["plain"], line)


class Module(torch.nn.Module):
    def __init__(self, device_mesh, factor=1):
        super().__init__()
        self.sdt = torch.nn.Parameter(sharded(factor * torch.arange(4.0), ((4,), (S0,)), device_mesh))
        self.rdt = torch.nn.Parameter(sharded(factor * (torch.arange(4.0) + 4), ((4,), (R,)), device_mesh))
        self.extra, self.extra_tensor = factor, torch.full((1,), float(factor - 1))

    def get_extra_state(self):
        return {"extra": self.extra, "tensor": self.extra_tensor}

    def set_extra_state(self, state):
        self.extra, self.extra_tensor = state["extra"], state["tensor"]


def modules(folder):
    device_mesh = Meshes()[(4,)]
    saved, loaded = Module(device_mesh), Module(device_mesh, 10)
    dcp.save(saved.state_dict(), storage_writer=Writer(folder("module")))
    assert not torch.equal(loaded.sdt.to_local(), saved.sdt.to_local()) or dist.get_rank() == 0
    state = loaded.state_dict()
    dcp.load(state, storage_reader=Reader(folder("module")))
    loaded.load_state_dict(state)
    for name in ("sdt", "rdt"):
        assert same(getattr(loaded, name).to_local(), getattr(saved, name).to_local())
    assert loaded.extra == 1 and torch.equal(loaded.extra_tensor, torch.zeros(1))


class Blob:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"blob": self.value}

    def load_state_dict(self, state):
        self.value = state["blob"]


def network():
    return torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 1), torch.nn.EmbeddingBag(5, 10)])


def in_background(folder, options):
    """The tensors may change once async_save has returned."""
    rank, writer = dist.get_rank(), Writer(folder("async"), **options)
    whole = torch.arange(16.0).reshape(16, 1)
    plan = [[[(0, 3), (0, 1)], [(9, 16), (0, 1)]], [[(3, 9), (0, 1)]]]
    parts = [whole[lo:hi].clone() for (lo, hi), _ in plan[rank]]
    for turn in range(2):
        name = f"w {turn}"
        state = {"w": sharded(truth(name, (6, 5)), ((2,), (S0,)), Meshes()[(2,)]), "step": turn,
                 "nested": {"x": [truth(name + "x", (3,)), "text"]},
                 "st": cut_as("chunk", [1, 0], (10, 20), truth(name, (10, 20))),
                 "boxes": boxed.wrapped(Meshes()[(2,)], (16, 1), plan[rank], parts)}
        pending = dcp.async_save(state, storage_writer=writer)
        tensors = [state["w"].to_local(), state["nested"]["x"][0], state["st"].local_shards()[0].tensor, *parts]
        for tensor in tensors:
            tensor.zero_()
        getattr(pending, "upload_completion", pending).result()
        dist.barrier()
        state["step"], state["nested"]["x"][1] = -1, ""
        dcp.load(state, storage_reader=Reader(folder("async")))
        assert same(state["w"].full_tensor(), truth(name, (6, 5))) and state["step"] == turn
        assert same(state["nested"]["x"][0], truth(name + "x", (3,))) and state["nested"]["x"][1] == "text"
        is_filled(state["st"], truth(name, (10, 20)))
        assert all(same(part, whole[lo:hi]) for part, ((lo, hi), _) in zip(parts, plan[rank]))
        dist.barrier()


def alone(folder):
    """Ranks that save without collectives have tensors of their own under the same names."""
    rank = dist.get_rank()
    state = {"own": truth(f"own {rank}", (3, 4)), "rank": rank,
             "rows": sharded(truth("rows", (7, 2)), ((3,), (S0,)), Meshes()[(3,)])}
    dcp.save(state, storage_writer=Writer(folder("alone")), use_collectives=False)
    dist.barrier()
    assert sorted(os.listdir(folder("alone"))) == sorted(
        [f"__{r}.metadata" for r in range(3)] + [f"__{r}_0.distcp" for r in range(3)])
    for reader in (Reader, FileSystemReader):
        got = {"own": filled((3, 4), torch.float32), "rank": -1,
               "rows": sharded(torch.zeros(7, 2), ((3,), (S0,)), Meshes()[(3,)])}
        dcp.load(got, storage_reader=reader(folder("alone")))
        assert same(got["own"], state["own"]) and got["rank"] == rank
        assert same(got["rows"].to_local(), state["rows"].to_local())


def some_save(folder):
    """A process group of two of three ranks saves and loads."""
    group = dist.new_group([2, 0])
    if dist.get_rank() in (0, 2):
        state = {"w": truth("w", (5,)), "x": truth("x", (4, 4))}
        dcp.save(state, storage_writer=Writer(folder("some")), process_group=group)
        state = {"w": torch.zeros(5), "x": torch.zeros(4, 4)}
        dcp.load(state, storage_reader=Reader(folder("some")), process_group=group)
        assert same(state["w"], truth("w", (5,))) and same(state["x"], truth("x", (4, 4)))


def from_meta(folder):
    state = {"w": torch.empty(6, 8, device="meta")}
    dcp.load(state, storage_reader=Reader(folder("x")))
    return same(state["w"], truth("w", (6, 8)))


def cached_plans(folder):
    """Plans that are kept from one save to the next, over the same path and to another."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for number, name in enumerate(("a", "b", "a", "a")):
        whole = truth(f"w {number}", (8, 3))
        state = {"w": sharded(whole, ((2,), (S0,)), Meshes()[(2,)]), "step": number}
        dcp.save(state, storage_writer=Writer(folder(name)), planner=planner)
        got = {"w": sharded(torch.zeros(8, 3), ((2,), (S0,)), Meshes()[(2,)]), "step": -1}
        dcp.load(got, storage_reader=Reader(folder(name)))
        assert same(got["w"].full_tensor(), whole) and got["step"] == number


class DcpState(unittest.TestCase):
    def test_network(self):
        """a module and a Stateful, one file or many, threads, extensions"""
        ways = itertools.product((1, 2), (True, False), (None, "rot13", "zstd", "compress"))
        for threads, single, how in ways:
            options = {"rot13": {"_extensions": [Rot13Example()]}, "zstd": {"_extensions": [ZStandard()]},
                       "compress": {"compress": "zstd:5"}}.get(how, {})
            with worlds.Folder() as folder:
                saved, loaded = network(), network()
                state = {"net": saved, "blob": Blob(b"SomeBlobForTesting"), "none": None}
                dcp.save(state, storage_writer=Writer(folder("x"), single, thread_count=threads, **options),
                         no_dist=True)
                blob = Blob(b"")
                for reader in (Reader, FileSystemReader):
                    dcp.load({"net": loaded, "blob": blob, "none": 5}, no_dist=True, storage_reader=reader(
                        folder("x"), _extension_registry=get_test_extension_registry()))
                    self.assertEqual(blob.value, b"SomeBlobForTesting")
                    for a, b in zip(saved.parameters(), loaded.parameters()):
                        self.assertTrue(torch.equal(a, b))

    def test_values(self):
        """bytes, text and objects come back, from torch's writer too"""
        state = {"bytes0": [1], "bytes1": "string", "nested": {"a": (1, 2.5), "s": {3}}, "big": 2**70,
                 "pair": (torch.ones(3), torch.zeros(2)), "dtype": torch.bfloat16}
        for writer, reader in itertools.product((Writer, FileSystemWriter), (Reader, FileSystemReader)):
            for options in ({}, {"_extensions": [ZStandard()]}):
                with worlds.Folder() as folder:
                    dcp.save(state, storage_writer=writer(folder("x"), **options), no_dist=True)
                    got = {"bytes0": [2], "bytes1": "other", "nested": {"a": None, "s": 0}, "big": 0,
                           "pair": 0, "dtype": 0}
                    dcp.load(got, storage_reader=reader(folder("x")), no_dist=True)
                    pair = got.pop("pair")
                    self.assertTrue(torch.equal(pair[0], torch.ones(3)) and len(pair) == 2)
                    self.assertEqual(got, {k: v for k, v in state.items() if k != "pair"})

    def test_dtypes(self):
        """every dtype, and every dtype into every other as copy_ converts it"""
        with worlds.Folder() as folder:
            state = {str(dtype): truth(str(dtype), (5, 3), dtype) for dtype in DTYPES}
            dcp.save(state, storage_writer=Writer(folder("x")), no_dist=True)
            got = {name: filled((5, 3), tensor.dtype) for name, tensor in state.items()}
            dcp.load(got, storage_reader=Reader(folder("x")), no_dist=True)
            for name, tensor in state.items():
                self.assertTrue(same(got[name], tensor), name)
            numbers = {"f": torch.tensor([0., 1.5, -2.5, 100.7, 3e4, 65519., 1e-8]),
                       "d": torch.tensor([0., 1 / 3, -7e5, 1e-3]), "i": torch.arange(-4, 120),
                       "b": torch.tensor([True, False]), "h": torch.tensor([.1, 2.]).half()}
            numbers["d"] = numbers["d"].double()
            dcp.save(numbers, storage_writer=Writer(folder("n")), no_dist=True)
            floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
            for dtype in (*floats, torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
                stock, ours = ({name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in numbers.items()}
                               for _ in range(2))
                dcp.load(stock, storage_reader=FileSystemReader(folder("n")), no_dist=True)
                dcp.load(ours, storage_reader=Reader(folder("n")), no_dist=True)
                for name in numbers:
                    self.assertTrue(same(ours[name], stock[name]), (name, dtype))

    def test_other_memory(self):
        """into columns, transposed tensors, parameters and tensors of the meta device"""
        whole = truth("w", (6, 8))
        with worlds.Folder() as folder:
            dcp.save({"w": whole}, storage_writer=Writer(folder("x")), no_dist=True)
            wide = torch.zeros(6, 16)
            for target in (wide[:, ::2], torch.zeros(8, 6).t(), torch.nn.Parameter(torch.zeros(6, 8))):
                dcp.load({"w": target}, storage_reader=Reader(folder("x")), no_dist=True)
                self.assertTrue(same(target.detach(), whole))
            self.assertEqual(int(wide[:, 1::2].count_nonzero()), 0)
            self.assertEqual(worlds.run(1, from_meta, folder), [True])

    def test_staged(self):
        """batches through host memory, as tensors of other devices go"""
        state = {f"w{i}": truth(f"w{i}", (9 - i, 40)) for i in range(8)}
        state.update(step=5, empty=torch.empty(0, 3), scalar=truth("s", ()))
        with worlds.Folder() as folder, \
                mock.patch.multiple("reshard.torch.writer", STAGED_NBYTES=2000, _has_other_devices=lambda: True), \
                mock.patch.multiple("reshard.torch.reader", STAGED_NBYTES=2000, _in_place=lambda *_: False):
            for threads, options in itertools.product((1, 2), ({}, {"compress": "zstd"})):
                dcp.save(state, storage_writer=Writer(folder("x"), thread_count=threads, **options), no_dist=True)
                for reader in (Reader, FileSystemReader):
                    got = {name: filled(one.shape, one.dtype) if isinstance(one, torch.Tensor) else 0
                           for name, one in state.items()}
                    dcp.load(got, storage_reader=reader(folder("x")), no_dist=True)
                    for name, one in state.items():
                        self.assertTrue(got[name] == 5 if name == "step" else same(got[name], one), name)

    def test_saved_in_another_dtype(self):
        """a planner that converts what it saves"""
        class Half(dcp.DefaultSavePlanner):
            def transform_object(self, item, what):
                what = super().transform_object(item, what)
                return what.bfloat16() if isinstance(what, torch.Tensor) else what
        whole = torch.randn(5, 4)
        for writer in (Writer, FileSystemWriter):
            with worlds.Folder() as folder:
                dcp.save({"w": whole, "n": 3}, storage_writer=writer(folder("x")), planner=Half(), no_dist=True)
                state = {"w": torch.zeros(5, 4), "n": 0}
                dcp.load(state, storage_reader=Reader(folder("x")), no_dist=True)
                self.assertTrue(torch.equal(state["w"], whole.bfloat16().float()))

    def test_all_of_it(self):
        """torch's planner for everything that is there, and for some keys"""
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
        state = {"model": {"w": truth("w", (3, 3)), "layers": [truth("l", (2,)), 5]}, "step": 9}
        with worlds.Folder() as folder:
            dcp.save(state, storage_writer=Writer(folder("x")), no_dist=True)
            for keys in (None, {"model"}):
                got = {}
                _load_state_dict(got, storage_reader=Reader(folder("x")), no_dist=True,
                                 planner=_EmptyStateDictLoadPlanner(keys=keys))
                self.assertTrue(same(got["model"]["w"], state["model"]["w"]))
                self.assertTrue(same(got["model"]["layers"][0], state["model"]["layers"][0]))
                self.assertEqual(got["model"]["layers"][1], 5)
                self.assertEqual("step" in got, keys is None)

    def test_sharded_tensors(self):
        """ShardedTensors of every spec into every other, and plain tensors both ways"""
        for threads in (1, 2):
            with worlds.Folder() as folder:
                worlds.run(2, sharded_tensors, folder, threads)

    def test_modules(self):
        """a module of DTensors with extra state"""
        with worlds.Folder() as folder:
            worlds.run(4, modules, folder)

    def test_in_background(self):
        """async_save, of DTensors and ShardedTensors on the CPU too, one over the other"""
        for options in ({}, {"cache_staged_state_dict": True}):
            with worlds.Folder() as folder:
                worlds.run(2, in_background, folder, options)

    def test_alone(self):
        """ranks that save without collectives load what is theirs"""
        with worlds.Folder() as folder:
            worlds.run(3, alone, folder)

    def test_some_save(self):
        """a process group of some ranks"""
        with worlds.Folder() as folder:
            worlds.run(3, some_save, folder)

    def test_cached_plans(self):
        """plans kept from save to save"""
        with worlds.Folder() as folder:
            worlds.run(2, cached_plans, folder)

    def test_writer_travels(self):
        """a Writer and a Reader can be sent to another process"""
        import pickle
        with worlds.Folder() as folder:
            writer = pickle.loads(pickle.dumps(Writer(folder("x"), compress="zstd", pool=2)))
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=SavePlanner(), no_dist=True)
            reader, state = Reader(folder("x")), {"w": torch.zeros(3)}
            dcp.load(state, storage_reader=reader, no_dist=True)
            dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)), no_dist=True)
            self.assertTrue(torch.equal(state["w"], torch.ones(3)))


if __name__ == "__main__":
    tap.main()
