"""Runs engines of DeepSpeed on the CPU, for test_universal.py.

    deepspeed_engine.py save|load STAGE RANKS CHECKPOINT RESULT

save trains a model and saves it, load loads a universal checkpoint and trains on. The weights and moments are
gathered in RESULT."""
import os
import sys
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from torch import multiprocessing, nn  # noqa: E402

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # collectives that would have to be compiled
warnings.simplefilter("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(13, 8), nn.Linear(8, 11), nn.Linear(11, 8, bias=False)
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, index):
        return self.head(self.down(torch.relu(self.up(self.embed(index)))))


def make(stage, seed, universal):
    torch.manual_seed(seed)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "checkpoint": {"load_universal": universal}}
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            net = Net()
    else:
        net = Net()
    named = list(net.named_parameters())
    groups = [{"params": [value for name, value in named if "bias" not in name], "weight_decay": 0.1},
              {"params": [value for name, value in named if "bias" in name], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups if stage < 3 else groups[0]["params"] + groups[1]["params"],
                                  lr=0.5 if universal else 0.01, foreach=False)
    return net, *deepspeed.initialize(model=net, optimizer=optimizer, config=config)[:2]


def gather_moment(optimizer, stage, param, key):
    """A moment with the shape of its parameter. Below stage 3, each rank has a part of a flat vector."""
    if stage == 3:
        return safe_get_full_optimizer_state(param, key).clone()
    number = next(i for i, group in enumerate(optimizer.bit16_groups) if any(one is param for one in group))
    flat, part, whole = optimizer.single_partition_of_fp32_groups[number], param._hp_mapping, torch.zeros(param.numel())
    if part is not None:
        to, at = part.lp_fragment_address, part.hp_fragment_address
        whole[to.start:to.start + to.numel] = optimizer.optimizer.state[flat][key][at.start:at.start + at.numel]
    dist.all_reduce(whole)
    return whole


def gather(net, optimizer, stage):
    found = {}
    for name, param in net.named_parameters():
        found[name] = safe_get_full_fp32_param(param).clone()
        for key in "exp_avg", "exp_avg_sq":
            found[f"{name}.{key}"] = gather_moment(optimizer, stage, param, key).reshape(found[name].shape)
    return found


def train(engine):
    loss = engine(torch.randint(0, 13, (2, 5))).float().square().mean()
    engine.backward(loss)
    engine.step()


def work(rank, what, stage, nranks, path, result):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nranks))
    dist.init_process_group("gloo", store=dist.FileStore(result + ".store", nranks), rank=rank, world_size=nranks)
    deepspeed.init_distributed("gloo", verbose=False)
    net, engine, optimizer = make(stage, 1 if what == "save" else 77, what == "load")
    if what == "save":
        for _ in range(3):
            train(engine)
        found = gather(net, optimizer, stage)
        engine.save_checkpoint(path)
    else:
        engine.load_checkpoint(path)
        found = gather(net, optimizer, stage)
        train(engine)
    found["lr"], found["steps"] = [group["lr"] for group in optimizer.param_groups], engine.global_steps
    if rank == 0:
        torch.save(found, result)
    dist.barrier()
    os._exit(0)  # threads of the groups that DeepSpeed keeps abort a process that ends in the usual way, now and then


if __name__ == "__main__":
    multiprocessing.spawn(work, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]), int(sys.argv[3]))
