"""Activations that wait for backward in slices: a model trained both ways, and each hazard of upstream's."""
import contextlib
import copy
import itertools
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard as upstream
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import reshard.torch as rt
import tap
import worlds
from moves import agrees
from tensors import R, S0, dtensor, same


class Block(nn.Module):
    """Attention and a feed-forward network, as a transformer has them."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.drop = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
                   for one in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + F.dropout(self.o(attention), self.drop)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
PLAN.update({name: RowwiseParallel() for name in ("o", "down")})


def model(mesh, seed=0, **more):
    torch.manual_seed(seed)
    made = nn.Sequential(Block(32, 4, **more), Block(32, 4, **more))
    for one in made:
        parallelize_module(one, mesh, PLAN)
    return made


def gradients(module):
    return [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in module.parameters()]


def all_same(a, b):
    return len(a) == len(b) and all(one is not None and same(one, other) for one, other in zip(a, b))


def saved_nbytes(module, x):
    """What autograd itself would hold for backward: each storage once, parameters not."""
    own = {one.untyped_storage().data_ptr() for one in (p.to_local() if isinstance(p, DTensor) else p
                                                         for p in module.parameters())}
    found = {}

    def pack(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.untyped_storage().data_ptr() not in own:
            found[local.untyped_storage().data_ptr()] = local
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        y = module(x)
    nbytes = sum(one.numel() * one.element_size() for one in found.values())
    del y
    return nbytes


def train(mesh, install, nsteps=3, **more):
    """Losses, gradients and parameters of a few steps."""
    module = install(model(mesh, **more))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen, held = [], None
    for step in range(nsteps):
        torch.manual_seed(step)
        x = torch.randn(2, 8, 32).requires_grad_()
        optimizer.zero_grad()
        loss = module(x).square().mean()
        held = rt.stashed()
        loss.backward()
        seen += [loss.detach(), x.grad, *gradients(module)]
        optimizer.step()
    return seen, held, module


def trained():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, _, module = train(mesh, lambda one: one)
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32)
    before = saved_nbytes(module, x.requires_grad_())
    ours, held, _ = train(mesh, lambda one: rt.input_reshard(one, mesh, 0))
    assert all_same(ours, plain)
    # Sharded activations stay whole; of all others each rank holds its part.
    assert 0 < held.nwhole < held.nbuffers and held.nbytes_kept < before <= held.nbytes_whole, (held, before)
    assert rt.stashed() == (0, 0, 0, 0)
    return held


def replicated_only():
    """A module whose activations are the same everywhere: each rank keeps exactly 1/n of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    n = mesh.size()
    for check in (True, False):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(16, 16 * n), nn.Tanh(), nn.Linear(16 * n, 8), nn.Sigmoid())
        x = torch.randn(4, 16, requires_grad=True)
        whole = saved_nbytes(module, x)
        plain = copy.deepcopy(module)
        assert rt.input_reshard(module, tp_device_mesh=mesh, input_reshard_dim=1, check=check) is module
        y = module(x)
        held = rt.stashed()
        assert held.nwhole == 0 and held.nbytes_whole == whole, (held, whole)
        assert held.nbytes_kept * n == whole, (held, whole)
        y.sum().backward(retain_graph=True)
        y.sum().backward()  # what is kept can be asked for twice
        plain(x.detach()).sum().backward()
        assert all_same([one.grad / 2 for one in module.parameters()], gradients(plain))
        del y
        assert rt.stashed().nbuffers == 0
        module(x)  # and goes with a graph that nobody uses
        assert rt.stashed().nbuffers == 0
        clone = copy.deepcopy(module)
        y = clone(x)
        assert rt.stashed().nbuffers == held.nbuffers
        del y


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Watch(torch.autograd.Function):
    """Notes the strides and values that come back."""
    seen = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Watch.seen.append(ctx.saved_tensors[0])
        return gradient * 2


