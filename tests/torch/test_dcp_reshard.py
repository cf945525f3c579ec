"""Checkpoints resharded by dcp.save and dcp.load with Writer and Reader, theirs and ours in every combination:
every layout of some shapes into every other, of as many ranks and of fewer, to the last bit."""
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

import boxed
import reshard.torch
import tap
import worlds
from reshard.torch import LoadPlanner, Reader, Writer
from tensors import R, S0, Meshes, cut, dtensor, filled, layouts, name_of, same, sharded, truth

SHAPES = [(), (1,), (5,), (4, 4), (7, 6), (3, 5, 4), (0, 3)]
KINDS = {"ours": (Writer, Reader), "to torch": (Writer, FileSystemReader), "from torch": (FileSystemWriter, Reader)}


def save_all(folder, kind, mesh):
    """Every layout of every shape on a mesh, in one checkpoint."""
    state = {}
    for shape in SHAPES:
        for layout in layouts(mesh, len(shape)):
            name = name_of(shape, layout)
            state[name] = sharded(truth(name, shape), layout, Meshes()[mesh])
    dcp.save(state, storage_writer=KINDS[kind][0](folder(kind + str(mesh))))


def names_of(mesh):
    return {name_of(shape, layout): shape for shape in SHAPES for layout in layouts(mesh, len(shape))}


def load_all(folder, kind, mesh, into, planner):
    """All of that, into every layout of another mesh: the k-th of each number of dims at once."""
    device_mesh, most = Meshes()[into], max(len(layouts(into, len(shape))) for shape in SHAPES)
    for k in range(most):
        state, right = {}, {}
        for name, shape in names_of(mesh).items():
            targets = layouts(into, len(shape))
            layout = targets[k % len(targets)]
            part = cut(truth(name, shape), layout)[dist.get_rank()]
            state[name] = dtensor(filled(part.shape, part.dtype), shape, device_mesh, layout[1])
            right[name] = part
        dcp.load(state, storage_reader=KINDS[kind][1](folder(kind + str(mesh))),
                 planner=LoadPlanner() if planner else None)
        for name, part in right.items():
            assert same(state[name].to_local(), part), f"{kind}: {name} into {state[name].placements}"


def extensions_round_trip(folder):
    """[R] and [S0] of a mesh of four, through extensions, each into the other."""
    device_mesh, whole = Meshes()[(4,)], torch.arange(16.0).reshape(4, 4)
    for number, made in enumerate(([], [Rot13Example()], [ZStandard()], [Rot13Example(), ZStandard()])):
        for threads in (1, 2):
            path = folder(f"{number} {threads}")
            dcp.save({"R": sharded(whole, ((4,), (R,)), device_mesh),
                      "S": sharded(whole, ((4,), (S0,)), device_mesh)},
                     storage_writer=Writer(path, thread_count=threads, _extensions=made))
            state = {"R": sharded(torch.zeros(4, 4), ((4,), (S0,)), device_mesh),
                     "S": sharded(torch.zeros(4, 4), ((4,), (R,)), device_mesh)}
            dcp.load(state, storage_reader=Reader(path, _extension_registry=get_test_extension_registry()))
            for name, tensor in state.items():
                assert torch.equal(tensor.full_tensor(), whole), (number, name)


UNEVEN = [[(0, 4)], [(4, 7)], [(7, 11)], [(11, 16)]]
LOADED = [[(0, 2)], [(2, 6)], [(6, 12)], [(12, 16)]]
SEVERAL = [[(0, 2), (9, 10)], [(2, 3)], [(10, 16), (3, 5)], [(5, 9)]]


def boxes_of(rows, rank):
    return [[edge, (0, 1)] for edge in rows[rank]]


def parts_of(whole, boxes):
    return [whole[tuple(slice(*edge) for edge in box)].clone() for box in boxes]


def uneven_boxes(folder):
    """Checkpointable objects and LocalShardsWrappers, with one shard a rank and with several."""
    whole, rank, device_mesh = torch.arange(16.0).reshape(16, 1), dist.get_rank(), Meshes()[(4,)]

    def made(kind, rows, of):
        boxes = boxes_of(rows, rank)
        parts = parts_of(of, boxes)
        if kind == "object":
            return boxed.checkpointable(of.shape, of.dtype, boxes, parts), parts
        return boxed.wrapped(device_mesh, of.shape, boxes, parts), parts

    for kind in ("object", "wrapper"):
        for save_rows in (UNEVEN, SEVERAL):
            path = folder(f"{kind} {save_rows is UNEVEN}")
            dcp.save({"w": made(kind, save_rows, whole)[0]}, storage_writer=Writer(path))
            for load_kind in ("object", "wrapper"):
                for load_rows in (UNEVEN, LOADED, SEVERAL):
                    for reader in (Reader, FileSystemReader):
                        tensor, parts = made(load_kind, load_rows, torch.zeros(16, 1))
                        dcp.load({"w": tensor}, storage_reader=reader(path))
                        for got, right in zip(parts, parts_of(whole, boxes_of(load_rows, rank))):
                            assert torch.equal(got, right), (kind, load_kind, load_rows)


