"""Reads the public headers of the library: its constants, structs, callbacks and functions, as ctypes.

The headers are the only description of the library, so the package cannot differ from them:

    enum { RSD_MAX_DIMS = 16 }           constants["MAX_DIMS"]
    struct rsd_load_options              structs["rsd_load_options"], a Struct
    typedef int rsd_on_progress(...)     callbacks["rsd_on_progress"], a CFUNCTYPE
    rsd_status rsd_load(...)             functions["rsd_load"], a Function

Pointers to constant text are c_char_p. Pointers to structs, numbers and addresses are POINTER. Pointers to objects
without fields (layouts, plans, bytes) and to text that rsd_free frees are c_void_p.
"""
from __future__ import annotations

import ctypes as C
import operator
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

_PLAIN: Dict[str, Any] = {
    "void": None, "char": C.c_char, "int": C.c_int, "double": C.c_double, "size_t": C.c_size_t,
    "int8_t": C.c_int8, "int16_t": C.c_int16, "int32_t": C.c_int32, "int64_t": C.c_int64,
    "uint8_t": C.c_uint8, "uint16_t": C.c_uint16, "uint32_t": C.c_uint32, "uint64_t": C.c_uint64}

# A callback in a struct, a callback type, a struct, an enum and a function.
_MEMBER = re.compile(r"(\w+) (\*?)\(\*(\w+)\)\((.*)\)$", re.S)
_CALLBACK = re.compile(r"typedef (\w+) (\*?)(rsd_\w+)\(([^;]*)\);")
_STRUCT = re.compile(r"typedef struct (\w+)\s*\{(.*?)\}\s*\1;", re.S)
_ENUM = re.compile(r"(typedef )?enum (\w*)\s*\{(.*?)\}\s*\w*;", re.S)
_FUNCTION = re.compile(r"((?:const )?\w+[ *]+)(rsd_\w+)\(([^;]*)\);")
_DECLARED = re.compile(r"((?:const )?\w+)\s*([* ]*(?:const\b[* ]*)*)(\w*)\s*(?:\[(\w*)\])?$")


def fitting(kind: Any, number: Any, what: str) -> int:
    """Returns an integer that a ctype can hold. OverflowError if it cannot: ctypes would drop its upper bits."""
    found = operator.index(number)
    if kind(found).value != found:
        raise OverflowError(f"{what} {found} does not fit in {8 * C.sizeof(kind)} bits"
                         + (" without a sign" if found < 0 and kind(-1).value > 0 else ""))
    return found


class Integer:
    """The type of an integer argument of a function. In contrast to ctypes, a number that does not fit is an error."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def from_param(self, number: Any) -> Any:
        """Returns the argument for a call."""
        return self.kind(fitting(self.kind, number, "the number"))


INTEGERS = {kind: Integer(kind) for kind in (C.c_int32, C.c_int64, C.c_uint32, C.c_uint64)}


class Struct(C.Structure):
    """A struct of the library. struct_nbytes is set; fields that are not passed are 0. OverflowError: an integer is too
    large for its field."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        for name, value in fields.items():
            if isinstance(value, int) and getattr(self, name) != value:
                fitting(dict(self._fields_)[name], value, name)
        if type(self)._fields_[0][0] == "struct_nbytes" and not args:
            self.struct_nbytes = C.sizeof(self)

    def as_dict(self) -> Dict[str, Any]:
        """Returns the fields by name, without struct_nbytes."""
        return {name: getattr(self, name) for name, *_ in self._fields_ if name != "struct_nbytes"}


class Function(NamedTuple):
    """The types of a function. `fails` is true if it returns a status."""

    answer: Any
    takes: List[Any]
    fails: bool


