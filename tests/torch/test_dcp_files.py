"""The files of a Writer: those of torch's writer to the byte, and an older checkpoint that stays readable until
the new one is complete."""
import itertools
import os
import pickle
import unittest
import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

import reshard
import tap
import worlds
from reshard.torch import Reader, Writer, threads, writer
from tensors import DTYPES, R, S0, S1, Meshes, filled, same, sharded, truth

OPTIONS = {"plain": {}, "threads": {"thread_count": 3}, "files": {"single_file_per_rank": False},
           "rot13": {"_extensions": [Rot13Example()], "thread_count": 2}, "unsynced": {"sync_files": False}}


def strided():
    """Tensors whose elements lie in other orders, or in more memory than their own."""
    a, b = truth("a", (5, 6, 7)), truth("b", (2, 3, 4, 5))
    return {"t": a[0].t().clone(memory_format=torch.preserve_format), "permuted": a.permute(2, 0, 1).clone(),
            "last": b.to(memory_format=torch.channels_last), "sliced": a[1:, ::2, 3:], "column": a[:, 0, 0],
            "row": truth("big", (1000, 50))[7], "rows": truth("big", (1000, 50))[7:9], "view": a[0].t(),
            "one": truth("one", (9, 1, 4))[2:3], "scalar": truth("s", ()), "element": a[1, 2, 3],
            "empty": torch.empty(0, 3), "nothing": a[:, :0], "wide": a[:1].expand(4, 6, 7),
            "parameter": torch.nn.Parameter(a.clone()), "conj": truth("c", (3,), torch.complex64).conj(),
            "tied": a, "tied too": a}


def state_of(rank):
    device_mesh = Meshes()[(3,)]
    state = {f"{kind} {dtype}": sharded(truth(f"{kind} {dtype}", (5, 6), dtype), ((3,), (how,)), device_mesh)
             for dtype in DTYPES for kind, how in (("rows", S0), ("columns", S1), ("all", R))}
    state.update(strided(), step=7, name="text", nested={"list": [1, 2, {"x": torch.ones(3)}]}, tuple=(1, 2))
    return state


def save_both(folder, name):
    for kind, writer in (("torch", FileSystemWriter), ("ours", Writer)):
        dcp.save(state_of(dist.get_rank()), storage_writer=writer(folder(kind + name), **OPTIONS[name]))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def places(path):
    with open(os.path.join(path, ".metadata"), "rb") as file:
        metadata = pickle.load(file)
    return metadata, {(index.fqn, index.offset): (place.relative_path, place.offset, place.length,
                                                  place.transform_descriptors)
                      for index, place in metadata.storage_data.items()}


class Broken(RuntimeError):
    pass


class FailingPlanner(dcp.DefaultSavePlanner):
    """Fails on rank 1, after its first tensor."""

    def resolve_data(self, item):
        if not dist.is_initialized() or dist.get_rank() == 1:
            raise Broken(f"cannot resolve {item.index.fqn}")
        return super().resolve_data(item)


def stopped(folder, kind):
    """A save over an older one that fails half-way; what a reader finds then."""
    def state(turn):
        return {"w": sharded(truth(f"w {turn}", (8, 3)), ((2,), (S0,)), Meshes()[(2,)]),
                "v": truth(f"v {turn}", (5,)), "turn": turn}
    writer = {"torch": FileSystemWriter, "ours": Writer}[kind]
    dcp.save(state(0), storage_writer=writer(folder(kind)))
    try:
        dcp.save(state(1), storage_writer=writer(folder(kind)), planner=FailingPlanner())
    except dcp.CheckpointException as error:
        assert "cannot resolve" in str(error)
    else:
        raise AssertionError("it did not fail")
    got = {"w": sharded(torch.zeros(8, 3), ((2,), (S0,)), Meshes()[(2,)]), "v": torch.zeros(5), "turn": -1}
    try:
        dcp.load(got, storage_reader=FileSystemReader(folder(kind)))
    except dcp.CheckpointException:
        return False
    return same(got["w"].full_tensor(), truth("w 0", (8, 3))) and same(got["v"], truth("v 0", (5,)))


