"""The examples run, and say what they should."""
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


if __name__ == "__main__":
    tap.main()
