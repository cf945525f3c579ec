"""Merges a checkpoint that ranks saved into one file of safetensors, and proves that nothing was lost.

    python examples/python/merge.py [CHECKPOINT OUT]

Without arguments it makes a checkpoint of its own first. Needs neither torch nor NumPy."""
import os
import shutil
import sys
import tempfile
from array import array

import reshard


def make_checkpoint(path):
    """A matrix whose rows are on four ranks, and a step count."""
    layout = reshard.Layout("f32[1000,64] @ dp=4 : S(0)")
    rows = [array("f", (1.0 * (rank + 1),)) * (250 * 64) for rank in range(4)]
    parts = [memoryview(one).cast("B").cast("f", shape=[250, 64]) for one in rows]
    reshard.save(path, {"model": {"w": parts}, "step": 7}, layouts={"model.w": layout})


def merge(source, out):
    with reshard.open(source) as checkpoint:
        print(checkpoint)
        report = reshard.merge(checkpoint, out)
        print(f"{report.nbytes_written} bytes in {out}")
        # Digests are the same whatever the layout and the format; names may have lost a prefix.
        assert sorted(reshard.digest(checkpoint).values()) == sorted(reshard.digest(out).values())
    print("the same tensors, by their digests")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        merge(sys.argv[1], sys.argv[2])
    else:
        folder = tempfile.mkdtemp()
        make_checkpoint(os.path.join(folder, "step-7"))
        merge(os.path.join(folder, "step-7"), os.path.join(folder, "model.safetensors"))
        shutil.rmtree(folder)
