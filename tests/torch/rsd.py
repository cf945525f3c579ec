"""The library as Python sees it: the functions of reshard.h that these tests call, and its structs.

The structs are read from the header, so that they are always those of the library: rsd_load_options is
LoadOptions here. Parts of the header that the library does not have yet are found out with has().
"""
import ctypes as C
import json
import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
HEADERS = [os.path.join(HERE, "../../include", name)
           for name in ("reshard.h", "reshard_files.h", "reshard_transport.h", "reshard_stash.h")]
lib = C.CDLL(os.environ.get("RESHARD_LIB", os.path.join(HERE, "../../build/libreshard.so")))

EVERY_RANK = -1
FORMAT_DCP, FORMAT_SAFETENSORS, FORMAT_TORCH_SAVE = 1, 2, 3
I32, I64, TEXT, PTR = C.c_int32, C.c_int64, C.c_char_p, C.c_void_p
LENGTHS = {"RSD_MAX_DIMS": 16}


class Struct(C.Structure):
    """A struct that says its own size, as those that may grow do."""

    def __init__(self, **fields):
        super().__init__(**fields)
        if self._fields_[0][0] == "struct_nbytes":
            self.struct_nbytes = C.sizeof(self)


def read_structs(paths):
    """The structs of the headers by their names; every pointer but text is a plain address."""
    header = ""
    for path in paths:
        with open(path) as file:
            header += re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    types = {"size_t": C.c_size_t, "int32_t": I32, "int64_t": I64, "uint64_t": C.c_uint64,
             "double": C.c_double, "char": C.c_char}
    types |= dict.fromkeys(re.findall(r"typedef enum (\w+)", header), C.c_int)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", header, flags=re.S):
        fields = []
        body = re.sub(r"\w+ \(\*(\w+)\)\([^;]*\)", r"void *\1", body)  # functions are addresses too
        for line in filter(str.strip, body.replace("const", "").split(";")):
            kind, rest = line.split(maxsplit=1)
            for field in rest.split(","):
                stars, word, length = re.match(r"([* ]*)(\w+)(?:\[(\w+)\])?", field.strip()).groups()
                if "*" in stars:
                    made = TEXT if kind == "char" and stars.count("*") == 1 else PTR
                else:
                    made = types[kind]
                fields.append((word, made * LENGTHS[length] if length else made))
        types[name] = type(name, (Struct,), {"_fields_": fields})
    return {name: made for name, made in types.items() if issubclass(made, Struct)}


structs = read_structs(HEADERS)
globals().update({"".join(part.title() for part in name.split("_")[1:]): made
                  for name, made in structs.items()})
CHOOSE = C.CFUNCTYPE(C.c_int, PTR, C.POINTER(Tensor), PTR)
ON_DIFFERENCE = C.CFUNCTYPE(C.c_int, PTR, TEXT, C.c_int, TEXT)
ON_FINDING = C.CFUNCTYPE(C.c_int, PTR, TEXT)

