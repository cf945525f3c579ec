"""Tensors of a GPU through Writer and Reader: copied through host memory, with the files of torch's writer."""
import os
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import tap
import worlds
from reshard.torch import HuggingFaceStorageReader, HuggingFaceStorageWriter, LoadPlanner, Reader, Writer
from tensors import DTYPES, same, truth


@unittest.skipUnless(torch.cuda.is_available(), "no GPU here")
class DcpCuda(unittest.TestCase):
    def state(self):
        state = {str(dtype): truth(str(dtype), (50, 6), dtype).cuda() for dtype in DTYPES}
        state.update(t=truth("t", (40, 30)).cuda().t(), rows=truth("rows", (90, 30)).cuda()[7:30], step=5,
                     here=truth("here", (8,)), empty=torch.empty(0, 3, device="cuda"), deep={"x": [1, "y"]})
        return state

    def blank(self, state, device):
        return {name: torch.zeros(one.nbytes, dtype=torch.uint8).view(one.dtype).reshape(one.shape).to(device)
                if isinstance(one, torch.Tensor) else 0 for name, one in state.items() if name != "deep"}

    def test_both_ways(self):
        """to the GPU and from it, by theirs and ours; the files are the same"""
        with worlds.Folder() as folder:
            state = self.state()
            for writer in (FileSystemWriter, Writer):
                dcp.save(state, storage_writer=writer(folder(writer.__name__)), no_dist=True)
            files = [name for name in os.listdir(folder("Writer")) if name != ".metadata"]
            for name in files:
                with open(folder("Writer", name), "rb") as a, open(folder("FileSystemWriter", name), "rb") as b:
                    self.assertTrue(a.read() == b.read(), name)
            for reader in (Reader, FileSystemReader):
                for device in ("cpu", "cuda"):
                    got = self.blank(state, device)
                    planner = LoadPlanner() if reader is Reader else None
                    dcp.load(got, storage_reader=reader(folder("Writer")), planner=planner, no_dist=True)
                    for name, one in got.items():
                        right = state[name]
                        self.assertTrue(one == right if name == "step" else same(one.cpu(), right.cpu()), name)

    def test_hugging_face(self):
        """safetensors from the GPU and to it, with the elements of torch's files"""
        from safetensors.torch import _TYPES  # which torch's reader knows
        state = {name: one for name, one in self.state().items()
                 if isinstance(one, torch.Tensor) and one.is_contiguous() and one.dtype in _TYPES.values()}
        with worlds.Folder() as folder:
            for number, writer in enumerate((dcp.HuggingFaceStorageWriter, HuggingFaceStorageWriter)):
                dcp.save(state, storage_writer=writer(folder(str(number))), no_dist=True)
            for reader, path in ((HuggingFaceStorageReader, "0"), (HuggingFaceStorageReader, "1"),
                                 (dcp.HuggingFaceStorageReader, "1")):
                for device in ("cpu", "cuda"):
                    got = self.blank(state, device)
                    dcp.load(got, storage_reader=reader(folder(path)), no_dist=True)
                    for name, one in got.items():
                        self.assertTrue(same(one.cpu(), state[name].cpu()), (name, reader, path))

    def test_in_background(self):
        """async_save copies before it returns"""
        with worlds.Folder() as folder:
            def work():
                tensor = truth("w", (300, 200)).cuda()
                pending = dcp.async_save({"w": tensor}, storage_writer=Writer(folder("x")))
                tensor.zero_()
                getattr(pending, "upload_completion", pending).result()
                return True
            import torch.distributed as dist
            store = dist.FileStore(folder("store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                work()
            finally:
                dist.destroy_process_group()
            got = {"w": torch.zeros(300, 200, device="cuda")}
            dcp.load(got, storage_reader=Reader(folder("x")), no_dist=True)
            self.assertTrue(same(got["w"].cpu(), truth("w", (300, 200))))


if __name__ == "__main__":
    tap.main()
