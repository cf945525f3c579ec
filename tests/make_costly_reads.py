#!/usr/bin/env python3
"""Writes more files as make_costly.py does, whose bytes are expensive to read: make_costly_reads.py DIRECTORY.

Many streams that are open at a time, items and files that are read again and again, views of rows that are apart,
boxes that overlap, and boxes that no file has.
"""

import json
import os
import struct

import bad_orbax
from bad_parts import chunk, index, info, meta, pickle, safe, saved, streamed, tensor, text, zstd, DATA, STREAM, ZSTD
from make_costly import dcp, listed, mapped, put, Memo, FOLDER


def zeros(n):
    """Blocks of zeros."""
    return [(b"\0", min(1 << 17, n - at)) for at in range(0, n, 1 << 17)]


# ---- streams ----


def array(name, about, chunks):
    put(f"{name}/_METADATA", b"{}")
    put(f"{name}/w/" + ("zarr.json" if b"node_type" in about else ".zarray"), about)
    for key, content in chunks.items():
        put(f"{name}/w/{key}", content)


def columns():
    """Arrays cut by columns: a row has an element of each chunk, so all chunks are read at a time."""
    def columns_of(rows, n, **more):
        return bad_orbax.zarray(shape=[rows, n], chunks=[rows, 1], compressor={"id": "zstd"}, **more)

    for what, rows, n in ("small", 65536, 3000), ("large", 1 << 18, 800):
        array(f"columns_{what}", columns_of(rows, n), dict.fromkeys((f"0.{i}" for i in range(n)),
                                                                    zstd(*zeros(4 * rows))))
    rows, n = 65536, 3000
    frame = zstd(*zeros(4 * rows))
    little = bad_orbax.codec("bytes", endian="little")
    about = bad_orbax.zarr_json(shape=[rows, n], chunk=(rows, n), codecs=[bad_orbax.codec(
        "sharding_indexed", chunk_shape=[rows, 1], index_codecs=[little, bad_orbax.codec("crc32c")],
        codecs=[little, bad_orbax.codec("zstd", level=1)])])
    entries = b"".join(struct.pack("<QQ", 0, len(frame)) for _ in range(n))
    array("columns_of_one_chunk", about, {"c/0/0": frame + entries + bad_orbax.crc32c(entries)})
    n = 400 << 20
    put("clipped_chunks/_METADATA", b"{}")
    for i in range(60):
        put(f"clipped_chunks/w{i}/.zarray", bad_orbax.zarray(shape=[1], chunks=[n], dtype="|u1",
                                                             compressor={"id": "zstd"}))
        put(f"clipped_chunks/w{i}/0", zstd(*zeros(n)))
    about = bad_orbax.zarray(shape=[1024, 1024 * 200], chunks=[1024, 1024], order="F", compressor={"id": "zstd"})
    array("transposed_chunks", about, dict.fromkeys((f"0.{i}" for i in range(200)), zstd(*zeros(4 << 20))))


