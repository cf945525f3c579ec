"""DTensors from any layout to any other: PyTorch's own cases, with every rank's values checked."""
import itertools
import random
import unittest

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Shard

import reshard.torch as rt
import tap
import worlds
from moves import P, Problem, check, number
from tensors import R, S0, S1, S2, Meshes, dtensor, same, sharded

SIZES = [((12, 3), S0), ((13, 3), S0), ((14, 3), S0), ((3, 12), S1), ((3, 13), S1), ((3, 14), S1)]
DTYPES = [torch.float32, torch.complex64]


def shard_and_replicate():
    mesh = Meshes()[(4,)]
    for dtype, (shape, shard) in itertools.product(DTYPES, SIZES):
        value = number(shape, 3, dtype)
        whole = sharded(value, ((4,), [R]), mesh)
        parts = sharded(value, ((4,), [shard]), mesh)
        check(rt.redistribute(parts, mesh, [R]), value, mesh, [R], shape)
        check(rt.redistribute(whole, mesh, [shard]), value, mesh, [shard], shape)
        partial = Problem(shape, (4,), [P], dtype)
        check(rt.redistribute(partial.tensor(mesh), mesh, [shard]), partial.value, mesh, [shard], shape)
        check(rt.redistribute(partial.tensor(mesh), mesh, [R]), partial.value, mesh, [R], shape)
    # Nothing to do: the local tensor itself, as torch has it.
    assert rt.redistribute(whole, mesh, [R]).to_local().data_ptr() == whole.to_local().data_ptr()
    assert rt.redistribute(whole).placements == (R,)
    flipped = rt.redistribute(sharded(value, ((4,), [S1]), mesh), mesh, [Shard(-1)])
    check(flipped, value, mesh, [S1])
    check(rt.redistribute(flipped, mesh, [Shard(-2)]), value, mesh, [S0])


def gradients():
    mesh = Meshes()[(4,)]
    for dtype, (shape, shard), back in itertools.product(DTYPES, SIZES, (False, True)):
        src, dst = ([R], [shard]) if back else ([shard], [R])
        value, gradient = number(shape, 5, dtype), number(shape, 6, dtype)
        for move in (rt.redistribute, lambda x, *rest: x.redistribute(*rest)):
            x = sharded(value, ((4,), src), mesh).requires_grad_()
            y = move(x, mesh, dst)
            assert y.requires_grad
            y.backward(sharded(gradient, ((4,), dst), mesh))
            check(x.grad, gradient, mesh, src, (shape, move))
    for move in (rt.redistribute, lambda x, *rest: x.redistribute(*rest)):
        x = Problem((12, 3), (4,), [P]).tensor(mesh).requires_grad_()
        ones = torch.ones(12, 3)
        move(x, mesh, [R]).backward(sharded(ones, ((4,), [R]), mesh))
        check(x.grad, ones, mesh, [R])  # of a partial input: replicated
        # The gradient's placements decide: a partial one is reduced.
        x = sharded(ones, ((4,), [S0]), mesh).requires_grad_()
        terms = Problem((12, 3), (4,), [P])
        move(x, mesh, [R]).to_local(grad_placements=[P]).backward(terms.local(dist.get_rank()))
        check(x.grad, terms.value, mesh, [S0])


def double_backward():
    mesh = Meshes()[(4,)]
    value = number((6, 5), 1)
    x = sharded(value, ((4,), [S0]), mesh).requires_grad_()
    y = rt.redistribute(x, mesh, [S1])
    first, = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    check(first.detach(), 3 * value * value, mesh, [S0])
    second, = torch.autograd.grad(first.sum(), x)
    check(second, 6 * value, mesh, [S0])


