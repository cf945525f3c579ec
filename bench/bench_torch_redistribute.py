"""reshard.torch.redistribute beside DTensor.redistribute over gloo, in the same processes, in turns.

    bench_torch_redistribute.py [EXTENT] [RANKS]

A square f64 tensor of EXTENT (8192) on RANKS (4) processes of this host. Each time is the best of several. The
limit is what it takes to fill as much new memory: every rank's result has to be written somewhere. The last
rows are small tensors, where it is the time of a call that counts."""
import logging
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros

import reshard.torch as rt
from reshard.torch.results import new_memory

TIMES = 4
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def seconds(work, repeat):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        work()
    dist.barrier()
    return (time.perf_counter() - began) / repeat


def compare(name, extent, mesh, src, dst, repeat=1):
    """Runs all sides in turns; prints the best of each."""
    x = zeros((extent, extent), dtype=torch.float64, device_mesh=mesh, placements=src)
    x.to_local().uniform_()
    shape = rt.redistribute(x, mesh, dst).to_local().shape
    sides = {"ours": lambda: rt.redistribute(x, mesh, dst), "torch": lambda: x.redistribute(mesh, dst),
             "limit": lambda: new_memory(8 * shape.numel()).view(torch.float64).fill_(1.0)}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(TIMES):
        for side, work in sides.items():
            best[side] = min(best[side], seconds(work, repeat))
    if dist.get_rank() == 0:
        ours, torchs, limit = (1e3 * best[side] for side in sides)
        print(f"f64[{extent},{extent}] {name:<18} ours {ours:9.2f} ms   torch {torchs:9.2f} ms   "
              f"{torchs / ours:6.2f} x   limit {limit:8.2f} ms", flush=True)


def live(rank, nranks, extent, folder):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), nranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks)
    line, grid = init_device_mesh("cpu", (nranks,)), init_device_mesh("cpu", (2, nranks // 2))
    cases = [("S0 -> S1", line, [S0], [S1]), ("S0 -> R", line, [S0], [R]),
             ("S0,S1 -> S1,S0", grid, [S0, S1], [S1, S0]), ("S0,S1 -> S0,S0", grid, [S0, S1], [S0, S0])]
    for size, repeat in ((extent, 1), (256, 20)):
        for name, mesh, src, dst in cases:
            compare(name, size, mesh, src, dst, repeat)
    dist.destroy_process_group()


def main():
    extent = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    nranks = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(live, (nranks, extent, folder), nprocs=nranks)


if __name__ == "__main__":
    main()
