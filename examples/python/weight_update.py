"""A trainer sends its weights to an inference engine, again and again.

    python weight_update.py                          on the CPU, with 4 processes
    python weight_update.py cuda                     on a GPU

Ranks 0 to 3 train with FSDP: each has some rows of every tensor. Ranks 2 and 3 also run an engine with tensor
parallelism, which has q, k and v in one tensor, in bfloat16. An update copies every element from the rank that has it
to the ranks that need it, in one run. No rank ever has the whole model."""
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard.torch as rt

HEADS, KV, WIDTH = 32, 8, 64
SHAPES = {"q_proj.weight": (HEADS, WIDTH), "k_proj.weight": (KV, WIDTH), "v_proj.weight": (KV, WIDTH),
          "o_proj.weight": (WIDTH, HEADS)}
FUSE = {"engine.*.qkv_proj.weight": ["engine.*.q_proj.weight", "engine.*.k_proj.weight", "engine.*.v_proj.weight"]}


def trainer(mesh, step):
    """The weights after a step of training, in rows."""
    torch.manual_seed(step)
    return {f"model.{layer}.{name}": distribute_tensor(torch.randn(shape).to(mesh.device_type), mesh, [Shard(0)])
            for layer in range(2) for name, shape in SHAPES.items()}


def engine(mesh, device):
    """Tensors of one rank of the engine. Each has its heads of q, k and v, and the columns of o for these heads."""
    qkv = (HEADS + 2 * KV) // mesh.size()
    local = {"qkv_proj.weight": (torch.zeros(qkv, WIDTH), Shard(0)),
             "o_proj.weight": (torch.zeros(WIDTH, HEADS // mesh.size()), Shard(1))}
    return {f"engine.{layer}.{name}": DTensor.from_local(one.to(device, torch.bfloat16), mesh, [placement])
            for layer in range(2) for name, (one, placement) in local.items()}


def live(rank, device, directory):
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(directory, "store"), 4), rank=rank, world_size=4)
    fsdp, tp = DeviceMesh(device, [0, 1, 2, 3]), DeviceMesh(device, [2, 3])
    weights = trainer(fsdp, 0)
    target = engine(tp, device) if rank >= 2 else None
    with rt.WeightSync(weights, target, rename=lambda name: name.replace("model.", "engine."), fuse=FUSE,
                       cast=True) as sync:
        for step in range(3):
            for name, one in trainer(fsdp, step).items():
                weights[name].to_local().copy_(one.to_local())  # a step of training
            sync.update()
            sync.verify()
            if rank == 0:
                print(f"step {step}: the engine has the weights of the trainer")
        whole = weights["model.1.k_proj.weight"].full_tensor().to(torch.bfloat16)
        if rank == 3:
            first = HEADS // 2  # the rows of k follow those of q
            mine = target["engine.1.qkv_proj.weight"].to_local()[first:first + KV // 2]
            print("rank 3 has its heads of k:", bool(torch.equal(mine, whole[KV // 2:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        multiprocessing.spawn(live, (kind, temporary), nprocs=4)
