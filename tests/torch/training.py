"""A small model, trained for a few steps with FSDP2, HSDP or FSDP2 on top of tensor parallelism."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, parallelize_module)
from torch.nn import LayerNorm, Linear, Module

# How a world is used: the axes of its mesh, and those that fully_shard gets; "tp" is for the layers.
# Without tensor parallelism the widths need not come out even.
KINDS = {"fsdp": (("dp",), 13), "hsdp": (("rep", "dp"), 13), "fsdp+tp": (("dp", "tp"), 12)}


class Net(Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = Linear(width, 2 * width), Linear(2 * width, width)
        self.norm = LayerNorm(width)
        self.register_buffer("positions", torch.arange(width))

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def start(kind, counts, seed):
    """A model and its optimizer on a mesh of this world."""
    axes, width = KINDS[kind]
    torch.manual_seed(seed)
    net, mesh = Net(width), init_device_mesh("cpu", counts, mesh_dim_names=axes)
    if "tp" in axes:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"] if "tp" in axes else mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(kind, net, optimizer, seed):
    torch.manual_seed(seed)
    net(torch.randn(5, KINDS[kind][1])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(value, path=()):
    """Whole tensors by their names in a checkpoint."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return {".".join(path): whole.detach().clone()}
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        found |= flat(inner, (*path, str(key)))
    return found


def state_of(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def train_and_save(kind, counts, path, truth_path):
    net, optimizer = start(kind, counts, seed=1)
    for i in range(3):
        step(kind, net, optimizer, i)
    state = state_of(net, optimizer)
    dcp.save(state | {"step": 3}, checkpoint_id=path)
    whole = flat(state)
    if dist.get_rank() == 0:
        torch.save(whole, truth_path)


def load_and_compare(kind, counts, path, truth_path):
    """A fresh model of another world takes the state over, to the last bit, and goes on training."""
    net, optimizer = start(kind, counts, seed=2)
    state = state_of(net, optimizer)
    state["step"] = 0
    dcp.load(state, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    right, got = torch.load(truth_path), flat(state_of(net, optimizer))
    assert state["step"] == 3
    assert got.keys() == right.keys(), got.keys() ^ right.keys()
    for name, whole in right.items():
        assert torch.equal(got[name], whole), name
    step(kind, net, optimizer, 9)
    return len(right)
