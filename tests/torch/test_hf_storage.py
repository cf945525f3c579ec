"""Hugging Face storage for DCP: what torch's reader, writer and quantized reader do, with each other's files."""
import glob
import json
import os
import pickle
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader)

import reshard
import tap
import worlds
from reshard.torch import (HuggingFaceStorageReader, HuggingFaceStorageWriter, LoadPlanner,
                           QuantizedHuggingFaceStorageReader, SavePlanner)
from tensors import (R, S0, Meshes, _StridedShard, check_mesh_loads, cut, dtensor, filled, layouts, mesh_state,
                     name_of, same, sharded, truth)

SHAPES = [(1,), (5,), (4, 4), (7, 6)]
INDEX = "model.safetensors.index.json"
BOTH = [(HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader), (dcp.HuggingFaceStorageWriter,
                                                                    HuggingFaceStorageReader)]
MIXED = {"w": torch.bfloat16, "i": torch.int64, "f": torch.float32, "b": torch.bool, "a": torch.float32,
         "q": torch.float8_e4m3fn, "d": torch.float64}


def parsed(path):
    """The header of a file, with the nested JSON as data, and the bytes behind it."""
    with open(path, "rb") as file:
        data = file.read()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + n])
    own = header.get("__metadata__", {})
    own["DCP_SHARDING_INFO"] = json.loads(own.get("DCP_SHARDING_INFO", "null"))
    return header, data[8 + n:]


def save(folder, name, mesh, writer, **options):
    dcp.save(mesh_state(SHAPES, mesh), storage_writer=writer(folder(name), save_distributed=True, **options))


def load(folder, name, mesh, into, reader):
    """Into every layout of another mesh."""
    check_mesh_loads(SHAPES, mesh, into, lambda state, _: dcp.load(
        state, storage_reader=reader(folder(name), thread_count=2)))


def save_async(folder):
    state = {"w": sharded(truth("w", (6, 4)), ((2,), (S0,)), Meshes()[(2,)])}
    writer = HuggingFaceStorageWriter(folder("async"), save_distributed=True)
    pending = dcp.async_save(state, storage_writer=writer)
    state["w"].to_local().zero_()
    pending.result()


def save_rows(folder, name):
    count = dist.get_world_size()
    state = {"a": sharded(truth("a", (8, 4)), ((count,), (S0,)), Meshes()[(count,)])}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder(name), save_distributed=True,
                                                            enable_consolidation=True))


def save_strided(folder):
    """Rows of a strided shard: a rank has several boxes."""
    layout = ((2,), (_StridedShard(0, split_factor=3),))
    part = cut(truth("w", (7, 3)), layout)[dist.get_rank()]
    state = {"w": dtensor(part, (7, 3), Meshes()[layout[0]], layout[1])}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder("strided"), save_distributed=True,
                                                            enable_consolidation=True), planner=SavePlanner())


def save_replicated(folder):
    state = {name: sharded(truth(name, (4,)), ((2,), (R,)), Meshes()[(2,)]) for name in "abcd"}
    try:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder("replicated")))
    except dcp.CheckpointException as error:
        return str(error)
    return ""


