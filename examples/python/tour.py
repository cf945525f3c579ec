# ---
# A tour of the package, cell by cell: run it as a script, or open it as a notebook (Jupytext, VS Code, Spyder).
# ---

# %% [markdown]
# # A tour of reshard
#
# A layout says which rank holds which elements of a tensor. A plan moves a tensor from one layout to another.

# %%
"""A tour of the package, in cells."""
import os
import tempfile

import numpy as np
import reshard

directory = tempfile.TemporaryDirectory()
print("reshard", reshard.__version__)

# %% [markdown]
# ## Layouts
# A layout is one line of text, or is made from objects.

# %%
rows = reshard.Layout("f32[8,8] @ 4 : S(0)")
tiles = reshard.Layout.on("f32", (8, 8), "dp=2,tp=2", [reshard.Shard(0), reshard.Shard(1)])
print(tiles)
for array in tiles.arrays():
    print("  rank", array.rank, "holds", array.shape, "from", tiles.boxes(array.rank)[0].lo)
print("covers its tensor", tiles.check().cover)

# %% [markdown]
# ## Plans
# A plan reports the cost of a move before data moves.

# %%
plan = reshard.Plan(rows, tiles)
print(plan.explain(ranks=True))
for piece in plan.pieces(rank=1):
    print(f"  rank 1 receives {piece.lo} + {piece.len} from rank {piece.from_rank}")

# %% [markdown]
# ## Moving
# NumPy arrays, torch tensors, and objects with DLPack or the buffer protocol are used in place.

# %%
whole = np.arange(64, dtype="f4").reshape(8, 8)
src = [whole[2 * rank:2 * rank + 2] for rank in range(4)]
dst = plan.run(src)
print(dst[3])
assert (dst[3] == whole[4:, 4:]).all()

bound = reshard.bind(plan, pool=2)  # can be run many times
for step in range(3):
    bound.run([part + step for part in src], dst)
assert (dst[0] == whole[:4, :4] + 2).all()

# %% [markdown]
# Partial values are reduced, with the same bits on every rank and backend.

# %%
terms = [np.full(6, rank, "f4") for rank in range(3)]
print(reshard.reshard("f32[6] @ 3 : P(sum)", "f32[6] @ 2 : S(0)", terms))

# %% [markdown]
# ## Checkpoints
# `save` writes what torch writes, one file per rank. `open` returns a mapping of tensors; reading is lazy.

# %%
path = os.path.join(directory.name, "step-1000")
state = {"model": {"up.weight": src, "norm.weight": np.ones(8, "f4")},
         "optim": {"state": {"up.weight": {"exp_avg": whole / 10}}}, "step": 1000}
report = reshard.save(path, state, layouts={"model.up.weight": rows})
print(report.nfiles_written, "files,", report.nbytes_written, "bytes")

checkpoint = reshard.open(path)
for name, tensor in checkpoint.items():
    print(f"  {name}: {tensor.dtype}{list(tensor.shape)} in {tensor.nboxes} boxes")
print("step", checkpoint.plain_values["step"])

# %%
print(checkpoint["model.up.weight"][3:5, ::-2])  # reads two rows
mine = {"model.up.weight": np.empty((8, 3), "f4")}  # the third of rank 0, in another layout than the files
checkpoint.load(mine, layouts={"model.up.weight": "f32[8,8] @ 3 : S(1)"}, rank=0)
assert (mine["model.up.weight"] == whole[:, :3]).all()

# %% [markdown]
# ## Conversion and verification
# Four ranks become three, with optimizer state. Then `merge` writes whole tensors that transformers loads.

# %%
three = path + ".dp3"
reshard.convert(checkpoint, three, mesh="3", preset="fsdp",
                progress=lambda done, total: print(f"  {done} of {total} bytes"))
print("differences:", reshard.diff(path, three), "damage:", reshard.verify(three))
assert reshard.digest(path) == reshard.digest(three)

reshard.merge(three, os.path.join(directory.name, "hf"), cast="bf16")
with reshard.open(os.path.join(directory.name, "hf")) as merged:
    print(list(merged.values()))
    print(merged["up.weight"].read(slice(0, 1), dtype="f32"))

# %% [markdown]
# ## Errors
# Messages have names and values. Exceptions are also builtin exceptions, such as ValueError.

# %%
for work in (lambda: reshard.Layout("f32[8,8] @ 4 : S(2)"),
             lambda: reshard.Plan("f32[8] @ 2:S0", "f32[9] @ 2:S0"),
             lambda: plan.run(src[:3]), lambda: checkpoint["model.down.weight"],
             lambda: reshard.save(path, state, layouts={"model.up.weight": rows})):
    try:
        work()
    except reshard.Error as error:
        builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        print(f"  {error.status}, a {builtin}: {error}")

checkpoint.close()
directory.cleanup()
