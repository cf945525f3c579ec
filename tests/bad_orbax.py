"""Orbax checkpoints that break one rule each, for make_bad.py: OCDBT databases, zarr arrays, trees.

As in bad_parts.py, every function has bytes, right ones unless it is told what to say wrongly.
"""

import json
import struct

from bad_parts import write, zstd, DATA


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<I", crc ^ 0xFFFFFFFF)


# ---- OCDBT ----


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def column(numbers):
    return b"".join(varint(n) for n in numbers)


def frame(magic, body, length=None, version=0, compression=0, crc=None):
    head = struct.pack(">I", magic)
    tail = varint(version) + varint(compression) + body
    head += struct.pack("<Q", len(tail) + 16 if length is None else length) + tail
    return head + (crc32c(head) if crc is None else crc)


def table(paths=("d/0",), bases=None, count=None):
    paths = [path.encode() for path in paths]
    bases = bases or [0] * len(paths)
    return (varint(len(paths) if count is None else count) + column([0] * (len(paths) - 1)) +
            column(map(len, paths)) + column(bases) + b"".join(paths))


def settings(kind=0, compression=b"\0"):
    return bytes(16) + varint(kind) + varint(100) + varint(1000) + b"\4" + compression


def versions(*roots, generations=None):
    """Each root is (height, file, offset, length, number of keys)."""
    height, file, offset, length, keys = zip(*roots) if roots else ((),) * 5
    n = len(roots)
    return (varint(n) + column(generations or range(1, n + 1)) + bytes(height) + column(file) + column(offset) +
            column(length) + column(keys) + column([0] * (2 * n)) + bytes(8 * n))


def manifest(*roots, files=None, config=None, generations=None, **wrong):
    body = (config or settings()) + (files or table()) + versions(*roots, generations=generations) + varint(0)
    return frame(0x0CDB3A2A, body, **wrong)


def leaf(entries, files=None, height=0, shared=None, kinds=None, tail=b"", count=None, **wrong):
    """Entries are (key, bytes) for values inside, or (key, (file, offset, length))."""
    n = len(entries)
    keys = [key.encode() for key, _ in entries]
    outside = [isinstance(value, tuple) for _, value in entries]
    body = (bytes([height]) + (files or table()) + varint(n if count is None else count) +
            column(shared or [0] * (n - 1)) + column(map(len, keys)) + b"".join(keys) +
            column(value[2] if out else len(value) for (_, value), out in zip(entries, outside)) +
            column(kinds or map(int, outside)) +
            column(value[0] for (_, value), out in zip(entries, outside) if out) +
            column(value[1] for (_, value), out in zip(entries, outside) if out) +
            b"".join(value for (_, value), out in zip(entries, outside) if not out) + tail)
    return frame(0x0CDB20DE, body, **wrong)


def inner(children, height=1, files=None, **wrong):
    """Children are (key, length of the common prefix, offset, length)."""
    n = len(children)
    keys, common, offsets, lengths = zip(*children)
    body = (bytes([height]) + (files or table()) + varint(n) + column([0] * (n - 1)) +
            column(map(len, keys)) + column(common) + "".join(keys).encode() + column([0] * n) +
            column(offsets) + column(lengths) + column([0] * (3 * n)))
    return frame(0x0CDB20DE, body, **wrong)


# ---- zarr ----


def zarray(**changes):
    about = {"shape": [2, 4], "chunks": [2, 4], "dtype": "<f4", "compressor": None, "order": "C",
             "filters": None, "fill_value": None, "zarr_format": 2}
    about.update(changes)
    return json.dumps(about).encode()


def codec(name, **settings):
    return {"name": name, "configuration": settings} if settings else {"name": name}


def zarr_json(chunk=(2, 4), codecs=None, **changes):
    about = {"zarr_format": 3, "node_type": "array", "shape": [2, 4], "data_type": "float32",
             "chunk_grid": codec("regular", chunk_shape=list(chunk)), "chunk_key_encoding": codec("default"),
             "codecs": codecs or [codec("bytes", endian="little")], "fill_value": 0}
    about.update(changes)
    return json.dumps(about).encode()


def sharded(inner=(1, 4), **changes):
    index = [codec("bytes", endian="little"), codec("crc32c")]
    return zarr_json(codecs=[codec("sharding_indexed", chunk_shape=list(inner), index_codecs=index,
                                   codecs=[codec("bytes", endian="little")])], **changes)


