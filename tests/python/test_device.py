"""Arrays in memory of a CUDA device, as objects with DLPack, on an emulator of a GPU that this test compiles."""
import collections
import contextlib
import ctypes as C
import glob
import os
import subprocess
import tempfile
import threading
import unittest

import numpy

import reshard
import tap
from reshard.memory import _DLTensor

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
driver = None
contexts = [C.c_void_p(), C.c_void_p()]  # of devices 0 and 1, which can access each other


def compile_emulator(directory):
    """Compiles the two libraries, and loads them. The library finds them by their names then."""
    includes = [f"-I{path}" for path in sorted(glob.glob(os.path.join(TREE, "src/*/")))]
    sources = sorted(glob.glob(os.path.join(TREE, "tests/cuda/emulator*.c")))
    loaded = []
    for name in ("libcuda.so.1", "libnvrtc.so.13"):
        path = os.path.join(directory, name)
        subprocess.run([os.environ.get("CC") or "cc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-w", "-fPIC", *includes,
                        f"-I{TREE}/include", f"-I{TREE}/tests/cuda", "-shared", f"-Wl,-soname,{name}", "-o", path,
                        *sources, "-lm", "-pthread"], check=True)
        loaded.append(C.CDLL(path))
    return loaded[0]


def setUpModule():
    global driver
    with tempfile.TemporaryDirectory() as directory:
        driver = compile_emulator(directory)
    assert not driver.cuInit(0)
    for ordinal, context in enumerate(contexts):
        device = C.c_int()
        assert not driver.cuDeviceGet(C.byref(device), ordinal)
        assert not driver.cuDevicePrimaryCtxRetain(C.byref(context), device)
    assert not driver.cuCtxPushCurrent_v2(contexts[0])


@contextlib.contextmanager
def on(device):
    """Makes a device current."""
    assert not driver.cuCtxPushCurrent_v2(contexts[device])
    yield
    assert not driver.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))