def casts():
    mesh = Meshes()[(4,)]
    f32, bf16 = torch.float32, torch.bfloat16
    pairs = [(bf16, bf16), (bf16, f32), (f32, bf16), (f32, f32), (bf16, None), (f32, None), (None, bf16),
             (None, f32)]
    for (forward, backward), src in itertools.product(pairs, ([R], [S0])):
        value, gradient = torch.randn(12, 3, generator=torch.Generator().manual_seed(2)), torch.ones(12, 3) / 3
        found = []
        for move in (rt.redistribute, lambda x, *rest, **more: x.redistribute(*rest, **more)):
            x = sharded(value, ((4,), src), mesh).requires_grad_()
            y = move(x, mesh, [R], forward_dtype=forward, backward_dtype=backward)
            assert y.dtype == (forward or f32)
            y.backward(sharded(gradient.to(y.dtype), ((4,), [R]), mesh))
            found.append((y.detach().to_local(), x.grad))
        (ours, our_grad), (theirs, their_grad) = found
        assert same(ours, theirs), (forward, backward, src)
        assert our_grad.dtype == f32 and our_grad.placements == their_grad.placements
        assert same(our_grad.to_local(), their_grad.to_local()), (forward, backward, src)


def small_meshes():
    devices = Meshes()
    for shape in ((10, 5), (9, 5), (3, 5), (1, 3), (8, 8), (8, 5), (5, 8), (5, 5), (2, 8), (0, 3), (8, 8, 8)):
        value = number(shape, 9)
        kinds = [R, S0, S1, S2][:len(shape) + 1]
        for mesh in ((4,), (2, 2), (4, 1)):
            every = list(itertools.product(kinds, repeat=len(mesh)))
            pairs = list(itertools.product(every, every))
            random.Random(str(shape)).shuffle(pairs)
            for src, dst in pairs[:12]:
                x = sharded(value, (mesh, src), devices[mesh])
                check(rt.redistribute(x, devices[mesh], dst), value, devices[mesh], dst, (shape, src, dst))


def long_rows():
    mesh = Meshes()[(2, 2)]
    for shape, src, dst in (((1, 512, 384), (S1, S1), (S1, R)), ((1, 512, 384), (S2, S2), (S2, R)),
                            ((4, 512, 384), (S1, S1), (S1, R))):
        value = number(shape, 4)
        check(rt.redistribute(sharded(value, ((2, 2), src), mesh), mesh, dst), value, mesh, dst, (src, dst))


def to_partial():
    mesh = Meshes()[(2, 2)]
    product = Partial("product")
    for src, dst in (((P, S0), (P, S0)), ((P, S0), (P, S1)), ((S0, P), (R, P)), ((S0, product), (R, product))):
        problem = Problem((12, 8), (2, 2), src)
        got = rt.redistribute(problem.tensor(mesh), mesh, dst)
        assert got.placements == dst
        moved = Problem((12, 8), (2, 2), dst)
        assert same(got.to_local(), moved.local(dist.get_rank())), (src, dst)
    prod = Partial("prod")  # torch moves what is called so, too
    x = dtensor(Problem((12, 8), (2, 2), (S0, product)).local(dist.get_rank()), (12, 8), mesh, (S0, prod))
    got = rt.redistribute(x, mesh, (R, prod))
    assert got.placements == (R, prod)
    assert same(got.to_local(), Problem((12, 8), (2, 2), (R, product)).local(dist.get_rank()))
    for src, dst in (((S0, R), (S0, P)), ((S0, R), (R, P)), ((S0, S1), (R, P)), ((S0, product), (R, P)),
                     ((P, R), (Partial("avg"), R)), ((R, R), (P, P))):
        x = Problem((12, 8), (2, 2), src).tensor(mesh)
        refused(ValueError, "redistribute from", rt.redistribute, x, mesh, dst)
        refused(RuntimeError, "Can not redistribute", rt.redistribute, x, mesh, dst)  # as in torch


