"""The per-rank files of verl, SkyRL and FSDP: random meshes and placements of real DTensors, FSDP2 with and
without tensor parallelism, and FSDP1."""
import json
import os
import random
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
import tap
import worlds
from tensors import bits, same


def write(folder, kind, state):
    """The files of verl's checkpoint manager."""
    path = os.path.join(folder, f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    torch.save(state, path)


def whole(value):
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach().clone()


def save_placements(folder, shape, seed):
    """Tensors in random placements, on the mesh and on its axes."""
    choose, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    names = tuple("abc"[:len(shape)])
    mesh, state, truth = init_device_mesh("cpu", shape, mesh_dim_names=names), {}, {}
    for i in range(24):
        extents = [choose.randint(1, 9) for _ in range(choose.randint(1, 3))]
        tensor = torch.randn(extents, generator=numbers).to(choose.choice([torch.float32, torch.bfloat16, torch.int64]))
        submesh = mesh[choose.choice(names)] if len(names) > 1 and choose.random() < 0.25 else mesh
        places = [choose.choice([Replicate(), *map(Shard, range(tensor.ndim))]) for _ in range(submesh.ndim)]
        truth[f"t{i}"], state[f"t{i}"] = tensor, distribute_tensor(tensor, submesh, places)
    truth["plain"] = state["plain"] = torch.arange(7.)
    state["nested"] = {"list": [state["t0"], 3], "odd": torch.ones(2, 3).t()}
    truth["nested.list.0"], truth["nested.odd"] = truth["t0"], torch.ones(3, 2)
    write(folder, "model", state)
    return truth


class Net(nn.Module):
    def __init__(self, tied, wide=12):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(13, 8), nn.Linear(8, wide), nn.Linear(wide, 8, bias=False)
        self.head, self.few = nn.Linear(8, 13, bias=False), nn.Parameter(torch.randn(2, 5))
        self.register_buffer("table", torch.randn(3, 2))
        if tied:
            self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)

    def forward(self, index):
        return self.head(self.down(torch.relu(self.up(self.embed(index))))) + self.few.sum()


