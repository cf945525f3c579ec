"""Tensors of a checkpoint, sliced as NumPy slices arrays, reading only what is needed."""
import importlib.util
import json
import os
import random
import struct
import sys
import tempfile
import threading
import unittest
from typing import Mapping
from unittest import mock

import numpy as np
import reshard
import tap
from reshard import slicing

try:
    import torch
except ImportError:
    torch = None

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden")
LIKES = ["numpy", "memoryview"] + (["torch"] if torch is not None else [])


def write_safetensors(path, tensors):
    """Writes a file of the format from (dtype name, array)."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Slices(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        rng = np.random.default_rng(5)
        cls.arrays = {"small": rng.integers(0, 1 << 30, (7, 1, 30, 5)).astype("i4"),
                      "wide": rng.integers(0, 255, (40, 6000)).astype("u1"), "line": rng.random(101),
                      "deep": rng.random((3, 20, 3000)).astype("f4"), "none": np.zeros((0, 3), "f4"),
                      "one": np.array(3.5), "pairs": (rng.random((9, 31)) + 1j * rng.random((9, 31))).astype("c8")}
        kinds = {"i4": "I32", "u1": "U8", "f8": "F64", "f4": "F32", "c8": "C64"}
        cls.path = os.path.join(cls.folder.name, "x.safetensors")
        write_safetensors(cls.path, {name: (kinds[array.dtype.str[1:]], array) for name, array in cls.arrays.items()})
        # The same, cut: a slice then comes from several files.
        cls.cut = os.path.join(cls.folder.name, "cut")
        reshard.convert(cls.path, cls.cut, format="dcp", mesh="3",
                        place=lambda tensor: f"S({tensor.ndim - 1})" if tensor.ndim else "R")

    def index(self, shape):
        """Returns a random index."""
        def one(extent):
            if random.random() < 0.25 and extent:
                return random.randrange(-extent, extent)

            def end():
                return random.choice([None, random.randint(-extent - 2, extent + 2)])

            return slice(end(), end(), random.choice([None, 1, 1, 2, 3, -1, -2, 7, -11, 1000]))

        found = [one(extent) for extent in shape[:random.randint(0, len(shape))]]
        if random.random() < 0.3 and shape:
            found = found[:1] + [Ellipsis] + ([one(shape[-1])] if len(shape) > 1 and random.random() < 0.5 else [])
        for _ in range(random.choice([0, 0, 0, 1, 2])):
            found.insert(random.randint(0, len(found)), None)
        return tuple(found) if len(found) != 1 or random.random() < 0.5 else found[0]

    def compare(self, checkpoint, name, index, like):
        right, got = self.arrays[name][index], checkpoint[name].read(index, like=like)
        about = f"{name}[{index}] as {like}"
        if like == "memoryview":
            self.assertEqual(bytes(got), right.tobytes(), about)
            if right.size:
                self.assertEqual(got.shape, right.shape + (2,) * (name == "pairs"), about)
            return
        self.assertEqual(tuple(got.shape), right.shape, about)
        self.assertTrue(np.array_equal(np.asarray(got), right), about)
        self.assertTrue(np.asarray(got).flags.c_contiguous, about)

    def test_random(self):
        """thousands of random indices equal those of NumPy, in every framework"""
        random.seed(11)
        with reshard.open(self.path) as whole, reshard.open(self.cut) as cut:
            for name, array in self.arrays.items():
                for i in range(400):
                    self.compare(cut if i % 2 else whole, name, self.index(array.shape), LIKES[i % len(LIKES)])

    def test_splits(self):
        """elements that are far apart are read separately, others together"""
        tensor = slicing.Selection((slice(None, None, 2), slice(None, None, 2)), (10, 8192))
        reading = tensor.reading(4)
        self.assertEqual((len(reading.boxes), reading.shape), (5, (5, 8191)))
        near = slicing.Selection((slice(None, None, -2), slice(5)), (10, 8)).reading(4)
        self.assertEqual((near.boxes, near.shape), ([((1, 0), (9, 5), (0, 0))], (9, 5)))

    def test_only_what_is_needed(self):
        """a slice reads its own bytes"""
        with reshard.open(self.path) as checkpoint:
            told = []
            load = checkpoint._load

            def counted(*args, **options):
                told.append(load(*args, **options))
                return told[-1]

            checkpoint._load = counted
            checkpoint["wide"][3:5]
            checkpoint["deep"][:, ::10]
            checkpoint["deep"][1, 4, 100:200]
            checkpoint["none"][:]
            checkpoint["wide"][5:5]
        self.assertEqual([one.nbytes_needed for one in told], [2 * 6000, 3 * 2 * 3000 * 4, 400])

    def test_into(self):
        """into existing memory, with its strides"""
        with reshard.open(self.cut) as checkpoint:
            wide = np.zeros((3, 30, 9), "i4")
            out = wide[:, ::2, 1:5]
            self.assertIs(checkpoint["small"].read((slice(2, 5), 0, slice(15), slice(4)), out=out), out)
            self.assertTrue((out == self.arrays["small"][2:5, 0, :15, :4]).all())
            self.assertFalse(wide[:, 1::2].any() or wide[:, :, 5:].any())
            line = np.zeros((1, 4))
            checkpoint["line"].read((None, slice(7, 11)), out=line)
            self.assertTrue((line[0] == self.arrays["line"][7:11]).all())
            half = np.zeros(4, "f4")
            checkpoint["line"].read(slice(4), out=half, dtype="f32")
            self.assertTrue((half == self.arrays["line"][:4].astype("f4")).all())
            for index, array, kind in ((slice(0, 8, 2), np.zeros(4), reshard.InvalidError),
                                       (slice(0, 5), np.zeros(4), reshard.MismatchError),
                                       (slice(0, 4), np.zeros(4, "f4"), reshard.MismatchError),
                                       (slice(0, 4), bytes(32), reshard.InvalidError)):
                with self.assertRaises(kind):
                    checkpoint["line"].read(index, out=array)

    def test_refused(self):
        """an invalid index is an IndexError or a TypeError, as in NumPy"""
        with reshard.open(self.path) as checkpoint:
            for name, index, kind in (("small", 7, IndexError), ("small", -8, IndexError), ("one", 0, IndexError),
                                      ("small", (0,) * 5, IndexError), ("small", (..., 0, ...), IndexError),
                                      ("small", [1, 2], TypeError), ("small", True, TypeError),
                                      ("small", np.array([1]), TypeError), ("small", 1.0, TypeError),
                                      ("small", "x", TypeError), ("small", slice(0, 5, 0), ValueError)):
                with self.assertRaises(kind, msg=str(index)):
                    checkpoint[name][index]
            self.assertEqual(checkpoint["line"][np.int64(3)], self.arrays["line"][3])

    def test_mapping(self):
        """a checkpoint is a mapping of names to tensors"""
        with reshard.open(self.cut) as checkpoint:
            self.assertEqual(set(checkpoint), set(self.arrays))
            self.assertEqual((len(checkpoint), checkpoint.format), (7, "dcp"))
            self.assertIn(Mapping[str, reshard.LazyTensor], type(checkpoint).__orig_bases__)  # for type checkers
            self.assertTrue("wide" in checkpoint and "other" not in checkpoint and 3 not in checkpoint)
            wide = checkpoint["wide"]
            self.assertEqual((wide.dtype, wide.shape, wide.ndim, len(wide), wide.nbytes, wide.nboxes),
                             ("u8", (40, 6000), 2, 40, 240000, 3))
            self.assertEqual([(box.lo, box.len) for box in wide.boxes],
                             [((0, 2000 * i), (40, 2000)) for i in range(3)])
            self.assertTrue(all(box.file in checkpoint.files for box in wide.boxes))
            self.assertEqual(wide.layout.check().cover, "once")
            self.assertTrue((np.asarray(wide) == self.arrays["wide"]).all())
            self.assertEqual(np.asarray(wide, dtype="f4").dtype, np.float32)
            self.assertTrue(all((row == right).all() for row, right in zip(wide, self.arrays["wide"])))
            for lookup in (lambda: checkpoint["other"], lambda: checkpoint.plain_values["other"]):
                with self.assertRaises(KeyError) as raised:
                    lookup()
                self.assertIsInstance(raised.exception, reshard.MissingError)
                self.assertIn("other", str(raised.exception))
            with self.assertRaises(TypeError):
                len(checkpoint["one"])
        self.assertIn("closed", repr(checkpoint))
        for work in (lambda: wide[:], lambda: checkpoint["wide"], lambda: len(checkpoint)):
            with self.assertRaises(ValueError):
                work()

    def test_golden(self):
        """checkpoints that torch wrote have the expected tensors"""
        seen = 0
        for name in sorted(os.listdir(GOLDEN)):
            paths = [os.path.join(GOLDEN, name, part) for part in ("ckpt", "truth.safetensors")]
            if not all(map(os.path.exists, paths)):
                continue
            with reshard.open(paths[0], like="raw") as found, reshard.open(paths[1], like="raw") as truth:
                for key in truth:
                    self.assertEqual(found[key][...].tobytes(), truth[key][...].tobytes(), (name, key))
                    seen += 1
        self.assertGreater(seen, 100)

    def test_everything(self):
        """a whole checkpoint as a state dict, in every framework"""
        for like in LIKES + ["raw"]:
            with reshard.open(self.cut, like=like) as checkpoint:
                found = checkpoint.state_dict()
            self.assertEqual(set(found), set(self.arrays))
            for name, array in self.arrays.items():
                got = found[name].numpy() if like == "torch" else found[name]
                self.assertEqual(bytes(got) if like == "memoryview" else got.tobytes(), array.tobytes(), (name, like))

    def test_dtypes(self):
        """dtypes that NumPy does not have: as torch, as bits, cast, or an error"""
        path = os.path.join(self.folder.name, "bf16.safetensors")
        write_safetensors(path, {"b": ("BF16", np.array([0x3F80, 0x4000, 0xC040], "u2"))})
        with reshard.open(path) as checkpoint:
            tensor = checkpoint["b"]
            self.assertEqual(tensor.read(like="raw").tolist(), [0x3F80, 0x4000, 0xC040])
            self.assertEqual(tensor.read(dtype="f32").tolist(), [1, 2, -3])
            self.assertEqual(tensor.read(slice(1, None), dtype=np.float64).tolist(), [2, -3])
            self.assertEqual(tensor.read(like="memoryview").tolist(), [0x3F80, 0x4000, 0xC040])
            if torch is not None:
                self.assertEqual((tensor.torch().dtype, tensor.torch().tolist()), (torch.bfloat16, [1, 2, -3]))
                self.assertEqual(tensor.read(dtype=torch.float16, like="torch").dtype, torch.float16)
            with mock.patch.dict(sys.modules, {"ml_dtypes": None}):
                with self.assertRaises(reshard.UnsupportedError) as raised:
                    tensor.read(like="numpy")
                self.assertIn('like="raw"', str(raised.exception))

    def test_usable(self):
        """a slice is an array of ml_dtypes if it is installed, else a torch tensor, else its bits"""
        path = os.path.join(self.folder.name, "small.safetensors")
        write_safetensors(path, {"b": ("BF16", np.array([0x3F80, 0x4000, 0xC040], "u2")),
                                 "e": ("F8_E4M3", np.array([0x38, 0xB8], "u1")), "f": ("F32", np.ones(2, "f4"))})
        without = {"ml_dtypes": None}
        with reshard.open(path) as checkpoint:
            self.assertIsInstance(checkpoint["f"][:1], np.ndarray)
            self.assertEqual(np.asarray(checkpoint["b"], dtype="f4").tolist(), [1, 2, -3])
            if importlib.util.find_spec("ml_dtypes"):
                for name, values in (("b", [1, 2, -3]), ("e", [1, -1])):
                    self.assertIsInstance(checkpoint[name][:], np.ndarray)
                    self.assertEqual(checkpoint[name][:].astype("f4").tolist(), values)
                    self.assertEqual(checkpoint[name][::-1].astype("f4").tolist(), values[::-1])
            if torch is not None:
                with mock.patch.dict(sys.modules, without):
                    self.assertEqual(checkpoint["b"][1:].tolist(), [2, -3])
                    self.assertEqual(checkpoint["e"][:].dtype, torch.float8_e4m3fn)
                    self.assertEqual(checkpoint.state_dict()["b"].dtype, torch.bfloat16)
            with mock.patch.dict(sys.modules, {**without, "torch": None}):
                self.assertEqual((checkpoint["b"][:].dtype, checkpoint["e"][1:].dtype), (np.uint16, np.uint8))
                self.assertEqual(checkpoint["b"][1:].tolist(), [0x4000, 0xC040])
            with mock.patch.dict(sys.modules, {**without, "numpy": None}):
                self.assertEqual(checkpoint["f"][:].tolist(), [1, 1])
                self.assertIsInstance(checkpoint["f"][:], memoryview)

    def test_opening(self):
        """errors of open have the cause"""
        broken = os.path.join(self.folder.name, "broken.safetensors")
        with open(broken, "wb") as file:
            file.write(b"\xff" * 20)
        for path, kind, builtin in ((os.path.join(self.folder.name, "no such"), reshard.MissingFileError,
                                     FileNotFoundError), (broken, reshard.FormatError, ValueError)):
            with self.assertRaises(kind) as raised:
                reshard.open(path)
            self.assertIsInstance(raised.exception, builtin)
            self.assertIn(os.path.basename(path), str(raised.exception))
        for options in ({"like": "jax"}, {"format": "zip"}):
            with self.assertRaises(reshard.InvalidError):
                reshard.open(self.path, **options)
        with reshard.open(self.path, format="safetensors") as checkpoint:
            self.assertEqual(checkpoint.format, "safetensors")

    def test_threads(self):
        """threads read one checkpoint at once"""
        wrong = []
        with reshard.open(self.cut) as checkpoint:
            def work(number):
                for i in range(40):
                    lo = (number * 131 + i * 17) % 5000
                    if not (checkpoint["wide"][:, lo:lo + 900] == self.arrays["wide"][:, lo:lo + 900]).all():
                        wrong.append((number, i))

            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])

    def test_closed_while_read(self):
        """close waits for reads of other threads"""
        for _ in range(20):
            checkpoint, answers = reshard.open(self.cut), []

            def work():
                try:
                    while True:
                        answers.append((checkpoint["wide"][:] == self.arrays["wide"]).all())
                except ValueError as error:
                    answers.append(str(error))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            while len(answers) < 5:
                pass
            checkpoint.close()
            for thread in threads:
                thread.join()
            self.assertEqual(set(answers), {True, "this Checkpoint is closed"})


if __name__ == "__main__":
    tap.main()
