"""FSDP2 saves a model on four ranks, and tensor parallel loads it on two: dcp.save and dcp.load as always, with
reshard's Writer and Reader.

    python examples/python/fsdp_to_tp.py [DIRECTORY]

Runs on CPUs, over gloo, each rank a process of this machine."""
import os
import shutil
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.torch import Reader, Writer


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 250), torch.nn.ReLU(), torch.nn.Linear(250, 10))


def train_and_save(path):
    """Two steps of training under FSDP2; the model and its optimizer are saved."""
    model = make_model(seed=0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    dcp.save(state, storage_writer=Writer(path))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def load_for_serving(path):
    """The same weights, each rank with its columns or rows of them."""
    model = make_model(seed=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=Reader(path))
    model.load_state_dict(state["model"])
    assert model(torch.ones(1, 64)).isfinite().all()
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]


def live(rank, nranks, work, path, answer):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{answer}.store", rank=rank, world_size=nranks)
    weights = work(path)
    if rank == 0:
        torch.save([one.detach() for one in weights], answer)
    dist.destroy_process_group()


def run(nranks, work, path):
    """What rank 0 of a world answers."""
    folder = tempfile.mkdtemp()
    answer = os.path.join(folder, "answer")
    try:
        multiprocessing.start_processes(live, (nranks, work, path, answer), nprocs=nranks, start_method="fork")
        return torch.load(answer)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    above = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    step = os.path.join(above, "step-2")
    saved = run(4, train_and_save, step)
    print(f"saved by 4 ranks: {' '.join(sorted(os.listdir(step)))}")
    loaded = run(2, load_for_serving, step)
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded))
    print(f"loaded by 2 ranks: {len(loaded)} tensors, all the same")
    if len(sys.argv) < 2:
        shutil.rmtree(above)
