"""The package: its requirements, its errors, and what pip builds from its sources."""
import ast
import glob
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

import reshard
import tap
from reshard import _c, errors

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
SOURCES = sorted(glob.glob(os.path.join(TREE, "python/**/*.py"), recursive=True) + [os.path.join(TREE, "setup.py")])

# Run with a new installation, without NumPy and torch, from its own directory.
USE = """
import array, os, sys
import reshard
from reshard import _c
here = os.path.dirname(reshard.__file__)
assert _c.shared_object() == os.path.join(here, "libreshard.so"), _c.shared_object()
assert all(path.startswith(here) for path in _c.header_paths), _c.header_paths
assert os.path.exists(os.path.join(here, "py.typed"))
assert not {"numpy", "torch", "mpi4py"} & set(sys.modules), "imported what was not asked for"
parts = [array.array("f", [1, 2]), array.array("f", [3, 4])]
got = reshard.reshard("f32[4] @ 2:S0", "f32[4] @ 1:R", parts, like="memoryview")[0]
assert got.tolist() == [1, 2, 3, 4], got
reshard.save("saved", {"w": memoryview(bytes(range(24))).cast("i", [2, 3]), "n": 5})
with reshard.open("saved", like="memoryview") as checkpoint:
    assert bytes(checkpoint["w"][1]) == bytes(range(12, 24)) and checkpoint.plain_values["n"] == 5
try:
    reshard.save("packed", {"w": memoryview(bytes(range(24)))}, compress="zstd")
    print("zstd")
except reshard.UnsupportedError as error:
    print("no zstd:", error)
"""


class Package(unittest.TestCase):
    def test_syntax(self):
        """every file has the syntax of Python 3.9, and evaluates no annotation"""
        self.assertGreater(len(SOURCES), 15)
        for path in SOURCES:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            tree = ast.parse(text, path, feature_version=(3, 9))
            self.assertTrue(ast.get_docstring(tree), path)
            if "->" in text:
                self.assertIn("from __future__ import annotations", text, path)

    def test_documented(self):
        """everything public has a docstring"""
        for name in reshard.__all__:
            thing = getattr(reshard, name)
            if callable(thing):
                self.assertTrue(thing.__doc__, name)
                members = vars(thing).items() if isinstance(thing, type) else ()
                for member, one in members:
                    if callable(one) and not member.startswith("_") and not isinstance(one, type):
                        self.assertTrue(one.__doc__, f"{name}.{member}")

    def test_light(self):
        """the import imports neither NumPy nor torch"""
        code = "import sys, reshard; print(sorted({'numpy', 'torch', 'mpi4py'} & set(sys.modules)))"
        said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
        self.assertEqual(said.strip(), b"[]")

    def test_errors(self):
        """every status has an exception, which is also a builtin one, and can be pickled"""
        builtin = {"EINVAL": ValueError, "EMISMATCH": ValueError, "ELIMIT": OverflowError, "EEXIST": FileExistsError,
                   "ECANCELLED": Exception, "ENOMEM": MemoryError, "EIO": OSError, "ENOENT": FileNotFoundError,
                   "EFORMAT": ValueError,
                   "EUNSUPPORTED": NotImplementedError, "EPEER": ConnectionError, "ETIMEOUT": TimeoutError}
        statuses = {name: number for name, number in _c.header.constants.items()
                    if name.startswith("E") and _c.lib.rsd_status_name(number).decode() == name}
        self.assertEqual(set(statuses), set(builtin))
        for name, number in statuses.items():
            error = errors.made(number, "what went wrong")
            self.assertIsInstance(error, reshard.Error)
            self.assertIsInstance(error, builtin[name])
            self.assertEqual((error.status, str(error), errors.number_of(error)), (name, "what went wrong", number))
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), again.status, str(again)), (type(error), name, "what went wrong"))
        for error, name in ((MemoryError(), "ENOMEM"), (OSError(), "EIO"), (FileNotFoundError(), "ENOENT"),
                            (TimeoutError(), "ETIMEOUT"),
                            (ValueError(), "EINVAL"), (KeyboardInterrupt(), "ECANCELLED")):
            self.assertEqual(errors.number_of(error), statuses[name])

    def test_no_library(self):
        """without the library, or with another version, the error of the import says what to do"""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(os.path.join(TREE, "python/reshard"), os.path.join(folder, "reshard"))
            shutil.copytree(os.path.join(TREE, "include"), os.path.join(folder, "reshard/include"))

            def told(**variables):
                env = {name: value for name, value in os.environ.items() if name != "RESHARD_LIB"}
                made = subprocess.run([sys.executable, "-c", "import reshard"], cwd=folder, stderr=subprocess.PIPE,
                                      env={**env, "PYTHONPATH": folder, **variables})
                return made.stderr.decode()

            self.assertIn("or set RESHARD_LIB", told())
            self.assertRegex(told(RESHARD_LIB="/nowhere.so"), "ImportError: .*/nowhere.so.*or set RESHARD_LIB")
            header = os.path.join(folder, "reshard/include/reshard.h")
            with open(header, encoding="ascii") as file:
                text = file.read()
            with open(header, "w", encoding="ascii") as file:
                file.write(text.replace(f'"{reshard.__version__}"', '"99.0.0"'))
            self.assertIn("the package 99.0.0", told(RESHARD_LIB=_c.shared_object()))


