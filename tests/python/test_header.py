"""The package reads the headers as a C compiler does."""
import ctypes as C
import glob
import os
import re
import subprocess
import tempfile
import unittest

import tap
from reshard import _c, _header

INCLUDE = os.path.dirname(_c.header_paths[0])


def told_by_c(lines):
    """Returns the output of a C program with these lines in its main."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "told.c")
        with open(source, "w", encoding="ascii") as file:
            file.write("#include <stdio.h>\n#include <reshard_experimental.h>\nint main(void)\n{\n")
            file.write("\n".join(lines) + "\nreturn 0;\n}\n")
        subprocess.run([*os.environ.get("CC", "cc").split(), f"-I{INCLUDE}", source, "-o", source[:-2]],
                       check=True)
        said = subprocess.run([source[:-2]], check=True, stdout=subprocess.PIPE)
        return said.stdout.decode().splitlines()


class Header(unittest.TestCase):
    def test_structs(self):
        """every field of every struct has the offset of C"""
        structs = _c.header.structs
        fields = [(name, field) for name, struct in structs.items() for field, *_ in struct._fields_]
        lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in structs]
        lines += [f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                  f'sizeof((({name} *)0)->{field}));' for name, field in fields]
        right = [f"{name} {C.sizeof(struct)}" for name, struct in structs.items()]
        right += ["{}.{} {} {}".format(name, field, getattr(structs[name], field).offset,
                                       getattr(structs[name], field).size) for name, field in fields]
        self.assertGreaterEqual(len(structs), 25)
        self.assertEqual(told_by_c(lines), right)

    def test_constants(self):
        """every constant has C's value"""
        names = _c.header.constants
        lines = [f'printf("{name} %d\\n", (int)RSD_{name});' for name in names]
        self.assertGreaterEqual(len(names), 70)
        self.assertEqual(told_by_c(lines), [f"{name} {value}" for name, value in names.items()])

    def test_functions(self):
        """every exported function is declared, and every declared function is exported"""
        text = "".join(open(path, encoding="ascii").read() for path in _c.header_paths)
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        declared = set(re.findall(r"\b(rsd_\w+)\(", text)) - set(_c.header.callbacks)
        self.assertEqual(set(_c.header.functions), declared)
        self.assertGreaterEqual(len(declared), 95)
        for name in declared:
            self.assertTrue(callable(getattr(_c.lib, name)), name)

    def test_prototypes(self):
        """functions have as many arguments as in C, of the same sizes"""
        lines, right = [], []
        for name, function in _c.header.functions.items():
            if function.answer is not None:
                zeros = ", ".join("0" for _ in function.takes)
                lines.append(f'printf("{name} %zu\\n", sizeof({name}({zeros})));')
                right.append(f"{name} {C.sizeof(function.answer)}")
        # sizeof does not call; that it compiles says how many arguments there are.
        self.assertEqual(told_by_c(lines), right)

    def test_callbacks(self):
        """functions in tables and callbacks are typed"""
        kinds = dict(_c.Transport._fields_)
        for name in ("send", "recv", "test", "cancel", "release"):
            self.assertTrue(issubclass(kinds[name], C._CFuncPtr), name)
        self.assertEqual(kinds["send"]._argtypes_, (C.c_void_p, C.c_int32, C.c_int32, C.c_void_p, C.c_size_t,
                                                    C.POINTER(C.c_void_p)))
        self.assertEqual((kinds["send"]._restype_, kinds["cancel"]._restype_), (C.c_int, C.c_int32))
        self.assertEqual(_c.OnDifference._argtypes_, (C.c_void_p, C.c_char_p, C.c_int, C.c_char_p))
        self.assertIs(dict(_c.Io._fields_)["on_progress"], _c.OnProgress)

    def test_refused(self):
        """an unknown declaration is an error"""
        for text in ("typedef struct rsd_x { rsd_new_kind y; } rsd_x;", "rsd_status rsd_y(int (*z)[2], odd q);"):
            with self.assertRaises(ValueError):
                _header.Header([text])

    def test_sizes(self):
        """struct_nbytes is set"""
        self.assertEqual(_c.LoadOptions().struct_nbytes, C.sizeof(_c.LoadOptions))
        self.assertEqual(_c.Box().ndim, 0)

    def test_shipped(self):
        """all public headers are read, except the one that needs MPI"""
        found = {os.path.basename(path) for path in glob.glob(os.path.join(INCLUDE, "*.h"))}
        self.assertEqual({os.path.basename(path) for path in _c.header_paths},
                         {name for name in found if "mpi" not in name})


if __name__ == "__main__":
    tap.main()