def shard(entries=((0, 16), (16, 16)), crc=None, data=DATA):
    index = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    return data + index + (crc32c(index) if crc is None else crc)


# ---- checkpoints ----


def tree(*names, **types):
    entries = {}
    for name in names:
        entries[f"('{name}',)"] = {"key_metadata": [{"key": name, "key_type": 2}],
                                   "value_metadata": {"value_type": types.get(name, "np.ndarray")}}
    return json.dumps({"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": False}).encode()


GOOD_LEAF = leaf([("w/.zarray", zarray()), ("w/0.0", (0, 0, 32))])


def ocdbt(name, node=GOOD_LEAF, height=0, before=DATA, root=None, top=None, keys=2):
    """The data file has the chunk, and then the root. None of the rest is needed to be right."""
    write(f"{name}/d/0", before + node)
    root = root or (height, 0, len(before), len(node), keys)
    write(f"{name}/manifest.ocdbt", manifest(root) if top is None else top)


def zarr(name, about, key="0.0", chunk=DATA, metadata=None):
    write(f"{name}/_METADATA", metadata or tree("w"))
    write(f"{name}/w/" + ("zarr.json" if b'"node_type"' in about else ".zarray"), about)
    if chunk is not None:
        write(f"{name}/w/{key}", chunk)


# ---- rules ----


def good_ones():
    ocdbt("good_ocdbt")
    zarr("good_zarr2", zarray())
    zarr("good_zarr3", sharded(), "c/0/0", shard())
    stored = shard()
    ocdbt("good_ocdbt_shard", leaf([("w/c/0/0", (0, 0, len(stored))), ("w/zarr.json", sharded())]), before=stored)
    about = ("w/.zarray", zarray())
    one, two = leaf([about]), leaf([("w/0.0", (0, 0, 32))])
    top = inner([("w/.zarray", 0, 32, len(one)), ("w/0.0", 0, 32 + len(one), len(two))])
    ocdbt("good_ocdbt_inner", one + two + top, root=(1, 0, 32 + len(one + two), len(top), 2))
    zarr("zarr_grid_huge", zarray(shape=[2**50, 4], chunks=[4, 4]), chunk=struct.pack("<16f", *range(16)))


def frames():
    root = (0, 0, 32, len(GOOD_LEAF), 2)
    good = manifest(root)
    for what, top in dict(short=good[:17], cut=good[:-1], empty=b"", length=manifest(root, length=2**63),
                          crc=manifest(root, crc=bytes(4)), version=manifest(root, version=1),
                          compression=manifest(root, compression=2), numbered=manifest(config=settings(1)),
                          codec=manifest(root, config=settings(0, b"\2")), none=manifest(),
                          magic=frame(0x0CDB20DE, b""), body=frame(0x0CDB3A2A, b""),
                          count=manifest(files=varint(2**40)), varint=manifest(files=b"\xff" * 10),
                          file=manifest((0, 7, 32, len(GOOD_LEAF), 2)),
                          generations=manifest(root, root, generations=(2, 1)),
                          keys=manifest((0, 0, 32, len(GOOD_LEAF), 3)),
                          no_keys=manifest((0, 0, 32, len(GOOD_LEAF), 0)),
                          no_zstd=manifest(root, compression=1)).items():
        ocdbt(f"ocdbt_manifest_{what}", top=top)


def paths():
    for what, path in dict(parent="../secret", absolute="/etc/passwd", missing="d/1", empty="", dot="./d/0",
                           directory="d", nul="d/0\0x").items():
        ocdbt(f"ocdbt_path_{what}", top=manifest((0, 0, 32, len(GOOD_LEAF), 2), files=table([path])))
    ocdbt("ocdbt_base_long", top=manifest((0, 0, 32, len(GOOD_LEAF), 2), files=table(bases=[4])))
    long = table(["x" * 4000, "y" * 97], count=2)
    ocdbt("ocdbt_path_long", leaf([("w/.zarray", zarray()), ("w/0.0", (1, 0, 32))], long))


