"""Merges what trainers write into safetensors, beside the usual ways, and beside a copy of the same bytes.

    bench_trainers.py COMMAND [MEGABYTES] [DIRECTORY]

    zero3    DeepSpeed, 8 ranks, fp32       beside zero_to_fp32 of DeepSpeed, or what it does if it is not installed
    fsdp     verl's files, 8 ranks, fp32    beside torch.load of all ranks, torch.cat and save_file
    orbax    OCDBT, 8 shards, fp32          beside orbax's restore and save_file; only if ORBAX_PYTHON has orbax

DIRECTORY should be in memory (/dev/shm). Each side is a process of its own, so its time has its start, and its memory
is the most that it had, and at least that of this process. Each time is the best of several."""
import os
import shutil
import subprocess
import sys
import time

TIMES = 2
RANKS = 8
HIDDEN, WIDE = 2048, 5632
LAYER = [("q_proj", (HIDDEN, HIDDEN)), ("k_proj", (HIDDEN // 4, HIDDEN)), ("v_proj", (HIDDEN // 4, HIDDEN)),
         ("o_proj", (HIDDEN, HIDDEN)), ("gate_proj", (WIDE, HIDDEN)), ("up_proj", (WIDE, HIDDEN)),
         ("down_proj", (HIDDEN, WIDE)), ("norm", (HIDDEN,))]


def numel(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def shapes(megabytes):
    count = max(1, megabytes * 10**6 // sum(4 * numel(shape) for _, shape in LAYER))
    return {f"model.layers.{i}.{name}.weight": shape for i in range(count) for name, shape in LAYER}


# ---- inputs ----

def make_zero3(path, megabytes):
    """Every parameter is cut over all ranks, in one flat vector per rank."""
    import torch
    params = shapes(megabytes)
    os.makedirs(f"{path}/global_step1")
    flat = torch.empty(sum(-(-numel(shape) // RANKS) for shape in params.values())).uniform_()
    for rank in range(RANKS):
        stem = f"{path}/global_step1/zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"module": {name: torch.empty(0) for name in params}, "buffer_names": [],
                    "param_shapes": [{name: torch.Size(shape) for name, shape in params.items()}],
                    "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {},
                    "ds_version": "0.19.8", "dp_world_size": RANKS, "mp_world_size": 1}, f"{stem}_model_states.pt")
        torch.save({"optimizer_state_dict": {
            "zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": {0: {"step": torch.tensor(1.)}},
                                     "param_groups": [{"lr": 0.1, "params": [0]}]}},
            "ds_version": "0.19.8", "ds_config": {}}, f"{stem}_optim_states.pt")
    with open(f"{path}/latest", "w", encoding="ascii") as file:
        file.write("global_step1")


def make_fsdp(path, megabytes):
    """DTensors, sharded along dim 0."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    os.makedirs(path)
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        state = {name: DTensor.from_local(torch.empty(shape[0] // RANKS, *shape[1:]).uniform_(), mesh, [Shard(0)],
                                          run_check=False) for name, shape in shapes(megabytes).items()}
        torch.save(state, f"{path}/model_world_size_{RANKS}_rank_{rank}.pt")
        dist.destroy_process_group()


def make_orbax(path, megabytes):
    """The values have the distribution of weights, of which zstd saves 8 %."""
    import jax
    import numpy
    import orbax.checkpoint as ocp
    mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    draw = numpy.random.default_rng(0)
    state = {name: jax.device_put(draw.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02), sharding)
             for name, shape in shapes(megabytes).items()}
    saver = ocp.StandardCheckpointer()
    saver.save(path, state)
    saver.wait_until_finished()


# ---- the usual ways ----

def merge_zero3(path, out, megabytes):
    try:
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    except ImportError:
        convert_zero_checkpoint_to_fp32_state_dict = None
    if convert_zero_checkpoint_to_fp32_state_dict:
        convert_zero_checkpoint_to_fp32_state_dict(path, out, safe_serialization=True)
        return
    import torch
    from safetensors.torch import save_file
    files = [torch.load(f"{path}/global_step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False)
             for rank in range(RANKS)]
    flat = [file["optimizer_state_dict"]["fp32_flat_groups"][0] for file in files]
    state, at = {}, 0
    for name, shape in shapes(megabytes).items():
        part = -(-numel(shape) // RANKS)
        state[name] = torch.cat([one.narrow(0, at, part) for one in flat]).narrow(0, 0, numel(shape)).view(shape)
        at += part
    os.makedirs(out)
    save_file(state, f"{out}/model.safetensors")


def merge_fsdp(path, out, _):
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    files = [torch.load(f"{path}/model_world_size_{RANKS}_rank_{rank}.pt", weights_only=False) for rank in range(RANKS)]
    os.makedirs(out)
    save_file({name: torch.cat([file[name].to_local() for file in files]) for name in files[0]},
              f"{out}/model.safetensors")


def merge_orbax(path, out, _):
    import numpy
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file
    state = ocp.StandardCheckpointer().restore(path)
    os.makedirs(out)
    save_file({name: numpy.asarray(value) for name, value in state.items()}, f"{out}/model.safetensors")


# ---- measuring ----

def run(*words):
    """Returns the seconds and the megabytes of a process."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(words)}")
    return time.perf_counter() - began, usage.ru_maxrss / 1000


def measure(kind, python, command, megabytes, directory):
    path, out = f"{directory}/{kind}", f"{directory}/out"
    itself = python, os.path.abspath(__file__)
    run(*itself, "make", kind, path, str(megabytes))
    nbytes = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(path) for name in names)
    best = {}
    for turn in range(TIMES):
        for side, words in (("cp", ("cp", "-r", path, out)), ("ours", (command, "merge", "-q", path, out)),
                            ("theirs", (*itself, "merge", kind, path, out, str(megabytes)))):
            if turn and side == "theirs" and best[side][0] > 20:
                continue
            best[side] = min(best.get(side, (float("inf"), 0)), run(*words))
            shutil.rmtree(out)
    times = [f" {side} {best[side][0]:6.2f} s {best[side][1]:6.0f} MB" for side in best]
    print(f"{kind:<6} {nbytes / 1e9:5.2f} GB", *times, f"  {best['theirs'][0] / best['ours'][0]:5.1f} x theirs",
          f" {best['cp'][0] / best['ours'][0]:5.2f} x cp", flush=True)
    shutil.rmtree(path)


def main():
    if sys.argv[1] == "make":
        globals()[f"make_{sys.argv[2]}"](sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "merge":
        globals()[f"merge_{sys.argv[2]}"](sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        command, megabytes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2000
        directory = os.path.join(sys.argv[3] if len(sys.argv) > 3 else "/dev/shm", f"reshard-bench-{os.getpid()}")
        os.makedirs(directory)
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
        try:
            for kind in "zero3", "fsdp":
                measure(kind, os.environ.get("DEEPSPEED_PYTHON" if kind == "zero3" else "", sys.executable), command,
                        megabytes, directory)
            if os.environ.get("ORBAX_PYTHON"):
                measure("orbax", os.environ["ORBAX_PYTHON"], command, megabytes, directory)
            else:
                print("orbax  set ORBAX_PYTHON to a Python with orbax-checkpoint and safetensors")
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
