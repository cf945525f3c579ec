"""What torch's own tests leave out: transforms in a row, thousands of chunks, strided shards that do not
come out even, other pickles of the same metadata, checksums that are not there or wrong."""
import io
import os
import pickle
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard

import boxed
import reshard
import tap
import worlds
from tensors import R, S0, S1, Meshes, Want, about, cut, dtensor, filled, of, same, sharded, truth

F32 = torch.float32


def strided(dp, tp, dim=0):
    """As fully_shard puts it on top of tensor parallelism on the same dim."""
    return (dp, tp), (_StridedShard(dim, split_factor=tp), (S0, S1)[dim])


def save_strided(folder):
    """Every extent; those that one box per rank cannot describe are refused by torch itself."""
    devices, saved = Meshes(), []
    for dp, tp in ((3, 2), (2, 3)):
        for n in range(1, 20):
            name = f"{dp} {tp} {n}"
            state = {name: sharded(truth(name, (n, 2)), strided(dp, tp), devices[(dp, tp)])}
            try:
                dcp.save(state, checkpoint_id=folder(name))
                saved.append(name)
            except dcp.CheckpointException:
                pass
    return saved


def save_many(folder):
    """Thousands of boxes, of tensors and of values."""
    rank, n = dist.get_rank(), 2600
    plan = [[[(i, i + 1), (c, c + 3)] for i in range(r, n // 2, 2) for c in (0, 3)] for r in range(2)]
    whole = truth("boxes", (n // 2, 6))
    parts = [whole[tuple(slice(*edge) for edge in box)] for box in plan[rank]]
    state = {"boxes": boxed.checkpointable(whole.shape, F32, plan[rank], parts)}
    for i in range(1200):
        state[f"layer.{i}.w"] = truth(f"layer.{i}.w", (3,))
        state[f"layer.{i}.n"] = i
    state["x" * 300] = truth("x" * 300, (2,))
    dcp.save(state, checkpoint_id=folder("many"))


def save_partial(folder):
    device_mesh = Meshes()[(2,)]
    tensor = dtensor(truth("w", (4,)), (4,), device_mesh, [Partial()])
    try:
        dcp.save({"w": tensor}, checkpoint_id=folder("partial"))
    except BaseException as error:
        return str(error)
    return ""


def save_line(folder, nranks, count):
    name = f"{count} over {nranks}"
    dcp.save({name: sharded(truth(name, (count,)), ((nranks,), (S0,)), Meshes()[(nranks,)])},
             checkpoint_id=folder(name))


def save_alone(folder, name, *extensions):
    writer = FileSystemWriter(folder(name), _extensions=list(extensions) or None)
    dcp.save({"w": truth("w", (50, 6)), "step": 3}, storage_writer=writer, no_dist=True)


class Gaps(unittest.TestCase):
    def load(self, checkpoint, name, shape, layout, **options):
        want = Want(name, shape, F32, layout)
        report = checkpoint.load([want.local], **options)
        for got, right in zip(want.arrays, cut(truth(name, shape), layout), strict=True):
            self.assertTrue(same(got, right), f"{name} -> {want.text}")
        return report

    def refused(self, status, work, *words):
        with self.assertRaises(reshard.Error) as raised:
            work()
        self.assertEqual(raised.exception.status, status, str(raised.exception))
        for word in words:
            self.assertIn(word, str(raised.exception))

    def test_two_transforms(self):
        """zstd of zstd"""
        with worlds.Folder() as folder:
            save_alone(folder, "twice", ZStandard(), ZStandard())
            with reshard.open(folder("twice")) as checkpoint:
                self.load(checkpoint, "w", (50, 6), ((3,), (S1,)))
                self.assertEqual(dict(checkpoint.plain_values), {"step": 3})

    def test_strided(self):
        """strided shards of every extent, and into them, where torch cannot put them into one box"""
        with worlds.Folder() as folder:
            saved = worlds.run(6, save_strided, folder)[0]
            self.assertGreater(len(saved), 30)
            for name in saved:
                n = int(name.split()[2])
                with reshard.open(folder(name)) as checkpoint:
                    for layout in (((1,), (R,)), ((4,), (S0,)), strided(2, 2), strided(3, 2),
                                   strided(2, 4), strided(4, 2, dim=1)):
                        self.load(checkpoint, name, (n, 2), layout)
            whole = {"w": truth("w", (13, 2))}
            torch.save(whole, folder("13.pt"))
            with reshard.open(folder("13.pt")) as checkpoint:
                self.load(checkpoint, "w", (13, 2), strided(3, 2))

    def test_many(self):
        """more chunks, tensors and values than one batch of a pickle"""
        with worlds.Folder() as folder:
            worlds.run(2, save_many, folder)
            with reshard.open(folder("many")) as checkpoint:
                found = about(checkpoint)
                self.assertEqual(found["boxes"], ("f32", (1300, 6), 2600))
                self.assertEqual(len(found), 1202)
                self.assertEqual(dict(checkpoint.plain_values), {f"layer.{i}.n": i for i in range(1200)})
                for layout in (((1,), (R,)), ((2, 3), (S0, S1)), ((7,), (S0,))):
                    self.load(checkpoint, "boxes", (1300, 6), layout)
                for i in range(1200):
                    self.load(checkpoint, f"layer.{i}.w", (3,), ((1,), (R,)))
                self.load(checkpoint, "x" * 300, (2,), ((2,), (S0,)))

    def test_lines(self):
        """the extents of torch's planner tests: 128 over 8 and 4, 120 over 4 for 3"""
        with worlds.Folder() as folder:
            for nranks, count, others in ((8, 128, (4,)), (4, 128, (8,)), (4, 120, (3, 5, 7))):
                worlds.run(nranks, save_line, folder, nranks, count)
                name = f"{count} over {nranks}"
                with reshard.open(folder(name)) as checkpoint:
                    for other in others:
                        report = self.load(checkpoint, name, (count,), ((other,), (S0,)))
                        self.assertEqual(report.nbytes_read, 4 * count, "each byte is read once")

    def test_partial(self):
        """Partial is refused, by torch when saving and here when loading"""
        with worlds.Folder() as folder:
            self.assertIn("partial placements", worlds.run(2, save_partial, folder)[0])
            save_alone(folder, "w")
            with reshard.open(folder("w")) as checkpoint:
                want = Want("w", (50, 6), F32, ((2,), (Partial(),)))
                self.refused("EINVAL", lambda: checkpoint.load([want.local]), "Partial")

    def test_misfits(self):
        """a missing tensor, another shape, another dtype, and what may be missing"""
        with worlds.Folder() as folder:
            save_alone(folder, "w")
            with reshard.open(folder("w")) as checkpoint:
                for name, shape, dtype in (("v", (50, 6), F32), ("w", (50, 7), F32), ("w", (300,), F32),
                                           ("w", (50, 6), torch.int32)):
                    want = Want(name, shape, dtype, ((2,), (S0,)))
                    self.refused("EMISMATCH", lambda: checkpoint.load([want.local]), name)
                missing = Want("v", (50, 6), F32, ((2,), (S0,)))
                there = Want("w", (50, 6), F32, ((2,), (S0,)))
                checkpoint.load([missing.local, there.local], strict=False)
                self.assertTrue(same(missing.arrays[0], filled((25, 6), F32)))
                self.assertTrue(same(there.arrays[1], truth("w", (50, 6))[25:]))

    def test_pickles(self):
        """the same metadata as other versions of torch and Python pickle it"""
        with worlds.Folder() as folder:
            save_alone(folder, "w")
            path = os.path.join(folder("w"), ".metadata")
            with open(path, "rb") as file:
                metadata = pickle.load(file)
            for old in (False, True):
                if old:
                    del metadata.storage_meta, metadata.version
                for protocol in (2, 3, 4, 5):
                    for pickler in (pickle.Pickler, pickle._Pickler):
                        stream = io.BytesIO()
                        pickler(stream, protocol).dump(metadata)
                        with open(path, "wb") as file:
                            file.write(stream.getvalue())
                        with reshard.open(folder("w")) as checkpoint:
                            self.load(checkpoint, "w", (50, 6), ((3,), (S1,)))
                            self.assertEqual(dict(checkpoint.plain_values), {"step": 3})

    def test_no_checksums(self):
        """files for which torch was told not to compute CRC-32"""
        torch.serialization.set_crc32_options(False)
        self.addCleanup(torch.serialization.set_crc32_options, True)
        with worlds.Folder() as folder:
            save_alone(folder, "plain")
            save_alone(folder, "zstd", ZStandard())
            torch.save({"w": truth("w", (50, 6))}, folder("x.pt"))
            for name in ("plain", "zstd", "x.pt"):
                with reshard.open(folder(name)) as checkpoint:
                    report = self.load(checkpoint, "w", (50, 6), ((1,), (R,)))
                    self.assertEqual(report.nbytes_unchecked, 1200, name)

    def test_damage(self):
        """a changed bit is found, also inside zstd, whose frames have no checksum of their own"""
        whole = truth("w", (50, 6)).contiguous().view(torch.uint8).numpy().tobytes()

        def damaged(item):
            at = item.index(whole) + 600
            return item[:at] + bytes([item[at] ^ 1]) + item[at + 1:]

        with worlds.Folder() as folder:
            for name in ("plain", "zstd"):
                save_alone(folder, name, *([ZStandard()] if name == "zstd" else []))
                with reshard.open(folder(name)) as checkpoint:
                    report = self.load(checkpoint, "w", (50, 6), ((1,), (R,)))
                    self.assertEqual(report.nbytes_unchecked, 0, name)
                path = os.path.join(folder(name), ".metadata")
                with open(path, "rb") as file:
                    metadata = pickle.load(file)
                about = next(v for k, v in metadata.storage_data.items() if k.fqn == "w")
                with open(os.path.join(folder(name), about.relative_path), "r+b") as file:
                    file.seek(about.offset)
                    item = file.read(about.length)
                    if name == "zstd":
                        item = zstandard.ZstdDecompressor().decompressobj().decompress(item)
                        item = zstandard.ZstdCompressor().compress(damaged(item))
                    else:
                        item = damaged(item)
                    file.seek(about.offset)
                    file.write(item)
                    file.truncate()
                about.length = len(item)
                with open(path, "wb") as file:
                    pickle.dump(metadata, file)
                with reshard.open(folder(name)) as checkpoint:
                    want = Want("w", (50, 6), F32, of((50, 6), F32, ((1,), (R,))))
                    self.refused("EFORMAT", lambda: checkpoint.load([want.local]), "w", "CRC")
                    self.assertEqual(len(reshard.verify(checkpoint)), 1, name)


if __name__ == "__main__":
    tap.main()
