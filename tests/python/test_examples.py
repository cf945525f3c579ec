"""The examples run, and print what is expected."""
import importlib.util
import os
import subprocess
import sys
import unittest

import tap

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/python")


class Examples(unittest.TestCase):
    def test_tour(self):
        """the tour, from its first cell to its last"""
        path = os.path.join(EXAMPLES, "tour.py")
        done = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.stdout.decode()
        self.assertEqual(done.returncode, 0, said)
        for line in ("covers its tensor once", "differences: [] damage: []", "moved    128 B",
                     "EEXIST, a FileExistsError"):
            self.assertIn(line, said)

    def runs(self, name, *lines):
        path = os.path.join(EXAMPLES, name)
        done = subprocess.run([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout.decode())
        for line in lines:
            self.assertIn(line, done.stdout.decode())

    def test_merge(self):
        """a checkpoint of four ranks as one file"""
        self.runs("merge.py", "1 tensors", "the same tensors, by their digests")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not there")
    def test_fsdp_to_tp(self):
        """saved by FSDP2, loaded by tensor parallel"""
        self.runs("fsdp_to_tp.py", "saved by 4 ranks: .metadata __0_0.distcp", "loaded by 2 ranks: 4 tensors")


if __name__ == "__main__":
    tap.main()
