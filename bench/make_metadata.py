#!/usr/bin/env python3
"""make_metadata.py DIRECTORY [NTENSORS [NCHUNKS]]: a .metadata as torch would write it for NTENSORS tensors of
NCHUNKS chunks each (1,000 of 1,000), with classes of torch's names and the pickler of this Python. Nothing
but the standard library is needed, and no data files are made."""
import collections
import enum
import os
import pickle
import sys
import types


def module(name):
    made = types.ModuleType(name)
    sys.modules[name] = made
    return made


METADATA = module("torch.distributed.checkpoint.metadata")
FILESYSTEM = module("torch.distributed.checkpoint.filesystem")
TORCH = module("torch")
SERIALIZATION = module("torch.serialization")
module("torch.distributed")
module("torch.distributed.checkpoint")


def put(where, name, base=object, **members):
    made = type(name, (base,), dict(members, __module__=where.__name__, __qualname__=name))
    setattr(where, name, made)
    return made


Metadata = put(METADATA, "Metadata")
Tensor = put(METADATA, "TensorStorageMetadata")
Properties = put(METADATA, "TensorProperties", __getstate__=lambda self: self.state)
Chunk = put(METADATA, "ChunkStorageMetadata")
Index = put(METADATA, "MetadataIndex")
Info = put(FILESYSTEM, "_StorageInfo")
Size = put(TORCH, "Size", tuple, __reduce__=lambda self: (Size, (tuple(self),)))


class Encoding(enum.Enum):
    TORCH_CONTIGUOUS_FORMAT = 0


Encoding.__module__, Encoding.__qualname__ = METADATA.__name__, "_MEM_FORMAT_ENCODING"
METADATA._MEM_FORMAT_ENCODING = Encoding


class Global:
    """Pickled as a name in a module: what torch does with its dtypes."""

    def __init__(self, where, name):
        self.name = name
        setattr(where, name, self)

    def __reduce__(self):
        return self.name


float32 = Global(TORCH, "float32")


def _get_layout(name):
    return Layout(name)


class Layout:
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return _get_layout, (self.name,)


_get_layout.__module__ = SERIALIZATION.__name__
SERIALIZATION._get_layout = _get_layout


def new(kind, **state):
    made = kind()
    made.__dict__.update(state)
    return made


class Pickler(pickle._Pickler):
    """Finds the module of a Global by its place in torch."""

    def save_global(self, obj, name=None):
        if isinstance(obj, Global):
            self.save("torch")
            self.save(obj.name)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def main():
    folder = sys.argv[1]
    ntensors = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    nchunks = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    tensors, storage, planner = {}, {}, {}
    where = collections.Counter()
    for t in range(ntensors):
        name = f"model.layers.{t}.self_attn.q_proj.weight"
        state = (float32, Layout("torch.strided"), False, Encoding(0), False)
        chunks = []
        for c in range(nchunks):
            offset, size = Size((c * 4, 0)), Size((4, 16))
            chunks.append(new(Chunk, offsets=offset, sizes=size))
            path = f"__{c}_0.distcp"
            storage[new(Index, fqn=name, index=c, offset=Size((c * 4, 0)))] = new(
                Info, relative_path=path, offset=where[path], length=1577)
            where[path] += 1577
        properties = new(Properties)
        properties.state = state
        tensors[name] = new(Tensor, properties=properties, size=Size((4 * nchunks, 16)), chunks=chunks)
        planner[name] = (name,)
    root = new(Metadata, state_dict_metadata=tensors, planner_data=planner, storage_data=storage,
               storage_meta=None, version="1.0.0")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".metadata"), "wb") as out:
        Pickler(out, 4).dump(root)


main()
