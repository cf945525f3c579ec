"""What torch's reader, writer and planners get wrong, shown beside what ours do. Each case says what torch 2.13
does; a torch that does it right makes its half of the test fail, and then the case can go.

Fixed in 2.13: a reader that fails on .metadata has an error with the cause (before: "metadata is None")."""
import collections
import os
import pickle
import re
import sys
import unittest
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, MetadataIndex, TensorProperties,
                                                   TensorStorageMetadata)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

import boxed
import reshard
import tap
import worlds
from reshard.torch import LoadPlanner, Reader, SavePlanner, Writer
from tensors import filled, same, truth


def load(reader, shape, **options):
    state = {"w": filled(shape, torch.float32)}
    dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state["w"]


def metadata_of(path):
    with open(os.path.join(path, ".metadata"), "rb") as file:
        return pickle.load(file)


def change_metadata(path, change):
    found = metadata_of(path)
    change(found)
    with open(os.path.join(path, ".metadata"), "wb") as file:
        pickle.dump(found, file)


class Tool:
    """An object whose pickle runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Plus(StreamTransformExtension):
    """Adds one to every byte: it does not commute with zstd."""

    @staticmethod
    def registry_name():
        return "stream.plus"

    @staticmethod
    def from_descriptor(version):
        return Plus()

    def get_descriptor(self):
        return "stream.plus/1"

    def transform_to(self, output):
        import io

        class Out(io.RawIOBase):
            def write(self, data):
                output.write(bytes((byte + 1) % 256 for byte in bytes(data)))
                return len(data)

            def close(self):
                output.close()
        return Out()

    def transform_from(self, stream):
        import io
        return io.BytesIO(bytes((byte - 1) % 256 for byte in stream.read()))


def registry():
    made = get_test_extension_registry()
    made.register(Plus)
    assert isinstance(made, ExtensionRegistry)
    return made


def saved_with_hole(path):
    """One rank that saves rows 0..3 and 6..9 of ten; torch compares volumes only for more than one."""
    whole = truth("w", (10, 3))
    boxes = [[(0, 4), (0, 3)], [(6, 10), (0, 3)]]
    state = {"w": boxed.checkpointable(whole.shape, whole.dtype, boxes, [whole[0:4], whole[6:10]])}
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return whole


def bytes_read():
    with open("/proc/self/io") as file:
        return int(re.search(r"rchar: (\d+)", file.read()).group(1))


def uneven_model(n):
    """A linear layer of n rows, cut by tensor parallel and then by FSDP2: on 3x2 ranks."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(4, n, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(truth(f"w {n}", (n, 4)).nan_to_num(0))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, truth(f"w {n}", (n, 4)).nan_to_num(0)


def save_uneven(folder, n, writer, planner):
    model, _ = uneven_model(n)
    try:
        dcp.save(model.state_dict(), storage_writer=writer(folder(str(n))), planner=planner)
    except dcp.CheckpointException as error:
        return str(error)
    return None


def load_uneven(folder, n, reader, planner):
    """Returns whether everything is loaded, or the error."""
    model, whole = uneven_model(n)
    model[0].weight._local_tensor.zero_()
    try:
        dcp.load(model.state_dict(), storage_reader=reader(folder(str(n))), planner=planner)
    except dcp.CheckpointException as error:
        return str(error)
    return torch.equal(model[0].weight.full_tensor(), whole)


