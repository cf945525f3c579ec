"""The wheel that `make wheel` built: its tag, its content, and its use in an empty environment without a compiler."""
import glob
import os
import re
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile

import reshard
import tap
from reshard import _c, mpi

TREE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
BUILD = os.environ.get("BUILD_DIR", os.path.join(TREE, "build"))
WHEELS = glob.glob(os.path.join(BUILD, "wheel", "*.whl"))
AUDIT = os.path.join(BUILD, "venv-wheel/bin/auditwheel")

# Run with a new installation, without NumPy and torch, from an empty directory.
USE = """
import array, os, sys
import reshard
from reshard import _c, mpi
here = os.path.dirname(reshard.__file__)
assert _c.shared_object() == os.path.join(here, "libreshard.so"), _c.shared_object()
assert all(path.startswith(here) for path in _c.header_paths), _c.header_paths
assert os.path.exists(os.path.join(here, "py.typed"))
assert not {"numpy", "torch", "mpi4py"} & set(sys.modules), "imported what was not asked for"
parts = [array.array("f", [1, 2]), array.array("f", [3, 4])]
got = reshard.reshard("f32[4] @ 2:S0", "f32[4] @ 1:R", parts, like="memoryview")[0]
assert got.tolist() == [1, 2, 3, 4], got
reshard.save("saved", {"w": memoryview(bytes(range(24))).cast("i", [2, 3]), "n": 5}, compress="zstd")
with reshard.open("saved", like="memoryview") as checkpoint:
    assert bytes(checkpoint["w"][1]) == bytes(range(12, 24)) and checkpoint.plain_values["n"] == 5
print("works")
"""

# The library for MPI is loaded with the libreshard of the wheel, and with no other.
USE_MPI = """
import reshard, reshard.mpi
assert reshard.mpi._load().rsd_mpi_transport_f
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libreshard" in line}
print(sorted(maps))
"""


def run(*words, **options):
    """Returns (exit status, output) of a program."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    return done.returncode, done.stdout.decode()


@unittest.skipIf(not WHEELS, "make wheel has not run, since auditwheel cannot be installed")
class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.work = holder.name
        cls.env = {"PATH": "", "HOME": cls.work}  # no compiler, and no package of this environment
        cls.site = os.path.join(cls.work, "venv")
        venv.create(cls.site, with_pip=True)
        cls.python = os.path.join(cls.site, "bin/python")
        cls.installed = run(cls.python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index",
                            *WHEELS, env=cls.env, cwd=cls.work)

    def test_tag(self):
        """there is one wheel, for any Python 3 on Linux, and auditwheel agrees with its tag"""
        self.assertEqual(len(WHEELS), 1, WHEELS)
        name = os.path.basename(WHEELS[0])
        found = re.fullmatch(rf"reshard-{re.escape(reshard.__version__)}-py3-none-(manylinux_[0-9_]+_\w+)\.whl", name)
        self.assertTrue(found, name)
        status, said = run(AUDIT, "show", WHEELS[0])
        self.assertEqual(status, 0, said)
        self.assertIn(f'following platform tag: "{found.group(1)}"', " ".join(said.split()))

    def test_content(self):
        """it has every module, the headers and the command, and shows the functions of the headers only"""
        with zipfile.ZipFile(WHEELS[0]) as file:
            names = set(file.namelist())
            about = file.read(f"reshard-{reshard.__version__}.dist-info/METADATA").decode()
            library = file.extract("reshard/libreshard.so", self.work)
        sources = {os.path.relpath(path, os.path.join(TREE, "python"))
                   for path in glob.glob(os.path.join(TREE, "python/reshard/**/*.py"), recursive=True)}
        headers = {"reshard/include/" + os.path.basename(path) for path in glob.glob(os.path.join(TREE, "include/*.h"))}
        needed = sources | headers | {"reshard/bin/reshard", "reshard/py.typed"}
        self.assertTrue(needed <= names, needed - names)
        self.assertIn("Requires-Python: >=3.9", about)
        self.assertNotIn("Requires-Dist: numpy\n", about)
        status, said = run("nm", "-D", "--defined-only", library)
        shown = {line.split()[-1].partition("@")[0] for line in said.splitlines()}
        version = {name for name in shown if name.startswith("RESHARD_")}
        self.assertEqual((status, shown - version), (0, set(_c.header.functions)))
        with open(os.path.join(TREE, "Makefile"), encoding="utf-8") as file:
            number = re.search(r"^SOVERSION := (\d+)$", file.read(), re.M).group(1)
        self.assertEqual(version, {"RESHARD_" + number})
        self.assertEqual(mpi._NAME, "libreshard_mpi.so." + number)

    def test_command(self):
        """pip install of this file alone: the command is in the PATH, and python -m reshard is the same"""
        self.assertEqual(self.installed, (0, ""))
        for words in ((os.path.join(self.site, "bin/reshard"),), (self.python, "-m", "reshard")):
            self.assertEqual(run(*words, "--version", env=self.env), (0, f"reshard {reshard.__version__}\n"))
            status, said = run(*words, "inspect", "/nowhere", env=self.env)
            self.assertEqual(status, 4, said)
            self.assertIn("/nowhere", said)
        reader = subprocess.Popen([os.path.join(self.site, "bin/reshard"), "--help"], env=self.env,
                                  stdout=subprocess.PIPE)
        reader.stdout.close()  # as `reshard --help | true`: the program ends by SIGPIPE, or has printed all before
        self.assertIn(reader.wait(), (0, -13))

    def test_package(self):
        """the package works without NumPy and torch, with zstd"""
        place = tempfile.mkdtemp(dir=self.work)
        self.assertEqual(run(self.python, "-c", USE, env=self.env, cwd=place), (0, "works\n"))

    def test_mpi(self):
        """libreshard_mpi of the C library is found by a variable, by its directory, and by the system"""
        built = os.path.join(BUILD, "libreshard_mpi.so")
        if not os.path.exists(built):
            self.skipTest("libreshard_mpi was not built")
        real = os.path.realpath(built)
        for variables in ({"RESHARD_MPI_LIB": built}, {"RESHARD_MPI_LIB": BUILD}, {"LD_LIBRARY_PATH": BUILD}):
            status, said = run(self.python, "-c", USE_MPI, env={**self.env, **variables}, cwd=self.work)
            mine = os.path.join(os.path.dirname(self.python_package()), "libreshard.so")
            self.assertEqual((status, said.strip()), (0, str(sorted((mine, real)))), variables)
        status, said = run(self.python, "-c", USE_MPI, env={**self.env, "RESHARD_MPI_LIB": "/nowhere"}, cwd=self.work)
        self.assertEqual(status, 1)
        self.assertIn("set RESHARD_MPI_LIB to the path of libreshard_mpi.so", said)

    def python_package(self):
        code = "import reshard; print(reshard.__file__)"
        return run(self.python, "-c", code, env=self.env, cwd=self.work)[1].strip()


if __name__ == "__main__":
    sys.exit(tap.main())
