"""Transports written in Python: plans between ranks that are threads, and exceptions."""
import collections
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
import weakref

import numpy as np
import reshard
import tap
from reshard import Layout, Plan
from test_plans import held


class Post:
    """The messages of all ranks."""

    def __init__(self, nranks):
        self.nranks, self.lock = nranks, threading.Lock()
        self.boxes = collections.defaultdict(collections.deque)


class Mailbox(reshard.Transport):
    """The transport of one rank."""

    def __init__(self, post, rank):
        super().__init__(rank, post.nranks)
        self.post, self.cancelled, self.nsent = post, 0, 0

    def send(self, to, tag, data):
        self.nsent += data.nbytes
        with self.post.lock:
            self.post.boxes[self.rank, to, tag].append(bytes(data))
        return "sent"

    def recv(self, origin, tag, data):
        return self.post.boxes[origin, self.rank, tag], data

    def test(self, request):
        if request == "sent":
            return True
        box, data = request
        with self.post.lock:
            if not box:
                return False
            data[:] = box.popleft()
        return True

    def cancel(self, request):
        self.cancelled += 1
        return True


def on_every_rank(nranks, work):
    """Calls work(rank) in one thread per rank. Returns their results or exceptions."""
    answers = [None] * nranks

    def live(rank):
        try:
            answers[rank] = work(rank)
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class Transports(unittest.TestCase):
    def test_moves(self):
        """every rank passes and receives only its own arrays"""
        whole = np.arange(12 * 10, dtype="i4").reshape(12, 10)
        sides = (("4:S0", "2x2:S0,S1"), ("4:S1", "4:R"), ("1:R", "3 ranks=1-3:S0"),
                 ("{ 0:5 | 5:12,0:4 ; 5:12,4:10 }", "4:S1"))
        for (a, b), node in itertools.product(sides, (-1, 0)):
            src, dst = Layout(f"i32[12,10] @ {a}"), Layout(f"i32[12,10] @ {b}")
            plan, given, right, post = Plan(src, dst), held(src, whole), held(dst, whole), Post(4)

            def work(rank):
                mine = [given[one.number] for one in src.arrays(rank)]
                got = [np.zeros(one.shape, "i4") for one in dst.arrays(rank)]
                transport = Mailbox(post, rank)
                bound = reshard.bind(plan, transport=transport, timeout=30, node=node)
                for _ in range(2):
                    for one in got:
                        one[...] = -1
                    bound.run(mine, got)
                bound.start(mine, got)
                bound.wait()
                for one, about in zip(got, dst.arrays(rank)):
                    self.assertTrue((one == right[about.number]).all())
                return transport.nsent

            sent = on_every_rank(4, work)
            self.assertTrue(all(isinstance(one, int) for one in sent), sent)
            if node < 0:  # without shared memory
                self.assertGreaterEqual(sum(sent), 3 * plan.totals["nbytes_moved"])

    def test_strides(self):
        """strides are those of this rank's arrays only"""
        whole, post = np.arange(64, dtype="f8").reshape(8, 8), Post(2)

        def work(rank):
            src = np.asfortranarray(whole[4 * rank:4 * rank + 4])
            wide = np.zeros((8, 9))
            out = wide[:, 1:8:2] if rank else wide[:, :4]
            bound = reshard.bind(Plan("f64[8,8] : 2:S0 -> 2:S1"), src=src, dst=out, transport=Mailbox(post, rank))
            bound.run(src, out)
            return (out == whole[:, 4 * rank:4 * rank + 4]).all()

        self.assertEqual(on_every_rank(2, work), [True, True])

    def test_arena(self):
        """arrays in shared memory, of every kind, keep their arena alive"""
        whole, post = np.arange(64, dtype="f8").reshape(8, 8), Post(2)

        def work(rank):
            arena = reshard.Arena(1 << 16)
            src, out = arena.empty((4, 8), "f64"), arena.empty((8, 4), "f64", like="memoryview")
            src[...] = whole[4 * rank:4 * rank + 4]
            bound = reshard.bind(Plan("f64[8,8] : 2:S0 -> 2:S1"), transport=Mailbox(post, rank), arena=arena,
                                 names=["w"])
            bound.run(src, out)
            told = bound.describe()
            del bound, arena, src
            gc.collect()
            self.assertTrue((np.asarray(out) == whole[:, 4 * rank:4 * rank + 4]).all())
            return told

        self.assertEqual(on_every_rank(2, work), ["2 of 2 ranks through shared memory"] * 2)
        arena = reshard.Arena(4096)
        with self.assertRaises(MemoryError):
            arena.empty((1000,), "f64")
        arena.alloc(4096)
        arena.clear()
        self.assertEqual(arena.alloc(4096).nbytes, 4096)
        self.assertEqual(arena.empty((0, 3), "f32").shape, (0, 3))

    def test_nodes(self):
        """ranks of one host have one number"""
        post = Post(3)
        found = on_every_rank(3, lambda rank: Mailbox(post, rank).nodes())
        self.assertEqual(found, [[found[0][0]] * 3] * 3)

    def test_other_plans(self):
        """ranks that bind different plans all raise the error"""
        post = Post(2)
        texts = ["f32[8] : 2:S0 -> 2:R", "f32[9] : 2:S0 -> 2:R"]
        found = on_every_rank(2, lambda rank: reshard.bind(Plan(texts[rank]), transport=Mailbox(post, rank)))
        self.assertEqual([type(one) for one in found], [reshard.MismatchError] * 2)

    def test_exceptions(self):
        """the call raises the exception of a method; other ranks have a status"""
        for method in ("send", "recv", "test"):
            post = Post(2)

            class Failing(Mailbox):
                pass

            def fail(self, *_):
                raise KeyError(method)

            setattr(Failing, method, fail)

            def work(rank):
                transport = (Failing if rank else Mailbox)(post, rank)
                bound = reshard.bind(Plan("f32[8] : 2:S0 -> 2:R"), transport=transport, timeout=0.3, node=-1)
                bound.run(np.zeros(4, "f4"), np.zeros(8, "f4"))
                return transport

            other, failed = on_every_rank(2, work)
            self.assertIsInstance(failed, KeyError, method)
            self.assertEqual(failed.args, (method,))
            self.assertNotIsInstance(other, KeyError)

    def test_interrupt(self):
        """Ctrl-C is raised in the call, wherever Python handles it, and requests are cancelled"""
        class Waiting(Mailbox):
            def test(self, request):
                return time.sleep(self.seconds) or super().test(request)

        def interrupted(seconds, call):
            transport = Waiting(Post(2), 0)
            transport.seconds = seconds
            timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            timer.start()
            with self.assertRaises(KeyboardInterrupt):
                call(transport)
            timer.join()
            self.assertGreater(transport.cancelled, 0)
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

        def bind(transport):
            reshard.bind(Plan("f32[8] : 2:S0 -> 2:R"), transport=transport)

        def save(transport):
            reshard.save(self.path, {"w": np.zeros(8)}, transport=transport)

        self.path = os.path.join(tempfile.mkdtemp(), "x")
        self.addCleanup(shutil.rmtree, os.path.dirname(self.path))
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        self.addCleanup(signal.signal, signal.SIGINT, handler)
        lost = []
        before, sys.unraisablehook = sys.unraisablehook, lost.append
        self.addCleanup(setattr, sys, "unraisablehook", before)
        for seconds, call in itertools.product((0, 0, 0, 1e-4, 0.2), (lambda one: one.gather(b"x"), bind, save)):
            interrupted(seconds, call)
        self.assertEqual(lost, [])

    def test_time_out(self):
        """the error names a rank that does not make the call"""
        post = Post(2)

        def work(rank):
            transport = Mailbox(post, rank)
            bound = reshard.bind(Plan("f32[8] : 2:S0 -> 2:R"), transport=transport, timeout=0.2, node=-1)
            if rank:
                return None
            try:
                bound.run(np.zeros(4, "f4"), np.zeros(8, "f4"))
            finally:
                self.assertGreater(transport.cancelled, 0)

        late = on_every_rank(2, work)[0]
        self.assertIsInstance(late, reshard.TimedOutError)
        self.assertIsInstance(late, TimeoutError)
        self.assertIn("rank 1", str(late))

    def test_gather(self):
        """every rank receives the bytes of all; the error names a rank with another number of bytes"""
        for nranks in (1, 2, 3, 5):
            post = Post(nranks)
            found = on_every_rank(nranks, lambda rank: Mailbox(post, rank).gather(bytes([rank] * 3)))
            self.assertEqual(found, [[bytes([rank] * 3) for rank in range(nranks)]] * nranks)
            self.assertEqual(on_every_rank(nranks, lambda rank: Mailbox(post, rank).gather(b"")),
                             [[b""] * nranks] * nranks)
        post = Post(3)
        found = on_every_rank(3, lambda rank: Mailbox(post, rank).gather(b"x" * (1 + (rank == 2))))
        for one in found:
            self.assertIsInstance(one, reshard.MismatchError)
            self.assertIn("rank 2 called rsd_gather of 2 bytes, rank 0 called rsd_gather of 1 bytes", str(one))
        post = Post(2)
        late = on_every_rank(2, lambda rank: rank or Mailbox(post, rank).gather(b"x", timeout=0.2))[0]
        self.assertIsInstance(late, reshard.TimedOutError)
        self.assertIn("rank 1", str(late))

    def test_bad_arrays(self):
        """invalid arrays of one rank fail on all ranks with the same status"""
        post, memory = Post(2), np.zeros(12, "f4")

        def work(rank):
            bound = reshard.bind(Plan("f32[8] : 2:S0 -> 2:R"), transport=Mailbox(post, rank), timeout=30, node=-1)
            got = np.zeros(8, "f4")
            with self.assertRaises(reshard.InvalidError) as raised:
                bound.run(memory[:4] if rank else np.ones(4, "f4"), memory[:8] if rank else got)
            self.assertIn("rank 1: ", str(raised.exception))
            self.assertIn("overlaps", str(raised.exception))
            bound.run(np.full(4, rank, "f4"), got)
            return got.tolist()

        self.assertEqual(on_every_rank(2, work), [[0.0] * 4 + [1.0] * 4] * 2)

    def test_wrong_arguments(self):
        """invalid arguments are refused"""
        for rank, nranks in ((2, 2), (-1, 2)):
            with self.assertRaises(reshard.InvalidError):
                reshard.Transport(rank, nranks)
        with self.assertRaises(reshard.InvalidError):
            reshard.bind(Plan("f32[8] : 2:S0 -> 2:R"), timeout=3)

    def test_life(self):
        """an exec keeps its transport alive"""
        transport = Mailbox(Post(1), 0)
        gone, bound = weakref.ref(transport), reshard.bind(Plan("f32[8] : 1:R -> 1:R"), transport=transport)
        del transport
        gc.collect()
        got = np.zeros(8, "f4")
        bound.run(np.ones(8, "f4"), got)
        self.assertEqual(got.sum(), 8)
        del bound
        gc.collect()
        self.assertIsNone(gone())


if __name__ == "__main__":
    tap.main()
