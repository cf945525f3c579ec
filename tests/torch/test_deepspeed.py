"""DeepSpeed's checkpoints of any sizes: the vectors of random models are cut as ZeRO cuts them, and every tensor
is read back. The golden checkpoints show that DeepSpeed writes such files."""
import math
import random
import unittest
from collections import OrderedDict

import torch

import reshard
import tap
import worlds
from tensors import same

KEYS = ("exp_avg", "exp_avg_sq")


def made(shape, rng, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 40))).to(dtype)


class Model:
    """Random trainable, frozen and shared parameters, and buffers."""

    def __init__(self, rng):
        self.dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
        shapes = [tuple(rng.randrange(1, 8) for _ in range(rng.randrange(0, 5)))
                  for _ in range(rng.randrange(1, 9))]
        self.groups = [OrderedDict() for _ in range(rng.randrange(1, 4))]
        for i, shape in enumerate(shapes):
            self.groups[rng.randrange(len(self.groups))][f"layers.{i}.weight"] = made(shape, rng)
        self.groups = [group for group in self.groups if group]
        self.states = {name: {key: made(value.shape, rng) for key in KEYS} for name, value in self.trained().items()}
        self.frozen = OrderedDict((f"frozen.{i}", made((rng.randrange(1, 6), rng.randrange(1, 4)), rng, self.dtype))
                                  for i in range(rng.randrange(0, 3)))
        self.buffers = {"scale": made((3,), rng), "count": torch.tensor(rng.randrange(100)),
                        "nothing": torch.zeros(0, 4)}
        first = next(iter(self.trained()))
        self.shared = {"head.weight": first} if rng.random() < 0.5 else {}

    def trained(self):
        return {name: value for group in self.groups for name, value in group.items()}

    def truth(self, model_dtype=False):
        values = self.trained()
        if model_dtype:
            values = {name: value.to(self.dtype) for name, value in values.items()}
        states = {f"optimizer.state.{name}.{key}": value for name, both in self.states.items()
                  for key, value in both.items()}
        return {**values, **{name: values[owner] for name, owner in self.shared.items()}, **self.frozen,
                **self.buffers, **states}

    def module(self, emptied):
        """The state dict; of stage 3 it has parameters without elements."""
        of = (lambda value: torch.zeros(0, dtype=self.dtype)) if emptied else (lambda value: value.to(self.dtype))
        trained = {name: of(value) for name, value in self.trained().items()}
        shared = {name: trained[owner] for name, owner in self.shared.items()}
        frozen = {name: of(value) for name, value in self.frozen.items()}
        return OrderedDict({**trained, **shared, **frozen, **self.buffers})

    def file(self, shapes, **more):
        return {"module": self.module(more.pop("emptied", False)), "buffer_names": list(self.buffers),
                "param_shapes": shapes, "shared_params": self.shared, "optimizer": None, "global_steps": 3,
                "ds_version": "0", "note": "hello", **more}

    def group_shapes(self):
        return [OrderedDict((name, value.shape) for name, value in group.items()) for group in self.groups]


def write_whole(model, rng, folder, world):
    """Stages 1 and 2: each group is one vector."""
    aligned, padded, elastic = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.3
    files = [{"partition_count": [world] * len(model.groups), "single_partition_of_fp32_groups": [],
              "base_optimizer_state": {}} for _ in range(world)]
    paddings = []
    for group in model.groups:
        behind = [rng.randrange(0, 8) if aligned else 0 for _ in group]
        paddings.append(behind)
        vectors = {}
        for key in ("", *KEYS):
            parts = []
            for (name, value), n in zip(group.items(), behind, strict=True):
                parts += [(model.states[name][key] if key else value).flatten(), torch.full((n,), 7.0)]
            whole = torch.cat(parts)
            used = len(whole)
            each = math.ceil(used / (2 * world)) * 2
            whole = torch.cat([whole, torch.full((each * world - used,), 9.0)])
            stored = padded if not key else not elastic
            vectors[key] = [whole[r * each:(r + 1) * each][:None if stored else max(0, used - r * each)]
                            for r in range(world)]
        for rank, file in enumerate(files):
            file["single_partition_of_fp32_groups"].append(vectors[""][rank])
            state = {"step": torch.tensor(3.0), **{key: vectors[key][rank] for key in KEYS}}
            base = file["base_optimizer_state"]
            number = len(base.get("state", {}))
            base.setdefault("state", {})[10 + number] = state
            base.setdefault("param_groups", []).append({"lr": 0.5, "params": [10 + number]})
    for file in files:
        if elastic:
            file["base_optimizer_state"] = list(file["base_optimizer_state"]["state"].values())
        if aligned or rng.random() < 0.5:
            file["param_alignment_paddings"] = paddings
    torch.save(model.file(model.group_shapes()), folder("mp_rank_00_model_states.pt"))
    return files


