"""Conversions in Python: rules, presets, names, casts, shards, cancellation and verification."""
import glob
import json
import os
import shutil
import subprocess
import tempfile
import unittest

import numpy as np
import reshard
import tap

HERE = os.path.dirname(os.path.abspath(__file__))
RESHARD = os.environ.get("RESHARD", os.path.join(HERE, "../../build/reshard"))


def state():
    rng = np.random.default_rng(3)
    model = {f"layers.{i}.{name}.weight": rng.random(shape).astype("f4")
             for i in range(2) for name, shape in (("q_proj", (8, 6)), ("o_proj", (6, 8)), ("norm", (6,)))}
    model["embed_tokens.weight"] = rng.random((10, 6)).astype("f4")
    moments = {name: {"exp_avg": value * 2, "step": np.array(3.0)} for name, value in model.items()}
    return {"model": model, "optim": {"state": moments}, "epoch": 4}


class Rules(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = directory.name
        cls.path = os.path.join(directory.name, "x")
        reshard.save(cls.path, state())
        with open(os.path.join(cls.path, "config.json"), "w") as file:
            file.write("{}")

    def out(self, *names):
        self.made = tempfile.mkdtemp(dir=self.directory)
        return os.path.join(self.made, *(names or ("out",)))

    def layouts(self, path):
        """Returns the number of boxes of each tensor, and the shape of the first."""
        with reshard.open(path) as checkpoint:
            return {name: (tensor.nboxes, tensor.boxes[0].len) for name, tensor in checkpoint.items()}

    def test_presets(self):
        """presets that fit the names of a checkpoint and a mesh"""
        with reshard.open(self.path) as checkpoint:
            self.assertEqual(checkpoint.presets(), ["llama-tp", "fsdp+llama-tp", "fsdp", "hsdp", "replicate"])
            self.assertEqual(checkpoint.presets(4), ["llama-tp", "fsdp", "replicate"])
            self.assertEqual(checkpoint.presets(mesh="2x2x2"), ["llama-tp", "fsdp+llama-tp", "fsdp", "replicate"])
            for preset in checkpoint.presets(mesh="dp=2,tp=2"):
                reshard.convert(checkpoint, self.out(), mesh="dp=2,tp=2", preset=preset)
            with self.assertRaises(reshard.InvalidError):
                checkpoint.presets(mesh="x")
        with self.assertRaises(ValueError):
            checkpoint.presets()

    def test_as_the_command(self):
        """the same rules write the same files as the command"""
        for options, words in (({"preset": "fsdp", "mesh": "3"}, ["--preset", "fsdp", "--mesh", "3"]),
                               ({"preset": "llama-tp", "mesh": "dp=2,tp=2"},
                                ["--preset", "llama-tp", "--mesh", "dp=2,tp=2"]),
                               ({"preset": "hsdp", "mesh": "2x2"}, ["--preset", "hsdp", "--mesh", "2x2"]),
                               ({"mesh": "tp=2", "place": {".*q_proj.*": "colwise"}, "default": "replicate"},
                                ["--mesh", "tp=2", "--place", ".*q_proj.*=colwise", "--default", "replicate"]),
                               ({"mesh": "2", "place": {r"model\..*o_proj.*": "rowwise"}, "preset": "replicate"},
                                ["--mesh", "2", "--place", "model[.].*o_proj.*=rowwise", "--preset", "replicate"])):
            ours, theirs = self.out("ours"), os.path.join(self.made, "theirs")
            reshard.convert(self.path, ours, **options)
            subprocess.run([RESHARD, "convert", "-q", self.path, theirs, *words], check=True,
                           stdout=subprocess.DEVNULL)
            self.assertEqual(self.layouts(ours), self.layouts(theirs), words)
            self.assertEqual(reshard.diff(ours, self.path), [])

    def test_follows(self):
        """optimizer state has the rule of its parameter, unless it has its own"""
        out = self.out()
        reshard.convert(self.path, out, mesh="2", default="R", place={
            r"model\.layers\.0\.q_proj\.weight": "S(0)", r"model\.layers\.1\.q_proj\.weight": "S(1)",
            r".*layers\.1\.q_proj.*exp_avg": "R"})
        found = self.layouts(out)
        self.assertEqual(found["optim.state.layers.0.q_proj.weight.exp_avg"], (2, (4, 6)))
        self.assertEqual(found["optim.state.layers.1.q_proj.weight.exp_avg"], (1, (8, 6)))
        self.assertEqual(found["optim.state.layers.0.q_proj.weight.step"], (1, ()))

    def test_function(self):
        """a function decides: placements, a layout, or whole"""
        def place(tensor):
            if tensor.name.endswith("embed_tokens.weight") and tensor.name.startswith("model"):
                return reshard.Layout("f32[10,6] @ { 0:1 | 1:10 }")
            return [reshard.Shard(1), reshard.Replicate()] if tensor.ndim == 2 else None

        out = self.out()
        reshard.convert(self.path, out, mesh="3x2", place=place)
        found = self.layouts(out)
        self.assertEqual(found["model.embed_tokens.weight"], (2, (1, 6)))
        self.assertEqual(found["model.layers.0.o_proj.weight"], (3, (6, 3)))
        self.assertEqual(found["model.layers.0.norm.weight"], (1, (6,)))
        self.assertEqual(reshard.diff(out, self.path), [])

    def test_refused_as_the_command(self):
        """outputs and sizes that cannot be meant are refused, and .pt is a file of torch.save"""
        with self.assertRaisesRegex(reshard.InvalidError, "'-' is not a path"):
            reshard.merge(self.path, "-")
        for call, options in ((reshard.convert, {"format": "dcp"}), (reshard.convert, {"format": "safetensors"}),
                              (reshard.split, {"mesh": 2, "default": "R"})):
            with self.assertRaisesRegex(reshard.InvalidError, "out.pt is named like a torch.save file"):
                call(self.path, self.out("out.pt"), **options)
            self.assertFalse(os.path.exists(self.out("out.pt")))
        with self.assertRaisesRegex(reshard.InvalidError, "is named like a safetensors file"):
            reshard.convert(self.path, self.out("out.safetensors"), format="dcp")
        for options in ({"max_shard_size": 5}, {"max_shard_size": "5"}, {"max_memory": 256}, {"max_nbytes": " 1 "}):
            with self.assertRaisesRegex(reshard.InvalidError, "bytes; add a unit: "):
                reshard.merge(self.path, self.out(), **options)
        with self.assertRaises(ValueError):
            reshard.merge(self.path, self.out(), max_shard_size="5 bananas")
        reshard.merge(self.path, self.out(), max_shard_size="300B", max_memory=1 << 20)
        out = self.out("out.pt")
        reshard.merge(self.path, out, verify=True)
        self.assertTrue(os.path.isfile(out))
        with reshard.open(out) as checkpoint:
            self.assertEqual(checkpoint.format, "torch.save")
            self.assertIn("layers.0.norm.weight", checkpoint)

    def test_heads_and_experts(self):
        """heads are those of the caller, and experts are distributed over the axis ep"""
        with self.assertRaisesRegex(reshard.MismatchError, "3 attention heads cannot be divided among 2 ranks"):
            reshard.split(self.path, self.out(), mesh="tp=2", preset="llama-tp", heads=3)
        with self.assertRaisesRegex(reshard.InvalidError, "must be N or N,K"):
            reshard.split(self.path, self.out(), mesh="tp=2", preset="llama-tp", heads=(2, 4))
        with self.assertRaisesRegex(reshard.InvalidError, "heads needs a preset"):
            reshard.split(self.path, self.out(), mesh="tp=2", default="R", heads=(4, 2))
        with self.assertRaisesRegex(reshard.InvalidError, "need names"):
            reshard.open(self.path, heads=4)
        reshard.convert(self.path, self.out(), mesh="tp=2", preset="llama-tp", heads=(4, 2))
        path = self.out()
        reshard.save(path, {f"mlp.experts.{i}.w1.weight": np.full((4, 2), i, "f4") for i in range(6)})
        reshard.split(path, self.out(), mesh="ep=2,tp=2", preset="moe-tp")
        with reshard.open(os.path.join(self.made, "out", "rank-00003-of-00004.safetensors")) as checkpoint:
            self.assertEqual(list(checkpoint), [f"mlp.experts.{i}.w1.weight" for i in (3, 4, 5)])
            self.assertEqual(checkpoint["mlp.experts.4.w1.weight"][2:].tolist(), [[4, 4], [4, 4]])

    def test_same_words(self):
        """axes and placements are those of the command, expressions those of Python"""
        out = self.out()
        reshard.convert(self.path, out, mesh="TP=2,dp=1", preset="llama-tp", place={r".*\.\d\.norm\.\w+": "Colwise,R"},
                        exclude="step")
        found = self.layouts(out)
        self.assertEqual(found["model.layers.0.q_proj.weight"], (2, (4, 6)))
        self.assertEqual(found["model.layers.1.norm.weight"], (2, (3,)))
        self.assertEqual(found["optim.state.layers.1.norm.weight.exp_avg"], (2, (3,)))
        out = self.out()
        reshard.convert(self.path, out, mesh=2, place=lambda tensor: "Replicate" if tensor.ndim < 2 else "rowwise")
        self.assertEqual(self.layouts(out)["model.layers.0.o_proj.weight"], (2, (6, 4)))

    def test_words_of_the_command(self):
        """force, all, threads, max_memory, rules, strip_prefix and split mean what they do in the command"""
        out = self.out()
        reshard.merge(self.path, out, all=True, threads=2, max_memory="1MB")
        with self.assertRaises(reshard.ExistsError):
            reshard.merge(self.path, out)
        report = reshard.merge(self.path, out, force=True, strip_prefix="layers.", verify=True)
        self.assertGreater(report.nbytes_written, 0)
        with reshard.open(out) as checkpoint:
            self.assertIn("0.q_proj.weight", checkpoint)
        with self.assertRaisesRegex(reshard.InvalidError, "max_nbytes and max_memory"):
            reshard.merge(self.path, out, force=True, max_memory=1 << 20, max_nbytes=1 << 21)
        with self.assertRaisesRegex(reshard.InvalidError, "pool and threads"):
            reshard.digest(self.path, pool=1, threads=2)
        rules = os.path.join(self.made, "rules")
        with open(rules, "w") as file:
            file.write(".*q_proj.*  Shard(0)\n.*  Replicate()\n")
        for options, words in (({"preset": "llama-tp"}, ["--preset", "llama-tp"]),
                               ({"rules": rules}, ["--rules", rules])):
            ours, theirs = self.out("ours"), os.path.join(self.made, "theirs")
            reshard.split(self.path, ours, mesh={"tp": 2}, **options)
            subprocess.run([RESHARD, "split", "-q", self.path, theirs, "--mesh", "tp=2", *words], check=True)
            self.assertEqual(reshard.digest(ours), reshard.digest(theirs))
            self.assertEqual(self.layouts(ours), self.layouts(theirs))
            self.assertIn("config.json", os.listdir(ours))
        with self.assertRaisesRegex(reshard.InvalidError, "split needs a mesh"):
            reshard.split(self.path, self.out())
        state = {"w": np.ones(3)}
        reshard.save(self.out("s"), state)
        reshard.save_start(os.path.join(self.made, "s"), state, force=True, threads=1, max_memory="1MB").wait()
        with reshard.open(os.path.join(self.made, "s")) as checkpoint:
            checkpoint.load(state, threads=1, max_memory="1MB")
        norm = "model.layers.0.norm.weight"
        self.assertEqual(reshard.digest(self.path, norm), {norm: reshard.digest(self.path)[norm]})
        self.assertEqual(list(reshard.digest(self.path, only="q_proj.weight$")),
                         [f"model.layers.{i}.q_proj.weight" for i in range(2)])

    def test_meshes(self):
        """a mesh is a number, a text, a tuple or a dict"""
        same = [reshard.Layout.on("f32", (8, 8), mesh, "S0,S1") for mesh in ("2x4", (2, 4), [2, 4])]
        self.assertEqual(len(set(map(str, same))), 1)
        self.assertEqual(reshard.Layout.on("f32", (8,), 8, "S0"), reshard.Layout("f32[8] @ 8 : S0"))
        self.assertEqual(str(reshard.Layout.by_dim("f32", (8,), {"dp": 2, "tp": 4}, [["tp"]]).mesh), "dp=2,tp=4")
        out = self.out()
        reshard.convert(self.path, out, mesh=4, preset="fsdp")
        with reshard.open(out) as checkpoint:
            self.assertEqual(checkpoint["model.embed_tokens.weight"].nboxes, 4)

    def test_verified(self):
        """verify compares what was written, also after a cast, and a difference leaves nothing"""
        out = self.out()
        reshard.convert(self.path, out, mesh=2, preset="fsdp", cast="bf16", verify=True)
        self.assertTrue(os.path.exists(out))
        times = []

        def damaged(done, total):  # a byte of what was written, before it appears at its path
            for path in glob.glob(os.path.join(self.made, "bad*", "**", "model*"), recursive=True):
                if done == total and self.made not in times:
                    times.append(self.made)
                    with open(path, "r+b") as file:
                        file.seek(-1, os.SEEK_END)
                        file.write(b"\xff")

        for options in ({}, {"cast": "f16"}):
            with self.assertRaisesRegex(reshard.FormatError, r"differs from the source: .*: element \["):
                reshard.convert(self.path, self.out("bad"), format="safetensors", progress=damaged, verify=True,
                                only="^model", **options)
            self.assertFalse(os.path.exists(os.path.join(self.made, "bad")))

    def test_functions_fail(self):
        """a function is called once per tensor; its ValueErrors are collected, other exceptions are raised"""
        called = []

        def place(tensor):
            called.append(tensor.name)
            if tensor.name.endswith("norm.weight"):
                raise ValueError("no norms")
            return None

        with self.assertRaisesRegex(reshard.MismatchError, r"2 of 7 tensors \(model.*f32\[6\].*\): no norms"):
            reshard.convert(self.path, self.out(), mesh=2, place=place, only="^model")
        self.assertEqual(len(called), 7)
        reshard.convert(self.path, self.out(), only=lambda tensor: called.append(tensor.name) or tensor.ndim == 2)
        self.assertEqual(len(called), 7 + 21)
        for name in ("only", "exclude", "cast", "rename"):
            with self.assertRaises(ZeroDivisionError):
                reshard.convert(self.path, self.out(), **{name: lambda _: 1 / 0})
        with self.assertRaisesRegex(reshard.InvalidError, "regular expression '[(]'"):
            reshard.convert(self.path, self.out(), only="(")

    def test_names_and_dtypes(self):
        """tensors are selected, renamed and cast"""
        out = self.out("y.safetensors")
        report = reshard.convert(self.path, out, only=[r"^model\."], exclude="norm", cast="bf16",
                                 rename={r"^model\.": "", r"layers\.(\d)": r"block\1"})
        self.assertEqual(report.ntensors, 5)
        self.assertEqual(report.nleft_out, 21 - 5 + 1)
        with reshard.open(out) as checkpoint:
            self.assertEqual(set(checkpoint), {"embed_tokens.weight", "block0.q_proj.weight", "block1.q_proj.weight",
                                               "block0.o_proj.weight", "block1.o_proj.weight"})
            self.assertEqual({tensor.dtype for tensor in checkpoint.values()}, {"bf16"})
        out = self.out()
        reshard.convert(self.path, out, only=lambda tensor: tensor.ndim == 1, rename=str.upper,
                        cast={r".*layers\.0\..*": "f64"})
        with reshard.open(out) as checkpoint:
            self.assertEqual({name: tensor.dtype for name, tensor in checkpoint.items() if "MODEL" in name},
                             {"MODEL.LAYERS.0.NORM.WEIGHT": "f64", "MODEL.LAYERS.1.NORM.WEIGHT": "f32"})

    def test_merge(self):
        """only the model, for transformers, in files of a limited size"""
        out = self.out("hf")
        report = reshard.merge(self.path, out, max_shard_size="400B")
        self.assertGreater(report.nfiles_written, 2)
        with open(os.path.join(out, "model.safetensors.index.json")) as file:
            self.assertEqual(set(json.load(file)["weight_map"]), set(state()["model"]))
        self.assertTrue(os.path.exists(os.path.join(out, "config.json")))
        with reshard.open(out) as checkpoint:
            for name, array in state()["model"].items():
                self.assertTrue((checkpoint[name][...] == array).all())
        one = self.out("all.safetensors")
        reshard.merge(self.path, one, everything=True)
        self.assertEqual(reshard.diff(one, self.path), [])
        theirs = self.out("theirs")
        subprocess.run([RESHARD, "merge", "-q", self.path, theirs], check=True, stdout=subprocess.DEVNULL)
        self.assertEqual(reshard.digest(out), reshard.digest(theirs))
        some = self.out("some")
        reshard.merge(self.path, some, only="norm")
        with reshard.open(some) as checkpoint:
            self.assertEqual(set(checkpoint), {"layers.0.norm.weight", "layers.1.norm.weight"})

    def test_config_from(self):
        """configs, model cards and licenses of a directory and its subdirectories are copied, as by the command"""
        base, ours, theirs = self.out("base"), self.out("ours"), self.out("theirs")
        our_parts, their_parts = self.out("ours"), self.out("theirs")
        os.makedirs(os.path.join(base, "a/b/c"))
        os.mkdir(os.path.join(base, ".cache"))
        for name in ("config.json", "tokenizer.json", "README.md", "LICENSE", "notes.log", "metadata.json",
                     "latest_x.txt", "_private.py", "model.safetensors.index.json", "a/processor.json", "a/notes.log",
                     "a/b/NOTICE", "a/b/c/deep.json", ".cache/config.json"):
            with open(os.path.join(base, name), "w", encoding="utf-8") as file:
                file.write("{}")
        reshard.merge(self.path, ours, config_from=base)
        subprocess.run([RESHARD, "merge", "-q", self.path, theirs, "--config-from", base], check=True)
        subprocess.run([RESHARD, "split", "-q", self.path, their_parts, "--mesh", "2", "--preset", "fsdp",
                        "--config-from", base], check=True)
        reshard.split(self.path, our_parts, mesh=2, preset="fsdp", config_from=base)
        for one, other in ((ours, theirs), (our_parts, their_parts)):
            files = {os.path.relpath(os.path.join(at, name), one) for at, _, names in os.walk(one) for name in names}
            self.assertEqual(files, {os.path.relpath(os.path.join(at, name), other) for at, _, names in os.walk(other)
                                     for name in names})
            self.assertLessEqual({"README.md", "a/processor.json", "a/b/NOTICE"}, files)

    def test_config_links(self):
        """links are not followed: below the output for writing, below config_from for reading"""
        base, out, victim = self.out("base"), self.out("out"), self.out("victim")
        os.makedirs(os.path.join(base, "a/b"))
        os.mkdir(victim)
        secret = os.path.join(victim, "secret.json")
        for path in (os.path.join(base, "config.json"), os.path.join(base, "a/b/processor.json"), secret):
            with open(path, "w", encoding="utf-8") as file:
                file.write("{}")
        os.mkfifo(os.path.join(base, "a/fifo.json"))
        os.symlink("/", os.path.join(base, "a/root"))
        command = [RESHARD, "merge", "-q", "--force", self.path, out, "--config-from", base]
        for inner, leads_to in (("a", victim), ("a/b", victim), ("a/b/processor.json", secret),
                                ("a/b/processor.json.reshard-part", secret)):
            for ours in (True, False):
                with self.subTest(inner=inner, ours=ours):
                    reshard.merge(self.path, out, force=True)
                    os.makedirs(os.path.dirname(os.path.join(out, inner)), exist_ok=True)
                    os.symlink(leads_to, os.path.join(out, inner))
                    if inner == "a/b/processor.json":  # the link is replaced
                        reshard.merge(self.path, out, force=True, config_from=base) if ours else \
                            subprocess.run(command, check=True)
                        self.assertFalse(os.path.islink(os.path.join(out, inner)))
                    elif ours:
                        self.assertRaises(OSError, reshard.merge, self.path, out, force=True, config_from=base)
                    else:
                        self.assertEqual(subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode, 5)
                    self.assertEqual(os.listdir(victim), ["secret.json"])
                    self.assertEqual(os.path.getsize(secret), 2)
                    shutil.rmtree(out)
        os.symlink(secret, os.path.join(base, "a/tokenizer.json"))
        with self.assertRaisesRegex(reshard.FormatError, "a/tokenizer.json: link leads out of"):
            reshard.merge(self.path, out, config_from=base)
        found = subprocess.run([*command[:4], self.path, out, "--config-from", base], check=False, capture_output=True)
        self.assertEqual(found.returncode, 4)
        self.assertIn(b"a/tokenizer.json: link leads out of", found.stderr)

    def test_config_cache(self):
        """links of a snapshot of Hugging Face's cache to its blobs are followed"""
        cache, ours, theirs = self.out("cache"), self.out("ours"), self.out("theirs")
        base = os.path.join(cache, "snapshots", "0123")
        os.makedirs(os.path.join(base, "a"))
        os.mkdir(os.path.join(cache, "blobs"))
        with open(os.path.join(cache, "blobs", "4567"), "w", encoding="utf-8") as file:
            file.write("{}")
        os.symlink("../../blobs/4567", os.path.join(base, "config.json"))
        os.symlink("../../../blobs/4567", os.path.join(base, "a/processor.json"))
        reshard.merge(self.path, ours, config_from=base)
        subprocess.run([RESHARD, "merge", "-q", self.path, theirs, "--config-from", base], check=True)
        for out in (ours, theirs):
            self.assertEqual(os.path.getsize(os.path.join(out, "a/processor.json")), 2)
            self.assertFalse(os.path.islink(os.path.join(out, "a/processor.json")))

    def test_ranks_files(self):
        """one file per rank, with everything that the rank holds"""
        out = self.out("split")
        reshard.convert(self.path, out, format="safetensors", mesh="2", preset="fsdp", every_replica=True)
        self.assertEqual(sorted(os.listdir(out)),
                         ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"])
        self.assertEqual(reshard.diff(out, self.path), [])

    def test_dry_run(self):
        """a dry run reports, and writes nothing"""
        out = self.out()
        report = reshard.convert(self.path, out, mesh="2", preset="fsdp", dry_run=True, compress="zstd")
        self.assertEqual((report.ntensors, os.path.exists(out)), (21, False))

    def test_stop_and_resume(self):
        """an exception in progress stops a conversion, and resume completes it"""
        out, told = self.out(), []

        def stop(done, total):
            told.append(done)
            if done > total // 2:
                raise StopIteration

        with self.assertRaises(StopIteration) as raised:
            reshard.convert(self.path, out, mesh="2", preset="fsdp", progress=stop, pool=1)
        self.assertTrue(raised.exception.__suppress_context__)
        self.assertTrue(os.path.isdir(out + ".reshard-part"))
        with self.assertRaises(reshard.ExistsError):
            reshard.convert(self.path, out, mesh="2", preset="fsdp")
        reshard.convert(self.path, out, mesh="2", preset="fsdp", resume=True)
        self.assertEqual((reshard.diff(out, self.path), reshard.verify(out)), ([], []))
        with self.assertRaises(FileExistsError):
            reshard.convert(self.path, out)
        reshard.convert(self.path, out, overwrite=True)

    def test_refused(self):
        """all invalid rules are reported at once, before anything is written"""
        out = self.out()
        for options, kind, word in (
                ({"mesh": "2", "place": {"nothing": "S0"}, "default": "R"}, reshard.MismatchError, "nothing"),
                ({"mesh": "2", "place": {".*q_proj.*": "S0"}}, reshard.MismatchError, "10 of 21 tensors"),
                ({"mesh": "2", "place": "S(1)"}, reshard.MismatchError, "norm.weight"),
                ({"mesh": "2", "place": "P"}, reshard.InvalidError, ""),
                ({"place": "S0"}, reshard.InvalidError, "mesh"), ({"preset": "fsdp"}, reshard.InvalidError, "mesh"),
                ({"mesh": "2", "preset": "tpu"}, reshard.InvalidError, "llama-tp"),
                ({"mesh": "2", "preset": "hsdp"}, reshard.InvalidError, "two axes"),
                ({"mesh": "2", "place": {"(": "R"}}, reshard.InvalidError, "regular expression '('"),
                ({"rename": {"[": ""}}, reshard.MismatchError, "regular expression '['"),
                ({"mesh": "2", "place": 3}, TypeError, "not 3"), ({"only": "a\0"}, reshard.InvalidError, "NUL"),
                ({"only": "zzz"}, reshard.MismatchError, "no tensor"), ({"cast": "f99"}, reshard.Error, "f99"),
                ({"rename": lambda name: "same"}, reshard.Error, "same"),
                ({"format": "orbax"}, reshard.Error, "orbax"),
                ({"max_shard_size": "5GB"}, reshard.InvalidError, "DCP"),
                ({"max_shard_size": "5 parsecs", "format": "safetensors"}, ValueError, "parsecs"),
                ({"compress": "gzip"}, reshard.InvalidError, "gzip")):
            with self.assertRaises(kind, msg=str(options)) as raised:
                reshard.convert(self.path, out, **options)
            self.assertIn(word, str(raised.exception))
            self.assertFalse(os.path.exists(out), options)

    def test_sizes(self):
        """sizes with units"""
        from reshard.local import size
        for text, right in (("256MB", 256000000), ("1GiB", 1 << 30), ("5GB", 5 * 10 ** 9), ("0.5 KiB", 512),
                            ("1700", 1700), (1000, 1000), ("9B", 9), (None, 0), (0, 0), ("2k", 2000), (1e9, 10 ** 9),
                            ("1e9", 10 ** 9), (np.int64(5000), 5000), (2 ** 62 + 1, 2 ** 62 + 1)):
            self.assertEqual(size(text), right)
        for text in (-5, "-5GB", -1e9, "inf", "nan", float("inf"), True, b"5GB", "GB", 2 ** 63, "1e30"):
            with self.assertRaisesRegex(reshard.InvalidError, "is not a number of bytes"):
                size(text)
        for options in ({"pool": 0}, {"threads": 0}):
            with self.assertRaisesRegex(reshard.InvalidError, "number of threads 0"):
                reshard.digest(self.path, **options)

    def test_heads(self):
        """presets do not cut the heads of config.json, and copy KV heads where that is asked for"""
        state = {"l.q_proj.weight": np.zeros((24, 24), "f4"),
                 "l.k_proj.weight": np.arange(192, dtype="f4").reshape(8, 24)}
        with tempfile.TemporaryDirectory() as work:
            source, out = os.path.join(work, "m"), os.path.join(work, "out")
            reshard.save(source, state)
            with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as file:
                json.dump({"num_attention_heads": 6, "num_key_value_heads": 2}, file)
            with self.assertRaisesRegex(reshard.MismatchError, "6 attention heads cannot be divided among 4 ranks"):
                reshard.convert(source, out, mesh="tp=4", preset="llama-tp")
            with self.assertRaisesRegex(reshard.MismatchError, "2 KV heads cannot be divided among 6 ranks"):
                reshard.split(source, out, mesh="tp=6", preset="llama-tp")
            reshard.split(source, out, mesh="tp=6", preset="llama-tp", replicate_kv_heads=True)
            self.assertEqual(reshard.diff(source, out), [])
            with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as file:
                file.write("{")
            with self.assertWarnsRegex(UserWarning, "number of heads is not known"):
                reshard.convert(source, out, mesh="tp=4", preset="llama-tp", force=True)


    def test_adapter(self):
        """an adapter keeps the names of PEFT, and a merge without a config says so"""
        with tempfile.TemporaryDirectory() as work:
            source, out = os.path.join(work, "m"), os.path.join(work, "out")
            reshard.save(source, {"base_model.model.q.lora_A.default.weight": np.ones((4, 2), "f4")})
            with self.assertWarnsRegex(UserWarning, "out has no config.json"):
                reshard.merge(source, out)
            with open(os.path.join(source, "adapter_config.json"), "w", encoding="utf-8") as file:
                json.dump({"peft_type": "LORA"}, file)
            for rename in ("s/^base_model[.](.*)[.]q/\\1.k/", ["s/base_model[.]//", "s/[.]q[.]/.k./"]):
                reshard.convert(source, out, rename=rename, force=True)
                with reshard.open(out) as checkpoint:
                    self.assertEqual(list(checkpoint), ["model.k.lora_A.default.weight"])
            with self.assertRaises(reshard.InvalidError):
                reshard.convert(source, out, rename="model", force=True)
            reshard.merge(source, out, force=True)
            self.assertEqual(sorted(os.listdir(out)), ["adapter_config.json", "adapter_model.safetensors"])
            with reshard.open(out) as checkpoint:
                self.assertEqual(list(checkpoint), ["base_model.model.q.lora_A.weight"])


class Proofs(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "x")
        self.array = np.arange(60, dtype="i4").reshape(6, 10)
        reshard.save(self.path, {"w": self.array, "v": np.arange(3.0)})

    def test_digest(self):
        """digests do not depend on the layout, and are those of the array"""
        found = reshard.digest(self.path)
        self.assertEqual(found["w"], reshard.digest_array(self.array))
        self.assertEqual(found["w"], reshard.digest_array(np.asfortranarray(self.array)))
        self.assertEqual(found["w"], reshard.digest_array(np.repeat(self.array, 2, 1)[:, ::2]))
        self.assertNotEqual(found["w"], reshard.digest_array(self.array.T))
        self.assertNotEqual(found["w"], reshard.digest_array(self.array.view("u4")))
        self.assertEqual(list(reshard.digest(self.path, ["v"])), ["v"])
        reshard.convert(self.path, self.path + "2", mesh="3", place="S(0)")
        self.assertEqual(reshard.digest(self.path + "2"), found)
        with self.assertRaises(KeyError):
            reshard.digest(self.path, ["other"])

    def test_diff(self):
        """every kind of difference"""
        other = self.array.copy()
        other[2, 3] = -1
        reshard.save(self.path + "2", {"w": other, "u": other, "v": np.arange(3, dtype="f4")})
        found = {one.name: one for one in reshard.diff(self.path, self.path + "2")}
        self.assertEqual({name: one.kind for name, one in found.items()},
                         {"w": "element", "u": "only_in_b", "v": "dtype"})
        self.assertIn("23", found["w"].text)
        self.assertIn("-1", found["w"].text)
        self.assertEqual([one.name for one in reshard.diff(self.path, self.path + "2", only="^w$")], ["w"])
        self.assertEqual(reshard.diff(self.path, self.path + "2", exclude="[uvw]"), [])
        swapped = {"u": "w", "w": "u"}  # which have the same elements
        path = self.path + "2"
        self.assertEqual(reshard.diff(path, path, rename=lambda name: swapped.get(name, name)), [])
        near = {one.name: one.kind for one in reshard.diff(self.path, self.path + "2", atol=24)}
        self.assertEqual(near, {"w": "element", "u": "only_in_b"})  # integers have no tolerance
        with self.assertRaises(reshard.InvalidError):
            reshard.diff(self.path, self.path, rtol=-1)

    def test_verify(self):
        """damage is found, with the file and the tensor"""
        self.assertEqual(reshard.verify(self.path), [])
        with reshard.open(self.path) as checkpoint:
            box = checkpoint["w"].boxes[0]
        data = os.path.join(self.path, box.file)
        with open(data, "r+b") as file:
            content = file.read()
            at = content.index(self.array.tobytes())
            file.seek(at + 7)
            file.write(b"\xff")
        found = reshard.verify(self.path)
        self.assertEqual(len(found), 1)
        self.assertIn("w", found[0])
        with self.assertRaises(reshard.FormatError), reshard.open(self.path) as checkpoint:
            checkpoint["w"][:]


if __name__ == "__main__":
    tap.main()
