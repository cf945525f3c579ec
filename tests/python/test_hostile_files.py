"""Hostile checkpoints through the Python package: an error of the library that names the file, and no memory for what
is only claimed."""
import os
import shutil
import sys
import tempfile
import unittest

import reshard
import tap

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TESTS)
import bad_parts as parts  # noqa: E402
from bad_parts import dct, index, info, meta, num, saved, state, tensor, text, tup  # noqa: E402


def path_of(*steps):
    """The pickle of a path in a state dict."""
    return tup(*(num(one) if isinstance(one, int) else text(one) for one in steps))


class HostileFiles(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        parts.FOLDER = self.folder  # where its functions write

    def with_paths(self, *paths):
        """A checkpoint of tensors with these paths in the state dict."""
        names = [f"t{number}" for number in range(len(paths))]
        parts.dcp("x", [(name, meta()) for name in names], [(index(name, (0, 0)), info()) for name in names],
                  dct(*((text(name), path_of(*path)) for name, path in zip(names, paths))))
        return reshard.open(os.path.join(self.folder, "x"))

    def test_paths(self):
        """lists with far more places than there are entries, and paths that contradict each other, are refused"""
        places, taken, key = "far more places than", "another entry is at its path", "has a key where others"
        for words, *paths in ((places, ("a", 10 ** 9)), (places, ("a", 10 ** 18), ("b",)),
                              (places, *(("a", number, 1 << 19) for number in range(4))),
                              (taken, ("a",), ("a", "b")), (taken, ("a", "b"), ("a",)), (taken, ("a",), ("a",)),
                              (key, ("a", 0), ("a", "b"))):
            with self.with_paths(*paths) as checkpoint, self.assertRaisesRegex(reshard.FormatError, words) as raised:
                checkpoint.state_dict()
            self.assertIn(self.folder, str(raised.exception))

    def test_ignored_paths(self):
        """what cannot be a path in a state dict is ignored"""
        for path in (("a", -1), ("a", 10 ** 30), (b"a\0b",), ("a",) * 1001):
            with self.with_paths(path) as checkpoint:
                self.assertIsNone(checkpoint["t0"].path)
                self.assertEqual(list(checkpoint.state_dict()), ["t0"])
                reshard.convert(checkpoint, os.path.join(self.folder, "out"), overwrite=True)

    def test_empty_places(self):
        """places of a list that were empty when it was saved are None"""
        with self.with_paths(("a", 2), ("a", 5000)) as checkpoint:
            found = checkpoint.state_dict()["a"]
        self.assertEqual(len(found), 5001)
        self.assertEqual([number for number, one in enumerate(found) if one is not None], [2, 5000])

    def claimed(self, nelements, count=1):
        """A file of tensors whose elements are all one element."""
        one = tensor(shape=(nelements,), strides=(0,))
        parts.write("claim/pytorch_model.bin", saved(state(**{f"w{number}": one for number in range(count)})))
        return reshard.open(os.path.join(self.folder, "claim"))

    def test_claims(self):
        """tensors that claim far more than their file can have are refused before memory is allocated"""
        for nelements, count in ((1 << 26, 1), (1 << 24, 300)):
            with self.claimed(nelements, count) as checkpoint:
                for like in ("numpy", "memoryview"):
                    for use in (checkpoint.state_dict, checkpoint["w0"].read):
                        with self.assertRaisesRegex(reshard.FormatError, r"tensors claim \d+ bytes"):
                            use(like=like)
        with self.claimed(1 << 20) as checkpoint:  # what is small may be repeated
            self.assertEqual(checkpoint["w0"].read().sum(), 0)

    def test_missing_file(self):
        """a file that is not there does not make claims of others plausible, and is named"""
        one = saved(tensor(shape=(1 << 26,), strides=(0,)))
        boxes = meta((1 << 26,), (((0,), (1 << 26,)),))
        parts.dcp("x", [("v", boxes), ("w", boxes)],
                  [(index("w", (0,)), info(length=len(one))), (index("v", (0,)), info("__9_0.distcp"))], data=one)
        with reshard.open(os.path.join(self.folder, "x")) as checkpoint:
            with self.assertRaisesRegex(reshard.MissingFileError, "__9_0.distcp"):
                checkpoint["w"].read()

    def test_no_memory(self):
        """a tensor that no file has, and that is larger than memory, is an error that names it"""
        parts.dcp("x", [("w", meta((1 << 44,), ()))], [])
        with reshard.open(os.path.join(self.folder, "x")) as checkpoint:
            for like in ("numpy", "memoryview"):
                with self.assertRaisesRegex(reshard.OutOfMemoryError, r"w: cannot allocate \d+ bytes for f32"):
                    checkpoint["w"].read(like=like)

    def test_empty_and_far(self):
        """an empty tensor whose extents are too large for an array is an error that names it"""
        with reshard.open(os.path.join(TESTS, "bad", "safe_empty_far.safetensors")) as checkpoint:
            for use in (checkpoint.state_dict, checkpoint["w"].read):
                with self.assertRaisesRegex(reshard.LimitError, "w: numpy has no arrays of "):
                    use(like="numpy")


if __name__ == "__main__":
    tap.main()