def write_cut(model, rng, folder, world):
    """Stage 3: each parameter is cut, and sub-groups have some parameters of one group each."""
    subgroups = []
    for group in model.groups:
        names, at = list(group), 0
        while at < len(names):
            n = rng.randrange(1, len(names) - at + 1)
            subgroups.append(names[at:at + n])
            at += n
    trained = model.trained()

    def pieces(value):
        each = math.ceil(value.numel() / world)
        padded = torch.cat([value.flatten(), torch.full((each * world - value.numel(),), 9.0, dtype=value.dtype)])
        return [padded[r * each:(r + 1) * each].clone() for r in range(world)]

    files = []
    for rank in range(world):
        flat = {key: [torch.cat([pieces(model.states[name][key] if key else trained[name])[rank] for name in names])
                      for names in subgroups] for key in ("", *KEYS)}
        state = {i: {"step": 3, **{key: flat[key][i] for key in KEYS}} for i in range(len(subgroups))}
        files.append({"zero_stage": 3, "partition_count": world, "fp32_flat_groups": flat[""],
                      "optimizer_state_dict": {"state": state, "param_groups": [
                          {"lr": 0.5, "params": list(range(len(subgroups)))}]}})
        shapes = [OrderedDict((name, trained[name].shape) for name in names) for names in subgroups]
        torch.save(model.file(shapes, emptied=True, frozen_param_shapes=OrderedDict(
            (name, value.shape) for name, value in model.frozen.items()), frozen_param_fragments=OrderedDict(
                (name, pieces(value)[rank]) for name, value in model.frozen.items())),
            folder(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
    return files


class DeepSpeed(unittest.TestCase):
    def equal(self, path, truth, **options):
        with reshard.open(path, like="torch", **options) as checkpoint:
            self.assertEqual(checkpoint.format, "deepspeed")
            self.assertEqual(set(checkpoint), set(truth))
            for name, value in truth.items():
                self.assertTrue(same(checkpoint[name].torch(), value), name)
            return dict(checkpoint.plain_values)

    def random_models(self, write, stage):
        for seed in range(60):
            rng = random.Random(seed)
            model, world = Model(rng), rng.choice([1, 2, 3, 4, 7, 11])
            with worlds.Folder() as folder:
                prefix = rng.choice(["", "bf16_", "fp16_"])
                for rank, file in enumerate(write(model, rng, folder, world)):
                    torch.save({"optimizer_state_dict": file, "ds_version": "0"},
                               folder(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
                values = self.equal(folder(""), model.truth())
                name = next(iter(model.trained()))
                self.assertEqual(values[f"optimizer.state.{name}.step"], 3)
                self.assertEqual(values["note"], "hello")
                if stage < 3:
                    self.equal(folder(""), model.truth(model_dtype=True), model_dtype=True)

    def test_whole_vectors(self):
        """stages 1 and 2: groups, alignment, padding that is stored or not, any number of ranks"""
        self.random_models(write_whole, 1)

    def test_cut_parameters(self):
        """stage 3: sub-groups, frozen parameters, more ranks than elements"""
        self.random_models(write_cut, 3)

    def test_missing_rank(self):
        """a missing file is named"""
        rng = random.Random(5)
        model = Model(rng)
        with worlds.Folder() as folder:
            for rank, file in enumerate(write_cut(model, rng, folder, 3)):
                if rank != 1:
                    torch.save({"optimizer_state_dict": file},
                               folder(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
            with self.assertRaisesRegex(reshard.Error, "optimizer file of rank 1 is missing"):
                reshard.open(folder(""))


if __name__ == "__main__":
    tap.main()