def nodes():
    entries = [("w/.zarray", zarray()), ("w/0.0", (0, 0, 32))]
    for what, node in dict(crc=leaf(entries, crc=bytes(4)), height=leaf(entries, height=1),
                           order=leaf(entries[::-1]), twice=leaf(entries + entries[1:]),
                           kind=leaf(entries, kinds=[0, 2]), tail=leaf(entries, tail=b"x"),
                           count=leaf(entries, count=2**30), none=leaf([]),
                           shared=leaf(entries, shared=[10]),
                           value_beyond=leaf(entries[:1] + [("w/0.0", (0, 1, 2**62))]),
                           value_short=leaf(entries[:1] + [("w/0.0", (0, 0, 31))]),
                           value_file=leaf(entries[:1] + [("w/0.0", (9, 0, 32))]),
                           no_array=leaf(entries[1:])).items():
        ocdbt(f"ocdbt_node_{what}", node, keys=1 if what == "no_array" else 2)
    ocdbt("ocdbt_node_beyond", root=(0, 0, 2**62, 2**62, 2))
    ocdbt("ocdbt_node_short", root=(0, 0, 32, 10, 2))
    ocdbt("ocdbt_empty", root=(0, 0, 2**64 - 1, 2**64 - 1, 0))
    ocdbt("ocdbt_keys_long", leaf([("k" * 4000, b""), ("l" * 97, b"")], shared=[4000]))
    bomb = [("k" * 4000, b"")] + [("l", b"")] * 90
    ocdbt("ocdbt_keys_bomb", leaf(bomb, shared=list(range(4000, 4090))), keys=len(bomb))


def trees():
    child = leaf([("w/.zarray", zarray()), ("w/0.0", (0, 0, 32))])
    at = 32 + len(child)
    again = inner([("a", 1, 32, len(child)), ("b", 1, 32, len(child)), ("c", 1, 32, len(child))])
    ocdbt("ocdbt_tree_again", child + again, root=(1, 0, at, len(again), 6))
    same = inner([("a", 0, at, 60)])
    ocdbt("ocdbt_tree_cycle", child + same, root=(1, 0, at, len(same), 2))
    common = inner([("w", 2, 32, len(child))])
    ocdbt("ocdbt_tree_common", child + common, root=(1, 0, at, len(common), 2))


def metadata_of_arrays():
    for what, about in dict(not_json=b"shape", list=b"[]", no_shape=zarray(shape=None), no_dtype=b'{"shape": [2]}',
                            ndim=zarray(shape=[2] * 17, chunks=[2] * 17), chunk_zero=zarray(chunks=[0, 4]),
                            chunk_ndim=zarray(chunks=[2]), chunk_huge=zarray(chunks=[2**61, 2**61]),
                            shape_huge=zarray(shape=[2**62, 2**62]), shape_negative=zarray(shape=[-2, 4]),
                            shape_2_64=b'{"shape": [18446744073709551616]}', order=zarray(order="K"),
                            separator=zarray(dimension_separator="_"), filters=zarray(filters=[{"id": "x"}]),
                            dtype=zarray(dtype="int4"), dtype_fields=zarray(dtype=[["a", "<f4"]]),
                            compressor=zarray(compressor={"id": "blosc"}),
                            compressor_none=zarray(compressor={"level": 1}), differs=zarray(dtype="<f8"),
                            fill=zarray(fill_value=[1, 2]),
                            deep=b'{"attributes": ' + b"[" * 100 + b"]" * 100 + b"}").items():
        zarr(f"zarr_{what}", about)
    zarr("zarr3_extension_good", zarr_json(hint={"must_understand": False}), "c/0/0")
    zarr("zarr_twice", zarray()[:-1] + b', "dtype": "bfloat16"}')
    inner_twice = sharded().replace(b'"chunk_shape": [1, 4]', b'"codecs": [{"name": "bytes"}], "chunk_shape": [1, 4]')
    zarr("zarr3_codecs_twice", inner_twice, "c/0/0", shard())
    zarr("zarr_fill_range", zarray(dtype="<i4", fill_value=2**40), chunk=None)
    zarr("zarr_fill_negative", zarray(dtype="<u8", fill_value=-1), chunk=None)
    many = 2**62
    zarr("zarr_grid_overflow", zarray(shape=[many, many, 0], chunks=[1, 1, 1]), f"{many - 1}.{many - 1}.0")
    zarr("zarr_fill_unknown", zarray(dtype="float8_e4m3fn", fill_value=1.5), chunk=None)
    nested = codec("sharding_indexed", chunk_shape=[1, 4], codecs=[codec("sharding_indexed", chunk_shape=[1, 1])])
    for what, about in dict(codec=zarr_json(codecs=[codec("bytes"), codec("gzip", level=1)]),
                            transpose=zarr_json(codecs=[codec("transpose", order=[1, 0]), codec("bytes")]),
                            codecs_none=zarr_json(codecs=[codec("zstd")]), nested=zarr_json(codecs=[nested]),
                            grid=zarr_json(chunk_grid=codec("irregular")),
                            encoding=zarr_json(chunk_key_encoding=codec("other")),
                            transformers=zarr_json(storage_transformers=[codec("x")]),
                            extension=zarr_json(key_order="reversed"), format=zarr_json(zarr_format=2),
                            extension_object=zarr_json(key_order={"name": "reversed"}),
                            group=zarr_json(node_type="group"), uneven=sharded((2, 3)),
                            dims=sharded((2,))).items():
        zarr(f"zarr3_{what}", about, "c/0/0")