class Header:
    """Everything that the headers declare."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.constants: Dict[str, int] = {}
        self.structs: Dict[str, Any] = {}
        self.callbacks: Dict[str, Any] = {}
        self.functions: Dict[str, Function] = {}
        self._types = dict(_PLAIN)
        text = "\n".join(texts)
        defined = re.search(r'#define RSD_VERSION\s+"(.*?)"', text)
        self.version = defined.group(1) if defined else ""
        self.add(text)

    def add(self, text: str) -> None:
        """Adds the declarations of a header."""
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        text = re.sub(r"^#(?:.*\\\n)*.*$|extern \"C\" \{", "", text, flags=re.M)
        for _, name, body in _ENUM.findall(text):
            for word, number in re.findall(r"RSD_(\w+)\s*=\s*(-?\d+)", body):
                self.constants[word] = int(number)
            self._types[name] = C.c_int
        # A struct or callback refers only to earlier ones.
        pieces = [(found.start(), found) for kind in (_STRUCT, _CALLBACK) for found in kind.finditer(text)]
        for _, found in sorted(pieces, key=lambda piece: piece[0]):
            if found.re is _STRUCT:
                self._read_struct(found.group(1), found.group(2))
            else:
                answer, stars, name, takes = found.groups()
                self.callbacks[name] = self._types[name] = self._callback(answer, stars, takes)
        rest = _CALLBACK.sub("", _ENUM.sub("", _STRUCT.sub("", text)))
        for answer, name, takes in _FUNCTION.findall(rest):
            kind, stars = self._split(answer)[:2]
            self.functions[name] = Function(self._made(kind, stars), self._taken(takes), kind == "rsd_status")

    def _read_struct(self, name: str, body: str) -> None:
        """Adds a struct, whose body is the text between its braces."""
        fields: List[Tuple[str, Any]] = []
        for line in filter(None, map(str.strip, body.split(";"))):
            member = _MEMBER.match(line)
            if member:
                answer, stars, word, takes = member.groups()
                fields.append((word, self._callback(answer, stars, takes)))
                continue
            first, *others = line.split(",")
            kind, stars, word, length = self._split(first)
            fields.append((word, self._field(kind, stars, length)))
            for other in others:
                _, stars, word, length = self._split(kind + " " + other.strip())
                fields.append((word, self._field(kind, stars, length)))
        self.structs[name] = self._types[name] = type(name, (Struct,), {"_fields_": fields})

    def _field(self, kind: str, stars: str, length: Optional[str]) -> Any:
        made = self._made(kind, stars)
        if not length:
            return made
        return made * (int(length) if length.isdigit() else self.constants[length[len("RSD_"):]])

    def _callback(self, answer: str, stars: str, takes: str) -> Any:
        return C.CFUNCTYPE(self._made(answer, stars), *self._taken(takes))

    def _taken(self, takes: str) -> List[Any]:
        """Returns the ctypes of a list of parameters."""
        made = []
        for one in re.split(r",\s*", takes.strip()):
            if one == "void":
                continue
            if "(*" in one:  # a list of arrays
                made.append(C.c_void_p)
                continue
            kind, stars, _, length = self._split(one)
            made.append(self._made(kind, stars + ("*" if length is not None else "")))
        return made

    @staticmethod
    def _split(declared: str) -> Tuple[str, str, str, Optional[str]]:
        """("const char", "*", "name", "16") of `const char *name[16]`."""
        declared = re.sub(r"\bstruct ", "", " ".join(declared.split()))
        found = _DECLARED.match(declared)
        if not found:
            raise ValueError(f"cannot read the declaration {declared!r}")
        kind, stars, word, length = found.groups()
        return kind, re.sub(r"[^*]", "", stars), word, length

    def _made(self, kind: str, stars: str) -> Any:
        """Returns the ctype of a C type with so many stars."""
        const, kind = kind.startswith("const "), kind.replace("const ", "")
        known = self._types.get(kind)
        if kind in self.callbacks:
            return known
        if not stars:
            if kind not in self._types:
                raise ValueError(f"the header does not say what {kind} is")
            return known
        made: Any
        if kind == "char":  # text that the caller frees is an address, which rsd_free needs
            made = C.c_char_p if const else C.c_void_p
        else:
            made = C.POINTER(known) if known is not None else C.c_void_p
        for _ in stars[1:]:
            made = C.POINTER(made)
        return made
