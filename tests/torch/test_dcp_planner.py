"""LoadPlanner: torch's plans, whatever is stored and wanted, and the same complaints."""
import itertools
import random
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor.placement_types import _StridedShard

import boxed
import reshard
import tap
import worlds
from reshard.torch import LoadPlanner, Reader, SavePlanner, Writer
from reshard.torch.boxes import MetadataIndex, Part, read_items
from tensors import S0, Meshes, dtensor, filled, same, truth


def chunk(lo, length):
    return ChunkStorageMetadata(torch.Size(lo), torch.Size(length))


def rows(n, *edges):
    """Boxes of a line of n, from edge to edge."""
    return [chunk([a], [b - a]) for a, b in zip(edges, edges[1:] + (n,))]


def about(shape, chunks):
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)


def planned(shape, stored, wanted):
    """The read items of both planners, in an order of their own: destination, then storage."""
    parts = [Part(tuple(one.offsets), tuple(one.sizes), MetadataIndex("w", one.offsets, i), (0,) * len(shape))
             for i, one in enumerate(wanted)]
    ours = list(read_items("w", about(shape, stored), parts))
    theirs = create_read_items_for_chunk_list("w", about(shape, stored), wanted)
    return tuple(sorted(map(plain, items)) for items in (ours, theirs))


def plain(item):
    return (tuple(item.dest_index.offset), tuple(item.dest_offsets), tuple(item.storage_index.offset),
            tuple(item.storage_offsets), tuple(item.lengths), item.storage_index.index)


def grid(random_, shape):
    """A tensor cut into a grid of boxes, some of them again."""
    cuts = [sorted(random_.sample(range(1, extent), random_.randint(0, min(4, extent - 1)))) for extent in shape]
    edges = [[0, *cut, extent] for cut, extent in zip(cuts, shape)]
    boxes = [chunk([lo for lo, _ in spans], [hi - lo for lo, hi in spans])
             for spans in itertools.product(*[list(zip(one, one[1:])) for one in edges])]
    random_.shuffle(boxes)
    return boxes


def strided_without_elements(folder):
    """Strided shards of tensors that have no elements, rows that go evenly or not."""
    device_mesh = Meshes()[(2, 2)]
    placements = [_StridedShard(0, split_factor=2), S0]
    at = device_mesh.get_coordinate()
    state = {"plain": torch.ones(1)}
    for rows_ in (0, 3, 8):
        ordered = torch.empty(rows_, 0).chunk(2)
        own = ordered[at[1]].chunk(2) if at[1] < len(ordered) else ()
        local = own[at[0]] if at[0] < len(own) else torch.empty(0, 0)
        state[f"e{rows_}"] = dtensor(local, (rows_, 0), device_mesh, placements)
    dcp.save(state, storage_writer=Writer(folder("x")), planner=SavePlanner())
    for reader, planner in ((Reader, LoadPlanner()), (FileSystemReader, LoadPlanner()), (FileSystemReader, None)):
        dcp.load(state, storage_reader=reader(folder("x")), planner=planner)
    about = FileSystemReader(folder("x")).read_metadata().state_dict_metadata
    return {name: list(one.size) for name, one in about.items()}


