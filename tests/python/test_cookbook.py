"""Runs docs/cookbook.md: the blocks of sh in their order in one shell, and those of SLURM as scripts. Each line of a
block of text is in the output of the commands before it."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import tap

TREE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
BUILD = os.environ.get("BUILD_DIR", os.path.join(TREE, "build"))
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.S | re.M)
MARK = "== block "
STUBS = {"make": "#!/bin/sh\n", "srun": '#!/bin/sh\nexec "$@"\n'}


def missing():
    """Returns what a user would have to build or install first, or None."""
    for program in ("reshard", "examples/make_checkpoint", "examples/load_slice"):
        if not os.path.exists(os.path.join(BUILD, program)):
            return f"{program} is not built"
    return subprocess.run([sys.executable, "-c", "import torch"], stderr=subprocess.PIPE).stderr.decode()[-100:] or None


def link_tree(top):
    """Makes a source tree of links whose build/ is new, and programs that stand for make and SLURM."""
    os.mkdir(os.path.join(top, "build"))
    os.mkdir(os.path.join(top, "bin"))
    for name in ("tools", "tests"):
        os.symlink(os.path.join(TREE, name), os.path.join(top, name))
    for name in os.listdir(BUILD):
        if name != "cookbook":
            os.symlink(os.path.join(BUILD, name), os.path.join(top, "build", name))
    for name, text in STUBS.items():
        with open(os.path.join(top, "bin", name), "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o755)


def script_of(blocks, top):
    """Returns a script that runs blocks and prints a mark before each."""
    has_mpi = os.path.exists(os.path.join(BUILD, "reshard-mpi")) and shutil.which("mpirun")
    lines = []
    for number, (kind, text) in enumerate(blocks):
        lines.append(f"echo '{MARK}{number}'")
        if kind == "text" or ("reshard-mpi" in text and not has_mpi):
            continue
        if text.startswith("#!"):
            path = os.path.join(top, f"job{number}")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            text = f"sh {path}\n"
        lines.append(text)
    return "\n".join(lines)


class Cookbook(unittest.TestCase):
    @unittest.skipIf(missing(), missing())
    def test_cookbook(self):
        """every command of the cookbook succeeds, and prints what the page says"""
        with open(os.path.join(TREE, "docs/cookbook.md"), encoding="utf-8") as file:
            blocks = BLOCK.findall(file.read())
        self.assertGreater(len(blocks), 20)
        with tempfile.TemporaryDirectory() as top:
            link_tree(top)
            env = {**os.environ, "PATH": f"{top}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                   "PYTHONPATH": os.path.join(TREE, "python"), "SCRATCH": ".", "SLURM_CPUS_PER_TASK": "2",
                   "LC_ALL": "C.UTF-8", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
            done = subprocess.run(["sh", "-e", "-c", script_of(blocks, top)], cwd=top, env=env, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=600)
        output = done.stdout.decode()
        self.assertEqual(done.returncode, 0, output[-2000:])
        outputs = re.split(f"^{MARK}[0-9]+\n", output, flags=re.M)[1:]
        for (kind, text), before in zip(blocks[1:], outputs):
            if kind == "text" and not text.startswith("$ "):
                for line in text.splitlines():
                    self.assertIn(line.replace("...", ""), before)


if __name__ == "__main__":
    tap.main()
