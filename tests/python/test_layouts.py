"""Layouts and meshes in Python: creation, queries, printing and pickling."""
import copy
import ctypes
import pickle
import unittest

import numpy as np
import reshard
import tap
from reshard import Layout, Mesh

TEXTS = ["f32[8,6] @ dp=2,tp=2 : S(0),S(1)", "bf16[9] @ 4 : B(0)", "i64[] @ 3 : R", "f32[12,2] @ 2x3 : _S(0,3),S(0)",
         "f32[8,6] @ dp=2,tp=2 : [tp.dp, -]", "f16[16,4] @ 2 : S(0;8,4,4)", "u8[10] @ 3 : C(0,2)",
         "f64[4,4] @ 2x2 ranks=7,5,4,6 : P(avg),S(1)", "f32[16,1] @ { 0:4 | 4:7 ; 7:11 | | 11:16 }"]


class Layouts(unittest.TestCase):
    def test_text(self):
        """a text and its layout, both ways, copied and pickled"""
        for text in TEXTS:
            layout = Layout(text)
            self.assertEqual(Layout(str(layout)), layout)
            self.assertEqual(pickle.loads(pickle.dumps(layout)), layout)
            self.assertEqual(copy.deepcopy(layout), layout)
            self.assertEqual(hash(Layout(text)), hash(layout))
            self.assertIn(str(layout), repr(layout))
        self.assertEqual(len({Layout(text) for text in TEXTS + TEXTS}), len(TEXTS))
        self.assertNotEqual(Layout(TEXTS[0]), TEXTS[0])

    def test_placements(self):
        """placements as objects are equal to their text, both ways"""
        P = reshard
        cases = [([P.Shard(0), P.Replicate()], "S(0),R"), ([P.Balanced(1), P.Partial("max")], "B(1),P(max)"),
                 ([P.Strided(0, 2), P.Shard(0)], "_S(0,2),S(0)"), ([P.Cyclic(1, 3), P.Shard(-2)], "C(1,3),S(0)"),
                 ([P.Segmented(0, [4, 8, 4]), P.Partial()], "S(0;4,8,4),P(sum)")]
        for placements, text in cases:
            made = Layout.on("f32", (16, 10), "dp=2,tp=2", placements)
            self.assertEqual(made, Layout.on("f32", (16, 10), Mesh("dp=2,tp=2"), text))
            self.assertEqual(",".join(map(str, made.placements)), text)
            self.assertEqual(Layout.on("f32", (16, 10), made.mesh, made.placements), made)

    def test_by_dim(self):
        """axes per dim, by number and by name, in their order"""
        made = Layout.by_dim("f32", (8, 8), "dp=2,tp=2", [["tp", 0], []])
        self.assertEqual(made, Layout("f32[8,8] @ dp=2,tp=2 : [tp.dp, -]"))
        self.assertEqual((made.axes(0), made.axes(1), made.axes(-2)), ((1, 0), (), (1, 0)))

    def test_boxes(self):
        """explicit boxes and chunks, as in specs of torch"""
        boxes = [(1, (0, 0), (2, 4)), (0, (2, 0), (3, 4)), (1, (5, 0), (0, 4))]
        made = Layout.from_boxes("f32", (5, 4), boxes)
        self.assertEqual((made.mesh, made.placements, made.nranks, made.world), (None, None, 2, 2))
        self.assertEqual([(one.rank, one.shape) for one in made.arrays()], [(0, (3, 4)), (1, (2, 4)), (1, (0, 4))])
        self.assertEqual([one.lo for one in made.boxes(1)], [(0, 0), (5, 0)])
        self.assertEqual(made.check(), ("once", 1, None))
        self.assertEqual(Layout.from_boxes("f32", (5, 4), boxes, enumerable=True), made)
        self.assertEqual(Layout.from_boxes("f32", (5,), [(0, (0,), (2,))]).check(), ("misses", 0, ((2,), (3,))))
        chunks = Layout.from_chunks("f32", (5, 4), 0, [1, 0, 1])
        self.assertEqual([(one.rank, one.shape, one.place) for one in chunks.arrays()],
                         [(0, (2, 4), 1), (1, (2, 4), 0), (1, (1, 4), 2)])
        self.assertEqual(Layout.whole("bf16", (3, 2), 5).arrays()[0][1:4], (5, 0, (3, 2)))

    def test_asking(self):
        """shapes, ranks, arrays, boxes and positions"""
        layout = Layout("f32[7,6] @ dp=2,tp=2 ranks=3,1,0,2 : S(0),S(1)")
        self.assertEqual((layout.dtype, layout.shape, layout.ndim, layout.world, layout.nranks, layout.narrays,
                          layout.nplaces), ("f32", (7, 6), 2, 4, 4, 4, 4))
        self.assertEqual([one.shape for one in layout.arrays()], [(3, 3), (4, 3), (3, 3), (4, 3)])
        self.assertEqual(layout.arrays(3), [layout.array(3)])
        self.assertEqual(layout.arrays(9), [])
        self.assertEqual((layout.rank_at(0), layout.position(0), list(layout.ranks())), (3, 2, [0, 1, 2, 3]))
        self.assertEqual(layout.boxes(2), [((4, 3), (3, 3), 2, (0, 0))])
        cyclic = Layout("u8[10] @ 2 : C(0,2)").boxes(0)
        self.assertEqual([(one.lo, one.at) for one in cyclic], [((0,), (0,)), ((4,), (2,)), ((8,), (4,))])
        self.assertEqual(Layout("f32[8] @ 2x2 : S0,R").check(), ("evenly", 2, None))
        self.assertEqual(layout.of_dtype("bf16").dtype, "bf16")
        src, dst = reshard.problem("f32[8] : 2:S0 -> 4:S0")
        self.assertEqual((src, dst), (Layout("f32[8] @ 2:S0"), Layout("f32[8] @ 4:S0")))

    def test_mesh(self):
        """meshes from text and from numbers"""
        mesh = Mesh.of([2, 3], ["dp", None], [5, 4, 3, 2, 1, 0])
        self.assertEqual((mesh.counts, mesh.names, mesh.nranks, mesh.naxes), ((2, 3), ("dp", None), 6, 2))
        self.assertEqual((mesh.coords(3), mesh.rank(0, 2)), ((0, 2), 3))
        self.assertEqual((Mesh(str(mesh)), pickle.loads(pickle.dumps(mesh))), (mesh, mesh))
        self.assertEqual(Mesh.of([4]), Mesh("4"))

    def test_many_ranks(self):
        """a layout over a hundred thousand ranks is cheap"""
        layout = Layout("f32[1000000,64] @ dp=1000,tp=100 : S(0),S(1)")
        self.assertEqual((layout.nranks, layout.array(99999).shape), (100000, (1000, 0)))

    def test_refused(self):
        """invalid arguments are refused, and errors have the values"""
        cases = [(lambda: Layout("f32[8,8] @ 4:S2"), "dim 2"), (lambda: Layout("f32[8"), "column 6"),
                 (lambda: Layout.on("f32", (8,), "2x2", [reshard.Shard(0)]), "1 placements for a mesh of 2"),
                 (lambda: Layout.on("f99", (8,), "2", "S0"), "f99"), (lambda: reshard.Partial("median"), "median"),
                 (lambda: Layout.from_boxes("f32", (8,), [(0, (0, 0), (1, 1))]), "1 dims"),
                 (lambda: Layout.from_boxes("f32", (8,), [(0, (4,), (5,))]), "4:9"),
                 (lambda: Layout.by_dim("f32", (8,), "dp=2", [["tp"]]), "tp"),
                 (lambda: Mesh.of([2, 2], ranks=[0, 1]), "2 ranks for a mesh of 4"),
                 (lambda: Mesh("dp=2").rank(1, 1), "2 coordinates"), (lambda: Mesh("0"), "0"),
                 (lambda: Layout("f32[8] @ 2:S0").array(7), "7")]
        for work, word in cases:
            with self.assertRaises(reshard.InvalidError) as raised:
                work()
            self.assertIn(word, str(raised.exception))
            self.assertEqual(raised.exception.status, "EINVAL")
            self.assertIsInstance(raised.exception, ValueError)
        with self.assertRaises(reshard.InvalidError):
            Layout.from_boxes("f32", (4,), [(0, (0,), (3,)), (1, (2,), (2,))], enumerable=True)
        with self.assertRaises(reshard.MismatchError):
            Layout.from_boxes("f32", (4,), [(0, (0,), (3,))], enumerable=True)

    def test_numbers(self):
        """integers of NumPy are accepted, and a number that does not fit is refused, not cut off"""
        layout, far = Layout("f32[8] @ 4:S0"), 2 ** 32 + 1
        self.assertEqual(Layout.on("f32", np.array([8]), np.int64(4), [reshard.Shard(np.int8(0))]), layout)
        self.assertEqual(layout.arrays(np.int32(1)), layout.arrays(1))
        for work in (lambda: Layout.from_boxes("f32", (4,), [(far, (0,), (4,))]), lambda: Mesh.of([2], ranks=[0, far]),
                     lambda: Layout.on("f32", (2 ** 64 + 8,), 4, "S0"),
                     lambda: Layout.on("f32", (8,), 4, [reshard.Shard(2 ** 32)])):
            with self.assertRaisesRegex(OverflowError, "does not fit in (32|64) bits"):
                work()
        for work in (lambda: layout.arrays(far), lambda: layout.boxes(far), lambda: reshard.Pool(far),
                     lambda: reshard.Plan(layout, layout).nbytes(far, 1)):
            with self.assertRaisesRegex(ctypes.ArgumentError, "4294967297 does not fit in 32 bits"):
                work()

    def test_wrong_types(self):
        """text with a NUL and arguments of a wrong type are refused, and errors name what is wrong"""
        for work in (lambda: Layout("f32[8] @ 2:S0\0"), lambda: Mesh("2\0"), lambda: reshard.Partial("sum\0"),
                     lambda: reshard.problem("f32[8] : 2:S0 -> 4:S0\0"), lambda: Layout.on("f32", (8,), 2, "S0\0"),
                     lambda: Mesh.of([2], ["a\0"])):
            with self.assertRaisesRegex(reshard.InvalidError, "contains NUL"):
                work()
        for work, word in ((lambda: Layout(3), "layout must be text, not int"), (lambda: Mesh(2.5), "float"),
                           (lambda: reshard.Plan(None), "layout must be text, not NoneType"),
                           (lambda: Layout.on("f32", (8,), 2, [0]), "a placement is Shard"),
                           (lambda: reshard.bind("f32[8] : 2:S0 -> 4:S0"), "bind takes a Plan"),
                           (lambda: reshard.bind([], transport=1), "transport must be a reshard.Transport"),
                           (lambda: reshard.Pool("two"), "integer"), (lambda: reshard.Arena("1GB"), "integer")):
            with self.assertRaisesRegex(TypeError, word):
                work()
        self.assertEqual(Layout.on("f32", (8,), 2, reshard.Shard(0)), Layout("f32[8] @ 2:S0"))


if __name__ == "__main__":
    tap.main()