def streamed_tensor(shape, strides):
    """A compressed item of zeros, whose CRC-32s are not known."""
    n = 4
    for extent in shape:
        n *= extent
    out = b""
    for name, content in ("archive/data.pkl", pickle(tensor(shape, strides, count=n // 4))), ("archive/data/0", b""):
        out += struct.pack("<4s5HIIIHH", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), 0) + name.encode() + content
        if content:
            out += struct.pack("<4sIII", b"PK\7\x08", 0, len(content), len(content))
    end = struct.pack("<4sIII", b"PK\7\x08", 0, n, n) + b"\0" * 600
    return zstd(out, *zeros(n), end, window=21)


def boxes_of(name, shape, boxes, item, **more):
    """A tensor whose boxes have the item, which is there twice, in turn."""
    memo, entries = Memo(), b""
    places = [memo.keep(info(offset=at, length=len(item), **more)) for at in (0, len(item))]
    for i, (lo, _) in enumerate(boxes):
        entries += index("w", lo) + places[i % 2][i > 1]
    dcp(name, mapped(text("w"), meta(shape, chunk_list=listed(*(chunk(*b) for b in boxes)))), mapped(entries),
        data=item * 2)


def streams():
    n = 2500
    boxes_of("columns_of_items", (65536, n), [((0, i), (65536, 1)) for i in range(n)],
             streamed_tensor((65536, 1), (1, 1)), transforms=ZSTD)
    n = 100 << 20
    boxes_of("two_overlapping_streams", (n + 1,), [((i,), (n,)) for i in range(2)], streamed_tensor((n,), (1,)),
             transforms=ZSTD)
    n = 2 << 20
    boxes_of("many_overlapping_streams", (n + 128,), [((i,), (n,)) for i in range(85)], streamed_tensor((n,), (1,)),
             transforms=ZSTD)
    at = STREAM.index(DATA)
    boxes_of("windows_that_grow", (2, 4), [((0, 0), (2, 4))],
             zstd(STREAM[:at], window=17) + zstd(STREAM[at:], window=24), transforms=ZSTD)


def shared_items():
    """Tensors that all refer to one compressed item, which begins with frames of nothing or has many layers."""
    def tensors_of(name, item, layers, ntensors):
        memo = Memo()
        where, again = memo.keep(info(length=len(item), transforms=listed(*[text("stream.zstd")] * layers)))
        whole, whole_again = memo.keep(meta((8,), (((0,), (8,)),)))
        names = [f"{i}" for i in range(ntensors)]
        dcp(name, mapped(*(text(n) + (whole_again if i else whole) for i, n in enumerate(names))),
            mapped(*(index(n, (0,)) + (again if i else where) for i, n in enumerate(names))), data=item)

    item = zstd(streamed(tensor((8,), (1,), count=8)))
    nothing = b"\x28\xb5\x2f\xfd\x00\x38\1\0\0"
    tensors_of("tensors_of_one_stream", nothing * 60000 + item, 1, 3500)
    for _ in range(7):
        item = zstd(item)
    tensors_of("tensors_of_one_deep_stream", item, 8, 4000)
    nothings = bytes.fromhex("28b52ffd00388d00004828b52ffd00380100000100efffcccb11")  # 14563 times nothing
    padding = struct.pack("<II", 0x184D2A50, 450) + b"x" * 450
    tensors_of("frames_of_nothing", (nothings + padding) * 1900, 2, 18)


# ---- links ----


def links():
    """A thousand names of one file."""
    tensors = {f"{i}": dict(dtype="U8", shape=[0], data_offsets=[0, 0]) for i in range(12000)}
    put("links/a.safetensors", safe(tensors, b""))
    put("links_of_pickles/a.bin", saved(b"]0" * 300000 + tensor()))
    put("links_of_pickles/pytorch_model.bin.index.json",
        json.dumps({"weight_map": {f"{i}": f"{i}.bin" for i in range(1000)}}).encode())
    for i in range(1000):
        os.symlink("a.safetensors", os.path.join(FOLDER, f"links/{i}.safetensors"))
        os.link(os.path.join(FOLDER, "links_of_pickles/a.bin"), os.path.join(FOLDER, f"links_of_pickles/{i}.bin"))


# ---- views ----


def views():
    def view(name, shape, strides, nbytes, dtype="float32", cls="FloatStorage", ntensors=100):
        width = 4 if dtype == "float32" else 1
        item, memo = saved(tensor(shape, strides, count=nbytes // width, cls=cls), data=b"\1" * nbytes), Memo()
        where, again = memo.keep(info(length=len(item)))
        whole = meta(shape, (((0,) * len(shape), shape),), dtype=dtype)
        names = [f"{i}" for i in range(ntensors)]
        dcp(name, mapped(*(text(n) + whole for n in names)),
            mapped(*(index(n, (0,) * len(shape)) + (again if i else where) for i, n in enumerate(names))), data=item)

    view("every_other_element", (90000,), (2,), 720000)
    view("eight_of_nine_bytes", (80000, 8), (9, 1), 720000, "uint8", "ByteStorage")
    view("elements_in_five_dims", (9,) * 5, (80000, 8000, 800, 80, 8), 720000, "uint8", "ByteStorage", ntensors=1050)
    view("expanded_rows", (10000, 10, 2), (0, 0, 8), 720000)
    memo = Memo()
    one, again = memo.keep(tensor((90000,), (2,), count=180000))
    put("strided_views.pt", saved(mapped(*(text(f"{i}") + (again if i else one) for i in range(80))),
                                  data=b"\1" * 720000))


# ---- boxes ----


def overlaps():
    n = 90000
    boxes_of("overlapping_columns", (n, 130), [((0, i), (n, 2)) for i in range(128)],
             saved(tensor((n, 2), (2, 1), count=2 * n), data=b"\1" * 8 * n)[:430000])
    memo = Memo()
    one, again = memo.keep(chunk((0, 0), (2, 4)))
    item = saved(tensor())
    dcp("boxes_without_bytes", mapped(text("w"), meta(chunk_list=listed(one, again * 300000))),
        mapped(index("w", (0, 0)) + info(length=len(item))), data=item)


def main():
    for make in (columns, streams, shared_items, links, views, overlaps):
        make()


if __name__ == "__main__":
    main()