def chunks():
    zarr("zarr_chunk_short", zarray(), chunk=DATA[:-1])
    zarr("zarr_chunk_long", zarray(), chunk=DATA + b"x")
    zarr("zarr_chunk_empty", zarray(), chunk=b"")
    for what, packed in dict(short=zstd(DATA[:-1]), long=zstd(DATA + b"x"), cut=zstd(DATA)[:-1], none=DATA,
                             empty=b"", good=zstd(DATA)).items():
        zarr(f"zarr_zstd_{what}", zarray(compressor={"id": "zstd"}), chunk=packed)
    checked = zarr_json(codecs=[codec("bytes", endian="little"), codec("crc32c")])
    zarr("zarr3_crc_good", checked, "c/0/0", DATA + crc32c(DATA))
    zarr("zarr3_crc", checked, "c/0/0", DATA + bytes(4))
    zarr("zarr3_crc_none", checked, "c/0/0", DATA)
    for what, stored in dict(short=b"x", crc=shard(crc=bytes(4)), beyond=shard([(0, 16), (20, 60)]),
                             huge=shard([(0, 16), (2**63, 2**63)]), length=shard([(0, 16), (16, 15)]),
                             empty=b"").items():
        zarr(f"zarr3_shard_{what}", sharded(), "c/0/0", stored)
    zarr("zarr3_shard_many", sharded((1, 1), chunk_grid=codec("regular", chunk_shape=[2**30, 2**30])), "c/0/0", shard())


def trees_of_names():
    write("orbax_both/w/zarr.json", zarr_json())
    zarr("orbax_both", zarray())
    for what, metadata in dict(not_json=b"x", list=b"[]", deep=b'{"a": ' + b"[" * 100, missing=tree("w", "v"),
                               text=tree("w", "v", v="string"),
                               twice=b'{"tree_metadata": {"a": {"key_metadata": [{"key": "a"}]}, '
                               b'"b": {"key_metadata": [{"key": "a"}]}}}',
                               no_key=b'{"tree_metadata": {"a": {"key_metadata": [{}]}}}',
                               unnamed=b'{"tree_metadata": {"a": {}}}').items():
        zarr(f"orbax_tree_{what}", zarray(), metadata=metadata)
    write("orbax_unfinished/ocdbt.process_0/manifest.ocdbt", manifest((0, 0, 32, len(GOOD_LEAF), 2)))
    write("orbax_unfinished/_METADATA", tree("w"))
    write("orbax_part/ocdbt.process_0/manifest.ocdbt", manifest((0, 0, 32, len(GOOD_LEAF), 2)))
    ocdbt("orbax_msgpack")
    write("orbax_msgpack/checkpoint", b"\x81\xa1w\x01")
    zarr("orbax_strings", zarray())
    write("orbax_strings/_strings.json", b'{"v": 1}')
    zarr("orbax_steps/3.orbax-checkpoint-tmp-7/default", zarray())
    zarr("orbax_steps/2/default", zarray())
    zarr("orbax_json/2/default", zarray())
    write("orbax_json/2/meta/metadata", b"{")


RULES = (good_ones, frames, paths, nodes, trees, metadata_of_arrays, chunks, trees_of_names)