def both(install, function, *inputs, dim=0):
    """Gradients of a function with and without, in a module of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    answers = []
    for wrap in (lambda one: one, lambda one: install(one, mesh, dim)):
        given = [one.detach().clone().requires_grad_() for one in inputs]
        module = wrap(Lambda(function))
        module(*given).sum().backward()
        answers.append([one.grad for one in given])
    return all_same(*answers)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# One case a hazard: a function, its input, the dim that is given.

def few(install):
    return both(install, torch.sin, numbers(8))  # 4 ranks: a slice has 2


def uneven(install):
    return both(install, torch.sin, numbers(6, 5)) and both(install, torch.sin, numbers(17, 3))


def differing(install):
    return both(install, lambda x: torch.sin(x * (1 + dist.get_rank())), numbers(16, 4))


def short_dims(install):
    return both(install, lambda x, b: torch.sin(torch.sin(x) + torch.sin(b)), numbers(16, 16), numbers(16), dim=1)


def of_other_sizes(install):
    """A rank has nothing where the others have something, and a view where they have copies."""
    rank = dist.get_rank()

    def function(x):
        mine = x[:rank * 2].sin()
        turned = mine.t().contiguous().t().exp()  # of one row or none: no copy
        return turned.sum() * x.sin()

    return both(install, function, numbers(8, 4))


HAZARDS = {"fewer elements than ranks squared": few, "a dim that does not cut evenly": uneven,
           "values that differ between ranks": differing, "tensors without the dim": short_dims,
           "sizes that differ between ranks": of_other_sizes}


def views():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = numbers(8, 6)
    cases = [x.t(), x[:, ::2], x[1:7], x.expand(3, 8, 6), x.t().unsqueeze(1).expand(6, 4, 8), x.unfold(0, 3, 1),
             numbers(2, 3, 4, 5).permute(3, 1, 0, 2), torch.tensor(2.0), numbers(3), x[:0],
             x.to(torch.bfloat16), x.to(torch.float64)]
    for given, check in itertools.product(cases, (True, False)):
        module = rt.input_reshard(Lambda(Watch.apply), mesh, 0, check=check)
        Watch.seen.clear()
        y = module(given.detach().requires_grad_())
        y.sum().backward()
        back, = Watch.seen
        assert same(back, given.detach()), given.shape
        gaps = given.shape in ((8, 3), (6, 6, 3)) or not given.numel()
        assert gaps or back.stride() == given.stride(), (given.shape, given.stride(), back.stride())
    module = rt.input_reshard(Lambda(lambda x: x.sin() + x.cos() + x.t().exp().t() + x.view(-1).sin().view(8, 6)),
                              mesh, 0)
    y = module(x.requires_grad_())
    assert rt.stashed().nbuffers == 2, rt.stashed()  # x in four ways, and the result of exp
    del y


def what_stays():
    """Parameters and buffers, and tensors that were changed since."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = nn.Sequential(nn.Linear(8, 8, bias=False))
    module.register_buffer("mask", torch.ones(4, 8))
    module.append(Lambda(lambda x: x * module.mask * module[0].weight[:4]))
    x = numbers(4, 8).requires_grad_()
    y = rt.input_reshard(module, mesh, 0)(x)
    assert rt.stashed().nbuffers == 2, rt.stashed()  # x, and the first product: no mask, no weight
    y.sum().backward()
    rank = dist.get_rank()
    module = rt.input_reshard(Lambda(lambda x: x.sin()), mesh, 0)
    mine = (numbers(4, 8) + rank).requires_grad_()
    z = mine * 1
    y = module(z)
    with torch.no_grad():
        z.add_(1)
    try:
        y.sum().backward()
        raise AssertionError("a value that was lost")
    except RuntimeError as error:
        assert "inplace" in str(error), error
    same_everywhere = numbers(4, 8).requires_grad_()
    z = same_everywhere * 1
    y = module(z)
    with torch.no_grad():
        z.add_(1)
    y.sum().backward()  # what was saved is in the slices
    assert same(same_everywhere.grad, torch.cos(numbers(4, 8)))


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def forward_raises(install):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def fails(x):
        raise ZeroDivisionError(x.sin())

    module = install(Lambda(fails), mesh, 0)
    with contextlib.suppress(ZeroDivisionError):
        module(numbers(8, 8).requires_grad_())
    return top_hooks() is None


