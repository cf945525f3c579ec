"""Plans in Python: descriptions, pieces, and copying the pieces one by one."""
import random
import unittest

import numpy as np
import reshard
import tap
from reshard import Layout, Plan

SIDES = ["1 : R", "4 : S(0)", "3 : S(1)", "2x2 : S(0),S(1)", "2x3 : S(1),R", "5 : B(0)", "2 : C(0,3)",
         "2x2 : _S(0,2),S(0)", "{ 0:5 | 5:5 | 5:12,0:4 ; 5:12,4:10 }", "2x2 ranks=5,4,1,0 : S(0),R"]


def held(layout, whole):
    """The arrays of a layout, cut from the whole tensor box by box."""
    arrays = [np.zeros(one.shape, whole.dtype) for one in layout.arrays()]
    for rank in layout.ranks():
        for one in layout.boxes(rank):
            there = tuple(slice(at, at + n) for at, n in zip(one.at, one.len))
            arrays[one.array][there] = whole[tuple(slice(lo, lo + n) for lo, n in zip(one.lo, one.len))]
    return arrays


class Plans(unittest.TestCase):
    def test_pieces(self):
        """copying every piece has the same result as a run"""
        whole = np.arange(120, dtype=np.int32).reshape(12, 10)
        for a in SIDES:
            for b in SIDES:
                src, dst = Layout(f"i32[12,10] @ {a}"), Layout(f"i32[12,10] @ {b}")
                plan, given, right = Plan(src, dst), held(src, whole), held(dst, whole)
                got = [np.zeros_like(one) for one in right]
                pieces = list(plan.pieces())
                for one in sorted(pieces, key=lambda one: one.stage):
                    giver = got[one.from_array] if one.from_destination else given[one.from_array]
                    taken = giver[tuple(slice(at, at + n) for at, n in zip(one.from_at, one.len))]
                    got[one.to_array][tuple(slice(at, at + n) for at, n in zip(one.to_at, one.len))] = taken
                    self.assertEqual(one.nbytes, taken.nbytes)
                ran = plan.run(given)
                for one, other, third in zip(got, right, ran):
                    self.assertTrue((one == other).all() and (third == other).all(), str(plan))
                self.check_numbers(plan, pieces)

    def check_numbers(self, plan, pieces):
        totals = plan.totals
        self.assertEqual(totals["npieces"], len(pieces))
        self.assertEqual(totals["nbytes_moved"], sum(one.nbytes for one in pieces if one.from_rank != one.to_rank))
        for rank in plan.dst.ranks():
            mine = list(plan.pieces(rank))
            self.assertEqual(sorted(mine), sorted(one for one in pieces if one.to_rank == rank))
            self.assertEqual(plan.rank_totals(rank)["nbytes_received"],
                             sum(one.nbytes for one in mine if one.from_rank != rank))
            self.assertEqual(plan.nbytes(rank, rank), sum(one.nbytes for one in mine if one.from_rank == rank))
        for rank in plan.src.ranks():
            self.assertEqual(sorted(plan.pieces(rank, sends=True)),
                             sorted(one for one in pieces if one.from_rank == rank))

    def test_casts(self):
        """elements are converted on the way, if asked for"""
        whole = np.random.default_rng(3).standard_normal((12, 10)).astype("f4") * 100
        for a in SIDES:
            for b in SIDES:
                src, dst = Layout(f"f32[12,10] @ {a}"), Layout(f"f16[12,10] @ {b}")
                for one, right in zip(reshard.reshard(src, dst, held(src, whole), cast=True),
                                      held(dst, whole.astype("f2"))):
                    self.assertTrue(one.dtype == right.dtype and (one == right).all(), f"{a} -> {b}")
        with self.assertRaisesRegex(reshard.MismatchError, "source f32, destination f16"):
            Plan(src, dst)
        with self.assertRaisesRegex(reshard.UnsupportedError, "f8e4m3 cannot be converted to f16"):
            Plan(src.of_dtype("f8e4m3"), dst, cast=True)
        plan = Plan("f32[8,8] : 4:S0 -> bf16 2x2:S0,S1")
        self.assertEqual(str(plan), "f32[8,8] : 4 : S(0) -> bf16 2x2 : S(0),S(1)")
        self.assertEqual(plan.inverse().dst.dtype, "f32")
        self.assertEqual(plan.as_dict()["dst_dtype"], "bf16")
        self.assertEqual(plan.totals["nbytes_total"], 128)

    def test_explain(self):
        """as text and as a dict"""
        plan = Plan("f32[8,8] : 4:S0 -> 2x2:S0,S1")
        self.assertIn("moved    128 B", plan.explain())
        about = plan.as_dict(pairs=True, ranks=True)
        self.assertEqual((about["bytes"]["moved"], about["digest"], about["shape"]), (128, plan.digest, [8, 8]))
        self.assertEqual((len(about["ranks"]), about["problem"]), (4, str(plan)))
        self.assertEqual(sum(one["bytes"] for one in about["pairs"]), 256)

    def test_digest(self):
        """equal plans have equal digests, others do not"""
        a, b = Plan("f32[8,8] : 4:S0 -> 4:S1"), Plan(Layout("f32[8,8] @ 4:S0"), "f32[8,8] @ 4:S1")
        self.assertEqual((a, hash(a), a.digest), (b, hash(b), b.digest))
        self.assertNotEqual(a, Plan("f32[8,8] : 4:S1 -> 4:S0"))
        self.assertNotEqual(a, Plan("f32[8,8] : 4:S0 -> 4:S1", nodes=[0, 0, 1, 1]))

    def test_inverse_and_backward(self):
        """the inverse plan, and the backward plan"""
        plan = Plan("f32[8,8] : 4:S0 -> 4:S1")
        self.assertEqual((plan.inverse().src, plan.inverse().dst), (plan.dst, plan.src))
        back = Plan("f32[8] : 4:P -> 4:S0").backward("f32[8] @ 4:S0")
        self.assertEqual((str(back.src), str(back.dst)), ("f32[8] @ 4 : S(0)", "f32[8] @ 4 : R"))
        with self.assertRaises(reshard.InvalidError):
            Plan("f32[8] : 4:P -> 4:S0").inverse()

    def test_reduction(self):
        """partial values are combined"""
        plan = Plan("f32[6] : 3:P(avg) -> 2:S0")
        self.assertEqual(plan.reduction, ("sum", 3, 3))
        terms = [np.arange(6, dtype="f4") * n for n in (1, 4, 7)]
        self.assertEqual(np.concatenate(plan.run(terms)).tolist(), [0, 4, 8, 12, 16, 20])
        self.assertEqual(Plan("f32[6] : 3:S0 -> 2:S0").reduction.nterms, 1)

    def test_nodes(self):
        """with a node map a replicated destination crosses once"""
        plan = Plan("f32[64] : 1:R -> 8:R", nodes=[0, 0, 0, 0, 1, 1, 1, 1])
        self.assertEqual(plan.totals["nbytes_crossed"], 256)
        got = plan.run([np.arange(64, dtype="f4")])
        self.assertTrue(all((one == np.arange(64)).all() for one in got))

    def test_kept(self):
        """pieces stay valid after the walk, which may be left early"""
        plan = Plan("f32[64,64] : 8:S0 -> 8:S1")
        random.seed(3)
        for _ in range(50):
            walk = plan.pieces()
            found = [next(walk) for _ in range(random.randrange(1, 64))]
            del walk
            self.assertEqual(len(set(found)), len(found))

    def test_refused(self):
        """errors for layouts that do not match have the values"""
        for work, kind, word in (
                (lambda: Plan("f32[8] @ 2:S0", "f32[9] @ 2:S0"), reshard.MismatchError, "9"),
                (lambda: Plan("f32[8] @ { 0:4 }", "f32[8] @ 1:R"), reshard.MismatchError, "4:8"),
                (lambda: Plan("f32[8] : 2:S0 -> 2:P"), reshard.InvalidError, ""),
                (lambda: Plan("c64[8] : 2:P(min) -> 2:R"), reshard.UnsupportedError, "min")):
            with self.assertRaises(kind) as raised:
                work()
            self.assertIn(word, str(raised.exception))
        self.assertIsInstance(raised.exception, NotImplementedError)


if __name__ == "__main__":
    tap.main()
