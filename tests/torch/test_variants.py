"""What other writers make of a checkpoint: paths of Python 3.13, attributes that torch does not know, items of a
big-endian machine, every pickle protocol."""
import io
import pickle
import sys
import tempfile
import types
import unittest
import zipfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard
import tap

STATE = {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "i": torch.arange(5)}


class PosixPath:
    """As Python 3.13 pickles it: another module, and the whole path in one piece."""

    def __reduce__(self):
        return PosixPath, ("/somewhere/ckpt",)


PosixPath.__module__, PosixPath.__qualname__ = "pathlib._local", "PosixPath"
sys.modules["pathlib._local"] = types.ModuleType("pathlib._local")
sys.modules["pathlib._local"].PosixPath = PosixPath


def turn_round(item, width):
    """The same item, as a big-endian machine writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("byteorder"):
                data = b"big"
            if name.endswith("data/0"):
                data = b"".join(data[i:i + width][::-1] for i in range(0, len(data), width))
            new.writestr(name, data)
    return out.getvalue()


class Variants(unittest.TestCase):
    def test_all_at_once(self):
        """a checkpoint with all of these loads equal, by every pickle protocol"""
        for protocol in 2, 3, 4, 5:
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(STATE, checkpoint_id=folder + "/x", no_dist=True)
                with open(folder + "/x/.metadata", "rb") as file:
                    metadata = pickle.load(file)
                with open(folder + "/x/__0_0.distcp", "rb") as file:
                    data = file.read()
                metadata.storage_meta.checkpoint_id = PosixPath()
                metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4)}}
                items = b""
                for key, info in metadata.storage_data.items():
                    item = turn_round(data[info.offset:info.offset + info.length],
                                      STATE[key.fqn].element_size())
                    info.offset, info.length = len(items), len(item)
                    items += item
                with open(folder + "/x/__0_0.distcp", "wb") as file:
                    file.write(items)
                with open(folder + "/x/.metadata", "wb") as file:
                    pickle.dump(metadata, file, protocol=protocol)
                save_file(STATE, folder + "/truth.safetensors")
                self.assertEqual(reshard.diff(folder + "/x", folder + "/truth.safetensors"), [], protocol)


if __name__ == "__main__":
    tap.main()