def interrupted():
    """BaseExceptions in forward and in hooks, also in a nested module."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def stop(*_):
        if kinds:
            raise kinds.pop()

    def inside(*args):
        assert top_hooks() is not None
        stop()
        return args[0].sin()

    for where in ("forward", "pre", "after", "outer"):
        module = rt.input_reshard(rt.input_reshard(Lambda(inside), mesh, 0), mesh, 0)
        if where == "pre":
            module.register_forward_pre_hook(stop)
        elif where == "after":
            module.register_forward_hook(stop, prepend=True)
        elif where == "outer":
            module = rt.input_reshard(nn.Sequential(module), mesh, 0)
        for one in (module, copy.deepcopy(module)):
            kinds = [KeyboardInterrupt, SystemExit, GeneratorExit]
            for _ in range(3):
                with contextlib.suppress(KeyboardInterrupt, SystemExit, GeneratorExit):
                    one(numbers(8, 8).requires_grad_())
                assert top_hooks() is None, where
            assert not kinds
            x = numbers(8, 8).requires_grad_()
            one(x).sum().backward()
            assert same(x.grad, x.detach().cos()) and top_hooks() is None
    module = rt.input_reshard(nn.Linear(4, 4), mesh, 0)
    clone = copy.deepcopy(module)
    with torch.no_grad():
        clone.weight.zero_()
        clone.bias.zero_()
    assert not clone(numbers(8, 4)).any() and module(numbers(8, 4)).any()


def reentry():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    class Twice(nn.Module):
        def forward(self, x, depth=3, broken=False):
            if broken and not depth:
                raise ZeroDivisionError
            if depth:
                with contextlib.suppress(ZeroDivisionError):
                    x = self(x.sin(), depth - 1, broken)
            assert top_hooks() is not None or not installed
            return x.cos()

    for broken in (False, True):
        answers = []
        for installed in (False, True):
            module = rt.input_reshard(Twice(), mesh, 0) if installed else Twice()
            x = numbers(8, 8).requires_grad_()
            module(x, broken=broken).sum().backward()
            answers.append(x.grad)
            assert top_hooks() is None
        assert same(*answers)
    assert rt.stashed().nbuffers == 0


def checkpoints():
    """Inside of it what is recomputed is not kept; around it the inputs wait in slices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    answers = []
    for reentrant, where in itertools.product((False, True), ("no", "inside", "around", "plain")):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = numbers(8, 10).requires_grad_()
        if where == "inside":
            rt.input_reshard(module, mesh, 0)
            y = checkpoint(module, x, use_reentrant=reentrant)
            assert rt.stashed().nbuffers == 0, rt.stashed()
        elif where == "around":
            wrapper = Lambda(lambda x: checkpoint(module, x.sin(), use_reentrant=reentrant))
            y = rt.input_reshard(wrapper, mesh, 0)(x)
            held = rt.stashed()
            assert held.nbytes_kept == held.nbytes_whole // mesh.size() > 0, held
        else:
            y = checkpoint(module, x.sin() if where == "plain" else x, use_reentrant=reentrant)
        y.square().sum().backward()
        answers.append((where in ("around", "plain"), [x.grad, *gradients(module)]))
        assert rt.stashed().nbuffers == 0 and top_hooks() is None
    for around, found in answers:
        assert all_same(found, next(one for also, one in answers if also == around))


