"""Types: mypy in its strictest mode accepts the package, and a script of a user that calls all of it. help() has every
keyword."""
import importlib
import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
import tempfile
import unittest

import reshard
import tap

HERE = os.path.dirname(os.path.abspath(__file__))
# torch takes minutes, and is not what is checked. The package itself may return what ctypes returns.
CONFIG = """[mypy]
strict = True
[mypy-reshard.*]
warn_return_any = False
[mypy-reshard.torch.*]
ignore_errors = True
[mypy-torch.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-numpy.*,ml_dtypes.*,mpi4py.*]
follow_imports = skip
ignore_missing_imports = True
"""


@unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")
class Checked(unittest.TestCase):
    def accepted(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "mypy.ini"), "w", encoding="utf-8") as file:
                file.write(CONFIG)
            done = subprocess.run(
                [sys.executable, "-m", "mypy", "--config-file", os.path.join(folder, "mypy.ini"), "--cache-dir",
                 os.path.join(folder, "cache"), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "MYPYPATH": os.path.dirname(os.path.dirname(reshard.__file__))})
        return done.returncode == 0, done.stdout

    def test_user(self):
        """a script of a user and the package pass mypy --strict, and a wrong call does not"""
        with tempfile.TemporaryDirectory() as folder:
            wrong = os.path.join(folder, "wrong.py")
            with open(wrong, "w", encoding="utf-8") as file:
                file.write("import reshard\nreshard.convert('a', 'b', mash=8)\nx: int = reshard.digest('a')\n")
            accepted, said = self.accepted(os.path.join(HERE, "typed.py"))
            self.assertTrue(accepted, said)
            accepted, said = self.accepted(wrong)
            self.assertFalse(accepted)
            self.assertIn('Unexpected keyword argument "mash"', said)
            self.assertIn("Incompatible types in assignment", said)


def public(module):
    """Every public function, class, method and property, with its docstring. That of a class describes its constructor.
    Arguments of methods that torch calls are torch's."""
    for name in module.__all__:
        one = getattr(module, name)
        if inspect.isfunction(one):
            yield name, one, inspect.getdoc(one)
        elif inspect.isclass(one):
            theirs = {part for base in one.__mro__ if not base.__module__.startswith("reshard") for part in vars(base)}
            if "__init__" in vars(one):
                yield name, one.__init__, inspect.getdoc(one)
            for part, method in vars(one).items():
                function = getattr(method, "fget", getattr(method, "__func__", method))
                if inspect.isfunction(function) and not part.startswith("_") and part not in theirs:
                    yield f"{name}.{part}", function, inspect.getdoc(function)


class Documented(unittest.TestCase):
    def test_docstrings(self):
        """every public call has a docstring that names each argument, and types"""
        modules = [reshard, importlib.import_module("reshard.mpi")]
        if importlib.util.find_spec("torch"):
            modules.append(importlib.import_module("reshard.torch"))
        for name, one, text in (found for module in modules for found in public(module)):
            signature = inspect.signature(one)
            self.assertTrue(text, name)
            self.assertNotEqual(signature.return_annotation, inspect.Signature.empty, name)
            if name.endswith("Error"):
                continue
            for key in signature.parameters:
                if key not in ("self", "cls"):
                    self.assertRegex(text, rf"\b{key}\b", f"{name} does not document {key}")

    def test_help(self):
        """help() of the package shows the calls with their keywords"""
        shown = re.sub("\b.", "", pydoc.render_doc(reshard.convert) + pydoc.render_doc(reshard.Checkpoint.load))
        for word in ("max_memory", "force", "threads", "layouts", "strict"):
            self.assertIn(word, shown)


if __name__ == "__main__":
    tap.main()
