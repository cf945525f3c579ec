"""Runs docs/tutorial.md: blocks of C and Python are files, blocks of sh are run in their order in one empty directory,
and each block of text is the output of the commands before it. RECORD=1 writes the outputs into the page."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import tap

TREE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
PAGE = os.path.join(TREE, "docs/tutorial.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
FILE = re.compile(r"^(?:/\*|#) ([\w.]+)(?: \*/)?\n")


def missing():
    """Returns what a user would have to install first, or None."""
    for program in ("cc", "pkg-config", "mpicc", "mpirun"):
        if not shutil.which(program):
            return f"{program} is not installed"
    return None


class Tutorial(unittest.TestCase):
    @unittest.skipIf(missing(), missing())
    def test_tutorial(self):
        """every file, command and output of the tutorial"""
        with tempfile.TemporaryDirectory() as top, open(PAGE, encoding="utf-8") as file:
            page = file.read()
            work, prefix = os.path.join(top, "work"), os.path.join(top, "usr")
            os.mkdir(work)
            alone = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
            subprocess.run(["make", "-C", TREE, "install", "PREFIX=" + prefix], check=True, env=alone,
                           stdout=subprocess.DEVNULL)
            env = {**os.environ, "PATH": f"{prefix}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                   "PKG_CONFIG_PATH": prefix + "/lib/pkgconfig", "LD_LIBRARY_PATH": prefix + "/lib",
                   "LC_ALL": "C.UTF-8", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
            output, blocks = "", BLOCK.findall(page)
            languages = [language for language, _ in blocks]
            self.assertEqual(set(languages), {"c", "python", "sh", "text"})
            self.assertEqual(languages.count("sh"), languages.count("text"), "each command has an output")
            for language, text in blocks:
                if language in ("c", "python"):
                    name = FILE.match(text).group(1)
                    with open(os.path.join(work, name), "w", encoding="utf-8") as made:
                        made.write(text)
                elif language == "sh":
                    noisy = "mpirun" in text  # MPI may print warnings of its own
                    done = subprocess.run(["sh", "-e", "-c", text], cwd=work, env=env, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE if noisy else subprocess.STDOUT, timeout=120)
                    output = done.stdout.decode()
                    self.assertEqual(done.returncode, 0, f"{text}{output}{done.stderr}")
                elif os.environ.get("RECORD"):
                    page = page.replace(f"```text\n{text}```", f"```text\n{output}```", 1)
                else:
                    self.assertEqual(output, text)
        if os.environ.get("RECORD"):
            with open(PAGE, "w", encoding="utf-8") as made:
                made.write(page)


if __name__ == "__main__":
    tap.main()
