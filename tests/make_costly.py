#!/usr/bin/env python3
"""Writes files of less than a megabyte that describe far more work than their size: make_costly.py DIRECTORY.

Each refers to one thing very often, or says the same thing in a way that is expensive to read. Nothing but
the standard library is used. costly.py runs the command on each of them.
"""

import json
import os
import struct
import sys

from bad_parts import archive, call, chunk, dct, glob, index, info, meta, num, obj, pickle, record, saved
from bad_parts import properties, storage, text, tup, zstd, FALSE, NONE

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "costly"
BYTES = obj("BytesStorageMetadata")


def put(name, content):
    path = os.path.join(FOLDER, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


class Memo:
    """Pushes a value once, and refers to it from then on."""

    def __init__(self):
        self.n = 0

    def keep(self, value):
        """The value with a number, and what refers to it."""
        number, self.n = self.n, self.n + 1
        if number < 256:
            return value + b"q" + bytes([number]), b"h" + bytes([number])
        return value + b"r" + struct.pack("<I", number), b"j" + struct.pack("<I", number)


def listed(*parts):
    return b"](" + b"".join(parts) + b"e"


def mapped(*parts):
    return b"}(" + b"".join(parts) + b"u"


def junk(n):
    """Entries of a dict that no reader looks for."""
    return b"NN" * n


def with_junk(name, n, *pairs):
    """An object whose state has n entries that nobody needs."""
    module = "filesystem" if name == "_StorageInfo" else "metadata"
    state = mapped(*(k + v for k, v in pairs), junk(n))
    return glob("torch.distributed.checkpoint." + module, name) + b")\x81" + state + b"b"


def metadata(tensors, stored, planner=NONE):
    return pickle(obj("Metadata", dct((text("state_dict_metadata"), tensors), (text("storage_data"), stored),
                                      (text("planner_data"), planner))))


def dcp(name, tensors, stored, planner=NONE, data=b""):
    put(f"{name}/.metadata", metadata(tensors, stored, planner))
    put(f"{name}/__0_0.distcp", data)


def float_tensor(n):
    return saved(call("torch._utils", "_rebuild_tensor_v2", storage(count=n), num(0), tup(num(n)), tup(num(1)),
                      FALSE, call("collections", "OrderedDict")), data=b"\1" * 4 * n)


# ---- one state that many refer to ----


def shared_states():
    memo = Memo()
    first, again = memo.keep(with_junk("ChunkStorageMetadata", 200000, (text("offsets"), tup(num(0))),
                                       (text("sizes"), tup(num(0)))))
    chunks = listed(first, again * 200000)
    dcp("state_of_chunks", mapped(text("w"), meta((0,), chunk_list=chunks)), mapped())
    for what, n_junk in dict(infos=200000, indices=200000).items():
        memo = Memo()
        key = with_junk("MetadataIndex", n_junk if what == "indices" else 0, (text("fqn"), text("none")))
        place = with_junk("_StorageInfo", n_junk if what == "infos" else 0, (text("relative_path"), text("x")),
                          (text("offset"), num(0)), (text("length"), num(0)))
        (key, key_again), (place, place_again) = memo.keep(key), memo.keep(place)
        dcp(f"state_of_{what}", mapped(), mapped(key, place, (key_again + place_again) * 90000))
    memo = Memo()
    first, again = memo.keep(with_junk("TensorStorageMetadata", 200000, (text("properties"), properties()),
                                       (text("size"), tup(num(0))), (text("chunks"), listed())))
    names = b"".join(text(f"{i}") + again for i in range(30000))
    dcp("state_of_tensors", mapped(text("w"), first, names), mapped())
    memo = Memo()
    one, one_again = memo.keep(text("some.transform"))
    transforms = listed(one, one_again * 200000)
    place, place_again = memo.keep(info(transforms=transforms))
    key, key_again = memo.keep(index("none"))
    dcp("list_of_transforms", mapped(), mapped(key, place, (key_again + place_again) * 90000))


def shared_texts():
    memo = Memo()
    name, again = memo.keep(text("n" * 300000))
    key, key_again = memo.keep(with_junk("MetadataIndex", 0, (text("fqn"), again)))
    place, place_again = memo.keep(info())
    dcp("name_looked_up", mapped(name, BYTES), mapped(key, place, (key_again + place_again) * 90000))
    memo = Memo()
    path, path_again = memo.keep(text("p" * 3000))
    key, key_again = memo.keep(index("none"))
    infos = b"".join(key_again + with_junk("_StorageInfo", 0, (text("relative_path"), path_again),
                                           (text("offset"), num(0)), (text("length"), num(0)))
                     for _ in range(2500))
    first = with_junk("_StorageInfo", 0, (text("relative_path"), path), (text("offset"), num(0)),
                      (text("length"), num(0)))
    dcp("file_looked_up", mapped(), mapped(key, first, infos))
    memo = Memo()
    step, step_again = memo.keep(text(b"\x02" * 150000))
    path, path_again = memo.keep(tup(step, step_again * 900))
    name, name_again = memo.keep(text("v"))
    dcp("paths_as_text", mapped(name, BYTES), mapped(), mapped(name_again, path, (name_again + path_again) * 90000))


def sorted_boxes():
    """Entries whose index is wrong: the boxes of one tensor and of another are searched in turn."""
    memo = Memo()
    one, again = memo.keep(chunk((0,), (0,)))
    boxes, boxes_again = memo.keep(listed(one, again * 100000))
    place, place_again = memo.keep(info())
    keys = [memo.keep(index(name, (1,))) for name in "ab"]
    entries = keys[0][0] + place + keys[1][0] + place_again
    entries += (keys[0][1] + place_again + keys[1][1] + place_again) * 70000
    dcp("sorted_in_turn", mapped(text("a"), meta((0,), chunk_list=boxes), text("b"),
                                 meta((0,), chunk_list=boxes_again)), mapped(entries))
    dims = 16
    one, again = Memo().keep(chunk((0,) * dims, (1,) * dims))
    dcp("boxes_of_16_dims", mapped(text("w"), meta((1,) * dims, chunk_list=listed(one, again * 400000))), mapped())


# ---- values that are printed ----


def opaque(first, refs=250000, values=200):
    """Dicts of many values, each a long list that turns out to be opaque at its end."""
    memo = Memo()
    value, value_again = memo.keep(first)
    items, items_again = memo.keep(listed(value, value_again * refs, glob("os", "system")))
    return saved(mapped(text("0"), items, *(text(f"{i}") + items_again for i in range(1, values))))


def printed_values():
    put("decimals.pt", opaque(b"\x8b" + struct.pack("<i", 256) + b"\x5a" * 256))
    put("floats.pt", opaque(b"G" + struct.pack(">d", 1.2345678901234567e-200)))
    put("subnormals.pt", opaque(b"G" + struct.pack(">Q", 12345678901)))
    put("escapes.pt", opaque(text(b"\x03" * 1000)))
    put("hex.pt", opaque(b"B" + struct.pack("<I", 5000) + b"\0" * 5000))
    memo = Memo()
    value, again = memo.keep(text(b"\x04" * 20000))
    put("long_list.pt", saved(listed(value, again * 300000)))
    put("many_nodes.pt", saved(b"(" + b"]" * 700000 + b"1" + listed(value, again * 50000)))
    for what, inner in dict(lists=b"]", dicts=b"}").items():
        memo = Memo()
        value, again = memo.keep(inner)
        for _ in range(50):
            value, again = memo.keep(listed(value, again * 3))
        put(f"shared_{what}.pt", saved(value))
    memo = Memo()
    key, key_again = memo.keep(text("k" * 90))
    value, again = memo.keep(num(1))
    for _ in range(20):
        value, again = memo.keep(mapped(key_again, value, (key_again + again) * 30))
    put("keys_of_dicts.pt", saved(listed(key, value)))
    memo = Memo()
    one, one_again = memo.keep(call("torch._utils", "_rebuild_tensor_v2", storage(count=200000), num(0),
                                    tup(num(200000)), tup(num(1)), FALSE, call("collections", "OrderedDict")))
    names = b"".join(text(f"{i}") + one_again for i in range(20000))
    put("one_storage.pt", saved(mapped(text("w"), one, names), data=b"\1" * 800000))


# ---- compression ----

HEAD = b"\x28\xb5\x2f\xfd\x00\x38"


def block(kind, n, last=False):
    return (last | kind << 1 | n << 3).to_bytes(3, "little")


def value_file(name, item, layers, values=1):
    descriptors = listed(*[text("stream.zstd")] * layers)
    memo = Memo()
    place, again = memo.keep(info(length=len(item), transforms=descriptors))
    cls, cls_again = memo.keep(glob("torch.distributed.checkpoint.metadata", "MetadataIndex"))
    key, key_again = memo.keep(text("fqn"))
    entries = cls + b")\x81}" + key + text("0") + b"sb" + place
    entries += b"".join(cls_again + b")\x81}" + key_again + text(f"{i}") + b"sb" + again for i in range(1, values))
    kind, kind_again = memo.keep(BYTES)
    dcp(name, mapped(*(text(f"{i}") + (kind_again if i else kind) for i in range(values))), mapped(entries), data=item)


def zeros(total):
    full, rest = divmod(total, 1 << 17)
    return HEAD + (block(1, 1 << 17) + b"\0") * full + block(1, rest, True) + b"\0"


def values_as_text():
    """Values of one item of 1 kB, each of which is 60 kB of text."""
    memo = Memo()
    part, again = memo.keep(text("a" * 480))
    item = archive(record("archive/data.pkl", pickle(listed(part, again * 130))))
    value_file("values_as_text", item, 0, values=20000)


def compressed():
    """Frames of zeros, frames that are skipped, and both inside of others."""
    skipped = struct.pack("<II", 0x184D2A51, (1 << 30) - 8)
    inner = HEAD + block(0, 8) + skipped + (block(1, 1 << 17) + b"\0") * 8191 + block(1, (1 << 17) - 8, True) + b"\0"
    value_file("skipped_frames", zstd(inner[:60000]) + zstd(inner[60000:][:60000]), 2)
    value_file("skipped_in_zeros", inner, 2)
    value_file("empty_frames", struct.pack("<II", 0x184D2A50, 0) * 100000, 1)
    value_file("empty_frames_inside", zstd(*[struct.pack("<II", 0x184D2A50, 0) * 16000] * 6), 2)
    value_file("zeros", zeros(1 << 34), 1)
    nodes = pickle(b"]0" * 30000 + b"N")
    plain = archive(record("archive/data.pkl", nodes), record("archive/version", b"3\n"))
    repeated = zstd(*[plain[i:i + 60000] for i in range(0, len(plain), 60000)])
    value_file("many_values_of_one_item", repeated, 1, values=9000)
    n = 1 << 20
    plain = archive(record("archive/data.pkl", pickle(b"(" + b"N" * n + b"1N"), crc=0),
                    record("archive/version", b"3\n"))
    start, end = plain.split(b"N" * n)
    value_file("many_values_of_one_byte", zstd(start, *[(b"N", 1 << 17)] * 8, end), 1, values=9000)
    memo = Memo()
    n = 1 << 36
    tensor = meta((n,), (((0,), (n,)),))
    place, again = memo.keep(info(length=500000, transforms=listed(text("stream.zstd"))))
    names = [f"{i}" for i in range(200)]
    entries = b"".join(index(name, (0,)) + (again if i else place) for i, name in enumerate(names))
    dcp("tensors_of_zeros", mapped(*(text(name) + tensor for name in names)), mapped(entries),
        data=zeros(1 << 34)[:500000])


# ---- items ----


def referred_items():
    n = 5000
    header = json.dumps({f"w{i}": dict(dtype="F32", shape=[1], data_offsets=[4 * i, 4 * i + 4])
                         for i in range(n)}).encode()
    blob = struct.pack("<Q", len(header)) + header + b"\0" * 4 * n
    broken = struct.pack("<Q", len(header)) + header[:-1] + b"x" + b"\0" * 4 * n
    for what, data in dict(blob=blob, broken_blob=broken).items():
        memo = Memo()
        tensor, tensor_again = memo.keep(meta((1,), (((0,), (1,)),)))
        place, again = memo.keep(info(length=len(data)))
        tensors = b"".join(text(f"w{i}") + (tensor_again if i else tensor) for i in range(n))
        stored = b"".join(index(f"w{i}") + (again if i else place) for i in range(n))
        dcp(f"tensors_of_one_{what}", mapped(tensors), mapped(stored), data=data)
    many = [record(f"archive/data/{i}", b"") for i in range(1, 3000)]
    item = saved(call("torch._utils", "_rebuild_tensor_v2", storage(count=8), num(0), tup(num(8)), tup(num(1)),
                      FALSE, call("collections", "OrderedDict")), *many)
    for what in ("one_archive", "archives_in_turn"):
        memo = Memo()
        tensor, tensor_again = memo.keep(meta((8,), (((0,), (8,)),)))
        places = [memo.keep(info(offset=o, length=len(item))) for o in (0, len(item))]
        used = [False, False]
        stored = b""
        for i in range(4000):
            which = i % 2 if what == "archives_in_turn" else 0
            stored += index(f"{i}") + places[which][used[which]]
            used[which] = True
        tensors = b"".join(text(f"{i}") + (tensor_again if i else tensor) for i in range(4000))
        dcp(f"tensors_of_{what}", mapped(tensors), mapped(stored), data=item * 2)
    width, count = 12000, 12000
    item, memo = float_tensor(width), Memo()
    boxes = listed(*(chunk((i,), (width,)) for i in range(4000)))
    place, again = memo.keep(info(length=len(item)))
    stored = b"".join(index("w", (i,)) + (again if i else place) for i in range(4000))
    dcp("shifted_boxes", mapped(text("w"), meta((count + 4000,), chunk_list=boxes)), mapped(stored), data=item)


def names_of_headers():
    def header(*names):
        body = b"{" + b",".join(b'"' + n + b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' for n in names) + b"}"
        return struct.pack("<Q", len(body)) + body

    put("dots.safetensors", header(b"." * 400000))
    put("dots_of_two.safetensors", header(b"." * 300000, b"." * 300000 + b"a"))
    put("parts.safetensors", header(*(b"a." * 2000 + b"%d" % i for i in range(200))))
    put("escapes.safetensors", header(b"\\u0007" * 150000))


def main():
    for make in (shared_states, shared_texts, sorted_boxes, printed_values, values_as_text, compressed,
                 referred_items, names_of_headers):
        make()


if __name__ == "__main__":
    main()
