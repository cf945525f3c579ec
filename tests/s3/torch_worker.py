"""What test_s3_torch.py lets torch do, in its own environment: each line of standard input is a list with the name of a
function below and its arguments, and what it returns is printed, as JSON. Credentials are in the environment."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import worlds
from reshard.torch import HuggingFaceStorageReader, HuggingFaceStorageWriter, Reader, Writer
from tensors import S0, Meshes, dtensor, filled, same, sharded, truth

SHAPES = {"a": (9, 5), "b": (64, 16), "c": (3,)}


def save_rank(path, step, options):
    count = dist.get_world_size()
    state = {"model": {name: sharded(truth(f"{name}{step}", shape), ((count,), (S0,)), Meshes()[(count,)])
                       for name, shape in SHAPES.items()}, "step": int(step)}
    dcp.save(state, storage_writer=Writer(path, **options))


def save(path, nranks, step, options="{}"):
    """Saves the tensors of a step, in a world of ranks."""
    options = json.loads(options)
    if options.pop("safetensors", False):
        options["serialization_format"] = torch.distributed.checkpoint.filesystem.SerializationFormat.SAFETENSORS
    try:
        worlds.run(int(nranks), save_rank, path, step, options)
    except AssertionError as error:
        return str(error)
    return ""


def load_rank(path, step):
    count = dist.get_world_size()
    right = {name: truth(f"{name}{step}", shape) for name, shape in SHAPES.items()}
    parts = {name: sharded(tensor, ((count,), (S0,)), Meshes()[(count,)]) for name, tensor in right.items()}
    state = {"model": {name: dtensor(filled(one.to_local().shape, torch.float32), one.shape, one.device_mesh,
                                     one.placements) for name, one in parts.items()}, "step": 0}
    dcp.load(state, storage_reader=Reader(path))
    assert state["step"] == int(step), state["step"]
    return all(same(state["model"][name].to_local(), parts[name].to_local()) for name in parts)


def load(path, nranks, step):
    """Loads them on another number of ranks. Returns whether all bits are right."""
    return all(worlds.run(int(nranks), load_rank, path, step))


def load_torch(path, step):
    """Loads them with the reader of torch."""
    state = {"model": {name: filled(shape, torch.float32) for name, shape in SHAPES.items()}, "step": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state["step"] == int(step) and all(same(state["model"][name], truth(f"{name}{step}", shape))
                                              for name, shape in SHAPES.items())


def load_hf(path, local):
    """Compares what the Hugging Face reader loads from a URL with what it loads from a directory."""
    about = HuggingFaceStorageReader(local).read_metadata().state_dict_metadata
    states = [{name: filled(one.size, one.properties.dtype) for name, one in about.items()} for _ in range(2)]
    for state, place in zip(states, (path, local)):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(place), no_dist=True)
    return len(about) > 0 and all(same(states[0][name], states[1][name]) for name in about)


def refused(path):
    """What cannot be done says so."""
    found = []
    for writer in (HuggingFaceStorageWriter(path), Writer(path, overwrite=False)):
        try:
            dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:
            found.append(str(error).strip().splitlines()[-1])
    return found


def moved(path, local):
    """A writer and a reader change between a directory and a URL."""
    writer, reader = Writer(local), Reader(local)
    for place in (path, local, path):
        dcp.save({"a": truth("m", (4, 4))}, checkpoint_id=place, storage_writer=writer, no_dist=True)
        state = {"a": torch.zeros(4, 4)}
        dcp.load(state, checkpoint_id=place, storage_reader=reader, no_dist=True)
        assert same(state["a"], truth("m", (4, 4)))
    return [Writer.validate_checkpoint_id(one) for one in (path, "https://host/x", os.path.join(local, "x"))]


if __name__ == "__main__":
    for line in sys.stdin:
        name, *args = json.loads(line)
        # In a process of its own, so that threads of the library are not forked.
        answer = globals()[name](*args) if name in ("save", "load") else worlds.run(1, globals()[name], *args)[0]
        print(json.dumps(answer), flush=True)
