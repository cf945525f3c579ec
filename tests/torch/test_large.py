"""Beyond 4 GiB: items whose archives are zip64, and offsets that need more than 32 bits.

The tensors are zeros but for a few places, so that they cost no memory until they are written.
"""
import os
import shutil
import tempfile
import unittest

import numpy
import torch
import torch.distributed.checkpoint as dcp

import reshard
import tap
import worlds
from tensors import S0, Want, filled, same, truth

ROWS, WIDTH = 2**32 // 4096 + 3, 4096  # of bytes: a little more than 4 GiB
PLACES = (0, 2**31 // WIDTH, ROWS - 1)
ROOM = 12 * 2**30


def large():
    tensor = torch.from_numpy(numpy.zeros((ROWS, WIDTH), dtype=numpy.uint8))
    for row in PLACES:
        tensor[row] = truth(f"row {row}", (WIDTH,), torch.uint8)
    return tensor


@unittest.skipUnless(shutil.disk_usage(tempfile.gettempdir()).free > ROOM, "the disk has less than 12 GiB")
class Large(unittest.TestCase):
    def rows(self, path):
        """Single rows, and what comes after the large tensor."""
        with reshard.open(path) as checkpoint:
            for row in PLACES:
                text = f"u8[{ROWS},{WIDTH}] @ {{ {row}:{row + 1} }}"
                want = Want("large", (ROWS, WIDTH), torch.uint8, text)
                report = checkpoint.load([want.local])
                self.assertTrue(same(want.arrays[0][0], truth(f"row {row}", (WIDTH,), torch.uint8)))
                self.assertLess(report.nbytes_read, 2**20, "only what is wanted is read")
            after = Want("after", (5, 4), torch.float32, ((2,), (S0,)))
            checkpoint.load([after.local])
            self.assertTrue(same(torch.cat(after.arrays), truth("after", (5, 4))))

    def test_load(self):
        """torch's item of more than 4 GiB, and the one behind it"""
        with worlds.Folder() as folder:
            writer = dcp.FileSystemWriter(folder("x"), sync_files=False)
            dcp.save({"large": large(), "after": truth("after", (5, 4))}, storage_writer=writer,
                     no_dist=True)
            self.rows(folder("x"))

    def test_save(self):
        """an item of more than 4 GiB that torch reads"""
        whole, after = large(), truth("after", (5, 4))
        with worlds.Folder() as folder:
            reshard.save(folder("x"), {"large": whole, "after": after}, torch_places=True)
            self.rows(folder("x"))
            state = {"after": filled((5, 4), torch.float32)}
            dcp.load(state, checkpoint_id=folder("x"), no_dist=True)
            self.assertTrue(same(state["after"], after))
            # An item is what torch.save writes. Cut off behind it, the file can be mapped, not read.
            places = dcp.FileSystemReader(folder("x")).read_metadata().storage_data
            behind = next(place.offset for key, place in places.items() if key.fqn == "after")
            self.assertGreater(behind, 2**32)
            os.truncate(folder("x", "__0_0.distcp"), behind)
            item = torch.load(folder("x", "__0_0.distcp"), mmap=True)
            self.assertEqual((item.shape, item.dtype), (whole.shape, whole.dtype))
            for row in PLACES:
                self.assertTrue(same(item[row], whole[row]))


if __name__ == "__main__":
    tap.main()