# What each function takes; those in ANSWERS return something else than a status.
TAKES = {
    "rsd_error": [],
    "rsd_status_name": [C.c_int],
    "rsd_free": [PTR],
    "rsd_dtype_name": [C.c_int],
    "rsd_dtype_parse": [TEXT, C.POINTER(C.c_int)],
    "rsd_layout_parse": [TEXT, C.POINTER(PTR)],
    "rsd_layout_print": [PTR, C.POINTER(PTR)],
    "rsd_layout_share": [PTR],
    "rsd_layout_free": [PTR],
    "rsd_layout_narrays": [PTR],
    "rsd_layout_array": [PTR, I64, C.POINTER(Array)],
    "rsd_layout_arrays_of": [PTR, I32, C.POINTER(I64), C.POINTER(I64)],
    "rsd_checkpoint_open": [TEXT, PTR, C.POINTER(PTR)],
    "rsd_checkpoint_close": [PTR],
    "rsd_checkpoint_format": [PTR],
    "rsd_checkpoint_ntensors": [PTR],
    "rsd_checkpoint_tensor": [PTR, I64, C.POINTER(Tensor)],
    "rsd_checkpoint_layout": [PTR, I64, C.POINTER(PTR)],
    "rsd_checkpoint_box": [PTR, I64, I64, C.POINTER(Stored)],
    "rsd_checkpoint_nfiles": [PTR],
    "rsd_checkpoint_file": [PTR, I64],
    "rsd_checkpoint_nvalues": [PTR],
    "rsd_checkpoint_value_name": [PTR, I64],
    "rsd_checkpoint_value": [PTR, I64, C.POINTER(PTR)],
    "rsd_load": [PTR, I64, PTR, PTR, PTR],
    "rsd_save": [TEXT, I64, PTR, PTR, PTR],
    "rsd_save_publish": [TEXT, I64, I32],
    "rsd_save_start": [TEXT, I64, PTR, PTR, C.POINTER(PTR)],
    "rsd_save_wait": [PTR, PTR],
    "rsd_convert": [PTR, TEXT, PTR, PTR],
    "rsd_digest": [PTR, I64, PTR, PTR, PTR, PTR],
    "rsd_diff": [PTR, PTR, PTR, ON_DIFFERENCE, PTR, C.POINTER(I64), PTR],
    "rsd_verify": [PTR, PTR, ON_FINDING, PTR, C.POINTER(I64), PTR],
}
ANSWERS = {"rsd_error": TEXT, "rsd_status_name": TEXT, "rsd_free": None, "rsd_dtype_name": TEXT,
           "rsd_layout_share": PTR, "rsd_layout_free": None, "rsd_layout_narrays": I64,
           "rsd_layout_arrays_of": None, "rsd_checkpoint_close": None, "rsd_checkpoint_ntensors": I64,
           "rsd_checkpoint_nfiles": I64, "rsd_checkpoint_file": TEXT, "rsd_checkpoint_nvalues": I64,
           "rsd_checkpoint_value_name": TEXT}


def has(*names):
    return all(hasattr(lib, name) for name in names)


for _name, _takes in TAKES.items():
    if has(_name):
        getattr(lib, _name).argtypes = _takes
        getattr(lib, _name).restype = ANSWERS.get(_name, C.c_int)


class Error(Exception):
    def __init__(self, status):
        self.status = lib.rsd_status_name(status).decode()
        super().__init__(f"{self.status}: {lib.rsd_error().decode()}")


def check(status):
    if status:
        raise Error(status)


def taken(pointer):
    """Text that the library returned through a pointer, given back to it."""
    if not pointer.value:
        return None
    text = C.cast(pointer, TEXT).value.decode()
    lib.rsd_free(pointer)
    return text


def dtype_number(name):
    number = C.c_int()
    check(lib.rsd_dtype_parse(name.encode(), C.byref(number)))
    return number.value


class Layout:
    def __init__(self, text=None, handle=None):
        self.handle = handle or PTR()
        if text is not None:
            check(lib.rsd_layout_parse(text.encode(), C.byref(self.handle)))

    def __del__(self):
        lib.rsd_layout_free(self.handle)

    def __str__(self):
        text = PTR()
        check(lib.rsd_layout_print(self.handle, C.byref(text)))
        return taken(text)

    def shapes(self):
        """The rank and shape of each array."""
        array, found = Array(), []
        for index in range(lib.rsd_layout_narrays(self.handle)):
            check(lib.rsd_layout_array(self.handle, index, C.byref(array)))
            found.append((array.rank, tuple(array.shape[:array.ndim])))
        return found


def local(name, layout, pointers, rank=EVERY_RANK, strides=None, path=None, column_major=0):
    """One rsd_local. What it points to lives as long as it does."""
    arrays = (PTR * max(1, len(pointers)))(*pointers)
    steps = (I64 * max(1, len(strides)))(*strides) if strides is not None else None
    made = Local(name=name.encode(), layout=layout.handle, rank=rank, arrays=C.cast(arrays, PTR),
                 column_major=column_major, strides=C.cast(steps, PTR) if steps else None,
                 path=json.dumps(path).encode() if path is not None else None)
    made.kept = (layout, arrays, steps)
    return made


def packed(kind, structs):
    """Structs one after the other, as the library takes them."""
    block = (kind * max(1, len(structs)))()
    for i, struct in enumerate(structs):
        block[i] = struct
    block.kept = structs
    return block


