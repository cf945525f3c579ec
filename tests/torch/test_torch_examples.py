"""The examples that need torch run, and say what they should."""
import os
import subprocess
import sys
import unittest

import tap

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/python")


class Examples(unittest.TestCase):
    def says(self, name, *lines):
        done = subprocess.run([sys.executable, os.path.join(EXAMPLES, name)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        said = done.stdout.decode()
        self.assertEqual(done.returncode, 0, said)
        for line in lines:
            self.assertIn(line, said)

    def test_tensor_parallel(self):
        """a weight on its way, and activations in slices"""
        self.says("tensor_parallel.py", "f32[7,5] @ 4 : S(0)  ->  f32[7,5] @ 2 ranks=2,3 : S(1): the same",
                  "the same gradients, with 10272 of 12352 bytes kept for backward")

    def test_weight_update(self):
        """a trainer and an engine with other ranks, names, dtypes and fused tensors"""
        self.says("weight_update.py", "step 2: the engine has the weights of the trainer",
                  "rank 3 has its heads of k: True")


if __name__ == "__main__":
    tap.main()
