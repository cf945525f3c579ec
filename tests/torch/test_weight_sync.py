"""Weight updates from a trainer to an inference engine: any two sets of ranks, fused and renamed tensors, casts."""
import unittest

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
import reshard.torch as rt
import tap
import worlds
from moves import mesh_over, number

DEVICE = "cpu"  # test_cuda.py has another one
HEADS, KV, WIDTH, INNER, LAYERS = 16, 8, 12, 20, 2


def weights(dtype=torch.float32, seed=0):
    """The parameters of a small Llama, whole."""
    shapes = {"embed.weight": (30, WIDTH), "norm.weight": (WIDTH,), "head.weight": (30, WIDTH)}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        shapes.update({f"{name}.q.weight": (HEADS, WIDTH), f"{name}.k.weight": (KV, WIDTH),
                       f"{name}.v.weight": (KV, WIDTH), f"{name}.o.weight": (WIDTH, HEADS),
                       f"{name}.gate.weight": (INNER, WIDTH), f"{name}.up.weight": (INNER, WIDTH),
                       f"{name}.down.weight": (WIDTH, INNER)})
    return {name: (number(shape, i + seed) + seed).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


FUSE = {"layers.*.qkv.weight": ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"],
        "layers.*.gate_up.weight": rt.Fuse(["layers.*.gate.weight", "layers.*.up.weight"], dim=0)}
ROWS, COLUMNS = ("qkv.weight", "gate_up.weight", "embed.weight", "head.weight"), ("o.weight", "down.weight")


def trainer(mesh, dtype=torch.float32, seed=0):
    """FSDP: every tensor is cut along dim 0."""
    return {name: rt.distribute_tensor(one.to(DEVICE), mesh, [Shard(0)]) for name, one in weights(dtype, seed).items()}


def engine_values(rank, nranks, seed=0):
    """The local tensors of one tensor-parallel rank, by hand."""
    whole = weights(seed=seed)
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        for made, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
            whole[f"{name}.{made}.weight"] = [whole.pop(f"{name}.{part}.weight") for part in parts]
    found = {}
    for name, one in whole.items():
        if isinstance(one, list):
            found[name] = torch.cat([part.chunk(nranks)[rank] for part in one])
        elif name.endswith(COLUMNS):
            found[name] = one.chunk(nranks, 1)[rank].contiguous()
        else:
            found[name] = one.chunk(nranks)[rank].contiguous() if name.endswith(ROWS) else one
    return found


def engine(mesh, dtype=torch.float32):
    """Tensor parallelism: empty tensors of one rank, as DTensors; norms are whole."""
    made = {}
    at = mesh.get_coordinate()
    if at is None:
        return None
    for name, one in engine_values(at[0], mesh.size()).items():
        local = torch.full(one.shape, -1.0, device=DEVICE).to(dtype)
        placement = Shard(1) if name.endswith(COLUMNS) else Shard(0) if name.endswith(ROWS) else None
        made[name] = local if placement is None else DTensor.from_local(local, mesh, [placement])
    return made


def check_engine(target, mesh, seed=0, dtype=torch.float32):
    if target is None:
        return
    for name, right in engine_values(mesh.get_coordinate()[0], mesh.size(), seed).items():
        got = getattr(target[name], "_local_tensor", target[name])
        assert got.dtype == dtype and got.device.type == DEVICE and torch.equal(got.cpu(), right.to(dtype)), name


def updated(src_ranks, dst_ranks):
    """From FSDP to tensor parallelism, several updates, and proofs."""
    fsdp, tp = mesh_over(src_ranks, kind=DEVICE), mesh_over(dst_ranks, kind=DEVICE)
    source = trainer(fsdp) if dist.get_rank() in src_ranks else None
    target = engine(tp)
    with rt.WeightSync(source, target, fuse=FUSE) as sync:
        raised = None
        try:
            sync.verify()  # nothing was copied yet
        except reshard.MismatchError as error:
            raised = str(error)
        assert raised and "differs from its source" in raised and "embed.weight" in raised, raised
        sync.update()
        check_engine(target, tp)
        sync.verify()
        for step in (3, 4):
            for name, one in (trainer(fsdp, seed=step) if source else {}).items():
                source[name]._local_tensor.copy_(one._local_tensor)
            sync.update()
            check_engine(target, tp, step)
            sync.verify()
        if target is not None and tp.get_coordinate()[0] == tp.size() - 1:
            target["layers.1.qkv.weight"]._local_tensor[-1, -1] += 1  # v of the last rank
        dist.barrier()
        try:
            sync.verify()
            raised = None
        except reshard.MismatchError as error:
            raised = str(error)
        last = tp.mesh.tolist()[-1]
        assert raised == f"layers.1.qkv.weight differs from its source layers.1.v.weight on rank {last}", raised


def cast(max_nbytes):
    fsdp, tp = mesh_over([0, 1, 2], kind=DEVICE), mesh_over([2, 3], kind=DEVICE)
    source = trainer(fsdp) if dist.get_rank() < 3 else None
    target = engine(tp, torch.bfloat16)
    try:
        rt.WeightSync(source, target, fuse=FUSE)
        raised = None
    except reshard.MismatchError as error:
        raised = str(error)
    assert raised and "bf16" in raised and "cast=True" in raised, raised
    with rt.WeightSync(source, target, fuse=FUSE, cast=True, max_nbytes=max_nbytes) as sync:
        if target is not None:
            before = target["norm.weight"]._version
        for seed in (0, 6):
            for name, one in (trainer(fsdp, seed=seed) if source else {}).items():
                source[name]._local_tensor.copy_(one._local_tensor)
            sync.update()
            check_engine(target, tp, seed, torch.bfloat16)
            sync.verify()
        assert target is None or target["norm.weight"]._version == before + 2


def cast_special():
    """Special values become those of a load: verify finds no difference, on no device."""
    me = dist.get_rank()
    bits = torch.tensor([0x7f800000, 0x7fc00001, 0x7f800001, 0x7fffffff, 0x7f7fffff, 0x00000001, 0x38800000, 1 << 30],
                        dtype=torch.int32)
    whole = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)]).reshape(4, 4).to(DEVICE)
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        name = str(kind).replace("torch.", "")
        target = {"w": torch.zeros(4, 2, dtype=kind, device=DEVICE)}
        with rt.WeightSync({"w": whole[2 * me:2 * me + 2]}, target, cast=True,
                           source_layouts={"w": "f32[4,4] @ 2 : S0"},
                           target_layouts={"w": f"{name}[4,4] @ 2 : S1"}) as sync:
            sync.update()
            sync.verify()
        right = whole.cpu()[:, 2 * me:2 * me + 2].to(kind)
        assert torch.equal(target["w"].cpu().nan_to_num(7.0), right.nan_to_num(7.0)), (kind, target["w"], right)


