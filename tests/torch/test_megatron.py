"""Megatron's checkpoints of the format torch, of any parallel sizes: random models are cut as Megatron cuts them,
and every tensor is read back. The golden checkpoints show that Megatron writes such files."""
import argparse
import os
import random
import unittest

import torch

import reshard
import tap
import worlds
from tensors import same

HIDDEN = 8


def rows(tensor, rank, world):
    return tensor.chunk(world, 0)[rank].clone()


def columns(tensor, rank, world):
    return tensor.chunk(world, 1)[rank].clone()


def gated(tensor, rank, world):
    gate, up = tensor.chunk(2, 0)
    return torch.cat([rows(gate, rank, world), rows(up, rank, world)])


def copies(tensor, rank, world):
    return tensor.clone()


class Model:
    """A GPT with random sizes, and how tensor-parallel ranks cut each tensor."""

    def __init__(self, rng, tensor, nlayers, nexperts=0):
        self.swiglu, self.nlayers, self.ffn = rng.random() < 0.5, nlayers, tensor * rng.randrange(1, 5)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
        self.tensors, self.cuts = {}, {}

        def add(name, shape, cut):
            self.tensors[name] = torch.randn(shape, generator=generator)
            self.cuts[name] = cut

        def add_mlp(prefix):
            add(f"{prefix}.linear_fc1.weight", (self.ffn * (1 + self.swiglu), HIDDEN), gated if self.swiglu else rows)
            add(f"{prefix}.linear_fc1.bias", (self.ffn * (1 + self.swiglu),), gated if self.swiglu else rows)
            add(f"{prefix}.linear_fc2.weight", (HIDDEN, self.ffn), columns)
            add(f"{prefix}.linear_fc2.bias", (HIDDEN,), copies)

        add("embedding.word_embeddings.weight", (4 * tensor, HIDDEN), rows)
        for i in range(nlayers):
            layer = f"decoder.layers.{i}"
            add(f"{layer}.input_layernorm.weight", (HIDDEN,), copies)
            add(f"{layer}.self_attention.linear_qkv.weight", (3 * tensor, HIDDEN), rows)
            add(f"{layer}.self_attention.linear_qkv.bias", (3 * tensor,), rows)
            add(f"{layer}.self_attention.linear_proj.weight", (HIDDEN, tensor), columns)
            add(f"{layer}.self_attention.linear_proj.bias", (HIDDEN,), copies)
            for k in range(nexperts):
                add_mlp(f"{layer}.mlp.experts.local_experts.{k}")
            if nexperts:
                add(f"{layer}.mlp.router.weight", (nexperts, HIDDEN), copies)
            else:
                add_mlp(f"{layer}.mlp")
        add("decoder.final_layernorm.weight", (HIDDEN,), copies)
        add("output_layer.weight", (4 * tensor, HIDDEN), rows)


def write(folder, model, world, stages, chunks=1, nexperts=0, expert_world=1, change=lambda where, model: None):
    """stages: how many layers each stage has in each chunk."""
    first, start = {}, 0
    for chunk in range(chunks):
        for stage, counts in enumerate(stages):
            first[chunk, stage] = start
            start += counts[chunk]
    args = argparse.Namespace(tensor_model_parallel_size=world, pipeline_model_parallel_size=len(stages),
                              num_layers=model.nlayers, swiglu=model.swiglu, ffn_hidden_size=model.ffn,
                              expert_model_parallel_size=expert_world, num_experts=nexperts or None)
    for rank in range(world):
        for stage, counts in enumerate(stages):
            for expert in range(expert_world):
                parts = [{} for _ in range(chunks)]
                for name, tensor in model.tensors.items():
                    words, value = name.split("."), model.cuts[name](tensor, rank, world)
                    if words[:2] == ["decoder", "layers"]:
                        chunk = next((c for c in range(chunks) if first[c, stage] <= int(words[2]) <
                                      first[c, stage] + counts[c]), None)
                        if chunk is None:
                            continue
                        words[2] = str(int(words[2]) - first[chunk, stage])
                        if "local_experts" in words:
                            at, local = words.index("local_experts") + 1, nexperts // expert_world
                            if int(words[at]) // local != expert:
                                continue
                            words[at] = str(int(words[at]) % local)
                        parts[chunk][".".join(words)] = value
                        parts[chunk][".".join(words[:4] + ["_extra_state"])] = None
                    elif stage == (0 if words[0] == "embedding" else len(stages) - 1):
                        parts[0 if words[0] == "embedding" else -1][name] = value
                change((rank, stage, expert), parts)
                path = folder(f"iter_0000012/mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else "") +
                              (f"_{expert:03d}" if expert_world > 1 else ""))
                os.makedirs(path)
                models = {"model": parts[0]} if chunks == 1 else {f"model{i}": part for i, part in enumerate(parts)}
                torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 12, **models,
                            "rng_state": [{"torch_rng_state": torch.zeros(4, dtype=torch.uint8)}]},
                           f"{path}/model_optim_rng.pt")
    with open(folder("latest_checkpointed_iteration.txt"), "w", encoding="ascii") as file:
        file.write("12\n")


