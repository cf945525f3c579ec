"""Weights that change their layout while a program runs, and activations that wait for backward in slices.

    python examples/python/tensor_parallel.py

Four ranks, each a process of this machine, over gloo: a weight goes from rows on four ranks to columns on two,
and a block under tensor parallelism keeps half of each activation that both of its ranks have."""
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard.torch as rt


def move_a_weight():
    """Trained on four ranks, served on the last two."""
    training, serving = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [2, 3])
    weight = torch.arange(35.0).reshape(7, 5)
    rows = rt.distribute_tensor(weight, training, [Shard(0)])
    columns = rt.redistribute(rows, serving, [Shard(1)])  # to other ranks, and by columns
    whole = rt.full_tensor(columns, dst_rank=0)           # on one rank alone
    if dist.get_rank() == 0:
        print(f"{rt.layout(rows)}  ->  {rt.layout(columns)}: {'the same' if whole.equal(weight) else 'wrong'}")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(wrap):
    """Returns the gradients of one step on an axis of a 2-d mesh, and the memory of its activations."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block = parallelize_module(Block(64), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    block = wrap(block, mesh["tp"])
    loss = block(torch.randn(8, 64)).square().mean()
    usage = rt.stashed()
    loss.backward()
    return [rt.full_tensor(one.grad) if hasattr(one.grad, "placements") else one.grad
            for one in block.parameters()], usage


def live(rank, nranks, directory):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{os.path.join(directory, 'store')}", rank=rank,
                            world_size=nranks)
    move_a_weight()
    plain, _ = train(lambda block, mesh: block)
    sliced, usage = train(lambda block, mesh: rt.input_reshard(block, mesh, 0))
    assert all(a.equal(b) for a, b in zip(plain, sliced))
    if rank == 0:
        print(f"the same gradients, with {usage.nbytes_kept} of {usage.nbytes_whole} bytes kept for backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.start_processes(live, (4, place), nprocs=4, start_method="fork")