class HfStorage(unittest.TestCase):
    def same_files(self, ours, theirs):
        names = sorted(os.listdir(ours))
        self.assertEqual(names, sorted(os.listdir(theirs)))
        for name in names:
            if name.endswith(".safetensors"):
                self.assertEqual(parsed(os.path.join(ours, name)), parsed(os.path.join(theirs, name)), name)
            elif name.endswith(".json"):
                with open(os.path.join(ours, name)) as a, open(os.path.join(theirs, name)) as b:
                    self.assertEqual(json.load(a), json.load(b))

    def test_distributed(self):
        """shards of every layout: the files of torch, read by either from either, on other meshes"""
        with worlds.Folder() as folder:
            for writer, reader in BOTH:
                worlds.run(4, save, folder, writer.__module__, (2, 2), writer)
                worlds.run(3, load, folder, writer.__module__, (2, 2), (3,), reader)
            worlds.run(2, load, folder, BOTH[0][0].__module__, (2, 2), (2,), HuggingFaceStorageReader)
            self.same_files(*(folder(writer.__module__) for writer, _ in BOTH))

    def test_consolidated(self):
        """whole tensors beside the shards, in the files of a mapping, with the index of torch"""
        with worlds.Folder() as folder:
            mapping = {name_of(shape, layout): 1 + k for shape in SHAPES
                       for k, layout in enumerate(layouts((2,), len(shape)))}
            for writer, _ in BOTH:
                worlds.run(2, save_mapped, folder, writer.__module__, writer, mapping)
            ours, theirs = (folder(writer.__module__) for writer, _ in BOTH)
            self.same_files(os.path.join(ours, "sharded"), os.path.join(theirs, "sharded"))
            with open(os.path.join(ours, INDEX)) as a, open(os.path.join(theirs, INDEX)) as b:
                self.assertEqual(json.load(a), json.load(b))
            self.assertEqual(sorted(os.listdir(ours)), sorted(os.listdir(theirs)))
            for path in glob.glob(os.path.join(ours, "*.safetensors")):
                got, right = load_file(path), load_file(os.path.join(theirs, os.path.basename(path)))
                self.assertEqual(set(got), set(right))
                self.assertTrue(all(same(got[name], right[name]) for name in got))

    def test_whole(self):
        """the whole state of one process, in one file and in those of a mapping, of many dtypes"""
        state = {name: truth(name, (3, 5), dtype) for name, dtype in MIXED.items()}
        mapping = {name: 1 + number % 3 for number, name in enumerate(state)}
        with worlds.Folder() as folder:
            for number, options in enumerate(({}, {"fqn_to_index_mapping": mapping, "thread_count": 2})):
                for writer, reader in BOTH:
                    path = folder(f"{writer.__module__}{number}")
                    dcp.save(state, storage_writer=writer(path, **options), no_dist=True)
                    got = {name: filled(tensor.shape, tensor.dtype) for name, tensor in state.items()}
                    dcp.load(got, storage_reader=reader(path), no_dist=True)
                    self.assertTrue(all(same(got[name], state[name]) for name in state))
                self.same_files(*(folder(f"{writer.__module__}{number}") for writer, _ in BOTH))
                self.assertEqual(HuggingFaceStorageReader(path).read_metadata().state_dict_metadata,
                                 dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata)

    def test_strides(self):
        """a tensor whose memory has another order, which torch refuses, has its elements in the order of the file"""
        state = {"s": truth("s", (4, 6)).t(), "r": truth("r", (9, 8))[2:7:2, 1:5], "e": torch.empty(0, 3)}
        with worlds.Folder() as folder:
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder("x")), no_dist=True)
            got = load_file(folder("x", "model-00001-of-00001.safetensors"))
            self.assertTrue(all(same(got[name], state[name]) for name in state))

    def test_async(self):
        """async_save copies the state, and a writer and a reader can be pickled"""
        with worlds.Folder() as folder:
            worlds.run(2, save_async, folder)
            reader = HuggingFaceStorageReader(folder("async"))
            reader.read_metadata()
            state = {"w": torch.zeros(6, 4)}
            dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)), no_dist=True)
            self.assertTrue(same(state["w"], truth("w", (6, 4))))
            writer = pickle.loads(pickle.dumps(HuggingFaceStorageWriter(folder("x"), {"a": 1}, 2, True, True, 3)))
            self.assertEqual((writer.fqn_to_index_mapping, writer.thread_count, writer.save_distributed,
                              writer.enable_consolidation, writer.thread_count_consolidation, writer.metadata_path),
                             ({"a": 1}, 2, True, True, 3, INDEX))

    def test_boxes(self):
        """several boxes of a tensor on a rank are all written, and torch reads them"""
        with worlds.Folder() as folder:
            worlds.run(2, save_strided, folder)
            self.assertGreater(len(os.listdir(folder("strided", "sharded"))), 2)
            for path, reader in ((folder("strided", "sharded"), dcp.HuggingFaceStorageReader),
                                 (folder("strided", "sharded"), HuggingFaceStorageReader),
                                 (folder("strided"), dcp.HuggingFaceStorageReader)):
                state = {"w": filled((7, 3), torch.float32)}
                dcp.load(state, storage_reader=reader(path), no_dist=True)
                self.assertTrue(same(state["w"], truth("w", (7, 3))))

    def test_replaced(self):
        """a save on fewer ranks leaves no shard of the one before, nor files of a shorter mapping"""
        with worlds.Folder() as folder:
            worlds.run(4, save_rows, folder, "x")
            worlds.run(2, save_rows, folder, "x")
            self.assertEqual(sorted(os.listdir(folder("x", "sharded"))),
                             [f"shard-0000{k}-model-00001-of-00001.safetensors" for k in (1, 2)])
            self.assertEqual(sorted(os.listdir(folder("x"))),
                             ["model-00001-of-00001.safetensors", INDEX, "sharded"])
            state = {"a": torch.ones(2), "b": torch.ones(3)}
            for mapping in ({"a": 1, "b": 2}, {"a": 1, "b": 1}):
                dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder("y"), mapping), no_dist=True)
            self.assertEqual(sorted(os.listdir(folder("y"))), ["model-00001-of-00001.safetensors", INDEX])
            dcp.save({"a": torch.zeros(2)}, checkpoint_id=folder("z"), no_dist=True,
                     storage_writer=HuggingFaceStorageWriter(folder("y"), None, 1, True, True))
            self.assertTrue(os.path.exists(folder("z", "sharded")) and os.path.exists(folder("z", INDEX)))

    def refused(self, words, state, writer, **options):
        with self.assertRaises((dcp.CheckpointException, reshard.Error)) as raised:
            dcp.save(state, storage_writer=writer, no_dist=True, **options)
        self.assertIn(words, str(raised.exception))

    def test_refused(self):
        """what safetensors cannot hold, or a reader would mix, is refused; nothing looks complete"""
        with worlds.Folder() as folder:
            tensor = {"a": torch.ones(2)}
            self.refused("step is not a tensor", {**tensor, "step": 3}, HuggingFaceStorageWriter(folder("a")))
            self.refused("mapping lacks b", {**tensor, "b": torch.ones(1)},
                         HuggingFaceStorageWriter(folder("a"), {"a": 1}))
            self.refused("torch.complex128", {"c": torch.ones(1, dtype=torch.complex128)},
                         HuggingFaceStorageWriter(folder("a")))
            self.assertEqual([name for name in os.listdir(folder("a")) if not name.endswith(".part")], [])
            self.refused("consolidation needs", tensor, HuggingFaceStorageWriter(
                folder("a"), save_distributed=True, enable_consolidation=True), use_collectives=False)
            os.mkdir(folder("b"))
            save_file(tensor, folder("b", "model.safetensors"))
            self.refused("has model.safetensors of another", tensor, HuggingFaceStorageWriter(folder("b")))
            dcp.save(tensor, storage_writer=HuggingFaceStorageWriter(folder("c")), no_dist=True)
            self.refused("of another checkpoint", tensor, HuggingFaceStorageWriter(folder("c"), save_distributed=True))
            self.refused("set overwrite", tensor, HuggingFaceStorageWriter(folder("c"), overwrite=False))
            with self.assertRaisesRegex(reshard.InvalidError, "numbered from 1"):
                HuggingFaceStorageWriter(folder("d"), {"a": 0})
            self.assertIn("save_distributed=True", worlds.run(2, save_replicated, folder)[0])

    def test_file_system(self):
        """another file system in fs is refused by readers and writers"""
        class Other(torch.distributed.checkpoint.filesystem.FileSystem):
            pass
        with worlds.Folder() as folder:
            for kind in (HuggingFaceStorageWriter, reshard.torch.Writer):
                writer = kind(folder("a"))
                writer.fs = Other()
                self.refused("file system Other", {"a": torch.ones(1)}, writer)
            for kind in (HuggingFaceStorageReader, reshard.torch.Reader):
                reader = kind(folder("a"))
                reader.fs = Other()
                with self.assertRaisesRegex(reshard.UnsupportedError, "file system Other"):
                    reader.read_metadata()


