"""DTensors with partial values, and what any rank should hold of them, known without communication."""
import itertools
import os

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

import worlds
from tensors import cut, dtensor, same

REDUCE = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum,
          "product": torch.mul, "band": torch.bitwise_and, "bor": torch.bitwise_or,
          "bxor": torch.bitwise_xor}


def number(shape, seed, dtype=torch.float32):
    """Small whole numbers, which every order of additions adds up to the same."""
    made = torch.randint(-4, 5, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def whole_placements(placements):
    return [Replicate() if one.is_partial() else one for one in placements]


class Problem:
    """A tensor in one layout: the terms of its partial values, and its value."""

    def __init__(self, shape, mesh, placements, dtype=torch.float32):
        self.shape, self.mesh, self.placements, self.dtype = shape, mesh, placements, dtype
        self.axes = [axis for axis, one in enumerate(placements) if one.is_partial()]
        counts = [mesh[axis] for axis in self.axes]
        self.terms = {places: number(shape, 7 + 13 * index, dtype)
                      for index, places in enumerate(itertools.product(*map(range, counts)))}
        self.value = None
        for term in self.terms.values():
            self.value = term if self.value is None else self.reduced(self.value, term)
        for axis in self.axes:
            if placements[axis].reduce_op == "avg":
                self.value = self.value / mesh[axis]

    def reduced(self, a, b):
        return REDUCE[self.placements[self.axes[0]].reduce_op](a, b)

    def local(self, position):
        """What the rank at a position of the mesh has."""
        places, rest = [], position
        for count in reversed(self.mesh):
            places.insert(0, rest % count)
            rest //= count
        term = self.terms[tuple(places[axis] for axis in self.axes)]
        return cut(term, (self.mesh, whole_placements(self.placements)))[position]

    def tensor(self, device_mesh):
        """The DTensor, on ranks of the mesh and on others."""
        coordinate = device_mesh.get_coordinate()
        local = torch.empty((0,) * len(self.shape), dtype=self.dtype)
        if coordinate is not None:
            local = self.local(position_of(device_mesh))
        return dtensor(local.to(device_mesh.device_type), self.shape, device_mesh, self.placements)


def position_of(device_mesh):
    """Of this rank in the mesh, row-major."""
    position = 0
    for count, place in zip(device_mesh.mesh.shape, device_mesh.get_coordinate()):
        position = position * count + place
    return position


def expected(value, device_mesh, placements):
    """What this rank should hold of a value."""
    return cut(value, (tuple(device_mesh.mesh.shape), placements))[position_of(device_mesh)]


def check(got, value, device_mesh, placements, what=""):
    """That a DTensor is on this mesh in these placements, and has these values."""
    assert got.device_mesh == device_mesh, what
    assert tuple(got.placements) == tuple(placements), (what, got.placements)
    assert got.shape == value.shape and got.dtype == value.dtype, (what, got)
    if device_mesh.get_coordinate() is not None:
        wanted = expected(value, device_mesh, placements)
        assert got.to_local().device.type == device_mesh.device_type, (what, got.to_local().device)
        assert same(got.to_local().cpu(), wanted), (what, got.to_local(), wanted)
        assert got.to_local().is_contiguous(), what


def mesh_over(ranks, shape=None, kind="cpu"):
    """Collective. A mesh of some ranks of the world."""
    made = torch.tensor(ranks, dtype=torch.int)
    return DeviceMesh(kind, made if shape is None else made.reshape(shape))


P = Partial()


def agrees(nranks, work, *args):
    """Whether upstream does right, which `work` answers on every rank: it may also fail, or never end."""
    patience, worlds.PATIENCE = worlds.PATIENCE, 6
    try:
        return all(worlds.run(nranks, quietly, work, *args))
    except AssertionError:
        return False
    finally:
        worlds.PATIENCE = patience


def quietly(work, *args):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo says a lot before it ends a process
    return work(*args)
