"""Tensors on a GPU: staged through the host's memory, and back where they were. Skipped without one."""
import os
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh

import reshard.torch as rt
import tap
import worlds
from moves import expected, number
from tensors import R, S0, S1, dtensor, same

KIND = "cuda"
FOUND = os.path.exists("/dev/nvidiactl")  # to ask CUDA itself would spoil the forks


def place():
    return torch.device(KIND, torch.cuda.current_device()) if KIND == "cuda" else torch.device(KIND)


def moved():
    mesh, value = init_device_mesh(KIND, (2,)), number((7, 5), 1)
    x = dtensor(expected(value, mesh, [S0]).to(place()), (7, 5), mesh, [S0]).requires_grad_()
    y = rt.redistribute(x, mesh, [S1])
    assert y.to_local().device == place() and same(y.to_local().detach().cpu(), expected(value, mesh, [S1]))
    y.backward(dtensor(expected(-value, mesh, [S1]).to(place()), (7, 5), mesh, [S1]))
    assert x.grad.to_local().device == place() and same(x.grad.to_local().cpu(), expected(-value, mesh, [S0]))
    host = init_device_mesh("cpu", (2,))
    down = rt.redistribute(x.detach(), host, [R])
    assert down.to_local().device.type == "cpu" and same(down.to_local(), value)
    up = rt.redistribute(down, mesh, [S0])
    assert up.to_local().device == place() and same(up.to_local().cpu(), expected(value, mesh, [S0]))
    one = rt.full_tensor(x.detach(), dst_rank=1)
    assert one is None or (one.device == place() and same(one.cpu(), value))
    spread = rt.distribute_tensor(value.to(place()), mesh, [S0], src_rank=1)
    assert spread.to_local().device == place() and same(spread.to_local().cpu(), expected(value, mesh, [S0]))


def resharded():
    me, value = dist.get_rank(), number((8, 6), 2)
    local = LocalShard(tensor=value[4 * me:4 * me + 4].to(place()).contiguous(), metadata=ShardMetadata(
        shard_offsets=[4 * me, 0], shard_sizes=[4, 6], placement=f"rank:{me}/{place()}"))
    st = init_from_local_shards([local], 8, 6)
    rt.reshard(st, ChunkShardingSpec(dim=1, placements=[f"rank:1/{place()}", f"rank:0/{place()}"]))
    found, = st.local_shards()
    assert found.tensor.device == place() and same(found.tensor.cpu(), value[:, 3 - 3 * me:6 - 3 * me].contiguous())
    assert str(found.metadata.placement) == f"rank:{me}/{place()}"


def sliced():
    mesh, answers = init_device_mesh(KIND, (2,)), []
    for on in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(place())
        if on:
            rt.input_reshard(module, mesh, 0)
        loss = module(number((4, 6), 3).to(place())).square().sum()
        held = rt.stashed()
        loss.backward()
        answers.append([one.grad.cpu() for one in module.parameters()])
    assert held.nbuffers and held.nbytes_kept * 2 == held.nbytes_whole, held
    assert all(same(a, b) for a, b in zip(*answers))


@unittest.skipUnless(FOUND, "no GPU here")
class Devices(unittest.TestCase):
    def test_moved(self):
        """DTensors on a mesh of GPUs, and between it and the CPUs"""
        worlds.run(2, moved)

    def test_resharded(self):
        """shards on a GPU"""
        worlds.run(2, resharded)

    def test_sliced(self):
        """activations on a GPU wait in slices, on it"""
        worlds.run(2, sliced)


if __name__ == "__main__":
    tap.main()