class Replaced(unittest.TestCase):
    def test_other_index(self):
        """an index that is a FIFO or has endless brackets is replaced by a save"""
        with worlds.Folder() as folder:
            for name in ("fifo", "deep"):
                os.mkdir(folder(name))
                if name == "fifo":
                    os.mkfifo(folder(name, INDEX))
                else:
                    with open(folder(name, INDEX), "w") as file:
                        file.write("[" * 200_000)
                dcp.save({"w": truth("w", (5,))}, storage_writer=HuggingFaceStorageWriter(folder(name)), no_dist=True)
                with open(folder(name, INDEX)) as file:
                    self.assertEqual(list(json.load(file)["weight_map"]), ["w"])


def save_mapped(folder, name, writer, mapping):
    dcp.save(mesh_state(SHAPES, (2,)), storage_writer=writer(folder(name), mapping, save_distributed=True,
                                                     enable_consolidation=True, thread_count_consolidation=2))


def load_quantized(folder, dtype):
    """Rows and columns of quantized weights on two ranks, against torch's reader on one."""
    mesh = Meshes()[(2,)]
    state = {"l.weight": dtensor(torch.zeros(*cut_shape((300, 200), 0)).to(dtype), (300, 200), mesh, (S0,))}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(folder("q"), target_dtype=dtype),
             planner=LoadPlanner())
    return state["l.weight"].to_local()


def cut_shape(shape, dim):
    count, rank = dist.get_world_size(), dist.get_rank()
    part = torch.arange(shape[dim]).chunk(count)[rank].numel()
    return [part if d == dim else extent for d, extent in enumerate(shape)]