def save_fsdp2(folder, shape, names, tp, tied, groups, wide=12):
    torch.manual_seed(3)
    net, mesh = Net(tied, wide), init_device_mesh("cpu", shape, mesh_dim_names=names)
    if tp:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh[names[0]]
    fully_shard(net, mesh=mesh)
    named = list(net.named_parameters())
    order = [name for name, _ in named]
    if groups:
        first, last = named[::2], named[1::2]
        order = [name for name, _ in first + last]
        if groups == "unnamed":
            first, last = [value for _, value in first], [value for _, value in last]
        optimizer = torch.optim.AdamW([{"params": first}, {"params": last, "lr": 0.5}], foreach=False)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for _ in range(0 if wide % 2 else 2):  # torch does not multiply parts of different widths
        net(torch.randint(0, 13, (4,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = net.state_dict(), optimizer.state_dict()
    write(folder, "model", model)
    write(folder, "optim", state)
    write(folder, "extra_state", {"lr_scheduler": {"last_epoch": 2}, "rng": {"cpu": torch.get_rng_state()}})
    truth = {name: whole(value) for name, value in model.items()}
    for number, slots in state["state"].items():
        for key, value in slots.items():
            truth[f"optimizer.state.{order[number]}.{key}"] = whole(value)
    return truth


def save_fsdp1(folder):
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    truth = {name: value.clone() for name, value in plain.state_dict().items()}
    net = FullyShardedDataParallel(plain, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        write(folder, "model", net.state_dict())
    return truth


def save_differing(folder):
    write(folder, "model", {"same": torch.ones(3), "own": torch.full((2,), float(dist.get_rank()))})


class RankFiles(unittest.TestCase):
    def equal(self, folder, truth):
        with reshard.open(folder) as checkpoint:
            self.assertEqual(checkpoint.format, "fsdp")
            self.assertEqual(set(checkpoint), set(truth))
            for name, right in truth.items():
                got = torch.from_numpy(checkpoint[name].numpy()) if right.dtype != torch.bfloat16 else None
                if got is not None:
                    self.assertTrue(same(got, right.contiguous()), name)
        reshard.merge(folder, os.path.join(folder, "merged.safetensors"), everything=True)
        from safetensors.torch import load_file
        merged = load_file(os.path.join(folder, "merged.safetensors"))
        self.assertEqual(set(merged), set(truth))
        for name, right in truth.items():
            self.assertTrue(torch.equal(bits(merged[name]), bits(right.contiguous())), name)
        os.remove(os.path.join(folder, "merged.safetensors"))

    def check(self, nranks, work, *args):
        with worlds.Folder() as folder:
            os.makedirs(folder("ckpt"))
            self.equal(folder("ckpt"), worlds.run(nranks, work, folder("ckpt"), *args)[0])

    def test_placements(self):
        """random placements on meshes of one to three axes"""
        for seed, shape in enumerate([(2,), (3,), (2, 2), (3, 2), (2, 2, 2)]):
            nranks = torch.Size(shape).numel()
            self.check(nranks, save_placements, shape, 100 + seed)

    def test_fsdp2(self):
        """FSDP2 on one axis, uneven and with empty shards; tied weights, a frozen one, one and two groups"""
        for nranks, tied, groups in ((1, True, ""), (2, False, ""), (3, True, ""), (2, True, "named")):
            self.check(nranks, save_fsdp2, (nranks,), ("fsdp",), False, tied, groups)

    def test_hybrid(self):
        """HSDP, and FSDP2 over tensor parallelism, which makes strided shards"""
        self.check(4, save_fsdp2, (2, 2), ("ddp", "fsdp"), False, True, "")
        self.check(4, save_fsdp2, (2, 2), ("fsdp", "tp"), True, False, "")

    def test_uneven_hybrid(self):
        """FSDP2 over tensor parallelism, where neither divides the size"""
        for wide in 7, 13:
            self.check(6, save_fsdp2, (3, 2), ("fsdp", "tp"), True, False, "", wide)

    def test_numbers(self):
        """two groups without names keep the numbers of their parameters, and say so"""
        with worlds.Folder() as folder:
            os.makedirs(folder("ckpt"))
            worlds.run(2, save_fsdp2, folder("ckpt"), (2,), ("fsdp",), False, False, "unnamed")
            with reshard.open(folder("ckpt")) as checkpoint:
                self.assertIn("optimizer.state.0.exp_avg", checkpoint)
                self.assertTrue(any("numbers" in note for note in checkpoint.notes))
                self.assertEqual(checkpoint.plain_values["lr_scheduler.last_epoch"], 2)

    def test_fsdp1(self):
        """FSDP1 without a mesh, which makes ShardedTensors"""
        self.check(3, save_fsdp1)

    def test_differing(self):
        """plain tensors that differ between ranks are refused, unless rank 0's are wanted"""
        with worlds.Folder() as folder:
            os.makedirs(folder("ckpt"))
            worlds.run(2, save_differing, folder("ckpt"))
            with self.assertRaisesRegex(reshard.Error, "own: copies of the tensor on ranks 0 and 1 differ"):
                reshard.open(folder("ckpt"))
            with reshard.open(folder("ckpt"), take_rank_0=True) as checkpoint:
                self.assertEqual(checkpoint["own"].numpy().tolist(), [0, 0])

    def test_alone(self):
        """one rank's file alone is refused, unless its parts are wanted; a missing rank is named"""
        with worlds.Folder() as folder:
            os.makedirs(folder("ckpt"))
            worlds.run(2, save_fsdp2, folder("ckpt"), (2,), ("fsdp",), False, False, "")
            one = folder("ckpt/model_world_size_2_rank_1.pt")
            with self.assertRaisesRegex(reshard.Error, "one rank's part"):
                reshard.open(one)
            with reshard.open(one, as_is=True) as checkpoint:
                self.assertEqual(checkpoint["up.weight"].shape, (6, 8))
            os.rename(one, folder("elsewhere.pt"))
            with self.assertRaisesRegex(reshard.Error, "model_world_size_2_rank_1.pt is missing"):
                reshard.open(folder("ckpt"))
            with self.assertRaisesRegex(reshard.Error, r"one rank's part, \[1,5\] of \[2,5\]"):
                reshard.open(folder("elsewhere.pt"))

    def test_config(self):
        """fsdp_config.json must name the number of ranks of the files"""
        with worlds.Folder() as folder:
            os.makedirs(folder("ckpt"))
            worlds.run(2, save_differing, folder("ckpt"))
            with open(folder("ckpt/fsdp_config.json"), "w") as file:
                json.dump({"FSDP_version": 2, "world_size": 4}, file)
            with self.assertRaisesRegex(reshard.Error, "names 4 ranks"):
                reshard.open(folder("ckpt"))


if __name__ == "__main__":
    tap.main()
