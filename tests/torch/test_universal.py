"""Universal checkpoints of DeepSpeed that the library writes: read back, and loaded by real engines on other numbers of
ranks. DEEPSPEED_PYTHON may name a Python that has DeepSpeed."""
import os
import shutil
import subprocess
import sys
import unittest

import torch

import reshard
import tap
import worlds
from reshard.torch import write_universal
from tensors import same

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden")
PYTHON = os.environ.get("DEEPSPEED_PYTHON", sys.executable)
ABSENT = subprocess.run([PYTHON, "-c", "import deepspeed"], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False,
                        capture_output=True).returncode != 0


def engine(*words):
    done = subprocess.run([PYTHON, os.path.join(HERE, "deepspeed_engine.py"), *map(str, words)], check=False,
                          capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])


class Universal(unittest.TestCase):
    def test_read_back(self):
        """weights and states of all stages are those of the source"""
        for case in "ds_z1", "ds_z2", "ds_z2_round_robin", "ds_z3", "ds_z3_subgroups", "ds_z1_bf16_optimizer":
            with worlds.Folder() as folder:
                source = os.path.join(GOLDEN, case, "ckpt")
                write_universal(source, folder("uni"))
                with open(folder("latest_universal"), encoding="utf-8") as file:
                    self.assertEqual(file.read(), "uni")
                with reshard.open(source, like="torch") as one, reshard.open(folder("uni"), like="torch") as other:
                    self.assertEqual(set(one), set(other), case)
                    for name in one:
                        self.assertTrue(same(one[name].torch(), other[name].torch()), (case, name))
                with self.assertRaises(reshard.ExistsError):
                    write_universal(source, folder("uni"))
                self.assertEqual(sorted(os.listdir(folder(""))), ["latest_universal", "uni"])

    def test_refused(self):
        """a source without groups or without files of the model leaves nothing"""
        with worlds.Folder() as folder:
            torch.save({"w": torch.ones(2)}, folder("model.pt"))
            with self.assertRaisesRegex(reshard.FormatError, "_model_states.pt"):
                write_universal(folder("model.pt"), folder("uni"))
            tag = os.path.join(GOLDEN, "ds_z2", "ckpt", "global_step3")
            with self.assertRaisesRegex(reshard.FormatError, "param_groups"):
                write_universal(folder("model.pt"), folder("uni"), model_from=tag)
            self.assertEqual(os.listdir(folder("")), ["model.pt"])

    def hostile(self, folder, groups, state, words):
        """Tries to write a source with the parameter w, and these groups and states. Nothing is left."""
        torch.save({"w": torch.ones(2), "optimizer": {"state": {"w": state}, "param_groups": groups}}, folder("x.pt"))
        before = sorted(os.listdir(folder("")))
        with self.assertRaisesRegex(reshard.Error, words):
            write_universal(folder("x.pt"), folder("uni"), model_from=folder("tag"))
        self.assertEqual(sorted(os.listdir(folder(""))), before)

    def test_hostile(self):
        """names that lead out of the output, groups that are none, and links are refused"""
        good = [{"params": ["w"]}]
        with worlds.Folder() as folder:
            os.mkdir(folder("tag"))
            with open(folder("secret"), "w", encoding="ascii") as file:
                file.write("secret")
            open(folder("tag", "mp_rank_00_model_states.pt"), "wb").close()
            for key in (folder("out"), "a/b", "x" * 300):
                self.hostile(folder, good, {key: torch.ones(2)}, "not the name of a file")
            for groups in ([{"params": 3}], [{"params": ["w"], "betas": 3}], [{"params": ["w", "w"]}],
                           [{"params": [["w"]]}], {"a": {"params": ["w"]}}, {"0": 5}):
                self.hostile(folder, groups, {}, "param_groups")
            self.hostile(folder, good, {"step": "x"}, "step")
            self.hostile(folder, good, {"step": 10 ** 400}, "step")
            os.unlink(folder("tag", "mp_rank_00_model_states.pt"))
            for make in (lambda path: os.symlink(folder("secret"), path), os.mkfifo):
                make(folder("tag", "mp_rank_00_model_states.pt"))
                self.hostile(folder, good, {}, "link that leads out|not a regular file")
                os.unlink(folder("tag", "mp_rank_00_model_states.pt"))
            open(folder("tag", "mp_rank_00_model_states.pt"), "wb").close()
            os.symlink(folder("secret"), folder("latest_universal"))
            write_universal(folder("x.pt"), folder("uni"), model_from=folder("tag"))
            with open(folder("secret"), encoding="ascii") as file:
                self.assertEqual(file.read(), "secret")

    @unittest.skipIf(ABSENT, "DeepSpeed is not installed")
    def test_engines(self):
        """engines of stages 1 to 3 load them, on as many ranks and on more"""
        for stage, ranks in (1, (2,)), (2, (3,)), (3, (3,)):
            with worlds.Folder() as folder:
                engine("save", stage, 2, folder("run"), folder("saved"))
                truth = torch.load(folder("saved"))
                write_universal(folder("run"), folder("run/universal"))
                shutil.rmtree(folder("run/global_step3"))  # nothing is read from there
                for n in ranks:
                    engine("load", stage, n, folder("run"), folder(f"loaded{n}"))
                    found = torch.load(folder(f"loaded{n}"))
                    self.assertEqual(found.pop("steps"), 4)
                    self.assertEqual(found.pop("lr"), truth["lr"])
                    for name, value in found.items():
                        self.assertTrue(same(value, truth[name]), (stage, n, name))


if __name__ == "__main__":
    tap.main()