class Quantized(unittest.TestCase):
    def folder(self, folder):
        weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
        state = {"l.weight": weight, "l.weight_scale_inv": torch.rand(3, 2) + 0.5, "n.weight": truth("n", (5,)),
                 "e_blocks": truth("e", (2, 6, 3, 4), torch.uint8),
                 "e_scales": 120 + (truth("s", (2, 6, 3), torch.uint8) & 15)}
        os.mkdir(folder("q"))
        names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(state)}
        for file in set(names.values()):
            save_file({name: state[name] for name in names if names[name] == file}, folder("q", file))
        with open(folder("q", INDEX), "w") as file:
            json.dump({"metadata": {}, "weight_map": names}, file)
        return state

    def test_blocks(self):
        """weights with a scale per block, to several dtypes, whole and sharded, equal those of torch"""
        with worlds.Folder() as folder:
            self.folder(folder)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                right = {"l.weight": torch.zeros(300, 200, dtype=dtype), "n.weight": torch.zeros(5)}
                got = {name: tensor.clone() for name, tensor in right.items()}
                dcp.load(right, storage_reader=TorchQuantizedReader(folder("q"), target_dtype=dtype), no_dist=True)
                dcp.load(got, storage_reader=QuantizedHuggingFaceStorageReader(
                    folder("q"), thread_count=2, target_dtype=dtype, block_size=128), no_dist=True)
                self.assertTrue(all(same(got[name], right[name]) for name in got))
                parts = worlds.run(2, load_quantized, folder, dtype)
                self.assertTrue(same(torch.cat(parts), right["l.weight"]))

    def test_many_tensors(self):
        """the metadata of quantized tensors is walked once, not once for each of them"""
        class Counted(dict):
            nsteps = 0

            def __iter__(self):
                for one in super().__iter__():
                    Counted.nsteps += 1
                    yield one

            def items(self):
                return ((one, self[one]) for one in self)

        with worlds.Folder() as folder:
            os.mkdir(folder("q"))
            save_file({f"{i}{end}": torch.zeros(0, 2, dtype=torch.uint8) for i in range(100)
                       for end in ("_blocks", "_scales")}, folder("q", "model.safetensors"))
            real = HuggingFaceStorageReader.read_metadata

            def counted(reader):
                found = real(reader)
                found.storage_data = Counted(found.storage_data)
                return found
            with mock.patch.object(HuggingFaceStorageReader, "read_metadata", counted):
                found = QuantizedHuggingFaceStorageReader(folder("q")).read_metadata()
            self.assertEqual(len(found.storage_data), 200)
            self.assertLessEqual(Counted.nsteps, 400)

    def test_mxfp4(self):
        """4-bit numbers with an exponent per group, all of them and parts across groups"""
        with worlds.Folder() as folder:
            state = self.folder(folder)
            table = [0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6]
            right = torch.zeros(2, 6, 24)
            for i in torch.cartesian_prod(*map(torch.arange, right.shape)):
                byte = int(state["e_blocks"][i[0], i[1], i[2] // 8, i[2] % 8 // 2])
                nibble = byte >> 4 if i[2] % 2 else byte & 15
                right[tuple(i)] = table[nibble] * 2.0 ** (int(state["e_scales"][i[0], i[1], i[2] // 8]) - 127)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                got = {"e_blocks": torch.zeros(2, 6, 24, dtype=dtype)}
                reader = QuantizedHuggingFaceStorageReader(folder("q"), target_dtype=dtype)
                dcp.load(got, storage_reader=reader, no_dist=True)
                self.assertTrue(same(got["e_blocks"], right.to(dtype)))
                about = reader.read_metadata().state_dict_metadata["e_blocks"]
                self.assertEqual((tuple(about.size), about.properties.dtype), ((2, 6, 24), dtype))
            for lo, n in ((0, 5), (3, 9), (8, 8), (15, 9), (23, 1)):
                part = reader._mxfp4("e_blocks", [(1, 1), (2, 3), (lo, n)])
                self.assertTrue(same(part, right[1:2, 2:5, lo:lo + n].to(torch.float16)))

    def test_refused(self):
        """scales that do not fit are an error"""
        with worlds.Folder() as folder:
            self.folder(folder)
            with self.assertRaises(dcp.CheckpointException) as raised:
                dcp.load({"l.weight": torch.zeros(300, 200)}, no_dist=True, storage_reader=(
                    QuantizedHuggingFaceStorageReader(folder("q"), block_size=64)))
            self.assertIn("block_size=64", str(raised.exception))
            with self.assertRaisesRegex(reshard.InvalidError, "block_size=0"):
                QuantizedHuggingFaceStorageReader(folder("q"), block_size=0)


if __name__ == "__main__":
    tap.main()
