"""Builds the package: the C library and the command are compiled into it, with a C compiler and nothing else.

What pyproject.toml cannot say is here: how they are compiled, where the headers go, and that the wheel
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
MODULES = [path for path in sorted(glob.glob(os.path.join(HERE, "src", "*")))
           if os.path.basename(path) not in ("cli", "mpi")]  # the command, and what needs MPI's headers
COMMAND = os.path.join(HERE, "src", "cli")


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


def build_program(objects, library, command):
    """Compiles the modules, and links them into a shared library and into the command."""
    linked = zstd()
    flags = ["-std=c11", "-ffp-contract=off", "-O2", "-DNDEBUG", "-fPIC", "-D_GNU_SOURCE",
             "-I" + os.path.join(HERE, "include"),
             *(flag for module in (*MODULES, COMMAND) for flag in ("-iquote", module))]
    flags += ["-DRSD_HAVE_ZSTD=1"] if linked else []
    flags += given("CFLAGS")
    for directory in (objects, os.path.dirname(library), os.path.dirname(command)):
        os.makedirs(directory, exist_ok=True)

    def compiled(source):
        made = os.path.join(objects, os.path.relpath(source, HERE).replace(os.sep, "-")[:-2] + ".o")
        subprocess.run(compiler() + flags + ["-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts, verbs = ([*pool.map(compiled, [source for module in modules
                                              for source in sorted(glob.glob(os.path.join(module, "*.c")))])]
                        for modules in (MODULES, [COMMAND]))
    shown = os.path.join(objects, "reshard.map")
    with open(shown, "w", encoding="ascii") as file:
        names = " ".join(name + ";" for name in functions())
        file.write(f"RESHARD_{SOVERSION} {{ global: {names} local: *; }};\n")
    libraries = [*given("LDFLAGS"), *(linked or []), "-lpthread", "-ldl"]
    # The soname is the one by which libreshard_mpi asks for the library.
    subprocess.run(compiler() + ["-shared", "-s", f"-Wl,-soname,libreshard.so.{SOVERSION}", "-o", library, *parts,
                                 "-Wl,--version-script=" + shown, "-Wl,-z,defs", *libraries], check=True)
    subprocess.run(compiler() + ["-s", "-o", command, *verbs, *parts, *libraries], check=True)


class BuildPackage(build_py):
    """The package, with the library, its headers and the command in it."""

    def run(self):
        shutil.rmtree(os.path.join(self.build_lib, "reshard"), ignore_errors=True)  # what an older tree had
        super().run()
        objects = os.path.join(self.get_finalized_command("build").build_temp, "reshard")
        if self.editable_mode:  # the package finds it there, after what make built
            made = os.path.join(HERE, "build", "python")
            build_program(objects, os.path.join(made, "libreshard.so"), os.path.join(made, "reshard"))
            return
        package = os.path.join(self.build_lib, "reshard")
        build_program(objects, os.path.join(package, "libreshard.so"), os.path.join(package, "bin", "reshard"))
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


SOVERSION = re.search(r"^SOVERSION := (\d+)$", read(os.path.join(HERE, "Makefile")), re.M).group(1)
VERSION = re.search(r'#define RSD_VERSION\s+"(.*?)"', read(os.path.join(HERE, "include/reshard.h"))).group(1)
setup(version=VERSION, distclass=WithLibrary,
      cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel},
      options={"build": {"build_base": "build/python"}, "egg_info": {"egg_base": "python"}})
