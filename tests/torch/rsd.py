"""The library as Python sees it: the structs and functions of reshard.h that these tests call.

Structs are called as in the header, without rsd_ and in capitals. Parts of the header that the library
does not have yet are found out with has().
"""
import ctypes as C
import json
import os

HERE = os.path.dirname(os.path.abspath(__file__))
lib = C.CDLL(os.environ.get("RESHARD_LIB", os.path.join(HERE, "../../build/libreshard.so")))

MAX_DIMS = 16
EVERY_RANK = -1
FORMAT_DCP, FORMAT_SAFETENSORS, FORMAT_TORCH_SAVE = 1, 2, 3
I32, I64, TEXT, PTR = C.c_int32, C.c_int64, C.c_char_p, C.c_void_p
ON_PROGRESS = C.CFUNCTYPE(C.c_int, PTR, PTR)


class Struct(C.Structure):
    """A struct that says its own size, as those that may grow do."""

    def __init__(self, **fields):
        super().__init__(**fields)
        if self._fields_[0][0] == "struct_nbytes":
            self.struct_nbytes = C.sizeof(self)


class Array(Struct):
    _fields_ = [("rank", I32), ("ndim", I32), ("place", I64), ("shape", I64 * MAX_DIMS),
                ("nbytes", C.c_size_t)]


class Box(Struct):
    _fields_ = [("ndim", I32), ("lo", I64 * MAX_DIMS), ("len", I64 * MAX_DIMS)]


class Tensor(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("name", TEXT), ("dtype", C.c_int), ("ndim", I32),
                ("shape", I64 * MAX_DIMS), ("nbytes", I64), ("nboxes", I64)]


class Stored(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("box", Box), ("file", I64), ("offset", C.c_uint64),
                ("nbytes", C.c_uint64)]


class OpenOptions(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("format", C.c_int)]


class Local(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("name", TEXT), ("layout", PTR), ("rank", I32),
                ("column_major", I32), ("arrays", C.POINTER(PTR)), ("strides", C.POINTER(I64)),
                ("path", TEXT)]


class Report(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("ntensors", I64), ("nbytes_needed", I64),
                ("nbytes_read", I64), ("nbytes_decoded_again", I64), ("nbytes_unchecked", I64),
                ("nbytes_written", I64), ("nfiles_written", I64), ("nbytes_memory", I64),
                ("nleft_out", I64), ("seconds", C.c_double)]


class LoadOptions(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("pool", PTR), ("max_nbytes", I64),
                ("allow_missing", I32), ("allow_cast", I32), ("on_progress", ON_PROGRESS),
                ("context", PTR)]


class Value(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("name", TEXT), ("json", TEXT), ("path", TEXT)]


class SaveOptions(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("pool", PTR), ("nranks", I64), ("max_nbytes", I64),
                ("overwrite", I32), ("to_lowest_rank", I32), ("compress", I32), ("one_rank", I32),
                ("rank", I32), ("nvalues", I64), ("values", C.POINTER(Value)),
                ("on_progress", ON_PROGRESS), ("context", PTR)]


class Choice(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("keep", I32), ("dtype", C.c_int), ("name", TEXT),
                ("layout", PTR)]


CHOOSE = C.CFUNCTYPE(C.c_int, PTR, C.POINTER(Tensor), C.POINTER(Choice))


class ConvertOptions(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("format", C.c_int), ("pool", PTR), ("max_nbytes", I64),
                ("max_shard_nbytes", I64), ("nranks", I64), ("every_replica", I32), ("compress", I32),
                ("overwrite", I32), ("resume", I32), ("dry", I32), ("choose", CHOOSE),
                ("on_progress", ON_PROGRESS), ("context", PTR)]


class ProveOptions(Struct):
    _fields_ = [("struct_nbytes", C.c_size_t), ("pool", PTR), ("max_nbytes", I64),
                ("on_progress", ON_PROGRESS), ("context", PTR)]


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
    made = Local(name=name.encode(), layout=layout.handle, rank=rank, arrays=arrays,
                 column_major=column_major,
                 path=json.dumps(path).encode() if path is not None else None)
    if strides is not None:
        made.strides = (I64 * max(1, len(strides)))(*strides)
    made.kept = (layout, arrays)
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
    made = SaveOptions(nvalues=len(values), values=block, **options)
    report = Report()
    check(lib.rsd_save(os.fsencode(path), len(locals_), packed(Local, locals_), C.byref(made),
                       C.byref(report)))
    return report


def publish(path, nranks, overwrite=0):
    check(lib.rsd_save_publish(os.fsencode(path), nranks, overwrite))


def convert(source, out, choose=None, **options):
    """choose(name, dtype name, shape) returns a dict of what to change of the rsd_choice, or None to
    leave the tensor out. Its layout is a text."""
    kept, raised = [], []

    def called(_, tensor, choice):
        try:
            about = tensor.contents
            wish = choose(about.name.decode(), lib.rsd_dtype_name(about.dtype).decode(),
                          tuple(about.shape[:about.ndim]))
            if wish is None:
                choice.contents.keep = 0
                return 0
            if "name" in wish:
                kept.append(C.create_string_buffer(wish["name"].encode()))
                choice.contents.name = C.cast(kept[-1], TEXT)
            if "dtype" in wish:
                choice.contents.dtype = dtype_number(wish["dtype"])
            if "layout" in wish:
                layout = Layout(wish["layout"])
                choice.contents.layout = lib.rsd_layout_share(layout.handle)
            return 0
        except BaseException as error:  # an exception cannot pass through C
            raised.append(error)
            return 1

    made = ConvertOptions(choose=CHOOSE(called) if choose else CHOOSE(), **options)
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