class Checkpoint:
    def __init__(self, path, format=0):
        self.handle = PTR()
        options = OpenOptions(format=format)
        check(lib.rsd_checkpoint_open(os.fsencode(path), C.byref(options), C.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        lib.rsd_checkpoint_close(self.handle)

    @property
    def format(self):
        return lib.rsd_checkpoint_format(self.handle)

    def tensors(self):
        """What is in it: (dtype name, shape, number of stored boxes) by name."""
        about, found = Tensor(), {}
        for index in range(lib.rsd_checkpoint_ntensors(self.handle)):
            check(lib.rsd_checkpoint_tensor(self.handle, index, C.byref(about)))
            found[about.name.decode()] = (lib.rsd_dtype_name(about.dtype).decode(),
                                          tuple(about.shape[:about.ndim]), about.nboxes)
        return found

    def files(self):
        return [os.fsdecode(lib.rsd_checkpoint_file(self.handle, i))
                for i in range(lib.rsd_checkpoint_nfiles(self.handle))]

    def values(self):
        """The plain values by name; None is also what is not plain."""
        found = {}
        for index in range(lib.rsd_checkpoint_nvalues(self.handle)):
            text = PTR()
            check(lib.rsd_checkpoint_value(self.handle, index, C.byref(text)))
            json_text = taken(text)
            name = lib.rsd_checkpoint_value_name(self.handle, index).decode()
            found[name] = json.loads(json_text) if json_text is not None else None
        return found

    def load(self, locals_, **options):
        report = Report()
        check(lib.rsd_load(self.handle, len(locals_), packed(Local, locals_),
                           C.byref(LoadOptions(**options)), C.byref(report)))
        return report


def save(path, locals_, values=(), **options):
    block = packed(Value, [Value(name=name.encode(), json=json.dumps(value).encode(),
                                 path=json.dumps(at).encode() if at is not None else None)
                           for name, value, at in values])
    made = SaveOptions(nvalues=len(values), values=C.cast(block, PTR), **options)
    report = Report()
    check(lib.rsd_save(os.fsencode(path), len(locals_), packed(Local, locals_), C.byref(made),
                       C.byref(report)))
    return report


def publish(path, nranks, overwrite=0):
    check(lib.rsd_save_publish(os.fsencode(path), nranks, overwrite))


def convert(source, out, choose=None, side_files=(), **options):
    """choose(name, dtype name, shape) returns a dict of what to change of the rsd_choice, or None to
    leave the tensor out. Its layout is a text."""
    kept, raised = [], []

    def called(_, tensor, choice):
        try:
            about, made = tensor.contents, Choice.from_address(choice)
            wish = choose(about.name.decode(), lib.rsd_dtype_name(about.dtype).decode(),
                          tuple(about.shape[:about.ndim]))
            if wish is None:
                made.keep = 0
                return 0
            if "name" in wish:
                kept.append(C.create_string_buffer(wish["name"].encode()))
                made.name = C.cast(kept[-1], TEXT)
            if "dtype" in wish:
                made.dtype = dtype_number(wish["dtype"])
            if "layout" in wish:
                layout = Layout(wish["layout"])
                made.layout = lib.rsd_layout_share(layout.handle)
            return 0
        except BaseException as error:  # an exception cannot pass through C
            raised.append(error)
            return 1

    callback = CHOOSE(called)
    paths = (TEXT * max(1, len(side_files)))(*map(os.fsencode, side_files))
    made = ConvertOptions(choose=C.cast(callback, PTR) if choose else None,
                          nside_files=len(side_files), side_files=C.cast(paths, PTR), **options)
    report = Report()
    status = lib.rsd_convert(source.handle, os.fsencode(out), C.byref(made), C.byref(report))
    if raised:
        raise raised[0]
    check(status)
    return report


def digests(checkpoint):
    n = lib.rsd_checkpoint_ntensors(checkpoint.handle)
    block = C.create_string_buffer(33 * max(1, n))
    check(lib.rsd_digest(checkpoint.handle, n, None, C.byref(ProveOptions()), block,
                         C.byref(Report())))
    return {name: block.raw[33 * i:33 * i + 32].decode()
            for i, name in enumerate(checkpoint.tensors())}


def differences(a, b):
    found, n = [], I64()
    told = ON_DIFFERENCE(lambda _, name, kind, text: found.append((name.decode(), kind)) or 0)
    check(lib.rsd_diff(a.handle, b.handle, C.byref(ProveOptions()), told, None, C.byref(n),
                       C.byref(Report())))
    return found


def findings(checkpoint):
    found, n = [], I64()
    told = ON_FINDING(lambda _, text: found.append(text.decode()) or 0)
    check(lib.rsd_verify(checkpoint.handle, C.byref(ProveOptions()), told, None, C.byref(n),
                         C.byref(Report())))
    return found
