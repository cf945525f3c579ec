"""The structs in rsd.py are those of the header: a C program says where each field lies."""
import os
import subprocess
import unittest

import rsd
import tap
import worlds

INCLUDE = os.path.dirname(rsd.HEADERS[0])


class Header(unittest.TestCase):
    def test_structs(self):
        """every field of every struct lies where C puts it"""
        lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in rsd.structs]
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
                  for name, struct in rsd.structs.items() for field, _ in struct._fields_]
        right = [f"{name} {rsd.C.sizeof(struct)}" for name, struct in rsd.structs.items()]
        right += [f"{name}.{field} {getattr(struct, field).offset}"
                  for name, struct in rsd.structs.items() for field, _ in struct._fields_]
        with worlds.Folder() as folder:
            with open(folder("fields.c"), "w") as file:
                file.write("#include <stdio.h>\n#include <reshard.h>\nint main(void)\n{\n")
                file.write("\n".join(lines) + "\nreturn 0;\n}\n")
            subprocess.run([os.environ.get("CC", "cc"), f"-I{INCLUDE}", folder("fields.c"), "-o",
                            folder("fields")], check=True)
            said = subprocess.run([folder("fields")], check=True, capture_output=True, text=True).stdout
        self.assertGreaterEqual(len(rsd.structs), 15)
        self.assertEqual(said.splitlines(), right)


if __name__ == "__main__":
    tap.main()
