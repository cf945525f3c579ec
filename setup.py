"""Builds the package: the C library is compiled into it, with a C compiler and nothing else.

What pyproject.toml cannot say is here: how the library is compiled, where its headers go, and that the wheel
is for any Python 3 of one platform. CC, CFLAGS and LDFLAGS are obeyed; zstd is used if a program that needs
it can be built, and RESHARD_ZSTD=no does without.
"""
import glob
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
HEADERS = sorted(glob.glob(os.path.join(HERE, "include", "*.h")))
NOT_IN_IT = ("cli", "mpi")  # the command, and what needs MPI's headers


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def given(variable):
    return shlex.split(os.environ.get(variable, ""))


def compiler():
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    sys.exit("reshard: no C compiler found: install one (gcc or clang), or say which in CC")


def can_link(flags):
    """Whether a shared object that uses zstd can be built so."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.c")
        with open(source, "w", encoding="ascii") as file:
            file.write("#include <zstd.h>\nunsigned probe(void) { return ZSTD_versionNumber(); }\n")
        made = compiler() + ["-fPIC", "-shared", *given("CFLAGS"), source, "-o", source + ".so",
                             "-Wl,-z,defs", *given("LDFLAGS"), *flags]
        return subprocess.run(made, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def zstd():
    """The flags that link zstd, the static library first: it makes the wheel stand alone. None: without."""
    if os.environ.get("RESHARD_ZSTD") == "no":
        return None
    for flags in (["-l:libzstd.a"], ["-lzstd"]):
        if can_link(flags):
            return flags
    print("reshard: zstd was not found: compressed checkpoints will be refused", file=sys.stderr)
    return None


def functions():
    """The names that the headers declare: all that the library shows."""
    spec = importlib.util.spec_from_file_location("header", os.path.join(HERE, "python/reshard/_header.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["header"] = module
    spec.loader.exec_module(module)
    ours = [path for path in HEADERS if "mpi" not in os.path.basename(path)]
    return sorted(module.Header(map(read, ours)).functions)


def build_library(objects, out):
    """Compiles the modules and links them into one shared library."""
    modules = [module for module in sorted(glob.glob(os.path.join(HERE, "src", "*")))
               if os.path.basename(module) not in NOT_IN_IT]
    sources = [path for module in modules for path in sorted(glob.glob(os.path.join(module, "*.c")))]
    compressed = zstd()
    flags = ["-std=c11", "-ffp-contract=off", "-O2", "-DNDEBUG", "-fPIC", "-D_GNU_SOURCE",
             "-I" + os.path.join(HERE, "include"), *(flag for module in modules for flag in ("-iquote", module))]
    flags += ["-DRSD_HAVE_ZSTD=1"] if compressed else []
    flags += given("CFLAGS")
    os.makedirs(objects, exist_ok=True)
    os.makedirs(os.path.dirname(out), exist_ok=True)

    def compiled(source):
        made = os.path.join(objects, os.path.relpath(source, HERE).replace(os.sep, "-")[:-2] + ".o")
        subprocess.run(compiler() + flags + ["-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(compiled, sources))
    shown = os.path.join(objects, "reshard.map")
    with open(shown, "w", encoding="ascii") as file:
        file.write("RESHARD_0 { global: " + " ".join(name + ";" for name in functions()) + " local: *; };\n")
    # The name by which libreshard_mpi asks for it.
    subprocess.run(compiler() + ["-shared", "-Wl,-soname,libreshard.so.0", "-o", out, *made,
                                 "-Wl,--version-script=" + shown, "-Wl,-z,defs", *given("LDFLAGS"),
                                 *(compressed or []), "-lpthread", "-ldl"], check=True)


class BuildPackage(build_py):
    """The package, with the library and its headers in it."""

    def run(self):
        shutil.rmtree(os.path.join(self.build_lib, "reshard"), ignore_errors=True)  # what an older tree had
        super().run()
        objects = os.path.join(self.get_finalized_command("build").build_temp, "reshard")
        if self.editable_mode:  # the package finds it there, after what make built
            build_library(objects, os.path.join(HERE, "build", "python", "libreshard.so"))
            return
        package = os.path.join(self.build_lib, "reshard")
        build_library(objects, os.path.join(package, "libreshard.so"))
        os.makedirs(os.path.join(package, "include"), exist_ok=True)
        for path in HEADERS:
            shutil.copy(path, os.path.join(package, "include"))


class Wheel(bdist_wheel):
    """For any Python 3: the library does not know of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """Belongs to a platform, though no extension module says so."""

    def has_ext_modules(self):
        return True


VERSION = re.search(r'#define RSD_VERSION\s+"(.*?)"', read(os.path.join(HERE, "include/reshard.h"))).group(1)
setup(version=VERSION, distclass=WithLibrary,
      cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel},
      options={"build": {"build_base": "build/python"}, "egg_info": {"egg_base": "python"}})