def two_axes():
    """The axis of a 2-d mesh: each row of ranks has data of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, tp = mesh.get_local_rank("dp"), mesh["tp"]
    answers = []
    for install in (lambda one: one, lambda one: rt.input_reshard(one, tp, 0)):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        parallelize_module(module, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        module = install(module)
        x = (numbers(4, 5) + row).requires_grad_()
        module(x).square().sum().backward()
        answers.append([x.grad, *gradients(module)])
    assert all_same(*answers)
    whole = numbers(8, 6)
    for placements, part in (([S0, R], True), ([R, R], True), ([R, S0], False), ([S0, S0], False)):
        x = dtensor(_local(whole, mesh, placements), whole.shape, mesh, placements).requires_grad_()
        module = rt.input_reshard(Lambda(torch.sin), tp, 0, check=False)
        y = module(x)
        held = rt.stashed()
        assert (held.nbuffers == 1 and held.nbytes_kept * 2 == held.nbytes_whole) == part, (placements, held)
        y.backward(dtensor(_local(torch.ones(8, 6), mesh, placements), whole.shape, mesh, placements))
        assert same(x.grad.to_local(), torch.cos(_local(whole, mesh, placements))), placements
        assert x.grad.placements == tuple(placements)


def with_fsdp():
    """FSDP2 over tensor parallelism: parameters are put together while forward runs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    answers = []
    for sliced in (False, True):
        module = model(mesh["tp"])
        for one in module:
            fully_shard(one, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
        if sliced:
            rt.input_reshard(module, mesh["tp"], 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
            loss = module(torch.randn(2, 8, 32)).square().mean()
            held = rt.stashed()
            loss.backward()
            optimizer.step()
            answers.append([loss.detach(), *gradients(module)])
            optimizer.zero_grad()
    assert all_same(answers[0], answers[2]) and all_same(answers[1], answers[3])
    # Nothing of a parameter is in it: as much as without FSDP2, but for x, which needs no gradient.
    assert 0 < held.nbytes_whole - held.nbytes_kept <= 16896 // 2, held


def _local(whole, mesh, placements):
    from moves import expected
    return expected(whole, mesh, placements)


def replicated_2d(install):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dtensor(numbers(8, 8), (8, 8), mesh, [R, R]).requires_grad_()
    module = install(Lambda(torch.sin), mesh["tp"], 0)
    module(x).backward(dtensor(torch.ones(8, 8), (8, 8), mesh, [R, R]))
    return same(x.grad.to_local(), torch.cos(numbers(8, 8)))


def sharded_dtensor(install):
    """Whether a DTensor that is sharded anyway comes back without a gather."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = dtensor(_local(numbers(8, 8), mesh, [S0]), (8, 8), mesh, [S0]).requires_grad_()
    y = install(Lambda(torch.sin), mesh, 0)(x)
    gradient = dtensor(torch.ones(8 // mesh.size(), 8), (8, 8), mesh, [S0])
    with CommDebugMode() as messages:
        y.backward(gradient)
    return messages.get_total_counts() == 0 and same(x.grad.to_local(), torch.cos(_local(numbers(8, 8), mesh, [S0])))


def kept_strides(install):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Watch.seen.clear()
    install(Lambda(Watch.apply), mesh, 0)(numbers(8, 8).t().requires_grad_()).sum().backward()
    return Watch.seen[0].stride() == (1, 8) and same(Watch.seen[0], numbers(8, 8).t())


def tp_model(install):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return all_same(train(mesh, lambda one: install(one, mesh, 0), 1)[0], train(mesh, lambda one: one, 1)[0])


class InputReshard(unittest.TestCase):
    def test_training(self):
        """a transformer under tensor parallelism trains alike, bit by bit, and holds less"""
        for nranks in (2, 4):
            for held in worlds.run(nranks, trained):
                # Of two blocks: x before and after each norm, and the means and deviations of both norms.
                replicated = 2 * (4 * 2 * 8 * 32 * 4 + 4 * 2 * 8 * 4)
                self.assertEqual((held.nbytes_whole - held.nbytes_kept) * nranks, replicated * (nranks - 1))
        self.assertFalse(agrees(2, tp_model, upstream))

    def test_share(self):
        """of what is the same everywhere each rank holds its part, and no more"""
        for nranks in (2, 4):
            worlds.run(nranks, replicated_only)

    def test_off(self):
        """without a dim the module stays as it is, as upstream"""
        module = nn.Linear(2, 2)
        self.assertIs(rt.input_reshard(module, None), module)
        self.assertFalse(module._forward_hooks or module._forward_pre_hooks)

    def test_views(self):
        """transposed, strided, expanded and overlapping tensors come back, and are kept once"""
        worlds.run(4, views)

    def test_what_stays(self):
        """parameters and buffers are not cut, and what changed is noticed"""
        worlds.run(2, what_stays)

    def test_reentry(self):
        """a module in itself, and an exception inside"""
        worlds.run(2, reentry)

    def test_interrupted(self):
        """Ctrl-C and the like leave nothing behind; a copy of a module calls its own forward"""
        worlds.run(2, interrupted)

    def test_checkpoints(self):
        """activation checkpointing of both kinds, inside and around"""
        worlds.run(2, checkpoints)

    def test_two_axes(self):
        """an axis of a 2-d mesh, and DTensors of that mesh"""
        worlds.run(4, two_axes)

    def test_fsdp(self):
        """FSDP2 over tensor parallelism trains alike"""
        worlds.run(4, with_fsdp)

    def test_hazards(self):
        """what 2.13 gets wrong with plain tensors is right here"""
        for name, work in HAZARDS.items():
            self.assertTrue(all(worlds.run(4, work, rt.input_reshard)), name)
            self.assertFalse(agrees(4, work, upstream), f"2.13 has learnt {name}")

    def test_hazards_of_dtensors(self):
        """what 2.13 gets wrong with strides, exceptions, 2-d meshes and sharded DTensors is right here"""
        for work in (kept_strides, forward_raises, replicated_2d, sharded_dtensor):
            self.assertTrue(all(worlds.run(4, work, rt.input_reshard)), work.__name__)
            self.assertFalse(agrees(4, work, upstream), f"2.13 has learnt {work.__name__}")


if __name__ == "__main__":
    tap.main()
