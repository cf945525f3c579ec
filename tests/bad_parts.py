"""The parts that make_bad.py puts together: pickles, archives, items, metadata, zstd frames and headers.

Every function returns bytes, which are valid unless arguments make them invalid.
"""

import json
import os
import struct
import zlib

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bad")


def write(name, content):
    path = os.path.join(FOLDER, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


# ---- pickles: each function returns the opcodes that push one value ----


def num(n):
    if 0 <= n < 256:
        return b"K" + bytes([n])
    if -(2**31) <= n < 2**31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def tup(*items):
    return b"(" + b"".join(items) + b"t"


def lst(*items):
    return b"](" + b"".join(items) + b"e"


def dct(*pairs):
    return b"}(" + b"".join(k + v for k, v in pairs) + b"u"


def glob(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def call(module, name, *args):
    return glob(module, name) + tup(*args) + b"R"


def obj(name, state=None):
    module = "filesystem" if name == "_StorageInfo" else "metadata"
    new = glob("torch.distributed.checkpoint." + module, name) + b")\x81"
    return new + state + b"b" if state else new


def pickle(body, protocol=2):
    return bytes([0x80, protocol]) + body + b"."


NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
SYSTEM = call("os", "system", text("touch this_must_never_run"))


# ---- archives ----


def record(name, data=b"", **wrong):
    """A record; what its headers say of it may be wrong: crc, size, stored, method, flags, header, extra,
    and, in front of the data only, local_name, local_method and local_extra (how many bytes)."""
    return dict(name=name.encode(), data=data, **wrong)


def archive(*records, end=(), end64=None, after=b"", directory=b""):
    """end and end64: what they say wrongly (count, nbytes, at; end_at of the locator)."""
    body, entries = b"", b""
    for r in records:
        true = dict(crc=zlib.crc32(r["data"]), size=len(r["data"]), stored=len(r["data"]))
        r = true | dict(method=0, flags=0x0800, header=len(body), extra=b"") | r
        name = r.get("local_name", r["name"])
        body += struct.pack("<4s5HIIIHH", b"PK\3\4", 0, r["flags"], r.get("local_method", 0), 0, 0, 0, 0, 0,
                            len(name), r.get("local_extra", 0)) + name + r["data"]
        entries += struct.pack("<4s6HIIIHHHHHII", b"PK\1\2", 0, 0, r["flags"], r["method"], 0, 0, r["crc"],
                               r["stored"], r["size"], len(r["name"]), len(r["extra"]), 0, 0, 0, 0,
                               r["header"]) + r["name"] + r["extra"]
    entries += directory
    true = dict(count=len(records), nbytes=len(entries), at=len(body), comment=0)
    says = true | dict(end)
    tail = b""
    if end64 is not None:
        says64 = true | dict(end_at=len(body) + len(entries)) | end64
        tail = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0, 45, 0, 0, says64["count"], says64["count"],
                           says64["nbytes"], says64["at"])
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, says64["end_at"], 1)
    tail += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, says["count"], says["count"], says["nbytes"],
                        says["at"], says["comment"])
    return body + entries + tail + after


# ---- what torch.save writes ----

DATA = struct.pack("<8f", *range(8))


def storage(count=8, key="0", cls="FloatStorage"):
    return tup(text("storage"), glob("torch", cls), text(key), text("cpu"), num(count)) + b"Q"


def tensor(shape=(2, 4), strides=(4, 1), offset=0, rebuild="_rebuild_tensor_v2", more=(), **kept):
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", rebuild, storage(**kept), num(offset), tup(*map(num, shape)),
                tup(*map(num, strides)), FALSE, hooks, *more)


def saved(body, *more, pickle_says=None, data_says=None, data=DATA, **says):
    """A torch.save file of one pickle and the storage 0."""
    return archive(record("archive/data.pkl", pickle(body), **(pickle_says or {})),
                   record("archive/byteorder", b"little"),
                   record("archive/data/0", data, **(data_says or {})),
                   record("archive/version", b"3\n"), *more, **says)


def streamed(body, name="archive/data/0", crc=None, pickle_crc=None, method=0, order=None):
    """The start of an archive as it comes out of a stream: CRCs stand behind the records."""
    out = b""
    between = [("archive/byteorder", order, None)] if order else []
    for n, content, said in ("archive/data.pkl", pickle(body), pickle_crc), *between, (name, DATA, crc):
        said = zlib.crc32(content) if said is None else said
        out += struct.pack("<4s5HIIIHH", b"PK\3\4", 0, 0x0808, method, 0, 0, 0, 0, 0, len(n), 0) + n.encode()
        out += content + struct.pack("<4sIII", b"PK\7\x08", said, len(content), len(content))
    return out + b"\0" * 600


def legacy(name, keys=None, count=8, magic=0x1950A86A20F9469CFC6C, body=None, data=DATA):
    """Five pickles and the storages: torch.save before 1.6."""
    system = dct((text("little_endian"), TRUE))
    keys = lst(text("0")) if keys is None else keys
    parts = [num(magic), num(1001), system, body or state(w=tensor()), keys]
    write(name, b"".join(map(pickle, parts)) + struct.pack("<Q", count) + data)


