"""Loading into another dtype has the same result as `to` of torch.

Floats out of an integer's range are left out: C, and so torch, promises nothing of them.
"""
import math
import unittest

import torch

import reshard
import tap
import worlds
from tensors import S0, Want, filled, same

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
        torch.uint8]
LAYOUT = ((3,), (S0,))


def halves():
    """Every 16-bit float there is: as f16 and as bf16."""
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    return every.view(torch.float16), every.view(torch.bfloat16)


def floats(dtype):
    """Every 16-bit value, what lies between two of them, and random bits, as one dtype."""
    f16, bf16 = (each.to(torch.float64) for each in halves())
    step = torch.tensor(0.0, dtype=torch.float64)
    between = [(a[:-1] + a[1:]) / 2 for a in (f16, bf16)]
    nudged = [torch.nextafter(b, step) for b in between] + [torch.nextafter(b, b * 2) for b in between]
    seed = torch.Generator().manual_seed(1)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(width)
    noise = torch.randint(limits.min, limits.max, (50000,), generator=seed, dtype=width).view(dtype)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, 1e-45, 1e-40, 65504,
                            65519.99, 65520, 3.4e38, 3.5e38, 1e308, -1e308], dtype=torch.float64)
    known = torch.cat([f16, bf16, *between, *nudged, special]).to(dtype)
    return torch.cat([known, noise])


def integers(dtype):
    limits = torch.iinfo(dtype)
    edges = {limits.min, limits.max, 0, 1}
    for bit in range(limits.bits):
        edges |= {sign * (2**bit + d) for d in (-1, 0, 1) for sign in (-1, 1)}
    kept = sorted(edge for edge in edges if limits.min <= edge <= limits.max)
    return torch.tensor(kept, dtype=dtype)


def within(values, to):
    """The floats whose integer part fits, as torch sees it in the dtype of the values."""
    limits = torch.iinfo(to)
    wide = values.to(torch.float64)
    return values[(wide > limits.min - 1.0) & (wide < float(limits.max) + 1.0)
                  & (wide < 2.0**limits.bits) & wide.isfinite()]


class Cast(unittest.TestCase):
    def cast(self, pairs):
        """pairs: (values, dtype to load them as)."""
        with worlds.Folder() as folder:
            torch.save({str(i): values for i, (values, _) in enumerate(pairs)}, folder("x.pt"))
            with reshard.open(folder("x.pt")) as checkpoint:
                for i, (values, to) in enumerate(pairs):
                    want = Want(str(i), values.shape, to, LAYOUT)
                    checkpoint.load([want.local], cast=True)
                    got, right = torch.cat(want.arrays), values.to(to)
                    if to.is_floating_point or to.is_complex:
                        nan = right.isnan()
                        self.assertTrue(torch.equal(got.isnan(), nan), f"NaN: {values.dtype} {to}")
                        got, right, values = got[~nan], right[~nan], values[~nan]
                    wrong = ~(got == right) if not to.is_floating_point else ~(
                        (got == right) & (got.signbit() == right.signbit()))
                    where = wrong.nonzero().flatten()[:3].tolist()
                    self.assertEqual(where, [], f"{values.dtype} to {to}: {values[where]} became "
                                     f"{got[where]}, not {right[where]}")

    def test_floats(self):
        """floats to floats, every 16-bit value and what rounds to them"""
        self.cast([(floats(a), b) for a in FLOATS for b in FLOATS])

    def test_integers(self):
        """integers to integers and floats, at every power of two"""
        self.cast([(integers(a), b) for a in INTS for b in INTS + FLOATS])

    def test_floats_to_integers(self):
        """floats to integers, within their range"""
        self.cast([(within(floats(a), b), b) for a in FLOATS for b in INTS])

    def test_bool(self):
        """to and from bool; whatever is not zero is true"""
        both = torch.tensor([True, False, True])
        self.cast([(both, b) for b in INTS + FLOATS])
        self.cast([(integers(a), torch.bool) for a in INTS])
        self.cast([(floats(a), torch.bool) for a in FLOATS])

    def test_complex(self):
        """complex numbers to complex numbers"""
        pairs = floats(torch.float64).view(-1)[:100000].reshape(-1, 2)
        wide = torch.view_as_complex(pairs[pairs.isfinite().all(1)].contiguous())
        self.cast([(wide, torch.complex64), (wide.to(torch.complex64), torch.complex128)])

    def test_refused(self):
        """another dtype is refused unless it is allowed, and complex as real always"""
        with worlds.Folder() as folder:
            torch.save({"w": torch.ones(3), "c": torch.ones(3, dtype=torch.complex64)}, folder("x.pt"))
            with reshard.open(folder("x.pt")) as checkpoint:
                for name, allowed in (("w", 0), ("c", 0), ("c", 1)):
                    want = Want(name, (3,), torch.bfloat16, LAYOUT)
                    with self.assertRaises(reshard.Error) as raised:
                        checkpoint.load([want.local], cast=allowed)
                    self.assertIn(raised.exception.status, ("EMISMATCH", "EUNSUPPORTED"))
                    for got in want.arrays:
                        self.assertTrue(same(got, filled(got.shape, got.dtype)), "touched")


if __name__ == "__main__":
    tap.main()
