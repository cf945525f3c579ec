"""State dicts are saved and loaded: nested, whole and sharded, by one process and by every rank."""
import copy
import os
import pathlib
import pickle
import signal
import tempfile
import threading
import unittest
from collections import OrderedDict

import numpy as np
import reshard
import tap
from reshard import Local, saving, states
from test_transports import Mailbox, Post, on_every_rank

WHOLE = np.arange(96, dtype="f4").reshape(12, 8)


def state():
    return {"model": OrderedDict(w=WHOLE.copy(), layers=[{"b": np.arange(5)}, {"b": np.arange(3) * 1.5}]),
            "optim": {"state": {0: {"step": 3, "m": WHOLE[:, ::2]}}, "groups": [{"lr": 0.1, "betas": [0.9, 0.99]}]},
            "epoch": 7, "name": "r\u00e9sum\u00e9", "none": None, "flags": [True, False], "empty": []}


class States(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "x")

    def equal(self, a, b):
        if isinstance(a, np.ndarray):
            self.assertTrue(np.array_equal(a, b) and a.dtype == b.dtype)
        elif isinstance(a, dict):
            self.assertEqual({str(key) for key in a}, {str(key) for key in b})
            for key in a:
                self.equal(a[key], b[key] if key in b else b[str(key)])
        elif isinstance(a, list):
            self.assertEqual(len(a), len(b))
            for one, other in zip(a, b):
                self.equal(one, other)
        else:
            self.assertEqual((type(a), a), (type(b), b))

    def test_nul_in_paths(self):
        """A NUL would end the path there: what is behind it would be ignored."""
        reshard.save(self.path, state())
        ours = reshard.open(self.path)
        for use in (lambda path: reshard.open(path), lambda path: reshard.save(path, state()),
                    lambda path: reshard.convert(ours, path), lambda path: reshard.open(self.path, metadata=path)):
            for path in (self.path + "\0.x", os.fsencode(self.path) + b"\0"):
                with self.assertRaisesRegex(ValueError, "contains NUL"):
                    use(path)
        self.assertEqual(os.listdir(os.path.dirname(self.path)), ["x"])

    def test_odd_states(self):
        """states that contain themselves, numbers that are too long, and text that cannot be encoded are refused"""
        deep, inside, dicts = [], [], {}
        for _ in range(5000):
            deep = [deep]
        inside.append(inside)
        dicts["a"] = dicts
        for one in ({"a": deep}, {"a": inside}, dicts, {"a": 10 ** 5000}):
            with self.assertRaises(reshard.Error):
                reshard.save(self.path, one)
        for use in (lambda: reshard.open("/tmp/\ud800"), lambda: reshard.Storage(region="\ud800")):
            with self.assertRaisesRegex(reshard.InvalidError, "cannot be|can be encoded"):
                use()

    def test_bytes_paths(self):
        """paths are text, bytes or path objects, also those of converted checkpoints and their configs"""
        def path(name):
            return os.fsencode(self.path + name)

        reshard.save(path(""), {"model": state()["model"]})
        os.mkdir(path("-config"))
        with open(self.path + "-config/config.json", "w", encoding="ascii") as file:
            file.write("{}")
        reshard.convert(path(""), path("-2"), mesh=2, place="S(0)")
        reshard.merge(path("-2"), path("-hf"), config_from=path("-config"))
        reshard.split(pathlib.Path(self.path), path("-tp"), mesh=2, default="R", config_from=path("-config"))
        self.assertEqual(reshard.diff(path(""), pathlib.Path(self.path + "-2")), [])
        self.assertTrue(os.path.exists(self.path + "-hf/config.json") and os.path.exists(self.path + "-tp/config.json"))
        with reshard.open(path("")) as checkpoint:
            self.assertEqual(checkpoint.path, self.path)
            self.assertIn(self.path, checkpoint._repr_html_())

    def test_round_trip(self):
        """a nested state is restored, into existing memory and read as a whole"""
        report = reshard.save(self.path, state())
        self.assertEqual(report.ntensors, 4)
        self.assertGreater(report.nbytes_written, report.nbytes_needed)
        with reshard.open(self.path) as checkpoint:
            self.assertEqual(checkpoint["model.layers.1.b"].path, ("model", "layers", 1, "b"))
            self.equal(state(), checkpoint.state_dict())
            other = state()
            for leaf in states.flatten(other).values():
                if isinstance(leaf.what, np.ndarray):
                    states.put(leaf, "", np.zeros(leaf.what.shape, leaf.what.dtype))
                else:
                    states.put(leaf, "", "other")
            place = other["model"]["w"]
            checkpoint.load(other)
            self.equal(state(), other)
            self.assertIs(other["model"]["w"], place)

    def test_flat(self):
        """dotted names load what a nested state saved"""
        reshard.save(self.path, state())
        flat = {"model.w": np.zeros((12, 8), "f4"), "epoch": None}
        with reshard.open(self.path) as checkpoint:
            self.assertEqual(checkpoint.load(flat).ntensors, 1)
            self.assertTrue((flat["model.w"] == WHOLE).all())
            self.assertEqual(flat["epoch"], 7)
            self.assertEqual(set(checkpoint.state_dict(nested=False)),
                             {"model.w", "model.layers.0.b", "model.layers.1.b", "optim.state.0.m",
                              "optim.state.0.step", "optim.groups.0.lr", "optim.groups.0.betas", "epoch", "name",
                              "none", "flags", "empty"})

    def test_layouts(self):
        """memory has another layout than the files"""
        rows = [WHOLE[0:4], WHOLE[4:8], WHOLE[8:12]]
        reshard.save(self.path, {"w": rows, "v": {0: WHOLE[:, :4].copy(), 1: WHOLE[:, 4:].copy()}, "x": WHOLE},
                     layouts={"w": "f32[12,8] @ 3:S0", "v": reshard.Layout("f32[12,8] @ 2:S1")})
        self.assertEqual(sorted(name for name in os.listdir(self.path) if name.endswith("distcp")),
                         ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"])
        with reshard.open(self.path) as checkpoint:
            got = {"w": [np.zeros((12, 3), "f4"), np.zeros((12, 3), "f4"), np.zeros((12, 2), "f4")]}
            checkpoint.load(got, layouts={"w": "f32[12,8] @ 3:S1"})
            self.assertTrue((np.hstack(got["w"]) == WHOLE).all())
            one = {"v": np.zeros((4, 8), "f4"), "x": np.zeros((6, 8), "f4", order="F")}
            checkpoint.load(one, layouts={"v": "f32[12,8] @ 3:S0", "x": "f32[12,8] @ 2:S0"}, rank=1)
            self.assertTrue((one["v"] == WHOLE[4:8]).all() and (one["x"] == WHOLE[6:]).all())
            parts = [Local("w", "f32[12,8] @ { 2:4 }", np.zeros((2, 8), "f4")),
                     Local("w", "f32[12,8] @ { 9:12,1:2 }", np.zeros((3, 1), "f4"))]
            checkpoint.load(parts)
            self.assertTrue((parts[0].arrays == WHOLE[2:4]).all() and (parts[1].arrays == WHOLE[9:, 1:2]).all())

    def test_ranks(self):
        """ranks save, load, convert and verify together over a transport"""
        post, other, loaded = Post(2), self.path + ".dcp", []
        layouts = {"w": "f32[12,8] @ 2:S0"}

        def work(rank):
            transport = Mailbox(post, rank)
            state = {"w": WHOLE[6 * rank:6 * rank + 6], "same": WHOLE, "step": 3}
            saved = reshard.save(self.path, state, layouts=layouts, compress="zstd:5", transport=transport)
            reshard.save_start(self.path, state, layouts=layouts, overwrite=True, transport=transport).wait()
            mine = {"w": np.zeros((12, 4), "f4"), "step": 0}
            with reshard.open(self.path) as checkpoint:
                checkpoint.load(mine, layouts={"w": "f32[12,8] @ 2:S1"}, transport=transport)
            loaded.append((rank, mine))
            reshard.convert(self.path, other, mesh=2, place="R", transport=transport, timeout=60)
            digests = reshard.digest(other, transport=transport)
            return (saved.nfiles_written, sorted(digests), reshard.diff(self.path, other, transport=transport),
                    reshard.verify(other, transport=transport))

        self.assertEqual(on_every_rank(2, work), [(2, ["same", "w"], [], [])] * 2)
        for rank, mine in loaded:
            self.assertTrue((mine["w"] == WHOLE[:, 4 * rank:4 * rank + 4]).all())
            self.assertEqual(mine["step"], 3)
        with reshard.open(self.path) as checkpoint:
            self.assertTrue((checkpoint["w"][:] == WHOLE).all() and (checkpoint["same"][:] == WHOLE).all())
            self.assertEqual(checkpoint.plain_values["step"], 3)

    def test_ranks_differ(self):
        """ranks that save different values all fail, and nothing is published"""
        post = Post(2)

        def work(rank):
            reshard.save(self.path, {"w": WHOLE, "step": rank}, transport=Mailbox(post, rank))

        for error in on_every_rank(2, work):
            self.assertIsInstance(error, reshard.MismatchError)
            self.assertIn("rank 1", str(error))
        self.assertFalse(os.path.exists(self.path))

    def test_levels(self):
        """invalid levels of zstd are refused before anything is written"""
        for given, level in ((None, 0), (False, 0), (0, 0), (True, 3), ("zstd", 3), (19, 19), ("zstd:1", 1)):
            self.assertEqual(saving.compress_level(given), level)
        for given in ("zstd:0", "zstd:-1", "zstd:--5", "zstd:20", "zstd:", "zstd:\u0663", "gzip", "", -3, 20):
            with self.assertRaises(reshard.InvalidError) as raised:
                reshard.save(self.path, {"w": WHOLE}, compress=given)
            self.assertIn(f"compress={given!r}", str(raised.exception))
        self.assertFalse(os.path.exists(self.path))

    def test_two_halves(self):
        """arrays may change or be freed after a save has started"""
        array = WHOLE.copy()
        saving = reshard.save_start(self.path, {"w": array})
        array[:] = 0
        del array
        self.assertEqual(saving.wait().ntensors, 1)
        with self.assertRaises(ValueError):
            saving.wait()
        with reshard.open(self.path) as checkpoint:
            self.assertTrue((checkpoint["w"][:] == WHOLE).all())
        with self.assertRaises(FileExistsError):
            reshard.save_start(self.path, {"w": WHOLE}).wait()
        with self.assertRaises(TypeError):
            reshard.save_start(self.path, {}, colour="blue")

    def test_overwrite(self):
        """an existing checkpoint is refused, or replaced if requested"""
        reshard.save(self.path, {"w": WHOLE})
        with self.assertRaises(reshard.ExistsError) as raised:
            reshard.save(self.path, {"w": WHOLE + 1})
        self.assertIsInstance(raised.exception, FileExistsError)
        reshard.save(self.path, {"w": WHOLE + 1}, overwrite=True)
        with reshard.open(self.path) as checkpoint:
            self.assertTrue((checkpoint["w"][:] == WHOLE + 1).all())

    def test_strict(self):
        """a missing entry is an error before anything is read, or stays unchanged"""
        reshard.save(self.path, {"w": WHOLE, "step": 1})
        with reshard.open(self.path) as checkpoint:
            target = {"w": np.zeros_like(WHOLE), "v": np.ones(3), "lr": 5, "step": 0}
            with self.assertRaises(KeyError) as raised:
                checkpoint.load(target)
            self.assertIn("the checkpoint lacks 2 entries: v, ", str(raised.exception))
            self.assertFalse(target["w"].any())
            with self.assertRaisesRegex(KeyError, "lacks model.w; names here lack model."):
                checkpoint.load({"model": {"w": target["w"]}})
            checkpoint.load(target, strict=False)
            self.assertTrue((target["w"] == WHOLE).all() and (target["v"] == 1).all())
            self.assertEqual((target["lr"], target["step"]), (5, 1))

    def test_misfits(self):
        """other shapes and dtypes are refused; dtypes are converted if requested"""
        reshard.save(self.path, {"w": WHOLE})
        with reshard.open(self.path) as checkpoint:
            for array in (np.zeros((8, 12), "f4"), np.zeros((12, 8), "f8"), np.zeros((12, 8), "u4")):
                with self.assertRaises(reshard.MismatchError) as raised:
                    checkpoint.load({"w": array})
                self.assertIn("w", str(raised.exception))
                self.assertFalse(array.any())
            wide = {"w": np.zeros((12, 8), "f8")}
            checkpoint.load(wide, cast=True)
            self.assertTrue((wide["w"] == WHOLE).all())
            halves = {"w": [np.zeros((6, 8), "f2"), np.zeros((6, 8), "f2")]}
            checkpoint.load(halves, layouts={"w": "f32[12,8] @ 2:S0"}, cast=True)
            self.assertTrue((np.vstack(halves["w"]) == WHOLE).all())
            for state in ([WHOLE], "w", 5):
                for work in (checkpoint.load, lambda one: reshard.save(self.path + "-other", one)):
                    with self.assertRaisesRegex(TypeError, "a state dict or a list of Local"):
                        work(state)
            fixed = WHOLE.copy()
            fixed.flags.writeable = False
            for target, kind in (({"w": fixed}, reshard.InvalidError), ({"w": "text"}, KeyError)):
                with self.assertRaises(kind):
                    checkpoint.load(target)
            with self.assertRaises(KeyError):
                checkpoint.load({"w": WHOLE.copy()}, layouts={"v": "f32[12,8] @ 1:R"})
            raw = {"w": bytearray(WHOLE.nbytes)}
            checkpoint.load(raw)
            self.assertEqual(bytes(raw["w"]), WHOLE.tobytes())

    def test_values(self):
        """plain values are saved, others are refused by name"""
        values = {"i": 2 ** 62, "f": 1e-300, "t": "x\n\"", "l": [1, [2, [None]]], "np": np.float32(0.5), "pair": (1, 2)}
        reshard.save(self.path, values, values=[("more", 5), ("deep.er", "y", ["deep", "er"])])
        with reshard.open(self.path) as checkpoint:
            found = dict(checkpoint.plain_values)
        self.assertEqual(found, {**values, "pair": [1, 2], "more": 5, "deep.er": "y"})
        for value in (object(), float("nan"), [1.0, {"x": float("nan")}], {1, 2}, b"bytes"):
            with self.assertRaises(reshard.UnsupportedError) as raised:
                reshard.save(self.path + "2", {"odd": value})
            self.assertIn("odd", str(raised.exception))
        with self.assertRaises(reshard.InvalidError):
            reshard.save(self.path + "2", {"a.b": 1, "a": {"b": 2}})
        for made in (copy.deepcopy(reshard.OPAQUE), pickle.loads(pickle.dumps(reshard.OPAQUE))):
            self.assertIs(made, reshard.OPAQUE)

    def test_infinity(self):
        """infinity is saved, also beside equal text; it is read as text, and loaded as a float"""
        inf = float("inf")
        values = {"best": inf, "worst": -inf, "l": [1.5, [inf, "Infinity"]], "text": 'a "-Infinity" NaN \\', "b": 1e308}
        reshard.save(self.path, values)
        with reshard.open(self.path) as checkpoint:
            self.assertEqual(dict(checkpoint.plain_values), {**values, "best": "inf", "worst": "-inf",
                                                             "l": [1.5, ["inf", "Infinity"]]})
            got = {"best": 0.0, "worst": "", "text": "", "b": 0.0}
            checkpoint.load(got)
        self.assertEqual(got, {"best": inf, "worst": "-inf", "text": values["text"], "b": 1e308})

    def test_names(self):
        """an invalid name is refused, and not found"""
        for name in ("x\0y", "", "\ud800"):
            for what in (WHOLE, 5):
                with self.assertRaises(reshard.InvalidError) as raised:
                    reshard.save(self.path, {name: what})
                self.assertIn(repr(name), str(raised.exception))
            with self.assertRaises(reshard.InvalidError):
                reshard.save(self.path, {}, values=[(name, 5)])
        self.assertFalse(os.path.exists(self.path))
        reshard.save(self.path, {"x": WHOLE})
        with reshard.open(self.path) as checkpoint:
            self.assertNotIn("x\0y", checkpoint)
            self.assertNotIn("\ud800", checkpoint)
            with self.assertRaises(KeyError):
                checkpoint.load({"x\0y": WHOLE.copy()})

    def test_progress(self):
        """progress is called; an exception in it stops the work and is raised"""
        big, told = np.arange(3 << 20, dtype="f4"), []
        reshard.save(self.path, {"w": big}, progress=lambda done, total: told.append((done, total)))
        self.assertEqual(told[-1], (big.nbytes, big.nbytes))
        self.assertEqual(told, sorted(told))

        def stop(done, total):
            raise InterruptedError(f"{done} of {total}")

        with reshard.open(self.path) as checkpoint:
            for work in (lambda: checkpoint.load({"w": np.zeros_like(big)}, progress=stop),
                         lambda: reshard.save(self.path + "2", {"w": big}, progress=stop),
                         lambda: reshard.digest(checkpoint, progress=stop)):
                with self.assertRaises(InterruptedError):
                    work()
        with self.assertRaises(FileNotFoundError):
            reshard.open(self.path + "2")

    def test_interrupt(self):
        """Ctrl-C stops the work"""
        big = np.arange(3 << 20, dtype="f4")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        self.addCleanup(signal.signal, signal.SIGINT, before)
        with self.assertRaises(KeyboardInterrupt):
            reshard.save(self.path, {"w": big}, pool=1,
                         progress=lambda done, total: signal.raise_signal(signal.SIGINT))
        self.assertFalse(os.path.exists(self.path))
        # While C works, so that Python handles the signal where the next callback begins.
        noise = np.random.default_rng(1).random(1 << 23)
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            reshard.save(self.path, {"w": noise}, pool=1, compress="zstd:19")
        timer.join()
        self.assertFalse(os.path.exists(self.path))
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)


if __name__ == "__main__":
    tap.main()
