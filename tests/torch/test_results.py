"""Memory of results on the host, which is kept when they are deleted."""
import threading
import unittest

import torch

import reshard.torch as rt
import tap
import worlds
from reshard.torch import results
from tensors import S0, S1, Meshes, sharded

LARGE = (1 << 10, 1 << 10, 3)  # 12 MiB of f32


def large_moves():
    mesh = Meshes()[(4,)]
    value = torch.arange(1 << 22, dtype=torch.float64).view(1 << 11, 1 << 11)
    x = sharded(value, ((4,), [S0]), mesh)
    addresses = set()
    for turn in range(3):
        made = rt.redistribute(x, mesh, [S1])
        assert torch.equal(made.to_local(), value.chunk(4, 1)[mesh.get_rank()])
        addresses.add(made.to_local().data_ptr())
        del made
    assert len(addresses) == 1, "the memory of an earlier result was not used"
    both = [rt.redistribute(x, mesh, [S1]) for _ in range(2)]
    assert both[0].to_local().data_ptr() != both[1].to_local().data_ptr()
    assert torch.equal(both[0].to_local(), both[1].to_local())
    rt.release()
    assert not results._kept


class Results(unittest.TestCase):
    def setUp(self):
        results.free_kept()

    def test_dtypes(self):
        """a result of kept memory is a tensor as any other, of every dtype"""
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.int8):
            for _ in range(2):
                made = results.empty(LARGE, dtype)
                self.assertEqual((made.shape, made.dtype, made._is_view()), (torch.Size(LARGE), dtype, False))
                self.assertTrue(made.is_contiguous() and made.is_leaf)
                made.view(torch.uint8).zero_()
        self.assertEqual(results.empty((), torch.int64).shape, ())
        self.assertEqual(results.empty((0, 1 << 30), torch.int64).shape, (0, 1 << 30))

    def test_views_keep(self):
        """memory is not used again while a view, a storage or NumPy has it"""
        for holder in (lambda one: one[5:7], lambda one: one.untyped_storage(), lambda one: one.numpy()):
            made = results.empty(LARGE, torch.float32)
            address, kept = made.data_ptr(), holder(made)
            del made
            self.assertNotEqual(results.empty(LARGE, torch.float32).data_ptr(), address)
            del kept
            self.assertEqual(results.empty(LARGE, torch.float32).data_ptr(), address)
            results.free_kept()

    def test_bounded(self):
        """the oldest is freed if more than MAX_KEPT bytes are kept, and another size is not used"""
        limit, results.MAX_KEPT = results.MAX_KEPT, 30 << 20
        try:
            three = [results.empty(LARGE, torch.float32) for _ in range(3)]
            addresses = [one.data_ptr() for one in three]
            while three:
                del three[0]
            self.assertEqual(list(results._kept), addresses[1:])
            del three
            results.empty((20 << 20,), torch.uint8)
            self.assertNotIn(addresses[1], results._kept)  # two of 12 MiB and one of 20 MiB are too much
            huge = results.empty((40 << 20,), torch.uint8)
            del huge
            self.assertEqual(len(results._kept), 0)
        finally:
            results.MAX_KEPT = limit

    def test_threads(self):
        """results of several threads never have the same memory"""
        wrong = []

        def work(number):
            for _ in range(50):
                made = results.empty((4 << 20,), torch.uint8).fill_(number)
                if not bool((made[::100] == number).all()):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(wrong, [])

    def test_redistribute(self):
        """large moves use the memory of earlier results, and release frees it"""
        worlds.run(4, large_moves)


if __name__ == "__main__":
    tap.main()
