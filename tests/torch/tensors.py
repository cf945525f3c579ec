"""Tensors whose every bit is known, cut by torch's own placements, and loaded by the library.

A layout here is a pair (mesh, placements): the extents of the mesh, and torch's placement of each axis.
"""
import itertools
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import reshard

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint64: "u64",
    torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128", torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2fnuz: "f8e5m2fnuz", torch.float8_e8m0fnu: "f8e8m0",
    torch.float4_e2m1fn_x2: "f4x2", torch.complex32: "c32",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
# Many operations know few dtypes; those that only move bits are done on one of the same width.
PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor):
    return tensor.detach().view(PLAIN[tensor.dtype.itemsize])


def truth(name, shape, dtype=torch.float32):
    """A tensor that depends on its name only: every process knows it without being told."""
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    count = 1
    for extent in shape:
        count *= extent
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=seed, dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def filled(shape, dtype):
    """Memory to load into, with nothing in it that could be taken for right."""
    count = 1
    for extent in shape:
        count *= extent
    return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype).reshape(shape)


def same(a, b):
    """Equal to the last bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        bits(a.contiguous()).reshape(-1).view(torch.uint8),
        bits(b.contiguous()).reshape(-1).view(torch.uint8))


def cut(whole, layout):
    """What each rank holds, by torch's own splitting, applied axis by axis."""
    mesh, placements = layout
    parts = [bits(whole)]
    for count, placement in zip(mesh, placements):
        if isinstance(placement, (Shard, _StridedShard)):
            parts = [piece for part in parts
                     for piece in placement._split_tensor(part, count, with_padding=False,
                                                          contiguous=True)[0]]
        else:
            parts = [part for part in parts for _ in range(count)]
    # A part without elements may keep the strides of what it was cut from, and torch would save those.
    return [(part.contiguous() if part.numel() else torch.empty(part.shape, dtype=part.dtype))
            .view(whole.dtype) for part in parts]


def of(whole_shape, dtype, layout):
    """The layout in the library's notation."""
    mesh, placements = layout
    words = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            words.append(f"_S({placement.dim},{placement.split_factor})")
        elif isinstance(placement, Shard):
            words.append(f"S({placement.dim})")
        else:
            words.append("R" if isinstance(placement, Replicate) else f"P({placement.reduce_op})")
    shape = ",".join(str(extent) for extent in whole_shape)
    return f"{DTYPES[dtype]}[{shape}] @ {'x'.join(map(str, mesh))} : {','.join(words)}"


def meshes(nranks, naxes=3):
    """Every mesh of nranks ranks with up to naxes axes of more than one rank."""
    found = [(nranks,)]
    for first in range(2, nranks):
        if nranks % first == 0 and naxes > 1:
            found += [(first, *rest) for rest in meshes(nranks // first, naxes - 1)]
    return found


def layouts(mesh, ndim):
    """Every layout of a tensor of ndim dims on a mesh."""
    kinds = [Replicate()] + [Shard(dim) for dim in range(ndim)]
    return [(mesh, placements) for placements in itertools.product(kinds, repeat=len(mesh))]


def name_of(shape, layout, dtype=torch.float32):
    """A name that says what it is a tensor of; no dots, which are for nesting."""
    return of(shape, dtype, layout).replace(" ", "")


class Meshes:
    """Device meshes of this rank's world, each made once: to make one is to make process groups."""

    def __init__(self):
        self.made = {}

    def __getitem__(self, mesh):
        if mesh not in self.made:
            self.made[mesh] = init_device_mesh("cpu", mesh)
        return self.made[mesh]


def dtensor(local, whole_shape, device_mesh, placements):
    stride = torch.empty(whole_shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, placements, run_check=False,
                              shape=torch.Size(whole_shape), stride=stride)


def sharded(whole, layout, device_mesh):
    """The DTensor of this rank, made without communication."""
    local = cut(whole, layout)[device_mesh.get_rank()]
    return dtensor(local, whole.shape, device_mesh, layout[1])


class Want:
    """Memory of a tensor in a layout, to be loaded."""

    def __init__(self, name, shape, dtype, layout, rank=None):
        self.text = layout if isinstance(layout, str) else of(shape, dtype, layout)
        self.layout = reshard.Layout(self.text)
        self.arrays = [filled(array.shape, dtype) for array in self.layout.arrays(rank)]
        self.local = reshard.Local(name, self.layout, self.arrays, rank)


class Have:
    """Memory of a tensor in a layout, to be saved: a layout, or the boxes of each rank."""

    def __init__(self, name, whole, layout, path=None, rank=None):
        explicit = isinstance(layout, list)
        self.text = (boxes_of if explicit else of)(whole.shape, whole.dtype, layout)
        self.layout = reshard.Layout(self.text)
        self.arrays = ([part for group in boxes(whole, layout) for part in group] if explicit
                       else cut(whole, layout))
        self.arrays = [self.arrays[array.number] for array in self.layout.arrays(rank)]
        self.local = reshard.Local(name, self.layout, self.arrays, rank, path=path)


def check_loads(checkpoint, name, whole, targets):
    """Loads a tensor into each layout that its dims allow, and compares the parts."""
    for layout in targets:
        if max((p.dim for p in layout[1] if p != R), default=-1) >= whole.ndim:
            continue
        want = Want(name, whole.shape, whole.dtype, layout)
        checkpoint.load([want.local])
        for got, right in zip(want.arrays, cut(whole, layout), strict=True):
            assert same(got, right), f"{name} -> {want.text}"


def mesh_state(shapes, mesh):
    """A DTensor of every shape in every layout of a mesh."""
    return {name_of(shape, layout): sharded(truth(name_of(shape, layout), shape), layout, Meshes()[mesh])
            for shape in shapes for layout in layouts(mesh, len(shape))}


def check_mesh_loads(shapes, mesh, into, load):
    """Loads mesh_state(shapes, mesh) into every layout of another mesh, with load(state, number)."""
    device_mesh = Meshes()[into]
    for k in range(max(len(layouts(into, len(shape))) for shape in shapes)):
        state, right = {}, {}
        for shape in shapes:
            targets = layouts(into, len(shape))
            target = targets[k % len(targets)]
            for layout in layouts(mesh, len(shape)):
                name = name_of(shape, layout)
                right[name] = cut(truth(name, shape), target)[dist.get_rank()]
                state[name] = dtensor(filled(right[name].shape, torch.float32), shape, device_mesh, target[1])
        load(state, k)
        for name, part in right.items():
            assert same(state[name].to_local(), part), name


def about(checkpoint):
    """What is in it: (dtype name, shape, number of stored boxes) by name."""
    return {name: (tensor.dtype, tensor.shape, tensor.nboxes) for name, tensor in checkpoint.items()}


def boxes(whole, groups):
    """The slices that lists of (lo, hi) per dim stand for: one list of boxes per rank."""
    return [[whole[tuple(slice(lo, hi) for lo, hi in box)].contiguous() for box in group]
            for group in groups]


def boxes_of(shape, dtype, groups):
    """Explicit boxes in the library's notation."""
    extents = ",".join(str(extent) for extent in shape)
    ranks = " | ".join(" ; ".join(",".join(f"{lo}:{hi}" for lo, hi in box) for box in group)
                       for group in groups)
    return f"{DTYPES[dtype]}[{extents}] @ {{ {ranks} }}"