class DcpFiles(unittest.TestCase):
    def test_same_bytes(self):
        """data files are torch's to the byte, and the metadata says the same"""
        with worlds.Folder() as folder:
            for name in OPTIONS:
                worlds.run(3, save_both, folder, name)
                theirs, ours = folder("torch" + name), folder("ours" + name)
                self.assertEqual(sorted(os.listdir(theirs)), sorted(os.listdir(ours)))
                for file in os.listdir(theirs):
                    if file != ".metadata":
                        self.assertTrue(read(os.path.join(theirs, file)) == read(os.path.join(ours, file)),
                                        f"{name}: {file}")
                (a, at_a), (b, at_b) = places(theirs), places(ours)
                self.assertEqual(at_a, at_b, name)
                self.assertEqual(a.state_dict_metadata, b.state_dict_metadata)
                self.assertEqual(a.planner_data, b.planner_data)
                self.assertEqual(a.version, b.version)

    def test_library_reads(self):
        """the library and its command take them too"""
        with worlds.Folder() as folder:
            worlds.run(3, save_both, folder, "plain")
            with reshard.open(folder("oursplain"), like="torch") as checkpoint:
                found = reshard.verify(checkpoint)
                self.assertEqual([line.split(': ')[1] for line in found], ["conj"])  # which torch alone reads
                self.assertTrue(same(checkpoint["rows torch.float32"].torch(), truth("rows torch.float32", (5, 6))))
                self.assertEqual(checkpoint.plain_values["step"], 7)

    def test_zstd(self):
        """compressed items are read by torch, and torch's by us; the same descriptors"""
        state = {"zeros": torch.zeros(300, 300), "w": truth("w", (70, 9)), "step": 3, "empty": torch.empty(0)}
        for options in ({"_extensions": [ZStandard()]}, {"compress": "zstd"}, {"compress": 9}):
            for threads in (1, 3):
                with worlds.Folder() as folder:
                    dcp.save(state, storage_writer=Writer(folder("x"), thread_count=threads, **options),
                             no_dist=True)
                    self.assertEqual({place[3][0] for place in places(folder("x"))[1].values()},
                                     {"stream.zstd/1"})
                    for reader in (Reader, FileSystemReader):
                        got = {"zeros": torch.ones(300, 300), "w": torch.zeros(70, 9), "step": 0,
                               "empty": torch.empty(0)}
                        dcp.load(got, storage_reader=reader(folder("x")), no_dist=True)
                        self.assertTrue(same(got["w"], state["w"]) and same(got["zeros"], state["zeros"]))
                        self.assertEqual(got["step"], 3)
        with self.assertRaises(reshard.InvalidError):
            Writer("x", compress="zstd", _extensions=[Rot13Example()])
        for level in ("zstd:-1", "zstd:0", -3):
            with self.assertRaises(reshard.InvalidError):
                Writer("x", compress=level)

    def test_safetensors(self):
        """items as safetensors: bytes before them and several shards of one tensor do no harm"""
        whole = truth("w", (16, 3))
        boxes = [[(0, 4), (0, 3)], [(4, 9), (0, 3)], [(9, 16), (0, 3)]]
        import boxed
        state = {"step": 5, "w": boxed.checkpointable(whole.shape, whole.dtype, boxes,
                                                      [whole[lo:hi] for (lo, hi), _ in boxes])}
        with worlds.Folder() as folder:
            dcp.save(state, no_dist=True, storage_writer=Writer(
                folder("x"), serialization_format=SerializationFormat.SAFETENSORS))
            got = {"step": 0, "w": filled((16, 3), torch.float32)}
            dcp.load(got, storage_reader=Reader(folder("x")), no_dist=True)
            self.assertTrue(same(got["w"], whole) and got["step"] == 5)
            with self.assertRaises(reshard.InvalidError):
                Writer(folder("x"), compress="zstd", serialization_format=SerializationFormat.SAFETENSORS)

    def test_stopped(self):
        """a save that fails leaves the older checkpoint as it was; torch's destroys it"""
        with worlds.Folder() as folder:
            self.assertEqual(worlds.run(2, stopped, folder, "ours"), [True, True])
            self.assertEqual(worlds.run(2, stopped, folder, "torch"), [False, False])

    def test_overwrite(self):
        """one save over another, smaller and larger: nothing of the older is left, other files are"""
        def files(path):
            return sorted(name for name in os.listdir(path) if name.endswith(".distcp"))
        with worlds.Folder() as folder:
            for turn, threads in enumerate((1, 4, 2, 1, 1)):
                state = {f"w{i}": truth(f"w{i} {turn}", (4, 5)) for i in range(5)}
                dcp.save(state, storage_writer=Writer(folder("x"), thread_count=threads), no_dist=True)
                used = {place[0] for place in places(folder("x"))[1].values()}
                self.assertEqual(set(files(folder("x"))), used)
                got = {name: torch.zeros(4, 5) for name in state}
                dcp.load(got, storage_reader=Reader(folder("x")), no_dist=True)
                self.assertTrue(all(same(got[name], state[name]) for name in state))
                with open(folder("x", "notes.txt"), "w") as file:
                    file.write("mine")
            self.assertIn("notes.txt", os.listdir(folder("x")))
            self.assertNotIn(".metadata.tmp", os.listdir(folder("x")))
            with self.assertRaises(dcp.CheckpointException) as raised:
                dcp.save({"w": torch.ones(2)}, storage_writer=Writer(folder("x"), overwrite=False), no_dist=True)
            self.assertIn("already exists", str(raised.exception))
            # torch keeps what a larger save left.
            for threads in (4, 1):
                dcp.save({f"w{i}": torch.ones(2) for i in range(5)}, no_dist=True,
                         storage_writer=FileSystemWriter(folder("torch"), thread_count=threads))
            self.assertEqual(len(files(folder("torch"))), 4)

    def test_open_for_long(self):
        """one who opened a checkpoint is told that it is gone, and never gets a later save's elements"""
        def state(turn):
            whole = truth(f"w {turn}", (8, 3))
            return {"w": sharded(whole, ((2,), (S0,)), Meshes()[(2,)]) if dist.is_initialized() else whole}

        def save(turn):
            dcp.save(state(turn), storage_writer=Writer(folder("x")), no_dist=not dist.is_initialized())

        with worlds.Folder() as folder:
            opened = []
            for turn, nranks in enumerate((2, 1, 2, 1, 1, 2)):
                if nranks == 1:
                    save(turn)
                else:
                    worlds.run(nranks, save, turn)
                for before in opened:  # none of them has read anything
                    with self.assertRaises(reshard.FileError):
                        before["w"][:]
                opened.append(reshard.open(folder("x"), like="torch"))
                with reshard.open(folder("x"), like="torch") as checkpoint:
                    self.assertTrue(same(checkpoint["w"][:], truth(f"w {turn}", (8, 3))))

    def test_kept_by_ranks(self):
        """a save without collectives does not change another checkpoint in the directory"""
        with worlds.Folder() as folder:
            dcp.save({"w": truth("w", (4,))}, storage_writer=Writer(folder("x")), no_dist=True)
            for turn in range(2):
                dcp.save({"w": truth(f"own {turn}", (4,))}, storage_writer=Writer(folder("x")), no_dist=True,
                         use_collectives=False)
            self.assertEqual(len([name for name in os.listdir(folder("x")) if name.endswith(".distcp")]), 2)
            state = {"w": torch.zeros(4)}
            dcp.load(state, storage_reader=Reader(folder("x")), no_dist=True)
            self.assertTrue(same(state["w"], truth("w", (4,))))

    def test_names(self):
        """names that no other reader takes are refused, of tensors and values, and nothing is written"""
        for name, what in itertools.product(("x\0y", "", "\ud800"), (torch.ones(2), 5)):
            for options in ({}, {"_extensions": [Rot13Example()]}):
                with worlds.Folder() as folder:
                    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(folder("x")), no_dist=True)
                    before = sorted(os.listdir(folder("x")))
                    with self.assertRaises(dcp.CheckpointException) as raised:
                        dcp.save({"w": torch.zeros(3), name: what}, no_dist=True,
                                 storage_writer=Writer(folder("x"), **options))
                    error, = (one[0] for one in raised.exception.failures.values())
                    self.assertIsInstance(error, reshard.InvalidError)
                    self.assertIn(repr(name), str(error))
                    self.assertEqual(sorted(os.listdir(folder("x"))), before)
        with worlds.Folder() as folder:
            state = {"a b": torch.ones(2), "\u00e9/\u00fc": torch.ones(2), "..": 3, "x\ny": 4}
            dcp.save(state, storage_writer=Writer(folder("x")), no_dist=True)
            got = {name: torch.zeros(2) if isinstance(one, torch.Tensor) else 0 for name, one in state.items()}
            dcp.load(got, storage_reader=Reader(folder("x")), no_dist=True)
            self.assertEqual((got[".."], got["x\ny"], got["a b"].sum().item()), (3, 4, 2))

    def test_pools(self):
        """threads of a Writer's own are there while it writes, and are made once a save"""
        made, there, write = weakref.WeakSet(), [], writer._c.lib.rsd_dcp_write_items

        def pool_of(pool):
            made.add(found := threads.pool_of(pool))
            return found

        def counted(*args):
            there.append(len(made))
            return write(*args)

        state = {f"w{i}": truth(f"w{i}", (3,)) for i in range(3)}
        for pool in (1, reshard.Pool(1), None):
            with worlds.Folder() as folder, mock.patch.object(writer, "pool_of", pool_of), \
                    mock.patch.object(writer._c.lib, "rsd_dcp_write_items", counted):
                dcp.save(state, storage_writer=Writer(folder("x"), False, pool=pool), no_dist=True)
            self.assertEqual(there, [1, 1, 1])
            there.clear()
            made.clear()

    def test_storage_meta(self):
        """ids and paths are where torch has them"""
        with worlds.Folder() as folder:
            writer, reader = Writer(folder("x")), Reader(folder("x"))
            dcp.save({"w": torch.zeros(4, 4)}, storage_writer=writer, no_dist=True)
            found = reader.read_metadata()
            self.assertEqual(str(found.storage_meta.checkpoint_id), folder("x"))
            self.assertEqual(found.storage_meta.save_id, writer.save_id)
            self.assertEqual(found.storage_meta.load_id, reader.load_id)
            self.assertIsInstance(found.state_dict_metadata["w"], TensorStorageMetadata)


if __name__ == "__main__":
    tap.main()