class Managed(C.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", C.c_void_p), ("deleter", C.c_void_p)]


new_capsule = C.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = C.py_object, [C.c_void_p, C.c_char_p, C.c_void_p]


class OnDevice:
    """An array on a device, with the values of a NumPy array. It has DLPack only, with strides."""

    streams = []

    def __init__(self, array, device=0):
        self.device = device
        self.shape, self.dtype = array.shape, array.dtype
        self.strides = [step // array.itemsize for step in array.strides]
        self.base = numpy.ascontiguousarray(array) if array.flags.c_contiguous else array.base
        self.address = C.c_uint64()
        with on(device):
            assert not driver.cuMemAlloc_v2(C.byref(self.address), C.c_size_t(self.base.nbytes))
        assert not driver.cuMemcpyHtoD_v2(self.address, C.c_void_p(self.base.ctypes.data), C.c_size_t(self.base.nbytes))

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, stream=None, max_version=None):
        self.streams.append(stream)
        code = {"f": 2, "i": 0, "u": 1}[self.dtype.kind]
        n = len(self.shape)
        self.kept = (C.c_int64 * n)(*self.shape), (C.c_int64 * n)(*self.strides)
        self.managed = Managed(_DLTensor(self.address.value, 2, self.device, n, code, 8 * self.dtype.itemsize, 1,
                                         C.cast(self.kept[0], C.POINTER(C.c_int64)),
                                         C.cast(self.kept[1], C.POINTER(C.c_int64)), 0), None, None)
        return new_capsule(C.addressof(self.managed), b"dltensor", None)

    def values(self):
        base = numpy.empty_like(self.base)
        assert not driver.cuMemcpyDtoH_v2(C.c_void_p(base.ctypes.data), self.address, C.c_size_t(base.nbytes))
        steps = [step * base.itemsize for step in self.strides]
        return numpy.lib.stride_tricks.as_strided(base, self.shape, steps)


class OnDeviceOnly(reshard.Transport):
    """A transport between threads that takes memory of the device for tensors, and bytes for the rest."""

    def __init__(self, rank, queues):
        super().__init__(rank, 2, device=0)
        self.queues, self.nexchanged = queues, 0

    def _queue(self, sender, receiver, tag):
        return self.queues[sender, receiver, tag]

    def send(self, to, tag, data):
        self._queue(self.rank, to, tag).append(bytes(data))
        return []

    def recv(self, origin, tag, data):
        def put(found):
            data[:] = found
        return [(self._queue(origin, self.rank, tag), put)]

    def exchange(self, messages):
        received = []
        self.nexchanged += len(messages)
        for one in messages:
            if one.sends:
                copy = C.create_string_buffer(one.nbytes)
                assert not driver.cuMemcpyDtoH_v2(copy, C.c_uint64(one.address), C.c_size_t(one.nbytes))
                self._queue(self.rank, one.peer, one.tag).append(copy.raw)
            else:
                def put(found, address=one.address):
                    assert not driver.cuMemcpyHtoD_v2(C.c_uint64(address), found, C.c_size_t(len(found)))
                received.append((self._queue(one.peer, self.rank, one.tag), put))
        return received

    def test(self, request):
        while request and request[0][0]:
            queue, put = request.pop(0)
            put(queue.popleft())
        return not request


class Devices(unittest.TestCase):
    def test_transport(self):
        """a transport that takes memory of the device"""
        value = numpy.arange(64 * 48, dtype="f4").reshape(64, 48)
        queues = collections.defaultdict(collections.deque)
        transports = [OnDeviceOnly(rank, queues) for rank in range(2)]
        cases = (("f32[64,48] : 2:S0 -> 2:S1", value[:32], value[:, :24], value[32:], value[:, 24:]),
                 ("f32[64,48] : 2:P -> 2:R", value, 2 * value, value, 2 * value))
        for problem, *parts in cases:
            found, notes = [None, None], [None, None]

            def live(rank, problem=problem, parts=parts, found=found, notes=notes):
                driver.cuCtxPushCurrent_v2(contexts[0])
                src, want = (numpy.ascontiguousarray(one) for one in parts[2 * rank:2 * rank + 2])
                dst = OnDevice(numpy.zeros_like(want))
                bound = reshard.bind(reshard.Plan(problem), transport=transports[rank], node=-1, max_nbytes=1,
                                     timeout=20)
                for _ in range(2):
                    bound.run([OnDevice(src)], [dst])
                found[rank], notes[rank] = numpy.array_equal(dst.values(), want), bound.describe()

            threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            self.assertEqual(found, [True, True], problem)
            for note in notes:
                self.assertRegex(note, "[12] sent from device memory by the transport, 0 packed")
        self.assertTrue(all(one.nexchanged > 0 for one in transports))

    def test_moved(self):
        """a plan between arrays on a device and in host memory, any to any"""
        value = numpy.arange(37 * 53, dtype="f4").reshape(37, 53)
        rows = numpy.array_split(value, [10, 20, 30])
        for there in range(4):
            src = [OnDevice(one) if there & 1 else numpy.ascontiguousarray(one) for one in rows]
            dst = [numpy.zeros((37, n), "f4") for n in (27, 26)]
            got = [OnDevice(one) for one in dst] if there & 2 else dst
            reshard.reshard("f32[37,53] @ 4:S0", "f32[37,53] @ 2:S1", src, got)
            if there & 1:
                self.assertEqual(set(OnDevice.streams), {1})  # the default stream, without torch
            found = [one.values() for one in got] if there & 2 else got
            self.assertTrue(numpy.array_equal(numpy.concatenate(found, 1), value), there)

    def test_several(self):
        """arrays on two devices: a run is complete when it returns"""
        value = numpy.arange(40 * 50, dtype="f4").reshape(40, 50)
        for first in range(2):
            src = [OnDevice(one, (first + i) % 2) for i, one in enumerate(numpy.array_split(value, 4))]
            dst = [OnDevice(numpy.zeros((40, 25), "f4"), i) for i in range(2)]
            bound = reshard.bind(reshard.Plan("f32[40,50] : 4:S0 -> 2:S1"))
            bound.run(src, dst)
            for device in range(2):
                with on(device):
                    self.assertEqual(driver.cuStreamQuery(None), 0, device)
            self.assertTrue(numpy.array_equal(numpy.concatenate([one.values() for one in dst], 1), value))
            self.assertEqual(reshard.digest_array(src[1]), reshard.digest_array(value[10:20]))

    def test_strided(self):
        """arrays with strides, bound once"""
        wide = numpy.arange(24 * 10, dtype="i8").reshape(24, 10)
        src, dst = OnDevice(wide[:, ::2]), OnDevice(numpy.zeros((24, 10), "i8")[:, ::2])
        bound = reshard.bind(reshard.Plan("i64[24,5] : 1:R -> 1:R"), src=[src], dst=[dst])
        bound.run([src], [dst])
        self.assertTrue(numpy.array_equal(dst.values(), wide[:, ::2]))
        bound.start([src], [dst])
        bound.wait()

    def test_digests(self):
        """digests are those of host memory"""
        value = numpy.arange(5000, dtype="f8").reshape(50, 100)
        self.assertEqual(reshard.digest_array(OnDevice(value)), reshard.digest_array(value))
        self.assertEqual(reshard.digest_array(OnDevice(value[:, ::2])), reshard.digest_array(value[:, ::2].copy()))

    def test_stored(self):
        """saved to the same bytes, and loaded, also converted"""
        value = numpy.arange(300 * 70, dtype="f4").reshape(300, 70)
        with tempfile.TemporaryDirectory() as directory:
            for name, one in (("host", value), ("device", OnDevice(value))):
                reshard.save(os.path.join(directory, name), [reshard.Local.whole("w", one)])
            self.assertEqual(reshard.diff(os.path.join(directory, "host"), os.path.join(directory, "device")), [])
            with reshard.open(os.path.join(directory, "host")) as checkpoint:
                want, other = OnDevice(numpy.zeros_like(value)), OnDevice(numpy.zeros(value.shape, "f8"))
                checkpoint.load([reshard.Local("w", "f32[300,70] @ 1:R", [want])])
                self.assertTrue(numpy.array_equal(want.values(), value))
                checkpoint.load([reshard.Local("w", "f64[300,70] @ 1:R", [other])], cast=True)
                self.assertTrue(numpy.array_equal(other.values(), value))
                rows = OnDevice(numpy.zeros((10, 70), "f4"))
                checkpoint["w"].read(slice(20, 30), out=rows)
                self.assertTrue(numpy.array_equal(rows.values(), value[20:30]))


if __name__ == "__main__":
    tap.main()