class DcpMended(unittest.TestCase):
    def refused(self, words, reader, shape, **options):
        with self.assertRaises(dcp.CheckpointException) as raised:
            load(reader, shape, **options)
        self.assertRegex(str(raised.exception), words)

    def test_metadata_that_changes_torch(self):
        """no opcode of .metadata changes a class of torch, takes memory or time out of proportion"""
        empty = (b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\0\0\0state_dict_metadata}"
                 b"X\x0c\0\0\0storage_data}ub")
        build = b"N}(X\x05\0\0\0spoilX\x03\0\0\0yesu\x86b0"
        doubled = b"Nq\0" + b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"0}h\x3cNs0"
        for what in (b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n" + build,
                     b"ctorch.serialization\n_get_layout\n" + build, doubled,
                     b"Nr\0\0\0\x0c0"):
            with worlds.Folder() as folder:
                os.mkdir(folder("x"))
                with open(folder("x", ".metadata"), "wb") as file:
                    file.write(b"\x80\x02" + what + empty + b".")
                try:
                    Reader(folder("x")).read_metadata()
                except reshard.FormatError:
                    pass
                self.assertFalse(hasattr(MetadataIndex, "spoil"))
                self.assertFalse(hasattr(torch.serialization._get_layout, "spoil"))

    def test_data_files_that_are_none(self):
        """a data file that is a FIFO or a link to somewhere else is not opened"""
        with worlds.Folder() as folder:
            dcp.save({"w": truth("w", (4,)), "n": 1}, storage_writer=Writer(folder("x")), no_dist=True)
            name = [one for one in os.listdir(folder("x")) if one.endswith(".distcp")][0]
            os.rename(folder("x", name), folder("moved"))
            os.symlink(folder("moved"), folder("x", name))
            self.refused("link that leads out|link leads out", Reader(folder("x")), (4,))
            self.value_refused("link that leads out|link leads out", folder("x"))
            os.unlink(folder("x", name))
            os.mkfifo(folder("x", name))
            self.refused("not a regular file", Reader(folder("x")), (4,))
            self.value_refused("not a regular file", folder("x"))

    def test_links_in_the_way(self):
        """torch writes through links that are in the way, and waits for a FIFO; Writer does neither"""
        def save(path, **options):
            dcp.save({"w": truth("w", (4,)), "n": 1}, storage_writer=Writer(path, **options), no_dist=True)

        for name, options in ((".metadata.tmp", {}), ("__0_0.distcp", {"_extensions": [Rot13Example()]})):
            for make in (lambda path: os.symlink(folder("other"), path), os.mkfifo):
                with worlds.Folder() as folder:
                    os.mkdir(folder("x"))
                    make(folder("x", name))
                    with self.assertRaises(dcp.CheckpointException):
                        save(folder("x"), **options)
                    self.assertFalse(os.path.exists(folder("other")))
        with worlds.Folder() as folder:
            os.mkdir(folder("x"))
            os.mkfifo(folder("x", ".metadata"))
            with self.assertRaisesRegex(dcp.CheckpointException, "not a regular file"):
                save(folder("x"))

    def value_refused(self, words, path):
        with self.assertRaises(dcp.CheckpointException) as raised:
            dcp.load({"n": 0}, storage_reader=Reader(path), no_dist=True)
        self.assertRegex(str(raised.exception), words)

    def test_lengths_that_are_wrong(self):
        """an item behind the end of its file, or one that grows out of proportion, is an error that names it"""
        with worlds.Folder() as folder:
            dcp.save({"n": "x" * 9_000_000}, no_dist=True,
                     storage_writer=Writer(folder("x"), _extensions=[ZStandard()]))
            self.value_refused(r"__0_0\.distcp: n, .*more than \d+ bytes after", folder("x"))
            dcp.save({"n": 1}, storage_writer=Writer(folder("y")), no_dist=True)
            for length in (1 << 20, 1 << 50, 1 << 62):
                change_metadata(folder("y"), lambda found, length=length: [
                    object.__setattr__(one, "length", length) for one in found.storage_data.values()])
                self.value_refused(r"__0_0\.distcp: .*ends before byte \d+, where n does", folder("y"))

    def test_hostile_metadata(self):
        """torch runs what .metadata says; Reader does not"""
        for where in ("root", "inside"):
            with worlds.Folder() as folder:
                dcp.save({"w": truth("w", (4,))}, storage_writer=Writer(folder("x")), no_dist=True)
                if where == "root":
                    with open(folder("x", ".metadata"), "wb") as file:
                        pickle.dump(Tool(folder("made")), file)
                    self.refused("not metadata of DCP", Reader(folder("x")), (4,))
                else:
                    change_metadata(folder("x"), lambda found: setattr(found, "more", Tool(folder("made"))))
                    self.assertTrue(same(load(Reader(folder("x")), (4,)), truth("w", (4,))))
                self.assertFalse(os.path.exists(folder("made")))
                try:
                    load(FileSystemReader(folder("x")), (4,))
                except dcp.CheckpointException:
                    pass
                self.assertTrue(os.path.exists(folder("made")))

    def test_hostile_values(self):
        """torch's planners run what a value says; LoadPlanner(weights_only=True) does not"""
        with worlds.Folder() as folder:
            plain = {"n": {"a": (1, 2.5), "t": 2 ** 70}, "l": [torch.ones(2), None], "o": collections.OrderedDict(b=1)}
            dcp.save(plain, storage_writer=Writer(folder("plain")), no_dist=True)
            got = {"n": {"a": 0, "t": 0}, "l": [torch.zeros(2), 1], "o": collections.OrderedDict(b=0)}
            dcp.load(got, storage_reader=Reader(folder("plain")), planner=LoadPlanner(weights_only=True), no_dist=True)
            self.assertTrue(torch.equal(got["l"][0], plain["l"][0]))
            self.assertEqual((got["n"], got["l"][1], got["o"]), (plain["n"], None, plain["o"]))
            dcp.save({"v": Tool(folder("made"))}, storage_writer=Writer(folder("x")), no_dist=True)
            for planner, runs in ((LoadPlanner(weights_only=True), False), (LoadPlanner(), True)):
                words = "v: not loaded with weights_only=True" if not runs else ""
                try:
                    dcp.load({"v": 0}, storage_reader=Reader(folder("x")), planner=planner, no_dist=True)
                    said = ""
                except dcp.CheckpointException as error:
                    said = str(error)
                self.assertIn(words, said)
                self.assertEqual(os.path.exists(folder("made")), runs)

    def test_wrong_crc(self):
        """a flipped bit goes unnoticed in torch; Reader names the file and the tensor"""
        for options in ({}, {"_extensions": [Rot13Example()]}):
            with worlds.Folder() as folder:
                whole = torch.zeros(200)
                dcp.save({"w": whole}, storage_writer=Writer(folder("x"), **options), no_dist=True)
                with open(folder("x", "__0_0.distcp"), "r+b") as file:
                    file.seek(800)
                    file.write(b"\1")
                found = load(FileSystemReader(folder("x"), _extension_registry=registry()), (200,))
                self.assertFalse(same(found, whole))
                self.refused(r"__0_0\.distcp: w\b.*CRC", Reader(folder("x"), registry()), (200,))

    def test_holes(self):
        """what no file has is left as it is by torch; Reader and LoadPlanner refuse"""
        with worlds.Folder() as folder:
            whole = saved_with_hole(folder("x"))
            found = load(FileSystemReader(folder("x")), (10, 3))
            self.assertTrue(same(found[:4], whole[:4]) and same(found[4:6], filled((2, 3), torch.float32)))
            self.refused(r"w: .*4:6", Reader(folder("x")), (10, 3))
            self.refused(r"w: .*4:6", FileSystemReader(folder("x")), (10, 3), planner=LoadPlanner())
            # What is there can be had.
            rows = [[(0, 2), (0, 3)], [(7, 9), (0, 3)]]
            for planner in (None, LoadPlanner()):
                parts = [filled((2, 3), torch.float32) for _ in rows]
                state = {"w": boxed.checkpointable((10, 3), torch.float32, rows, parts)}
                dcp.load(state, storage_reader=Reader(folder("x")), no_dist=True, planner=planner)
                self.assertTrue(same(parts[0], whole[0:2]) and same(parts[1], whole[7:9]))

    def test_two_extensions(self):
        """torch undoes several extensions in the wrong order; Reader in the right one"""
        for made in ([ZStandard(), Plus()], [Plus(), ZStandard()]):
            for writer in (FileSystemWriter, Writer):
                with worlds.Folder() as folder:
                    state = {"w": truth("w", (40,)), "step": 3}
                    dcp.save(state, storage_writer=writer(folder("x"), _extensions=made), no_dist=True)
                    self.assertTrue(same(load(Reader(folder("x"), registry()), (40,)), truth("w", (40,))))
                    got = {"step": 0}
                    dcp.load(got, storage_reader=Reader(folder("x"), registry()), no_dist=True)
                    self.assertEqual(got["step"], 3)
                    with self.assertRaises(dcp.CheckpointException):
                        load(FileSystemReader(folder("x"), registry()), (40,))

    def test_names_that_lead_out(self):
        """torch follows a name out of the directory; Reader refuses it"""
        for transformed in (False, True):
            options = {"_extensions": [Rot13Example()]} if transformed else {}
            with worlds.Folder() as folder:
                dcp.save({"w": truth("w", (4,)), "v": 1}, storage_writer=Writer(folder("x"), **options),
                         no_dist=True)
                os.rename(folder("x", "__0_0.distcp"), folder("elsewhere"))

                def lead_out(found):
                    for place in found.storage_data.values():
                        place.relative_path = "../elsewhere"
                change_metadata(folder("x"), lead_out)
                self.assertTrue(same(load(FileSystemReader(folder("x"), registry()), (4,)), truth("w", (4,))))
                self.refused(r"\.\./elsewhere|leads out|name", Reader(folder("x"), registry()), (4,))
                with self.assertRaises(dcp.CheckpointException):
                    dcp.load({"v": 0}, storage_reader=Reader(folder("x"), registry()), no_dist=True)

    def test_bytes_read(self):
        """for ten rows torch reads the tensor ten times; Reader the rows"""
        whole = truth("w", (1000, 1000))
        rows = [[(100 * i, 100 * i + 1), (0, 1000)] for i in range(10)]
        with worlds.Folder() as folder:
            dcp.save({"w": whole}, storage_writer=Writer(folder("x")), no_dist=True)
            counts = {}
            for reader in (FileSystemReader, Reader, FileSystemReader, Reader):  # imports read files too
                parts = [filled((1, 1000), torch.float32) for _ in rows]
                state = {"w": boxed.checkpointable(whole.shape, whole.dtype, rows, parts)}
                before = bytes_read()
                dcp.load(state, storage_reader=reader(folder("x")), no_dist=True)
                counts[reader] = bytes_read() - before
                self.assertTrue(all(same(part, whole[edge[0]:edge[1]]) for part, (edge, _) in zip(parts, rows)))
            self.assertGreater(counts[FileSystemReader], 10 * whole.nbytes)
            self.assertLess(counts[Reader], 100000)

    def test_safetensors_items(self):
        """torch cannot read the safetensors that its writer makes; Reader can"""
        with worlds.Folder() as folder:
            dcp.save({"w": truth("w", (6, 2))}, no_dist=True, storage_writer=FileSystemWriter(
                folder("x"), serialization_format=SerializationFormat.SAFETENSORS))
            with self.assertRaises(dcp.CheckpointException):
                load(FileSystemReader(folder("x")), (6, 2))
            self.assertTrue(same(load(Reader(folder("x")), (6, 2)), truth("w", (6, 2))))

    def test_safetensors_and_extensions(self):
        """torch says that safetensors went through extensions, and does not do it; Writer does, Reader undoes it"""
        state = {"w": truth("w", (6, 2)), "step": 3}
        for made in ([ZStandard()], [Rot13Example()], [Plus(), ZStandard()]):
            options = {"_extensions": made, "serialization_format": SerializationFormat.SAFETENSORS}
            with worlds.Folder() as folder:
                dcp.save(state, no_dist=True, storage_writer=FileSystemWriter(folder("torch"), **options))
                self.refused(r"__0_0\.distcp: w\b", Reader(folder("torch"), registry()), (6, 2))
                dcp.save(state, no_dist=True, storage_writer=Writer(folder("x"), **options))
                got = {"w": filled((6, 2), torch.float32), "step": 0}
                dcp.load(got, storage_reader=Reader(folder("x"), registry()), no_dist=True)
                self.assertTrue(same(got["w"], state["w"]) and got["step"] == 3)
                with mock.patch.dict(sys.modules, {"safetensors.torch": None}):
                    self.refused("w, .*safetensors", Reader(folder("x"), registry()), (6, 2))

    def test_uneven_fsdp_and_tp(self):
        """FSDP2 over TP, 7 rows: torch saves 6 of them and says nothing; 13 rows it cannot save"""
        with worlds.Folder() as folder:
            self.assertEqual(set(worlds.run(6, save_uneven, folder, 7, FileSystemWriter, None)), {None})
            self.assertEqual(set(worlds.run(6, load_uneven, folder, 7, FileSystemReader, None)), {False})
            said = worlds.run(6, load_uneven, folder, 7, Reader, LoadPlanner())
            self.assertTrue(all("in the item, but" in one for one in said), said)
        with worlds.Folder() as folder:
            said = worlds.run(6, save_uneven, folder, 7, Writer, None)
            self.assertTrue(all("SavePlanner" in one for one in said), said)
            said = worlds.run(6, save_uneven, folder, 13, FileSystemWriter, None)
            self.assertTrue(all("overlapping" in one for one in said), said)
        with worlds.Folder() as folder:
            for n in (7, 13, 2):
                self.assertEqual(set(worlds.run(6, save_uneven, folder, n, Writer, SavePlanner())), {None})
                self.assertEqual(set(worlds.run(6, load_uneven, folder, n, Reader, LoadPlanner())), {True})
            whole = filled((7, 4), torch.float32)
            dcp.load({"0": {"weight": whole}}, storage_reader=FileSystemReader(folder("7")), no_dist=True)
            self.assertTrue(same(whole, truth("w 7", (7, 4)).nan_to_num(0)))
            said = worlds.run(6, load_uneven, folder, 13, Reader, None)
            self.assertTrue(all("LoadPlanner" in one for one in said), said)

    def test_every_pair(self):
        """torch compares every stored box with every wanted one; LoadPlanner does not"""
        n = 60
        chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 1000))) for i in range(n)]
        about = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((n, 1000)), chunks)
        rows = [[(i, i + 1), (0, 1000)] for i in range(n)]
        tensor = boxed.checkpointable((n, 1000), torch.float32, rows, [None] * n)
        compared, real = [0], planner_helpers._check_shard_metadata_pair_overlap

        def counted(*args):
            compared[0] += 1
            return real(*args)
        planner_helpers._check_shard_metadata_pair_overlap = counted
        try:
            plans, counts = [], []
            for planner in (dcp.DefaultLoadPlanner(), LoadPlanner()):
                compared[0] = 0
                metadata = dcp.Metadata(state_dict_metadata={"w": about})
                planner.set_up_planner({"w": tensor}, metadata, True)
                plans.append(planner.create_local_plan())
                counts.append(compared[0])
        finally:
            planner_helpers._check_shard_metadata_pair_overlap = real
        self.assertEqual(counts, [n * n, 0])
        key = (lambda item: item.dest_index.offset)
        self.assertEqual(sorted(plans[0].items, key=key), sorted(plans[1].items, key=key))

    def test_views_in_background(self):
        """torch cannot stage a DTensor of the CPU that is a view for async_save; Writer can"""
        def stage(writer, folder):
            from torch.distributed.tensor import DTensor, Replicate
            mesh = init_device_mesh("cpu", (1,))
            tensor = DTensor.from_local(torch.ones(8)[4:], mesh, [Replicate()])
            try:
                staged = writer(folder("x")).stage({"w": tensor})
            except RuntimeError as error:
                return str(error)
            return bool((staged["w"].to_local() == 1).all()) and staged["w"].placements == tensor.placements
        with worlds.Folder() as folder:
            self.assertIn("invalid python storage", worlds.run(1, stage, FileSystemWriter, folder)[0])
            self.assertEqual(worlds.run(1, stage, Writer, folder), [True])

    def test_short_file(self):
        """a file that ends too early is named"""
        with worlds.Folder() as folder:
            dcp.save({"w": truth("w", (400,)), "v": 5}, storage_writer=Writer(folder("x")), no_dist=True)
            with open(folder("x", "__0_0.distcp"), "r+b") as file:
                file.truncate(1000)
            self.refused("__0_0.distcp", Reader(folder("x")), (400,))
            os.truncate(folder("x", "__0_0.distcp"), 100)
            with self.assertRaises(dcp.CheckpointException) as raised:
                dcp.load({"v": 0}, storage_reader=Reader(folder("x")), no_dist=True)
            self.assertIn("__0_0.distcp: the file ends before byte", str(raised.exception))


if __name__ == "__main__":
    tap.main()
