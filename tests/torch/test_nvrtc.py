"""The kernels are compiled by NVRTC 12 and 13, from their PyPI packages. No GPU is needed."""
import glob
import os
import subprocess
import sysconfig
import unittest

import tap

PROGRAM = os.path.join(os.path.dirname(os.environ["RESHARD_LIB"]), "compile_kernels")
PACKAGES = os.path.join(sysconfig.get_paths()["purelib"], "nvidia")


class Nvrtc(unittest.TestCase):
    def compile_with(self, version):
        found = glob.glob(os.path.join(PACKAGES, "*", "lib", f"libnvrtc.so.{version}"))
        if not found:
            self.skipTest(f"NVRTC {version} is not installed")
        ran = subprocess.run([PROGRAM], env={"LD_LIBRARY_PATH": os.path.dirname(found[0])}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertEqual(ran.stdout.count("compiled"), 8, ran.stdout)

    def test_12(self):
        """NVRTC 12 compiles every kernel"""
        self.compile_with(12)

    def test_13(self):
        """NVRTC 13 compiles every kernel"""
        self.compile_with(13)


if __name__ == "__main__":
    tap.main()
