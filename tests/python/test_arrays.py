"""Plans run on memory of every kind without copies. Arrays that do not match are refused."""
import array
import mmap
import os
import threading
import unittest

import ctypes as C
import numpy as np
import reshard
import tap
from reshard import Plan, frameworks, memory

try:
    import torch
except ImportError:
    torch = None

WHOLE = np.arange(64, dtype="f4").reshape(8, 8)
ROWS = [WHOLE[2 * i:2 * i + 2] for i in range(4)]
A, B = "f32[8,8] @ 4:S0", "f32[8,8] @ 2x2:S0,S1"


def put_together(quarters):
    return np.block([[np.asarray(quarters[0]), np.asarray(quarters[1])],
                     [np.asarray(quarters[2]), np.asarray(quarters[3])]])


class DLPack:
    """An object with DLPack only."""

    def __init__(self, of, device=None):
        self.of, self.device = of, device

    def __dlpack__(self, **options):
        return self.of.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.of.__dlpack_device__()


class OldDLPack(DLPack):
    """DLPack without versions."""

    def __dlpack__(self, stream=None):
        return self.of.__dlpack__()


class Arrays(unittest.TestCase):
    def test_numpy(self):
        """NumPy arrays, dense and strided, in and out"""
        self.assertTrue((put_together(reshard.reshard(A, B, ROWS)) == WHOLE).all())
        wide = np.zeros((8, 16), "f4")
        out = [wide[0:4, 0:8:2], wide[0:4, 1:8:2], wide[4:8, 8:12], np.zeros((4, 4), "f4", order="F")]
        columns = [np.asfortranarray(one) for one in ROWS]
        self.assertIs(reshard.reshard(A, B, columns, out), out)
        self.assertTrue((put_together(out) == WHOLE).all())
        self.assertFalse(wide[4:, :8].any() or wide[:4, 8:].any())
        same = reshard.reshard("f32[2,8] @ 1:R", "f32[2,8] @ 3:R", [np.broadcast_to(WHOLE[0], (2, 8))])
        self.assertTrue(all((one == WHOLE[0]).all() for one in same))

    def test_no_copies(self):
        """a view is the memory itself, not a copy"""
        for what, address in self.kinds():
            seen = memory.see(what, "it", writable=True)
            self.assertEqual(seen.address, address, type(what))
            C.memset(seen.address, 7, 1)
            self.assertEqual(C.string_at(address, 1), b"\7")

    def kinds(self):
        one = np.zeros((3, 4), "i2")
        yield one, one.ctypes.data
        yield one[1:, ::2], one.ctypes.data + 8
        yield DLPack(one), one.ctypes.data
        yield OldDLPack(one[:, 1:]), one.ctypes.data + 2
        raw = bytearray(16)
        yield raw, C.addressof((C.c_char * 16).from_buffer(raw))
        yield memoryview(raw)[4:], C.addressof((C.c_char * 16).from_buffer(raw)) + 4
        numbers = array.array("d", [1, 2, 3])
        yield numbers, numbers.buffer_info()[0]
        words = (C.c_int32 * 5)()
        yield words, C.addressof(words)
        mapped = mmap.mmap(-1, 4096)
        yield mapped, C.addressof(C.c_char.from_buffer(mapped))
        if torch is not None:
            tensor = torch.zeros(5, 6, dtype=torch.bfloat16)
            yield tensor, tensor.data_ptr()
            yield tensor.t()[1:], tensor.data_ptr() + 2
            yield DLPack(tensor), tensor.data_ptr()

    def test_kinds(self):
        """buffers, DLPack, raw bytes and a dict of ranks, in one move"""
        src = [DLPack(ROWS[0]), bytes(ROWS[1].tobytes()), OldDLPack(ROWS[2]), memoryview(ROWS[3])]
        out = {0: bytearray(64), 1: array.array("f", [0] * 16), 2: [np.zeros((4, 4), "f4")],
               3: DLPack(np.zeros((4, 4), "f4"))}
        with self.assertRaises(reshard.MismatchError):  # 16 numbers are not a 4 by 4 array
            reshard.reshard(A, B, src, out)
        out[1] = memoryview(bytearray(64)).cast("f", [4, 4])
        reshard.reshard(A, B, src, out)
        got = [np.frombuffer(out[0], "f4").reshape(4, 4), np.asarray(out[1]), out[2][0], out[3].of]
        self.assertTrue((put_together(got) == WHOLE).all())

    def test_private(self):
        """large new arrays belong to one process, as small ones do"""
        for n in 10, frameworks.LARGE_NBYTES:
            made = frameworks.empty((n,), "u8", "memoryview")
            made[0] = 1
            child = os.fork()
            if child == 0:
                made[0] = 2
                os._exit(0)
            os.waitpid(child, 0)
            self.assertEqual(made[0], 1)

    def test_like(self):
        """new arrays are of the same kind as the sources, or of the requested kind"""
        self.assertIsInstance(reshard.reshard(A, B, ROWS)[0], np.ndarray)
        views = reshard.reshard(A, B, [one.tobytes() for one in ROWS])
        self.assertEqual((type(views[0]), views[0].shape, views[0][3, 3]), (memoryview, (4, 4), 27.0))
        self.assertIsInstance(reshard.reshard(A, B, ROWS, like="memoryview")[0], memoryview)

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_torch(self):
        """torch tensors, with strides and dtypes that NumPy does not have"""
        got = reshard.reshard(A, B, [torch.from_numpy(one.copy().T.copy()).T for one in ROWS])
        self.assertIsInstance(got[0], torch.Tensor)
        self.assertTrue((put_together(got) == WHOLE).all())
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool):
            name = memory.see(torch.zeros(1, dtype=dtype), "").dtype.name
            parts = [torch.arange(4).to(torch.float32).to(dtype), torch.ones(4).to(dtype)]
            got = reshard.reshard(f"{name}[8] @ 2:S0", f"{name}[8] @ 1:R", parts)[0]
            self.assertTrue(torch.equal(got.view(torch.uint8), torch.cat([p.view(torch.uint8) for p in parts])))
            self.assertEqual(got.dtype, dtype)
        raw = [np.arange(4, dtype="u2"), np.arange(4, 8, dtype="u2")]
        got = reshard.reshard("bf16[8] @ 2:S0", "bf16[8] @ 1:R", raw, like="torch")[0]
        self.assertEqual(got.view(torch.int16).tolist(), list(range(8)))
        with torch.no_grad():
            leaf = torch.zeros(8, 8, requires_grad=True)
        reshard.reshard(A, "f32[8,8] @ 1:R", ROWS, [leaf])
        self.assertTrue((leaf.detach().numpy() == WHOLE).all())

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_torch_refused(self):
        """tensors that are not plain memory are refused by name"""
        for tensor, word in ((torch.zeros(8, 8, device="meta"), "meta"), (torch.eye(8).to_sparse(), "sparse"),
                             (torch.zeros(8, 8, dtype=torch.complex64).conj(), "resolve_conj"),
                             (torch._neg_view(torch.zeros(8, 8)), "resolve_neg")):
            with self.assertRaises(reshard.UnsupportedError) as raised:
                memory.see(tensor, "the tensor")
            self.assertIn(word, str(raised.exception))

    def test_refused(self):
        """errors for wrong counts, shapes, dtypes, strides and read-only memory have names and values"""
        fixed = WHOLE.copy()
        fixed.flags.writeable = False
        record = np.zeros((2, 8), [("a", "i1"), ("b", "f4")])["b"]
        cases = [(ROWS[:3], None, reshard.MismatchError, "got 3 arrays, but the layout has 4"),
                 ([one.astype("f8") for one in ROWS], None, reshard.MismatchError, "dtype f64; expected f32"),
                 ([one.astype("u4") for one in ROWS], None, reshard.MismatchError, "dtype u32; expected f32"),
                 ([one.T for one in ROWS], None, reshard.MismatchError, "shape [8, 2]; expected [2, 8]"),
                 ([one[::-1] for one in ROWS], None, reshard.InvalidError, "strides [-8, 1]"),
                 ([one.astype(">f4") for one in ROWS], None, reshard.UnsupportedError, "byte order"),
                 ([record] * 4, None, reshard.UnsupportedError, "4 bytes per element"),
                 ([None] * 4, None, reshard.MismatchError, "array 0 of rank 0 is None"),
                 (["text"] * 4, None, TypeError, "a str is not an array"),
                 ([b"12"] * 4, None, reshard.MismatchError, "2 bytes; f32[2, 8] has 64"),
                 ([DLPack(one, (10, 0)) for one in ROWS], None, reshard.UnsupportedError, "(10, 0)"),
                 ({0: ROWS[0]}, None, reshard.MismatchError, "arrays of rank 1 are missing"),
                 ({i: ROWS[i % 4] for i in range(5)}, None, reshard.MismatchError, "rank 4"),
                 (ROWS, [fixed], reshard.InvalidError, "read-only"),
                 (ROWS, [bytes(256)], reshard.InvalidError, "read-only"),
                 (ROWS, [np.broadcast_to(np.zeros(8, "f4"), (8, 8))], reshard.InvalidError, "read-only"),
                 (ROWS, [np.lib.stride_tricks.as_strided(np.zeros(64, "f4"), (8, 8), (4, 4))],
                  reshard.InvalidError, "")]
        for src, dst, kind, word in cases:
            with self.assertRaises(kind) as raised:
                reshard.reshard(A, "f32[8,8] @ 1:R", src, dst)
            self.assertIn(word, str(raised.exception))

    def test_empty(self):
        """ranks without elements have empty arrays, or None"""
        got = reshard.reshard("f32[2] @ 4:S0", "f32[2] @ 3:S0", [WHOLE[0, :1], WHOLE[0, 1:2], None, WHOLE[0, :0]])
        self.assertEqual([one.tolist() for one in got], [[0.0], [1.0], []])

    def test_exec(self):
        """bound once and run many times, in one call and in two"""
        plan, out = Plan(A, B), [np.zeros((4, 4), "f4") for _ in range(4)]
        for pool in (None, 1, 3, reshard.Pool(2)):
            bound = reshard.bind(plan, pool=pool)
            for i in range(5):
                src = [one + i for one in ROWS]
                bound.run(src, out)
                self.assertTrue((put_together(out) == WHOLE + i).all())
                bound.start([one * i for one in ROWS], out)
                bound.wait()
                self.assertTrue((put_together(out) == WHOLE * i).all())
            with self.assertRaises(reshard.InvalidError):
                bound.wait()
            bound.close()
            with self.assertRaises(ValueError):
                bound.run(ROWS, out)

    def test_bound_strides(self):
        """arrays of a run must have the strides that were bound"""
        columns = [np.asfortranarray(one) for one in ROWS]
        bound, out = reshard.bind(Plan(A, B), src=columns), [np.zeros((4, 4), "f4") for _ in range(4)]
        bound.run(columns, out)
        self.assertTrue((put_together(out) == WHOLE).all())
        with self.assertRaises(reshard.MismatchError):
            bound.run(ROWS, out)

    def test_many(self):
        """several plans in one exec"""
        plans = [Plan(A, B), Plan("i64[5] : 2:S0 -> 1:R")]
        bound, out = reshard.bind(plans), [[np.zeros((4, 4), "f4") for _ in range(4)], np.zeros(5, "i8")]
        bound.run([ROWS, [np.arange(3), np.arange(3, 5)]], out)
        self.assertTrue((put_together(out[0]) == WHOLE).all() and (out[1] == np.arange(5)).all())
        with self.assertRaises(reshard.MismatchError):
            bound.run([ROWS], out)

    def test_threads(self):
        """threads share plans and a pool, and each has its own errors"""
        plan, pool, wrong = Plan(A, B), reshard.Pool(2), []

        def work(number):
            try:
                for i in range(30):
                    got = plan.run([one + number for one in ROWS], pool=pool)
                    if not (put_together(got) == WHOLE + number).all():
                        wrong.append(number)
                    try:
                        reshard.Layout(f"f32[{number},{i}] @ 4:S9")
                    except reshard.InvalidError as error:
                        if f"column {len(f'f32[{number},{i}] @ 4:S9')}" not in str(error):
                            wrong.append(str(error))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_fork(self):
        """a forked child has a pool of its own"""
        reshard.reshard(A, B, ROWS)
        child = os.fork()
        if not child:
            right = False
            try:
                right = bool((put_together(reshard.reshard(A, B, ROWS)) == WHOLE).all())
                right = right and bool((put_together(Plan(A, B).run(ROWS, pool=2)) == WHOLE).all())
            finally:
                os._exit(0 if right else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


if __name__ == "__main__":
    tap.main()
