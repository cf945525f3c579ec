"""dcp.load and dcp.save with Reader and Writer beside torch's own, in the same processes, in turns.

    bench_torch_dcp.py [MEGABYTES] [DIRECTORY]

The state has layers of Llama 3 8B, bf16, on one rank and on two: saved as FSDP cuts it (rows), loaded as it was
saved, as tensor parallel cuts it, and whole. Nothing waits for a disk on either side (sync_files=False), and what
is read is in the page cache, so that it is the software that is measured. Each time is the best of several. The
limit of a load is that of the machine: each rank reads as many bytes into the same memory, and does nothing
else."""
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from reshard.torch import Reader, Writer

TIMES = 5


def shapes(megabytes):
    """Names and shapes of a model with so many megabytes, and the dim that tensor parallel cuts."""
    hidden, wide = 4096, 14336
    layer = [("q_proj", (hidden, hidden), 0), ("k_proj", (hidden // 4, hidden), 0),
             ("v_proj", (hidden // 4, hidden), 0), ("o_proj", (hidden, hidden), 1),
             ("gate_proj", (wide, hidden), 0), ("up_proj", (wide, hidden), 0), ("down_proj", (hidden, wide), 1),
             ("norm", (hidden,), None)]
    nbytes = sum(2 * torch.Size(shape).numel() for _, shape, _ in layer)
    return [(f"layers.{i}.{name}.weight", shape, dim) for i in range(max(1, megabytes * 10**6 // nbytes))
            for name, shape, dim in layer]


def state_of(mesh, megabytes, kind, fill):
    state = {}
    for name, shape, dim in shapes(megabytes):
        if kind == "whole":
            state[name] = torch.zeros(shape, dtype=torch.bfloat16)
            continue
        cut = Shard(0) if kind == "fsdp" else Replicate() if dim is None else Shard(dim)
        state[name] = zeros(shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[cut])
        if fill:
            state[name].to_local().view(torch.int16).random_(-30000, 30000)
    return state


def seconds(work):
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def compare(name, nbytes, sides):
    """Runs all sides in turns; prints the best of each."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(TIMES):
        for side, work in sides.items():
            best[side] = min(best[side], seconds(lambda: work(turn)))  # noqa: B023
    if dist.get_rank() == 0:
        print(f"{name:<26}", *(f"{side} {best[side]:6.3f} s {nbytes / best[side] / 1e9:6.2f} GB/s " for side in best),
              f"{best['torch'] / best['ours']:5.2f} x", flush=True)


def read_only(path, target):
    """Reads as many bytes as the tensors have into them, from wherever they are in the files."""
    rank, nranks = dist.get_rank(), dist.get_world_size()
    files = [open(os.path.join(path, name), "rb") for name in sorted(os.listdir(path)) if name.endswith(".distcp")]
    file, at = rank * len(files) // nranks, 0
    for tensor in target.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory, done = memoryview(local.view(torch.uint8).flatten().numpy()), 0
        while done < len(memory):
            got = os.preadv(files[file].fileno(), [memory[done:]], at)
            done, at = done + got, at + got
            if got == 0:
                file, at = (file + 1) % len(files), 0
    for one in files:
        one.close()


def live(rank, nranks, megabytes, folder):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(nranks)  # as torchrun does
    store = dist.FileStore(os.path.join(folder, "store"), nranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks)
    mesh = init_device_mesh("cpu", (nranks,))
    state = state_of(mesh, megabytes, "fsdp", True)
    nbytes = sum(2 * torch.Size(shape).numel() for _, shape, _ in shapes(megabytes))
    paths = {side: os.path.join(folder, side) for side in ("ours", "torch")}

    def save(side, writer):
        def work(turn):  # into a new directory each time, as training does
            if rank == 0:
                shutil.rmtree(paths[side], ignore_errors=True)
            dist.barrier()
            return dcp.save(state, storage_writer=writer(paths[side], sync_files=False))
        return work

    compare(f"dcp.save, fsdp {nranks}", nbytes, {"torch": save("torch", FileSystemWriter),
                                                 "ours": save("ours", Writer)})
    for kind in ("fsdp", "tp", "whole") if nranks > 1 else ("whole",):
        target = state_of(mesh, megabytes, kind, False)
        sides = {side: (lambda turn, reader=reader: dcp.load(target, storage_reader=reader(paths["torch"])))
                 for side, reader in (("torch", FileSystemReader), ("ours", Reader))}
        sides["limit"] = lambda turn: read_only(paths["torch"], target)  # noqa: B023
        compare(f"dcp.load, fsdp {nranks} -> {kind}", nbytes * (nranks if kind == "whole" else 1), sides)
    dist.destroy_process_group()


def main():
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for nranks in (1, 2):
        folder = tempfile.mkdtemp(prefix="bench", dir=sys.argv[2] if len(sys.argv) > 2 else None)
        try:
            multiprocessing.start_processes(live, (nranks, megabytes, folder), nprocs=nranks, start_method="fork")
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
