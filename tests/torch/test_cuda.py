"""Tensors on a GPU: moved, saved and loaded there, in the order of streams. Skipped without one.

All ranks use one GPU. Each case is a world of processes, which are forked before this one uses CUDA."""
import gc
import itertools
import os
import time
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh

import reshard
import reshard.torch as rt
import tap
import test_weight_sync
import worlds
from moves import P, Problem, check, expected, mesh_over, number
from reshard.proving import digest_array
from reshard.transport import DeviceMessage
from tensors import R, S0, S1, dtensor, same, truth

KIND = "cuda"
# To ask CUDA itself would spoil the forks.
FOUND = os.path.exists("/dev/nvidiactl") and torch.version.cuda is not None


def place():
    return torch.device(KIND, torch.cuda.current_device()) if KIND == "cuda" else torch.device(KIND)


def moved():
    mesh, value = init_device_mesh(KIND, (2,)), number((7, 5), 1)
    x = dtensor(expected(value, mesh, [S0]).to(place()), (7, 5), mesh, [S0]).requires_grad_()
    y = rt.redistribute(x, mesh, [S1])
    assert y.to_local().device == place() and same(y.to_local().detach().cpu(), expected(value, mesh, [S1]))
    y.backward(dtensor(expected(-value, mesh, [S1]).to(place()), (7, 5), mesh, [S1]))
    assert x.grad.to_local().device == place() and same(x.grad.to_local().cpu(), expected(-value, mesh, [S0]))
    host = init_device_mesh("cpu", (2,))
    down = rt.redistribute(x.detach(), host, [R])
    assert down.to_local().device.type == "cpu" and same(down.to_local(), value)
    up = rt.redistribute(down, mesh, [S0])
    assert up.to_local().device == place() and same(up.to_local().cpu(), expected(value, mesh, [S0]))
    one = rt.full_tensor(x.detach(), dst_rank=1)
    assert one is None or (one.device == place() and same(one.cpu(), value))
    cut = rt.distribute_tensor(value.to(place()), mesh, [S0], src_rank=1)
    assert cut.to_local().device == place() and same(cut.to_local().cpu(), expected(value, mesh, [S0]))


def resharded():
    me, value = dist.get_rank(), number((8, 6), 2)
    local = LocalShard(tensor=value[4 * me:4 * me + 4].to(place()).contiguous(), metadata=ShardMetadata(
        shard_offsets=[4 * me, 0], shard_sizes=[4, 6], placement=f"rank:{me}/{place()}"))
    st = init_from_local_shards([local], 8, 6)
    rt.reshard(st, ChunkShardingSpec(dim=1, placements=[f"rank:1/{place()}", f"rank:0/{place()}"]))
    found, = st.local_shards()
    assert found.tensor.device == place() and same(found.tensor.cpu(), value[:, 3 - 3 * me:6 - 3 * me].contiguous())
    assert str(found.metadata.placement) == f"rank:{me}/{place()}"


def sliced():
    mesh, answers = init_device_mesh(KIND, (2,)), []
    for on in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(place())
        if on:
            rt.input_reshard(module, mesh, 0)
        loss = module(number((4, 6), 3).to(place())).square().sum()
        kept = rt.stashed()
        loss.backward()
        answers.append([one.grad.cpu() for one in module.parameters()])
    assert kept.nbuffers and kept.nbytes_kept * 2 == kept.nbytes_whole, kept
    assert all(same(a, b) for a, b in zip(*answers))


def any_layout(dtype):
    """All changes of layout on two meshes, uneven; also with partial values."""
    for shape, extents in (((4,), (7, 5)), ((2, 2), (7, 5)), ((2, 2), (64, 48)), ((4,), (257, 129))):
        mesh = mesh_over([0, 1, 2, 3], shape, KIND)
        kinds = [R, S0, S1] + ([P] if dtype.is_floating_point else [])
        for before in itertools.product(kinds, repeat=mesh.ndim):
            problem = Problem(extents, shape, before, dtype)
            for after in itertools.product([R, S0, S1], repeat=mesh.ndim):
                got = rt.redistribute(problem.tensor(mesh), mesh, after)
                check(got, problem.value, mesh, after, (shape, before, after))


def between_meshes():
    """Between a mesh of GPUs and one of CPUs, of other ranks."""
    a, b, c = mesh_over([0, 1], kind=KIND), mesh_over([3, 2, 1], kind=KIND), mesh_over([2, 0], kind="cpu")
    for src, dst in itertools.permutations((a, b, c), 2):
        problem = Problem((9, 6), tuple(src.mesh.shape), [S0])
        check(rt.redistribute(problem.tensor(src), dst, [S1]), problem.value, dst, [S1], (src, dst))