def named():
    """Plain tensors with layouts, renamed and left out, on all ranks."""
    me = dist.get_rank()
    whole = number((8, 6), 5)
    source = {"model.w": whole[4 * me:4 * me + 4].clone(), "model.step": torch.tensor(7.0)} if me < 2 else None
    target = {"w": torch.zeros(8, 2)} if me >= 1 else {}
    with rt.WeightSync(
            source, target, rename=lambda name: None if name.endswith("step") else name.replace("model.", ""),
            source_layouts={"w": "f32[8,6] @ 2 : S0"}, target_layouts={"w": "f32[8,6] @ 3 ranks=1-3 : S1"}) as sync:
        sync.update()
        sync.verify()
    if me >= 1:
        assert torch.equal(target["w"], whole[:, 2 * me - 2:2 * me]), target


def refused(source, target, word, **options):
    try:
        rt.WeightSync(source, target, **options)
    except reshard.Error as error:
        assert word in str(error), (word, str(error))
        return
    raise AssertionError(f"{word}: nothing was raised")


def refusals():
    me = dist.get_rank()
    a, b = torch.ones(4, 3), torch.zeros(4, 3)
    refused({"a": a}, {"b": b}, "the source lacks b")
    refused({"a": a, "c": a.clone()}, {"a": b}, "the target lacks c")
    refused({"a": a}, {"a": torch.zeros(3, 4)}, "[3, 4]")
    refused({"a": a}, {"a": torch.zeros(4, 3, dtype=torch.int32)}, "only floating-point", cast=True)
    refused({"a": a}, {"a": b, "tied": b}, "share memory: a, tied")
    refused({"a": a} if me else {"a": "text"}, {"a": b}, "a str is neither")  # on one rank: all raise
    refused({"a": a}, {"a": b}, "rank", timeout=5.0, allow_missing=bool(me == 1))
    # A wrong option on one rank: all raise, and that rank its own exception.
    refused({"a": a}, {"a": b}, "'1 parsec'", max_nbytes="1 parsec" if me else "1MB")
    for kind, options in ((TypeError, {"source": [a]}), (TypeError, {"target": [b]}), (TypeError, {"fuse": {"a": "b"}}),
                          (TypeError, {"rename": lambda name: 3}),
                          (ZeroDivisionError, {"rename": lambda name: 1 // 0})):
        try:
            rt.WeightSync(**{"source": {"a": a}, "target": {"a": b}, **(options if me else {})})
            raise AssertionError(f"{options} is taken")
        except (kind if me else reshard.Error) as error:
            assert me or "rank 1: " + kind.__name__ in str(error), error
    fuse = {"a": rt.Fuse(["b", "c"], 2)}
    refused({"b": a[:2], "c": a[2:]}, {"a": b}, "fused along dim 2, but has 2 dims", fuse=fuse)
    refused({"a": a, "b": a + 1}, {"a": b, "b": b}, "share memory in the target, but not in the source",
            allow_tied=True)
    with rt.WeightSync({"a": a, "c": a.clone()}, {"a": b, "d": torch.ones(2)}, allow_missing=True,
                       allow_unused=True) as sync:
        sync.update()
    assert torch.equal(a, b)
    head = torch.zeros(4, 3)
    with rt.WeightSync({"embed": a + 1}, {"embed": head, "head": head}, allow_tied=True) as sync:
        sync.update()
        sync.verify()
        if me == 1:
            head.data = torch.zeros(4, 3)
        for work in (sync.update, sync.verify):  # all ranks raise, also if one has other memory
            try:
                work()
                raise AssertionError("other memory was used")
            except reshard.InvalidError as error:
                assert "rank 1" in str(error) if me == 0 else "other memory" in str(error), (me, str(error))


def strided():
    """FSDP2 over tensor parallelism, uneven, to another mesh."""
    grid, line = mesh_over([0, 1, 2, 3], (2, 2)), mesh_over([3, 1])
    whole = number((8, 5), 3)
    x = distribute_tensor(whole, grid, [_StridedShard(0, split_factor=2), Shard(0)])
    target = DTensor.from_local(torch.zeros(8, 3 if line.get_coordinate()[0] == 0 else 2), line, [Shard(1)],
                                shape=(8, 5), stride=(5, 1)) if line.get_coordinate() is not None else None
    with rt.WeightSync({"x": x}, None if target is None else {"x": target}) as sync:
        sync.update()
        sync.verify()
    if target is not None:
        at = line.get_coordinate()[0]
        assert torch.equal(target._local_tensor, whole.chunk(2, 1)[at])
    replicated = distribute_tensor(torch.zeros(8, 5), grid, [Replicate(), Shard(1)])
    with rt.WeightSync({"x": x}, {"x": replicated}) as sync:
        sync.update()
        sync.verify()
    assert torch.equal(replicated.full_tensor(), whole)


class Forged:
    """A transport whose other rank sends wrong bytes."""

    def __init__(self, size, text):
        self.answers = [size.to_bytes(8, "little"), text]

    def gather(self, own):
        return [own, self.answers.pop(0)[:len(own)].ljust(len(own))]


class WeightSync(unittest.TestCase):
    def test_wrong_peers(self):
        """what another rank states is checked, and no memory is allocated for what it announces"""
        from reshard.torch.weight_names import exchanged
        self.assertEqual(exchanged(Forged(2, b"{}"), {}), [{}, {}])
        for size, text in ((1 << 60, b""), (9, b"[[[[[[[[["), (2, b"\xff\xfe"), (100000, b"[" * 100000), (0, b"")):
            with self.assertRaisesRegex(reshard.PeerError, "rank 1 states"):
                exchanged(Forged(size, text), {})

    def test_updates(self):
        """4 FSDP ranks to 2 tensor-parallel ranks with fused tensors: apart, overlapping and the same"""
        for source, target in (([0, 1, 2, 3], [4, 5]), ([0, 1, 2, 3], [2, 4]), ([0, 1], [0, 1]), ([1], [0, 2])):
            worlds.run(max(source + target) + 1, updated, source, target)

    def test_casts(self):
        """f32 to bf16, also in many small messages; every NaN and infinity"""
        worlds.run(4, cast, "1MB")
        worlds.run(4, cast, "100B")
        worlds.run(2, cast_special)

    def test_names(self):
        """plain tensors with layouts, a function that renames and leaves out"""
        worlds.run(4, named)

    def test_refused(self):
        """names that are missing, left over or tied, other shapes, dtypes, options and memory"""
        worlds.run(2, refusals)

    def test_strided(self):
        """strided shards, replicated targets, and meshes in another order"""
        worlds.run(4, strided)


if __name__ == "__main__":
    tap.main()