class Build(unittest.TestCase):
    """Builds from a copy of the tree, with only a C compiler in PATH."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.tree = os.path.join(self.folder, "tree")
        os.mkdir(self.tree)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "README.md", "LICENSE", "CHANGELOG.md"):
            shutil.copy(os.path.join(TREE, name), self.tree)
        for name in ("include", "src", "python"):
            shutil.copytree(os.path.join(TREE, name), os.path.join(self.tree, name),
                            ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        self.tools = os.path.join(self.folder, "tools")
        os.mkdir(self.tools)
        for name in ("cc", "as", "ld"):
            os.symlink(shutil.which(name), os.path.join(self.tools, name))

    def build(self, *words, **variables):
        env = {name: value for name, value in os.environ.items()
               if name not in ("CC", "CFLAGS", "LDFLAGS", "RESHARD_LIB", "PYTHONPATH", "MAKEFLAGS")}
        done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
                              cwd=self.tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**env, "PATH": self.tools, **variables})
        self.assertEqual(done.returncode, 0, done.stdout.decode())

    def use(self, fill):
        """Calls fill(site-packages) to install the package in an empty environment, and uses it there."""
        venv = os.path.join(self.folder, "venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", venv], check=True)
        python = os.path.join(venv, "bin/python")
        site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
                              stdout=subprocess.PIPE, check=True).stdout.decode().strip()
        fill(site)
        work = tempfile.mkdtemp(dir=self.folder)
        env = {"PATH": self.tools, "HOME": self.folder}
        done = subprocess.run([python, "-c", USE], cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout.decode())
        return done.stdout.decode().strip()

    def test_install(self):
        """pip install without zstd: a compressed checkpoint is an error that names it"""
        def fill(site):
            self.build("install", "--no-build-isolation", "--no-deps", "-q", "--target", site, ".",
                       RESHARD_ZSTD="no")

        self.assertIn("zstd", self.use(fill).partition("no zstd:")[2])
        said = subprocess.run([os.path.join(self.folder, "venv/bin/python"), "-m", "reshard", "--version"],
                              stdout=subprocess.PIPE, check=True, env={"PATH": ""}).stdout.decode()
        self.assertEqual(said, f"reshard {reshard.__version__}\n", "the command is in the package")

    def test_source(self):
        """a source distribution has all files"""
        env = {**os.environ, "PYTHONPATH": ""}
        subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", self.folder], cwd=self.tree, check=True,
                       env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with tarfile.open(glob.glob(os.path.join(self.folder, "*.tar.gz"))[0]) as file:
            names = {name.partition("/")[2] for name in file.getnames()}
        for folder in ("src", "include", "python/reshard"):
            for path in glob.glob(os.path.join(self.tree, folder, "**/*.[chp]*"), recursive=True):
                if os.path.isfile(path) and not path.endswith(".pyc"):
                    self.assertIn(os.path.relpath(path, self.tree), names)
        self.assertTrue({"setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md"} <= names)


if __name__ == "__main__":
    tap.main()