def in_streams():
    """Work that is queued before a move is done before it, and what follows comes after it."""
    mesh, extent = mesh_over([0, 1, 2, 3], kind=KIND), 2048
    stream = torch.cuda.Stream()
    for step in range(4):
        x = dtensor(torch.empty(extent // 4, extent, device=place()), (extent, extent), mesh, [S0])
        poison = torch.full((extent, extent // 4), float("nan"), device=place())
        torch.cuda.synchronize()
        del poison  # the result has its memory
        with torch.cuda.stream(stream):
            x._local_tensor.record_stream(stream)
            torch.cuda._sleep(50_000_000)
            x._local_tensor.copy_(torch.arange(extent // 4 * extent, device=place()).reshape(extent // 4, extent))
            x._local_tensor.add_(step + 1000 * dist.get_rank())
            y = rt.redistribute(x, mesh, [S1])
            later = y._local_tensor * 2
            x._local_tensor.fill_(float("nan"))
            z = rt.redistribute(y, mesh, [S0], async_op=True)
            again = z.to_local() + 0
        stream.synchronize()
        rows = torch.arange(extent // 4 * extent).reshape(extent // 4, extent).float()
        right = torch.cat([rows + (step + 1000 * rank) for rank in range(4)])
        assert same(later.cpu(), 2 * right.chunk(4, 1)[dist.get_rank()].contiguous()), step
        assert same(again.cpu(), right.chunk(4)[dist.get_rank()].contiguous()), step


def reused(expandable):
    """Memory that the allocator frees, reuses and returns to the driver between calls."""
    if expandable:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            os.environ[name] = "expandable_segments:True"
    mesh = mesh_over([0, 1, 2, 3], kind=KIND)
    for step, extent in enumerate((64, 3000, 64, 5000, 300, 3000, 64)):
        local = torch.arange(extent * 40, device=place()).reshape(-1, 40) + dist.get_rank() * 10**6 + step
        x = dtensor(local.float(), (4 * extent, 40), mesh, [S0])
        y = rt.redistribute(x, mesh, [S1])
        right = torch.cat([(torch.arange(extent * 40).reshape(-1, 40) + rank * 10**6 + step).float()
                           for rank in range(4)]).chunk(4, 1)[dist.get_rank()]
        assert same(y.to_local().cpu(), right.contiguous()), (step, extent)
        del x, y, local
        gc.collect()
        if step % 2:
            torch.cuda.empty_cache()


def of_nccl():
    """A group of NCCL alone: the data needs no other group. NCCL itself refuses ranks on one GPU."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, nranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=store, rank=rank, world_size=nranks)
    mesh = mesh_over(list(range(nranks)), kind=KIND)
    problem = Problem((9, 6), (nranks,), [S0])
    check(rt.redistribute(problem.tensor(mesh), mesh, [S1]), problem.value, mesh, [S1])
    dist.barrier = lambda: None  # of the world, by NCCL


def messages_by_nccl():
    """Memory of the device as NCCL takes it, from one rank to itself: two ranks need two GPUs."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    transport = rt.Group(devices=dist.group.WORLD)
    assert transport.table.exchange and transport.table.device == torch.cuda.current_device()
    out = [torch.arange(nbytes, device="cuda").to(torch.uint8) for nbytes in (1, 5000, 1 << 20)]
    into = [torch.zeros_like(one) for one in out]
    torch.cuda.synchronize()
    request = transport.exchange([DeviceMessage(0, 0, sends, one.data_ptr(), one.numel())
                                  for sends, list_ in ((False, into), (True, out)) for one in list_])
    until = time.monotonic() + 30
    while not transport.test(request):
        assert time.monotonic() < until, "NCCL does not complete"
    torch.cuda.synchronize()
    assert all(same(a.cpu(), b.cpu()) for a, b in zip(out, into)) and transport.cancel(request)
    dist.barrier = lambda: None  # of the world, by NCCL


def in_one_process():
    """Plans, digests and DLPack; results are on the GPU."""
    value = number((37, 53), 1).cuda()
    got = reshard.reshard("f32[37,53] @ 4:S0", "f32[37,53] @ 4:S1", list(value.chunk(4)))
    assert all(one.is_cuda for one in got) and same(torch.cat(got, 1).cpu(), value.cpu())
    host = reshard.reshard("f32[37,53] @ 4:S0", "f32[37,53] @ 1:R", list(value.chunk(4)), [torch.empty(37, 53)])
    assert same(host[0], value.cpu())

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    there = [torch.empty(37, 53, device=place())]
    reshard.reshard("f32[37,53] @ 4:S0", "f32[37,53] @ 1:R", [Packed(one.contiguous()) for one in value.chunk(4)],
                    [Packed(there[0])])
    assert same(there[0].cpu(), value.cpu())
    assert digest_array(value) == digest_array(value.cpu())
    assert digest_array(value.t()) == digest_array(value.cpu().t().contiguous())
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            part = value * 2
            moved, = reshard.reshard("f32[37,53] @ 1:R", "f32[37,53] @ 1:R", [part])
            part.zero_()
            del part
            assert same(moved.cpu(), 2 * value.cpu())


def stored():
    """Whole checkpoints to and from tensors on the GPU, with strides and other dtypes."""
    state = {"a": truth("a", (50, 6)), "t": truth("t", (40, 30)).t(), "rows": truth("r", (90, 30))[7:30, ::2],
             "b": truth("b", (300, 200), torch.bfloat16), "step": 3}
    there = {name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in state.items()}
    with worlds.Folder() as directory:
        reshard.save(directory("host"), state)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            # clone keeps the bits of NaN, which arithmetic does not
            changed = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in there.items()}
            reshard.save(directory("gpu"), changed)
        found = reshard.diff(directory("host"), directory("gpu"))
        assert not found, found
        with reshard.open(directory("host"), like="torch") as checkpoint:
            wanted = {name: torch.zeros_like(one) if name != "step" else 0 for name, one in there.items()}
            checkpoint.load(wanted)
            assert all(same(one.cpu(), state[name]) for name, one in wanted.items() if name != "step")
            assert wanted["step"] == 3
            other = {"b": torch.zeros(300, 400, device="cuda")[:, ::2]}
            checkpoint.load(other, cast=True)
            assert same(other["b"].cpu(), state["b"].float())
            part = torch.empty(10, 200, device="cuda", dtype=torch.bfloat16)
            checkpoint["b"].read(slice(20, 30), out=part)
            assert same(part.cpu(), state["b"][20:30].contiguous())


def synced(*args):
    test_weight_sync.DEVICE = KIND
    test_weight_sync.updated(*args)


def synced_with_casts(name, *args):
    test_weight_sync.DEVICE = KIND
    getattr(test_weight_sync, name)(*args)


@unittest.skipUnless(FOUND, "no GPU here")
class Devices(unittest.TestCase):
    def test_moved(self):
        """DTensors on a mesh of GPUs, and between it and the CPUs"""
        worlds.run(2, moved)

    def test_resharded(self):
        """shards on a GPU"""
        worlds.run(2, resharded)

    def test_sliced(self):
        """activations on a GPU wait in slices, on it"""
        worlds.run(2, sliced)

    def test_layouts(self):
        """any layout to any other on 4 ranks, of f32, bf16, f64 and 64-bit integers"""
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            worlds.run(4, any_layout, dtype)

    def test_meshes(self):
        """between meshes of GPUs and CPUs"""
        worlds.run(4, between_meshes)

    def test_streams(self):
        """moves are ordered in the current stream"""
        worlds.run(4, in_streams)

    def test_allocators(self):
        """memory that is reused and freed between calls, of both allocators"""
        for expandable in (False, True):
            worlds.run(4, reused, expandable)

    def test_nccl(self):
        """a process group of NCCL alone"""
        worlds.run(2, of_nccl)

    def test_nccl_messages(self):
        """messages on the device by NCCL"""
        worlds.run(1, messages_by_nccl)

    def test_one_process(self):
        """plans, digests and DLPack in one process"""
        worlds.run(1, in_one_process)

    def test_stored(self):
        """load and save"""
        worlds.run(1, stored)

    def test_weights(self):
        """weight updates: fused, converted, verified"""
        for source, target in (([0, 1, 2, 3], [0, 1]), ([0, 1], [2, 3]), ([1], [0, 2])):
            worlds.run(max(source + target) + 1, synced, source, target)
        worlds.run(4, synced_with_casts, "cast", "1MB")
        worlds.run(4, synced_with_casts, "cast", "100B")
        worlds.run(2, synced_with_casts, "cast_special")


if __name__ == "__main__":
    tap.main()
