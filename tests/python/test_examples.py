"""The examples run, and print what is expected."""
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import reshard
import tap

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
EXAMPLES = os.path.join(ROOT, "examples/python")
MAKE_CHECKPOINT = os.path.join(ROOT, "build/examples/make_checkpoint")


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

    @unittest.skipUnless(os.path.exists(MAKE_CHECKPOINT), "examples/make_checkpoint is not built")
    def test_readme(self):
        """the lines of the README run on the checkpoint of the demo"""
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            blocks = re.findall(r"```python\n(.*?)```", file.read(), re.S)
        lines = next(block for block in blocks if "reshard.open" in block)
        here = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            try:
                os.chdir(folder)
                subprocess.run([MAKE_CHECKPOINT, "step-1000"], check=True, stdout=subprocess.DEVNULL)
                with reshard.open("step-1000") as checkpoint:
                    state, right = checkpoint.state_dict(), checkpoint["model.lm_head.weight"].read(like="raw")
                names = {"state": state, "rows_of_each_rank": list(np.arange(64, dtype="f4").reshape(4, 2, 8))}
                state["model"]["lm_head.weight"][:] = 0
                exec(lines, names)  # noqa: S102 (our own lines)
                self.assertEqual(reshard.diff("step-1000", "tp4"), [])
            finally:
                os.chdir(here)
        rows = names["rows"]
        self.assertEqual(reshard.digest_array(rows), reshard.digest_array(state["model"]["lm_head.weight"][10:20]))
        self.assertEqual(tuple(rows.shape), (10, right.shape[1]))
        self.assertGreater(float(abs(rows.astype("f4") if hasattr(rows, "astype") else rows.float()).max()), 0)
        self.assertEqual([part.shape for part in names["parts"]], [(4, 4)] * 4)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not there")
    def test_fsdp_to_tp(self):
        """saved by FSDP2, loaded by tensor parallel"""
        self.runs("fsdp_to_tp.py", "saved by 4 ranks: .metadata __0_0.distcp", "loaded by 2 ranks: 4 tensors")


if __name__ == "__main__":
    tap.main()
