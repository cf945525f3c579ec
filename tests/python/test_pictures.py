"""Layouts, plans, tensors and checkpoints draw themselves in notebooks."""
import os
import tempfile
import unittest
import xml.dom.minidom
from unittest import mock

import numpy as np
import reshard
import tap
from reshard import pictures


def texts(svg):
    """The texts of a picture, which must be well-formed."""
    parsed = xml.dom.minidom.parseString(svg)
    return ["".join(part.data for part in one.childNodes) for one in parsed.getElementsByTagName("text")]


class Pictures(unittest.TestCase):
    def test_layouts(self):
        """a layout has one rectangle per box, with the ranks that hold it"""
        svg = reshard.Layout("f32[10,6] @ dp=2,tp=2 : S(0),R")._repr_svg_()
        found = texts(svg)
        self.assertIn("f32[10,6] @ dp=2,tp=2 : S(0),R", found)
        self.assertIn("0-1", found)
        self.assertIn("2-3", found)
        for text in ("240 B in all; 4 ranks, each with 120 B; each element 2 times", "dim 0", "dim 1", "10", "6",
                     "ranks 0-1: 120 B each", "ranks 2-3: 120 B each"):
            self.assertIn(text, found)
        self.assertEqual(svg.count("<title>"), 2)
        self.assertIn("[5:10, 0:6] on 2-3", svg)
        self.assertEqual(reshard.Layout("f32[9,8] @ 2x2 : S0,S1")._repr_svg_().count("<title>"), 4)
        self.assertEqual(reshard.Layout("f32[16,4] @ 4 : C(0,2)")._repr_svg_().count("<title>"), 8)
        self.assertIn("dims 0 and 2 of 3", reshard.Layout("f32[4,5,6] @ 2x3 : S0,S2")._repr_svg_())
        found = texts(reshard.Layout("bf16[5] @ 40 ranks=40-79 : S0")._repr_svg_())
        self.assertEqual([text for text in found if text.startswith("rank")], [f"rank {40 + i}: 2 B" for i in range(5)])
        self.assertIn("10 B in all; 40 ranks, each with 0 B to 2 B; each element once", found)
        self.assertIn("... and 8 more", texts(reshard.Layout("bf16[40] @ 40 : S0")._repr_svg_()))
        found = texts(reshard.Layout("f64[16,4] @ 2 : C(0,2)")._repr_svg_())
        self.assertIn("rank 1: 256 B in 4 boxes", found)
        found = texts(reshard.Layout("f64[4] @ { 0:2 | 1:3 }")._repr_svg_())
        self.assertTrue(any(text.endswith("some elements on no rank") for text in found), found)
        for text in ("f32[] @ 4 : R", "f32[5] @ 2 : S0", "f32[4,4] @ { 0:2 | 2:4,0:2; 0:2,1:2 }"):
            texts(reshard.Layout(text)._repr_svg_())
        self.assertIsNone(reshard.Layout("f32[100000] @ 5000 : S0")._repr_svg_())
        self.assertIsNone(reshard.Layout("f32[0,3] @ 2 : S0")._repr_svg_())

    def test_plans(self):
        """a plan is the picture of the command, with its numbers"""
        plan = reshard.Plan("f32[8,8] : 4:S0 -> 2x2:S0,S1")
        self.assertTrue(texts(plan._repr_svg_()))
        html = plan._repr_html_()
        self.assertIn("<svg", html)
        self.assertIn("-&gt;", html)
        with mock.patch.object(pictures, "_command", lambda: None):
            self.assertIsNone(plan._repr_svg_())
            self.assertIn("moved", plan._repr_html_())
        with mock.patch.object(pictures, "_command", lambda: "/bin/false"):
            self.assertIsNone(plan._repr_svg_())

    def test_checkpoints(self):
        """a checkpoint is a table of its tensors, a tensor a picture of its boxes; names are escaped"""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "-x")
            parts = list(np.arange(64, dtype="f4").reshape(4, 2, 8))
            reshard.save(path, {"<b>&w": parts}, layouts={"<b>&w": "f32[8,8] @ 4 : S0"})
            with reshard.open(path) as checkpoint:
                html = checkpoint._repr_html_()
                self.assertIn("&lt;b&gt;&amp;w", html)
                self.assertNotIn("<b>", html)
                self.assertIn("f32[8, 8]", html)
                for svg in (checkpoint["<b>&w"]._repr_svg_(), checkpoint._repr_svg_()):
                    self.assertTrue(texts(svg))
                    self.assertIn("__3_0.distcp", svg)
            self.assertIn("closed", checkpoint._repr_html_())
            self.assertIsNone(checkpoint._repr_svg_())
            with reshard.open(path, format="dcp") as checkpoint:  # an option that the command does not have
                self.assertIsNone(checkpoint._repr_svg_())
            many = {f"t{i}": np.zeros(1) for i in range(pictures.MOST_ROWS + 5)}
            reshard.save(path, many, force=True)
            with reshard.open(path) as checkpoint:
                self.assertIn("and 5 more", checkpoint._repr_html_())


if __name__ == "__main__":
    tap.main()