def state(**tensors):
    return dct(*((text(k), v) for k, v in tensors.items()))


ITEM = saved(tensor())
VALUE = archive(record("archive/data.pkl", pickle(num(7))), record("archive/version", b"3\n"))


# ---- distributed checkpoints ----


def size(*dims):
    return call("torch", "Size", tup(*map(num, dims)))


def chunk(lo, length):
    return obj("ChunkStorageMetadata", dct((text("offsets"), size(*lo)), (text("sizes"), size(*length))))


def properties(dtype="float32"):
    layout = call("torch.serialization", "_get_layout", text("torch.strided"))
    enum = call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", num(0))
    return obj("TensorProperties", tup(glob("torch", dtype), layout, FALSE, enum, FALSE))


def meta(shape=(2, 4), chunks=(((0, 0), (2, 4)),), dtype="float32", chunk_list=None):
    boxes = chunk_list or lst(*(chunk(*c) for c in chunks))
    return obj("TensorStorageMetadata", dct((text("properties"), properties(dtype)), (text("size"), size(*shape)),
                                            (text("chunks"), boxes)))


def index(fqn, lo=None, number=None):
    where = [(text("offset"), size(*lo))] if lo is not None else []
    hint = NONE if number is None else num(number)
    return obj("MetadataIndex", dct((text("fqn"), text(fqn)), (text("index"), hint), *where))


def info(path="__0_0.distcp", offset=0, length=len(ITEM), transforms=None):
    more = [(text("transform_descriptors"), transforms)] if transforms else []
    return obj("_StorageInfo", dct((text("relative_path"), text(path)), (text("offset"), num(offset)),
                                   (text("length"), num(length)), *more))


def metadata(tensors, stored, planner=NONE):
    return obj("Metadata", dct((text("state_dict_metadata"), dct(*((text(k), v) for k, v in tensors))),
                               (text("planner_data"), planner), (text("storage_data"), dct(*stored)),
                               (text("version"), text("1.0.0"))))


ONE = pickle(metadata([("w", meta())], [(index("w", (0, 0)), info())]))


def dcp(name, tensors=None, stored=None, planner=NONE, data=ITEM, pickled=None, file=".metadata", **of_info):
    """Returns the files of a directory with the tensor w of shape [2, 4] in one item, except for the arguments."""
    tensors = [("w", meta())] if tensors is None else tensors
    stored = [(index("w", (0, 0)), info(**(dict(length=len(data)) | of_info)))] if stored is None else stored
    write(f"{name}/{file}", pickled or pickle(metadata(tensors, stored, planner)))
    write(f"{name}/__0_0.distcp", data)


def value(name, data=VALUE, **of_info):
    """Returns the files of a directory with the value v in one item."""
    stored = [(index("v"), info(**(dict(length=len(data)) | of_info)))]
    dcp(name, [("v", obj("BytesStorageMetadata"))], stored, data=data)


# ---- zstd: frames of blocks that are not compressed, or one byte many times ----


def zstd(*blocks, window=17):
    """A block is bytes, or (a byte, how many times)."""
    out = b"\x28\xb5\x2f\xfd\x00" + bytes([(window - 10) << 3])
    for i, b in enumerate(blocks):
        kind, n, raw = (0, len(b), b) if isinstance(b, bytes) else (1, b[1], b[0])
        out += ((i + 1 == len(blocks)) | kind << 1 | n << 3).to_bytes(3, "little") + raw
    return out


ZSTD = lst(text("stream.zstd/1"))
STREAM = streamed(tensor())


def compressed(name, *blocks, transforms=ZSTD, **kept):
    dcp(name, data=zstd(*(blocks or (STREAM,)), **kept), transforms=transforms)


# ---- safetensors ----


def safe(tensors, data=DATA, length=None, metadata=None):
    """tensors: the header, as JSON or as something that becomes JSON."""
    if metadata is not None:
        tensors = {"__metadata__": metadata} | tensors
    header = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def about(dtype="F32", shape=(2, 4), begin=0, end=32, **more):
    return dict(dtype=dtype, shape=list(shape), data_offsets=[begin, end], **more)


GOOD = {"w": about()}


