"""The structs in rsd.py are those of the header: a C program says where each field lies."""
import os
import re
import subprocess
import unittest

import rsd
import tap
import worlds

INCLUDE = os.path.join(rsd.HERE, "../../include")


def c_name(struct):
    return "rsd_" + re.sub("(?<!^)([A-Z])", r"_\1", struct.__name__).lower()


class Header(unittest.TestCase):
    def test_structs(self):
        """every field of every struct lies where C puts it"""
        with open(os.path.join(INCLUDE, "reshard.h")) as file:
            header = file.read()
        structs = [struct for struct in rsd.Struct.__subclasses__()
                   if re.search(rf"}} {c_name(struct)};", header)]
        lines = [f'printf("{c_name(struct)} %zu\\n", sizeof({c_name(struct)}));' for struct in structs]
        lines += [f'printf("{c_name(struct)}.{field} %zu\\n", offsetof({c_name(struct)}, {field}));'
                  for struct in structs for field, _ in struct._fields_]
        right = [f"{c_name(struct)} {rsd.C.sizeof(struct)}" for struct in structs]
        right += [f"{c_name(struct)}.{field} {getattr(struct, field).offset}"
                  for struct in structs for field, _ in struct._fields_]
        with worlds.Folder() as folder:
            with open(folder("fields.c"), "w") as file:
                file.write("#include <stdio.h>\n#include <reshard.h>\nint main(void)\n{\n")
                file.write("\n".join(lines) + "\nreturn 0;\n}\n")
            subprocess.run([os.environ.get("CC", "cc"), f"-I{INCLUDE}", folder("fields.c"), "-o",
                            folder("fields")], check=True)
            said = subprocess.run([folder("fields")], check=True, capture_output=True, text=True).stdout
        self.assertGreaterEqual(len(structs), 8)
        self.assertEqual(said.splitlines(), right)


if __name__ == "__main__":
    tap.main()