def empty_and_uneven(folder):
    """Rows 4, 4, 4, 2 into a plain tensor; one row of four ranks on a mesh of two axes."""
    devices, rank = Meshes(), dist.get_rank()
    whole = truth("w", (14, 1))
    rows = dtensor(whole[4 * rank:4 * rank + 4].clone(), (14, 1), devices[(4,)], [S0])
    one = sharded(truth("one", (1,)), ((4,), (S0,)), devices[(4,)])
    dcp.save({"w": rows, "one": one}, storage_writer=Writer(folder("x")))
    state = {"w": filled((14, 1), torch.float32)}
    dcp.load(state, storage_reader=Reader(folder("x")))
    assert same(state["w"], whole)
    target = ((2, 2), (S0, S0))
    part = cut(truth("one", (1,)), target)[rank]
    state = {"one": dtensor(filled(part.shape, part.dtype), (1,), devices[(2, 2)], target[1])}
    dcp.load(state, storage_reader=Reader(folder("x")))
    assert same(state["one"].to_local(), part)


def some_ranks(folder):
    """A mesh of some ranks: the others have nothing, on saving and on loading."""
    from torch.distributed.device_mesh import DeviceMesh
    some, others = DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [3, 1, 0])
    whole = truth("w", (7, 4))

    def on(mesh, ranks, value):
        mine = mesh.get_coordinate()
        part = cut(value, ((len(ranks),), (S0,)))[mine[0]] if mine else torch.empty(0)
        return dtensor(part.clone(), (7, 4), mesh, [S0])

    dcp.save({"w": on(some, [0, 2], whole)}, storage_writer=Writer(folder("some")))
    for planner in (None, LoadPlanner()):
        state = {"w": on(others, [3, 1, 0], torch.zeros(7, 4))}
        dcp.load(state, storage_reader=Reader(folder("some")), planner=planner)
        mine = others.get_coordinate()
        if mine:
            assert same(state["w"].to_local(), cut(whole, ((3,), (S0,)))[mine[0]])


class DcpReshard(unittest.TestCase):
    def test_every_layout(self):
        """every layout into every other, of four ranks and of three, by theirs and ours"""
        with worlds.Folder() as folder:
            for mesh in ((4,), (2, 2)):
                for kind in KINDS:
                    worlds.run(4, save_all, folder, kind, mesh)
                    worlds.run(4, load_all, folder, kind, mesh, (4,), True)
                worlds.run(4, load_all, folder, "ours", mesh, (2, 2), False)
                worlds.run(3, load_all, folder, "ours", mesh, (3,), False)
                worlds.run(1, load_all, folder, "from torch", mesh, (1,), True)

    def test_extensions(self):
        """through Rot13, zstd and both"""
        with worlds.Folder() as folder:
            worlds.run(4, extensions_round_trip, folder)

    def test_uneven_boxes(self):
        """Checkpointable objects and LocalShardsWrapper, several shards a rank"""
        with worlds.Folder() as folder:
            worlds.run(4, uneven_boxes, folder)

    def test_empty_and_uneven(self):
        """empty shards and uneven ones have the right values"""
        with worlds.Folder() as folder:
            worlds.run(4, empty_and_uneven, folder)

    def test_some_ranks(self):
        """meshes of some of the ranks, in any order"""
        with worlds.Folder() as folder:
            worlds.run(4, some_ranks, folder)

    def test_partial(self):
        """a Partial tensor is refused"""
        def work(folder):
            from torch.distributed.tensor import Partial
            state = {"w": dtensor(torch.ones(3), (3,), Meshes()[(2,)], [Partial()])}
            try:
                dcp.save(state, storage_writer=Writer(folder("x")), planner=reshard.torch.SavePlanner())
            except dcp.CheckpointException as error:
                return "partial" in str(error)
            return False
        with worlds.Folder() as folder:
            self.assertEqual(worlds.run(2, work, folder), [True, True])


if __name__ == "__main__":
    tap.main()