def place(lo, shape=None):
    """Where a shard lies, as PyTorch says it, or as we do."""
    if shape is None:
        return {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": lo}})}
    return {"reshard": json.dumps({"tensors": {"w": {"lo": lo, "shape": shape}}})}


def pieces(numbers, shape):
    """The same for an array that is packed from pieces: lo, len and where in the array, of each."""
    said = {"pieces": numbers} | ({"shape": shape} if shape else {})
    return {"reshard": json.dumps({"tensors": {"w": said}})}


def shards(name, *files):
    for i, file in enumerate(files):
        write(f"{name}/shard-0000{i + 1}-model-00001-of-00001.safetensors", file)




# ---- per-rank files ----

TENSOR_TYPES = ("torch.distributed.tensor", "DTensor")


def built(module, name, **attributes):
    """An instance whose state is a dict."""
    pairs = [(text(key), value) for key, value in attributes.items()]
    return glob(module, name) + b")\x81" + dct(*pairs) + b"b"


def placed(name, **attributes):
    return built("torch.distributed.tensor.placement_types", name,
                 **{key: num(value) for key, value in attributes.items()})


def mesh(rank, ids=(0, 1), shape=(2,), strides=None, at=(), cls="IntStorage"):
    """As up to torch 2.8: the ranks are a tensor, in the storage `ranks`."""
    strides = strides or [1] * len(shape)
    at = NONE if at is None else tup(*map(num, at or (rank,)))
    ranks = tensor(shape=shape, strides=strides, key=f"ranks{''.join(map(str, ids))}", count=2, cls=cls)
    return built("torch.distributed.device_mesh", "DeviceMesh", mesh=ranks, _coordinate_on_dim=at)


def layout_mesh(rank, count=2, stride=1):
    """As since torch 2.13: a layout in a list of ranks."""
    flat = built("torch.distributed._mesh_layout", "_FlatLayout", shape=tup(num(count)), stride=tup(num(stride)))
    layout = built("torch.distributed._mesh_layout", "_MeshLayout", axes=tup(flat))
    return built("torch.distributed.device_mesh", "DeviceMesh", _layout=layout,
                 _rank_map=tensor(shape=(2,), strides=(1,), key="ranks01", count=2, cls="IntStorage"),
                 _coordinate_on_dim=tup(num(rank)))


def wrapped(cls, shape, state):
    """What torch pickles for a tensor without a storage of its own."""
    args = tup(glob(*cls), glob("torch", "float32"), tup(*map(num, shape)), tup(), num(0), NONE, NONE, FALSE)
    return call("torch._tensor", "_rebuild_from_type_v2", glob("torch._utils", "_rebuild_wrapper_subclass"),
                glob(*cls), args, state)


def dtensor(rank, device_mesh=None, places=None, local=None, shape=(2, 4), order=NONE, cls=TENSOR_TYPES, meta=None):
    stated = tup(size(*(meta or shape)), tup(), glob("torch", "float32"))
    spec = built("torch.distributed.tensor._dtensor_spec", "DTensorSpec", mesh=device_mesh or mesh(rank),
                 placements=places or tup(placed("Shard", dim=0)), shard_order=order,
                 tensor_meta=glob("torch.distributed.tensor._dtensor_spec", "TensorMeta") + stated + b"\x81")
    local = local or tensor(count=4, shape=(1, 4))
    return wrapped(cls, shape, tup(NONE, dct((text("_local_tensor"), local), (text("_spec"), spec))))


def shard_metadata(offset, sizes, rank=0):
    placement = built("torch.distributed.remote_device", "_remote_device", _rank=num(rank))
    return built("torch.distributed._shard.metadata", "ShardMetadata", shard_offsets=lst(num(offset), num(0)),
                 shard_sizes=lst(*map(num, sizes)), placement=placement)


def sharded(rank, offset=None, rows=1, count=4, sizes=None, listed=None, whole=(2, 4)):
    """listed: offsets of all shards by rank, in the metadata of the whole."""
    sizes = sizes or (rows, 4)
    offset = rank if offset is None else offset
    shard = built("torch.distributed._shard.sharded_tensor.shard", "Shard",
                  tensor=tensor(count=count, shape=(rows, 4)), metadata=shard_metadata(offset, sizes))
    about = NONE if listed is None else built(
        "torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata", size=size(*whole),
        shards_metadata=lst(*(shard_metadata(at, sizes, i) for i, at in enumerate(listed))))
    return wrapped(("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), (2, 4),
                   tup(lst(shard), about, NONE, NONE, FALSE))


def ranks(name, mesh=None, local=None, whole=None, shape=(2, 4), skip=None, skip_optim=None, names=None, config=None,
          optim=None, **given):
    """A directory with the files of two ranks. `whole`: w as it is; `local`: its part, or all of it."""
    data = struct.pack("<4f", 0, 1, 2, 3), struct.pack("<4f", 4, 5, 6, 7)
    rows = [record(f"archive/data/ranks{a}{b}", struct.pack("<2i", a, b))
            for a, b in ((0, 1), (0, 7), (1, 7), (7, 8))]
    for rank in (0, 1)[:len(names) if names else 2]:
        part = local(rank) if local else None
        own = shape(rank) if callable(shape) else shape
        body = whole(rank) if whole else part if part and b"_rebuild_wrapper" in part else dtensor(
            rank, mesh(rank) if mesh else None, local=part, shape=own, **given)
        n = max(4, body.count(b"K\x08t") and 8)
        stored = (data[rank] * 2)[:4 * n]
        if rank != skip:
            file = names[rank] if names else f"model_world_size_2_rank_{rank}.pt"
            write(f"{name}/{file}", archive(record("archive/data.pkl", pickle(state(w=body))),
                                            record("archive/data/0", stored), *rows))
        if optim and rank != skip_optim:
            write(f"{name}/optim_world_size_2_rank_{rank}.pt", archive(
                record("archive/data.pkl", pickle(optim(rank))), record("archive/data/0", data[rank]), *rows))
    if config:
        write(f"{name}/fsdp_config.json", json.dumps(config).encode())
