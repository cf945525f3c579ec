"""CUDA tensors from Python beside torch, in turns: redistribute, dcp.load and dcp.save, safetensors, weight updates.

    bench_torch_cuda.py [GIGABYTES] [DIRECTORY]

All ranks are processes on one GPU, over gloo. Checkpoints of GIGABYTES (5) are in DIRECTORY (/dev/shm). Each time is
the best of several. Everything is measured from Python, to the end of the work on the GPU. Skipped without a GPU."""
import logging
import os
import pathlib
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing import reductions

import reshard
import reshard.torch as rt

TIMES = 5
LAYERS, HIDDEN, WIDE, VOCABULARY = 32, 4096, 14336, 128256  # Llama 3 8B


def seconds(work, repeat=1):
    """Returns the time of the slowest rank."""
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        work()
    torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - began) / repeat], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def best(sides, times=TIMES, repeat=1, before=None):
    """Runs all sides in turns, and `before` before each of them, which is not measured. Returns the best time of
    each."""
    found = dict.fromkeys(sides, float("inf"))
    for _ in range(times):
        for side, work in sides.items():
            if before:
                before()
            found[side] = min(found[side], seconds(work, repeat))
    return found


def report(text):
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


# ---- redistribute ----


def moves():
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for dtype, extent, repeat in ((torch.float64, 8192, 1), (torch.float32, 256, 50)):
        # Not to Replicate: torch 2.11 ends with a segmentation fault there, over gloo with CUDA tensors.
        for name, before, after in (("S0 -> S1", Shard(0), Shard(1)),):
            local = torch.rand(extent // mesh.size(), extent, dtype=dtype, device="cuda")
            x = DTensor.from_local(local, mesh, [before])
            assert torch.equal(rt.redistribute(x, mesh, [after]).to_local(), x.redistribute(mesh, [after]).to_local())
            found = best({"ours": lambda: rt.redistribute(x, mesh, [after]),
                          "torch": lambda: x.redistribute(mesh, [after])}, repeat=repeat)
            report(f"redistribute {str(dtype)[6:]} [{extent},{extent}] {name:<8} on {mesh.size()} ranks   ours "
                   f"{1e3 * found['ours']:9.3f} ms   torch {1e3 * found['torch']:9.3f} ms   "
                   f"{found['torch'] / found['ours']:7.1f} x")


# ---- checkpoints ----


def state_of(gigabytes, fill=False):
    state = {}
    while sum(one.nbytes for one in state.values()) < gigabytes * 1e9:
        for shape in ((HIDDEN, HIDDEN), (HIDDEN, WIDE), (HIDDEN,)):
            one = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            state[f"t{len(state)}"] = one.normal_() if fill else one.zero_()
    return state


def print_rate(name, nbytes, found, reference):
    rates = "   ".join(f"{side} {nbytes / 1e9 / one:7.2f} GB/s" for side, one in found.items())
    report(f"{name:<34} {rates}   {found[reference] / min(v for k, v in found.items() if 'ours' in k):6.1f} x")


def pwrite(path, data):
    with open(path, "wb") as file:
        file.write(data)


def checkpoints(gigabytes, directory):
    path = tempfile.mkdtemp(prefix="bench", dir=directory)
    try:
        state = state_of(gigabytes, True)
        nbytes = sum(one.nbytes for one in state.values())
        plain = bytearray(nbytes)

        def save(writer, threads):
            dcp.save(state, storage_writer=writer(os.path.join(path, "c"), sync_files=False, thread_count=threads),
                     no_dist=True)

        def remove():
            shutil.rmtree(os.path.join(path, "c"), ignore_errors=True)
            pathlib.Path(path, "plain").unlink(missing_ok=True)

        for threads in (8, 1):
            sides = {"torch": lambda: save(FileSystemWriter, threads),
                     "write": lambda: pwrite(os.path.join(path, "plain"), plain),
                     "ours": lambda: save(rt.Writer, threads)}
            print_rate(f"dcp.save from CUDA tensors, {threads} file{'s' * (threads > 1)}", nbytes,
                       best(sides, 3, before=remove), "torch")
        del plain
        want = state_of(gigabytes)

        def load(reader):
            dcp.load(want, storage_reader=reader, no_dist=True)

        found = best({"torch": lambda: load(FileSystemReader(os.path.join(path, "c"))),
                      "ours, 8 threads": lambda: load(rt.Reader(os.path.join(path, "c"), pool=8)),
                      "ours, 16 threads": lambda: load(rt.Reader(os.path.join(path, "c"), pool=16))}, 3)
        print_rate("dcp.load into CUDA tensors", nbytes, found, "torch")
        assert all(torch.equal(want[name], one) for name, one in state.items())
        safetensors(state, want, path, nbytes)
    finally:
        shutil.rmtree(path)


def safetensors(state, want, path, nbytes):
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        report("safetensors into CUDA tensors: skipped, the package safetensors is not installed")
        return
    shutil.rmtree(os.path.join(path, "c"))
    file = os.path.join(path, "model.safetensors")
    save_file({name: one.cpu() for name, one in state.items()}, file)

    def load():
        with reshard.open(path) as checkpoint:
            checkpoint.load(want, pool=16)

    found = best({"load_file": lambda: load_file(file, device="cuda"), "ours, 16 threads": load}, 3)
    print_rate("safetensors into CUDA tensors", nbytes, found, "load_file")
    assert all(torch.equal(want[name], one) for name, one in state.items())


# ---- weight updates ----

SHAPES = {"q": (HIDDEN, HIDDEN, 0), "k": (HIDDEN // 4, HIDDEN, 0), "v": (HIDDEN // 4, HIDDEN, 0),
          "o": (HIDDEN, HIDDEN, 1), "gate": (WIDE, HIDDEN, 0), "up": (WIDE, HIDDEN, 0), "down": (HIDDEN, WIDE, 1)}
FUSE = {"*.qkv": ["*.q", "*.k", "*.v"], "*.gate_up": ["*.gate", "*.up"]}


def empty(rows, columns):
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")


def trainer(mesh):
    """Every tensor is cut along dim 0, as FSDP does."""
    n, made = mesh.size(), {}
    for name in ("embed", "head"):
        made[name] = DTensor.from_local(empty(VOCABULARY // n, HIDDEN).normal_(), mesh, [Shard(0)])
    for layer in range(LAYERS):
        for name, (rows, columns, _) in SHAPES.items():
            made[f"{layer}.{name}"] = DTensor.from_local(empty(rows // n, columns).normal_(), mesh, [Shard(0)])
    return made


def engine(mesh):
    """Tensor parallelism, with fused tensors."""
    n, made = mesh.size(), {}
    for name in ("embed", "head"):
        made[name] = DTensor.from_local(empty(VOCABULARY // n, HIDDEN), mesh, [Shard(0)])
    for layer in range(LAYERS):
        for name, rows in (("qkv", HIDDEN * 3 // 2), ("gate_up", 2 * WIDE)):
            made[f"{layer}.{name}"] = DTensor.from_local(empty(rows // n, HIDDEN), mesh, [Shard(0)])
        for name, columns in (("o", HIDDEN), ("down", WIDE)):
            made[f"{layer}.{name}"] = DTensor.from_local(empty(HIDDEN, columns // n), mesh, [Shard(1)])
    return made


def gathered(x):
    """Returns the whole tensor. Not by full_tensor: torch 2.11 ends with a segmentation fault there, over gloo with
    CUDA tensors."""
    mesh, local = x.device_mesh, x.to_local()
    parts = [torch.empty_like(local) for _ in range(mesh.size())]
    dist.all_gather(parts, local, group=mesh.get_group())
    return torch.cat(parts)


def bucketed(source, target, tp, layers):
    """An update as it is common: tensors are gathered one by one, and the engine opens IPC handles of each bucket."""
    me, nsource = dist.get_rank(), dist.get_world_size() - tp.size()
    for layer in range(layers):
        bucket, handles = {}, [None]
        if me < nsource:
            bucket = {name: gathered(source[f"{layer}.{name}"]) for name in SHAPES}
            torch.cuda.synchronize()
            handles = [{name: reductions.reduce_tensor(one) for name, one in bucket.items()}]
        dist.broadcast_object_list(handles, src=0)
        if me >= nsource:
            at, n = tp.get_local_rank(), tp.size()
            whole = {name: rebuild(*args) for name, (rebuild, args) in handles[0].items()}
            part = {name: one.chunk(n, SHAPES[name][2])[at] for name, one in whole.items()}
            target[f"{layer}.qkv"].to_local().copy_(torch.cat([part[name] for name in "qkv"]))
            target[f"{layer}.gate_up"].to_local().copy_(torch.cat([part["gate"], part["up"]]))
            for name in ("o", "down"):
                target[f"{layer}.{name}"].to_local().copy_(part[name])
            del whole, part
            torch.cuda.synchronize()
        dist.barrier()


def weights():
    world = dist.get_world_size()
    fsdp = DeviceMesh("cuda", list(range(world - 2)))
    tp = DeviceMesh("cuda", [world - 2, world - 1])
    source = trainer(fsdp) if fsdp.get_coordinate() is not None else None
    target = engine(tp) if tp.get_coordinate() is not None else None
    nbytes = 2 * (2 * VOCABULARY * HIDDEN + LAYERS * sum(rows * columns for rows, columns, _ in SHAPES.values()))
    began = time.perf_counter()
    with rt.WeightSync(source, target, fuse=FUSE) as sync:
        bound = time.perf_counter() - began
        sync.update()
        sync.verify()
        ours = best({"ours": sync.update})["ours"]
        report(f"weight update: {sync.describe() or 'ranks share memory'}")
    copy = float("inf")
    if dist.get_rank() == 0:
        a, b = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        for _ in range(TIMES):
            torch.cuda.synchronize()
            began = time.perf_counter()
            b.copy_(a)
            torch.cuda.synchronize()
            copy = min(copy, time.perf_counter() - began)
        del a, b
        report(f"weight update, {nbytes / 1e9:.1f} GB, {world - 2} FSDP ranks -> 2 tensor-parallel ranks   ours "
               f"{1e3 * ours:8.2f} ms   one copy {1e3 * copy:8.2f} ms ({ours / copy:.2f} x)   bind {bound:.2f} s")
    part = 4
    torch_ = best({"torch": lambda: bucketed(source, target, tp, part)}, 2)["torch"] * LAYERS / part
    if dist.get_rank() == 0:
        report(f"weight update by torch in buckets {1e3 * torch_:8.0f} ms ({torch_ / ours:.0f} x; measured on {part} "
               f"of {LAYERS} layers)")
    dist.barrier()


def live(rank, nranks, directory, work):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    store = dist.FileStore(os.path.join(directory, "store"), nranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks)
    work()
    dist.destroy_process_group()


def main():
    if not torch.cuda.is_available():
        print("bench_torch_cuda.py is skipped: torch finds no GPU")
        return
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 5
    checkpoints(gigabytes, sys.argv[2] if len(sys.argv) > 2 else "/dev/shm")
    for nranks, work in ((4, moves), (6, weights)):
        with tempfile.TemporaryDirectory() as directory:
            multiprocessing.spawn(live, (nranks, directory, work), nprocs=nranks)


if __name__ == "__main__":
    main()