class Megatron(unittest.TestCase):
    def equal(self, path, truth, **options):
        with reshard.open(path, like="torch", **options) as checkpoint:
            self.assertEqual(checkpoint.format, "megatron")
            self.assertEqual(set(checkpoint), set(truth))
            for name, value in truth.items():
                self.assertTrue(same(checkpoint[name].torch(), value), name)
            self.assertEqual(checkpoint.plain_values["iteration"], 12)

    def test_tensor_and_pipeline(self):
        """tensor ranks, stages of different lengths, virtual stages"""
        for seed in range(40):
            rng = random.Random(seed)
            world, nstages, chunks = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
            stages = [[rng.randrange(1, 3) for _ in range(chunks)] for _ in range(nstages)]
            model = Model(rng, world, sum(map(sum, stages)))
            with worlds.Folder() as folder:
                write(folder, model, world, stages, chunks)
                self.equal(folder(""), model.tensors)
                self.equal(folder("iter_0000012"), model.tensors)
                cut = {name: value[:3] if "embedding" in name or "output" in name else value
                       for name, value in model.tensors.items()}
                self.equal(folder(""), cut, vocab_size=3)

    def test_experts(self):
        """expert-parallel ranks, with stages and without"""
        for seed in range(10):
            rng = random.Random(seed)
            world, nstages, expert_world = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([2, 3])
            nexperts = expert_world * rng.choice([1, 2])
            model = Model(rng, world, 2 * nstages, nexperts)
            with worlds.Folder() as folder:
                write(folder, model, world, [[2]] * nstages, 1, nexperts, expert_world)
                self.equal(folder(""), model.tensors)

    def test_unknown_parameters(self):
        """a parameter without a rule: equal on all ranks, or refused by name"""
        model = Model(random.Random(1), 2, 1)
        with worlds.Folder() as folder:
            write(folder, model, 2, [[1]], change=lambda where, parts: parts[0].update(alpha=torch.ones(3)))
            self.equal(folder(""), {**model.tensors, "alpha": torch.ones(3)})
        with worlds.Folder() as folder:
            write(folder, model, 2, [[1]],
                  change=lambda where, parts: parts[0].update(alpha=torch.ones(3) * where[0]))
            with self.assertRaisesRegex(reshard.Error, "alpha: .*no rule says which dim is cut; add .*'alpha=S"):
                reshard.open(folder(""))
            joined = torch.cat([torch.zeros(3), torch.ones(3)])
            self.equal(folder(""), {**model.tensors, "alpha": joined}, from_rules=["alp.*=S(0)"])
            with self.assertRaisesRegex(reshard.Error, "rule 'alpha' is invalid"):
                reshard.open(folder(""), from_rules=["alpha"])

    def test_copies(self):
        """a copy that differs is refused, unless rank 0's is asked for"""
        model = Model(random.Random(2), 2, 1)
        name = "decoder.final_layernorm.weight"

        def change(where, parts):
            if where[0] == 1:
                parts[0][name] = parts[0][name] + 1
        with worlds.Folder() as folder:
            write(folder, model, 2, [[1]], change=change)
            with self.assertRaisesRegex(reshard.Error, f"{name}: copies"):
                reshard.open(folder(""))
            self.equal(folder(""), model.tensors, take_rank_0=True)

    def test_missing_rank(self):
        """a missing directory is named"""
        model = Model(random.Random(3), 2, 2)
        with worlds.Folder() as folder:
            write(folder, model, 2, [[1], [1]])
            os.rename(folder("iter_0000012/mp_rank_01_001"), folder("away"))
            with self.assertRaisesRegex(reshard.Error, "mp_rank_01_001 is missing"):
                reshard.open(folder(""))


if __name__ == "__main__":
    tap.main()