def refused(kind, words, function, *args, **more):
    try:
        function(*args, **more)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def every_reduction():
    mesh = Meshes()[(2, 2)]
    for word in ("sum", "avg", "min", "max", "product", "band", "bor", "bxor"):
        dtype = torch.int32 if word in ("band", "bor", "bxor") else torch.float32
        for src, dst in itertools.product(([Partial(word), S0], [Partial(word), Partial(word)],
                                           [R, Partial(word)]), ([R, R], [S1, S0], [S0, S0])):
            problem = Problem((7, 5), (2, 2), src, dtype)
            check(rt.redistribute(problem.tensor(mesh), mesh, dst), problem.value, mesh, dst, (src, dst))
    mixed = Problem((7, 5), (2, 2), [Partial("sum"), Partial("avg")])
    check(rt.redistribute(mixed.tensor(mesh), mesh, [S0, R]), mixed.value, mesh, [S0, R])


def multi_dim(mesh, npairs):
    device_mesh = Meshes()[mesh]
    sources = list(itertools.product([R, S0, S1, P], repeat=len(mesh)))
    targets = list(itertools.product([R, S0, S1], repeat=len(mesh)))
    pairs = list(itertools.product(sources, targets))
    random.Random(str(mesh)).shuffle(pairs)
    for src, dst in pairs[:npairs]:
        problem = Problem((16, 24), mesh, src)
        check(rt.redistribute(problem.tensor(device_mesh), device_mesh, dst), problem.value, device_mesh, dst,
              (src, dst))
    return len(pairs[:npairs])


def three_axes():
    mesh = Meshes()[(2, 2, 2)]
    value = number((8, 8, 8), 2)
    for src, dst in (((S0, S0, S0), (S1, S1, S1)), ((S0, S1, S0), (S1, S0, S0)), ((S0, S1, S2), (S2, S1, S0)),
                     ((S1, S0, S0), (R, S0, S0)), ((S1, R, S0), (R, S0, S0)), ((S0, S0, S1), (S0, S1, S2))):
        x = sharded(value, ((2, 2, 2), src), mesh)
        check(rt.redistribute(x, mesh, dst), value, mesh, dst, (src, dst))
        check(x.redistribute(mesh, dst), value, mesh, dst, "torch")


class RedistributeTest(unittest.TestCase):
    def test_shard_and_replicate(self):
        """S to R, R to S, P to S and P to R of even and uneven sizes, f32 and c64"""
        worlds.run(4, shard_and_replicate)

    def test_gradients(self):
        """the gradient goes back to the layout of the input, as torch's does"""
        worlds.run(4, gradients)

    def test_double_backward(self):
        """it can be differentiated twice"""
        worlds.run(4, double_backward)

    def test_casts(self):
        """forward_dtype and backward_dtype as torch has them"""
        worlds.run(4, casts)

    def test_small_meshes(self):
        """any layout to any other on (4), (2,2) and (4,1), with uneven, empty and no shards"""
        worlds.run(4, small_meshes)

    def test_long_rows(self):
        """gathers along the first, a middle and the last dim"""
        worlds.run(4, long_rows)

    def test_to_partial(self):
        """terms stay where they are or move with their axis, and nothing else becomes partial"""
        worlds.run(4, to_partial)

    def test_every_reduction(self):
        """sum, avg, min, max, product, band, bor, bxor, and sum with avg"""
        worlds.run(4, every_reduction)

    def test_multi_dim_mesh(self):
        """{R,S0,S1,P} to {R,S0,S1} on (4,2), (8) and (2,2,2)"""
        self.assertEqual(worlds.run(8, multi_dim, (4, 2), 72)[0], 72)
        self.assertEqual(worlds.run(8, multi_dim, (8,), 144)[0], 12)
        self.assertEqual(worlds.run(8, multi_dim, (2, 2, 2), 36)[0], 36)

    def test_three_axes(self):
        """the changes of three axes that torch tests, and torch's own answers"""
        worlds.run(8, three_axes)


if __name__ == "__main__":
    tap.main()