class DcpPlanner(unittest.TestCase):
    def equal(self, shape, stored, wanted):
        ours, theirs = planned(shape, stored, wanted)
        self.assertEqual(ours, theirs)
        return [(one[1][0], one[3][0], one[4][0]) for one in ours]

    def test_table(self):
        """the cases of torch's own tests"""
        # 128 elements, 8 ranks to 4 and 4 to 8: (destination, storage offset, length) of each rank
        for rank in range(4):
            found = self.equal((128,), rows(128, *range(0, 128, 16)), [chunk([32 * rank], [32])])
            self.assertEqual(found, [(0, 0, 16), (16, 0, 16)])
        for rank in range(8):
            found = self.equal((128,), rows(128, 0, 32, 64, 96), [chunk([16 * rank], [16])])
            self.assertEqual(found, [(0, rank % 2 * 16, 16)])
        found = self.equal((120,), rows(120, 0, 30, 60, 90), [chunk([40], [40])])
        self.assertEqual(found, [(0, 10, 20), (20, 0, 20)])
        found = self.equal((16,), rows(16, 0, 8), [chunk([4], [7])])
        self.assertEqual(found, [(0, 4, 4), (4, 0, 3)])

    def test_random(self):
        """random grids, wanted in boxes of another grid, are planned as torch does"""
        numbers = random.Random(7)
        for _ in range(150):
            shape = [numbers.randint(1, 12) for _ in range(numbers.randint(1, 3))]
            stored, wanted = grid(numbers, shape), grid(numbers, shape)
            numbers.shuffle(wanted)
            self.equal(shape, stored, wanted[:numbers.randint(1, len(wanted))])

    def test_scalars_and_empty(self):
        """no dims, no elements, empty boxes"""
        ours, theirs = planned((), [chunk([], [])], [chunk([], [])])
        self.assertEqual(ours, theirs)
        self.assertEqual(planned((0, 3), [chunk([0, 0], [0, 3])], [chunk([0, 0], [0, 3])])[0], [])
        stored = [chunk([0], [5]), chunk([5], [0])]
        ours = planned((5,), stored, [chunk([2], [3]), chunk([5], [0])])[0]
        self.assertEqual(ours, [((2,), (0,), (0,), (2,), (3,), 0)])

    def test_complaints(self):
        """missing keys, other sizes, values where tensors are"""
        with worlds.Folder() as folder:
            dcp.save({"w": torch.ones(4), "n": 5}, storage_writer=Writer(folder("x")), no_dist=True)
            for state, words in (({"v": torch.ones(4)}, "Missing key in checkpoint state_dict: v"),
                                 ({"w": torch.ones(5)}, "Size mismatch"),
                                 ({"w": "text"}, "w is a tensor in the checkpoint, but a str in the state")):
                with self.assertRaises(dcp.CheckpointException) as raised:
                    dcp.load(state, storage_reader=Reader(folder("x")), planner=LoadPlanner(), no_dist=True)
                self.assertIn(words, str(raised.exception))
            state = {"v": torch.ones(4), "w": torch.zeros(4)}
            dcp.load(state, storage_reader=Reader(folder("x")), no_dist=True,
                     planner=LoadPlanner(allow_partial_load=True))
            self.assertTrue(torch.equal(state["w"], torch.ones(4)))

    def test_names_of_before(self):
        """a checkpoint of torch before 2.4, where a dict without tensors is one value"""
        from torch.distributed.checkpoint import _version
        state = {"w": truth("w", (3,)), "about": {"step": 5, "lr": 0.1}}
        with worlds.Folder() as folder:
            _version._derived_version = "2_3"
            try:
                dcp.save(state, storage_writer=Writer(folder("x")), no_dist=True)
            finally:
                _version._derived_version = None
            for planner in (None, LoadPlanner()):
                got = {"w": torch.zeros(3), "about": {"step": 0, "lr": 0.0}}
                dcp.load(got, storage_reader=Reader(folder("x")), planner=planner, no_dist=True)
                self.assertEqual(got["about"], state["about"])

    def test_without_elements(self):
        """SavePlanner keeps strided tensors without elements, and everyone loads them"""
        with worlds.Folder() as folder:
            right = {"plain": [1], "e0": [0, 0], "e3": [3, 0], "e8": [8, 0]}
            self.assertEqual(worlds.run(4, strided_without_elements, folder), [right] * 4)
            with reshard.open(folder("x")) as checkpoint:
                self.assertEqual({name: list(checkpoint[name].shape) for name in checkpoint}, right)

    def test_many(self):
        """hundreds of boxes, with torch's reader and with ours"""
        n = 300
        whole = truth("w", (n, 4))
        boxes = [[(i, i + 1), (c, c + 2)] for i in range(n) for c in (0, 2)]
        parts = [whole[tuple(slice(*edge) for edge in box)] for box in boxes]
        with worlds.Folder() as folder:
            state = {"w": boxed.checkpointable(whole.shape, whole.dtype, boxes, parts)}
            planner = dcp.DefaultSavePlanner()
            dcp.save(state, storage_writer=Writer(folder("x")), planner=planner, no_dist=True)
            for reader in (Reader, FileSystemReader):
                got = {"w": filled((n, 4), torch.float32)}
                dcp.load(got, storage_reader=reader(folder("x")), planner=LoadPlanner(), no_dist=True)
                self.assertTrue(same(got["w"], whole))


if __name__ == "__main__":
    tap.main()
