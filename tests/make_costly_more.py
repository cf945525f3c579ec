#!/usr/bin/env python3
"""Writes more files as make_costly.py does: of trainers, of Orbax, and headers: make_costly_more.py DIRECTORY."""

import json
import os
import struct

import bad_orbax
import bad_trainers
import make_costly
from bad_parts import archive, built, chunk, dct, dtensor, glob, index, info, meta, num, pickle, pieces, placed
from bad_parts import record, safe, saved, size, state, tensor, text, tup, zstd, NONE
from make_costly import dcp, listed, mapped, metadata, put, Memo

CONTENT = struct.pack("<64i", *range(64))


def flat(n=4, **more):
    return tensor(shape=(n,), strides=(1,), count=64, **more)


def torch_file(name, body, *more, data=CONTENT):
    put(name, archive(record("archive/data.pkl", pickle(body)), record("archive/data/0", data), *more))


# ---- tensors that overlap ----


def overlaps():
    """Rows and columns of one tensor: each row overlaps with each column."""
    n = 2000
    memo = Memo()
    item = saved(tensor(shape=(1, n), strides=(n, 1), count=n), data=b"\1" * 4 * n)
    place_of, again = memo.keep(info(length=len(item)))
    boxes = [((i, 0), (1, n)) for i in range(n)] + [((0, i), (n, 1)) for i in range(n)]
    tensors = mapped(text("w"), meta((n, n), chunk_list=listed(*(chunk(*b) for b in boxes))))
    stored = b"".join(index("w", lo) + (again if i else place_of) for i, (lo, _) in enumerate(boxes))
    dcp("rows_and_columns", tensors, mapped(stored), data=item)
    memo, tensors, stored = Memo(), b"", b""
    width = 150
    item = saved(flat(64), data=b"\1" * 256)
    place_of, again = memo.keep(info(length=len(item)))
    boxes, boxes_again = memo.keep(listed(*(chunk((i,), (64,)) for i in range(width))))
    for t in range(60):
        tensors += text(f"{t}") + meta((64 + width,), chunk_list=boxes_again if t else boxes)
        stored += b"".join(index(f"{t}", (i,)) + (again if t + i else place_of) for i in range(width))
    dcp("shifted_in_tensors", mapped(tensors), mapped(stored), data=item)
    memo = Memo()
    n = 300
    boxes = [((i, 0), (1, n)) for i in range(n)] + [((0, i), (n, 1)) for i in range(n)]
    boxes, boxes_again = memo.keep(listed(*(chunk(*b) for b in boxes)))
    tensors = b"".join(text(f"{t}") + meta((n, n), chunk_list=boxes_again if t else boxes) for t in range(780))
    dcp("crossed_in_tensors", mapped(tensors), mapped())
    numbers = [x for i in range(20000) for x in (0, 1, 0)]
    header = {"w": dict(dtype="F32", shape=[8], data_offsets=[0, 32])}
    put("pieces.safetensors", safe(header, metadata=pieces(numbers, [8])))


# ---- files of ranks ----


def rank_files(name, body, *records, nranks=2):
    for rank in range(nranks):
        torch_file(f"{name}/model_world_size_{nranks}_rank_{rank}.pt", body(rank), *records)


def meshes():
    """Many meshes that refer to one long list of ranks; a shard in very many pieces; views that are copies."""
    n = 60000
    ranks = record("archive/data/r", struct.pack(f"<{n}i", *range(n)))

    def with_meshes(rank):
        memo = Memo()
        local, local_again = memo.keep(flat())
        list_of, list_again = memo.keep(tensor(shape=(n,), strides=(1,), key="r", count=n, cls="IntStorage"))
        places, places_again = memo.keep(tup(placed("Replicate")))
        out = b""
        for i in range(1200):
            mesh = built("torch.distributed.device_mesh", "DeviceMesh", mesh=list_again if i else list_of)
            out += text(f"{i}") + dtensor(rank, mesh, places_again if i else places, local_again if i else local, (4,))
        return mapped(out)

    rank_files("meshes", with_meshes, ranks)

    def in_pieces(rank):
        shard = tup(placed("_StridedShard", dim=0, split_factor=1 << 19))
        local = tensor(shape=(1 << 19,), strides=(0,), count=64)
        mesh = built("torch.distributed.device_mesh", "DeviceMesh",
                     mesh=tensor(shape=(2,), strides=(1,), count=64, cls="IntStorage"))
        return mapped(*(text(f"{i}") + dtensor(rank, mesh, shard, local, (1 << 20,)) for i in range(20)))

    rank_files("strided_shards", in_pieces)

    def states(rank):
        memo, n = Memo(), 4096
        mesh = built("torch.distributed.device_mesh", "DeviceMesh",
                     mesh=tensor(shape=(2,), strides=(1,), count=64, cls="IntStorage"))
        shard = tup(placed("_StridedShard", dim=0, split_factor=n))
        one, again = memo.keep(dtensor(rank, mesh, shard, tensor(shape=(n,), strides=(0,), count=64), (2 * n,)))
        of_one = mapped(*(text(f"s{i}") + (again if i else one) for i in range(40000)))
        return dct((text("state"), mapped(num(0), of_one)), (text("param_groups"), listed()))

    rank_files("strided_states", lambda _: state(w=flat()))
    for rank in range(2):
        torch_file(f"strided_states/optim_world_size_2_rank_{rank}.pt", states(rank))

    def copies(rank):
        memo = Memo()
        view, again = memo.keep(tensor(shape=(300, 300), strides=((1, 300), (300, 1))[rank], count=90000))
        return mapped(*(text(f"{i}") + (again if i else view) for i in range(3000)))

    for rank in range(2):
        put(f"copies/model_world_size_2_rank_{rank}.pt", archive(
            record("archive/data.pkl", pickle(copies(rank))), record("archive/data/0", b"\1" * 360000, crc=0)))

    def objects(_):
        memo = Memo()
        one, again = memo.keep(flat())
        args, args_again = memo.keep(tup(b"N" * 100000, one))
        first = glob("a", "B") + args + b"\x81"
        return listed(first, *(glob("a", "B") + args_again + b"\x81" for _ in range(20000)), again)

    torch_file("objects.pt", objects(0))


def links():
    """The file of one rank, which is also that of all others, by links."""
    n, memo = 2000, Memo()
    one, again = memo.keep(flat())
    name = f"links_of_ranks/model_world_size_{n}_rank_"
    torch_file(f"{name}0.pt", mapped(*(text(f"{i}") + (again if i else one) for i in range(20000))))
    for rank in range(1, n):
        os.symlink(os.path.basename(f"{name}0.pt"), os.path.join(make_costly.FOLDER, f"{name}{rank}.pt"))


def optimizers():
    """Numbers of parameters, and their names, again and again."""
    memo = Memo()
    numbers, again = memo.keep(listed(*(num(i) for i in range(2000))))
    name, name_again = memo.keep(text("n" * 20 + "\1" * 100))
    names, names_again = memo.keep(listed(name, name_again * 1999))
    groups = [state(params=numbers, param_names=names)]
    groups += [dct((text("params"), again), (text("param_names"), names_again))] * 8000
    bad = dct((text("state"), mapped()), (text("param_groups"), listed(*groups)))
    for rank in range(2):
        torch_file(f"groups/model_world_size_2_rank_{rank}.pt", state(w=flat()))
        torch_file(f"groups/optim_world_size_2_rank_{rank}.pt", bad)


# ---- DeepSpeed and Megatron ----


def zero(name, model, optim, stage=1):
    for rank in range(2):
        if rank == 0 or stage == 3:
            file = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch_file(f"{name}/{file}_model_states.pt", model)
        torch_file(f"{name}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", state(optimizer_state_dict=optim))


def trainers():
    def model(n):
        names = mapped(*(text(f"p{i}") + size(0) for i in range(n)))
        return state(module=mapped(), buffer_names=listed(), param_shapes=listed(names))

    def vectors(states, groups=None, fp32=None):
        base = dct((text("state"), states), (text("param_groups"), groups or listed()))
        return dct((text("partition_count"), listed(num(2))), (text("base_optimizer_state"), base),
                   (text("single_partition_of_fp32_groups"), fp32 or listed(flat(1))))

    memo = Memo()
    one, again = memo.keep(flat(1))
    zero("zero_vectors", model(1), vectors(mapped(), fp32=listed(one, again * 400000)))
    memo = Memo()
    one, again = memo.keep(flat(1))
    zero("zero_states", model(8000), vectors(mapped(num(0), mapped(
        *(text(f"s{i}") + (again if i else one) for i in range(250))))))
    memo = Memo()
    long, again = memo.keep(listed(text("\1" * 50000)))
    zero("zero_scalars", model(10000), vectors(mapped(num(0), mapped(
        *(text(f"s{i}") + (again if i else long) for i in range(200))))))
    memo = Memo()
    one, again = memo.keep(mapped(*(text("k" * 1500 + f"{i:04}") + NONE for i in range(250))))
    zero("zero_keys", model(1), vectors(mapped(num(0), one, (num(0) + again) * 60000)))
    memo = Memo()
    one, again = memo.keep(flat(1))
    none, none_again = memo.keep(mapped())
    group, group_again = memo.keep(dct((text("params"), listed(num(1)))))
    zero("zero_ids", model(1), vectors(
        mapped(num(70000), none, (num(70000) + none_again) * 20000), fp32=listed(one, again * 20000),
        groups=listed(group, group_again * 19999, dct((text("params"), listed(num(70000)))))))
    memo = Memo()
    numbers, again = memo.keep(listed(num(0), num(0) * 1000))
    zero("zero_groups", model(10000), vectors(mapped(), listed(state(params=numbers), *(
        dct((text("params"), again)) for _ in range(20000)))))

    memo = Memo()
    one, again = memo.keep(flat())
    for what, name in dict(layers="decoder.layers.{}.w", names="a" * 30 + ".{}").items():
        for rank in range(2):
            parts = mapped(text("x" * 1800), mapped(
                *(text(name.format(i)) + (again if i else one) for i in range(12000))))
            torch_file(f"megatron_{what}/mp_rank_0{rank}/model_optim_rng.pt",
                       state(args=bad_trainers.args(), model=parts))


def old_files():
    """A file of torch before 1.6 whose pickle refers to one list very often."""
    memo = Memo()
    value, again = memo.keep(listed(b"N" * 1000))
    for _ in range(6):
        value, again = memo.keep(tup(value, again * 300))
    parts = [num(0x1950A86A20F9469CFC6C), num(1001), dct(), mapped(text("w"), value), listed()]
    put("old.pt", b"".join(map(pickle, parts)))


# ---- metadata of ranks, joined ----


def joined():
    memo = Memo()
    one, again = memo.keep(chunk((0,), (8,)))
    tensors = mapped(text("w"), meta((8,), chunk_list=listed(one, again * 3000)))
    for rank in range(120):
        put(f"joined/__{rank}.metadata", metadata(tensors, mapped(*[index("w", (0,)) + info()] * 10)))
        put(f"joined/__{rank}_0.distcp", b"")


# ---- pickles ----


def numbers():
    put("long4.pt", saved(listed(b"\x8b" + struct.pack("<i", 700000) + b"\x7f" * 700000)))
    put("long_digits.pt", saved(listed(*[b"\x8a\xff" + b"\x7f" * 255] * 3500)))


# ---- headers ----


def headers():
    def one(name, body):
        put(name, struct.pack("<Q", len(body)) + body)

    one("deep.safetensors", b'{"__metadata__":{"reshard":"{\\"a\\":' + b"[" * 400000 + b'"}}')
    one("long_number.safetensors", b'{"w":{"dtype":"U8","shape":[' + b"0" * 800000 + b'],"data_offsets":[0,0]}}')
    one("metadata.safetensors", b'{"__metadata__":{' + b",".join(b'"%d":"x"' % i for i in range(60000)) + b"}}")
    one("same_names.safetensors", b'{' + b",".join(
        b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' for _ in range(15000)) + b"}")
    names = {f"w{i}": "a.safetensors" for i in range(20000)}
    put("index/model.safetensors.index.json", json.dumps({"weight_map": names}).encode())
    put("index/a.safetensors", safe({"w0": dict(dtype="F32", shape=[8], data_offsets=[0, 32])}))
    put("index_deep/model.safetensors.index.json", b'{"metadata":' + b'{"a":' * 200000)
    put("index_files/model.safetensors.index.json", json.dumps(
        {"weight_map": {f"w{i}": f"{'d' * 200}{i}.safetensors" for i in range(3000)}}).encode())


# ---- Orbax ----


def database(name, node):
    put(f"{name}/manifest.ocdbt", bad_orbax.manifest((0, 0, 0, len(node), 1)))
    put(f"{name}/d/0", node)
    put(f"{name}/_METADATA", b"{}")


def orbax():
    grid = bad_orbax.zarray(shape=[1 << 40, 3], chunks=[1, 1], fill_value=0)
    put("grid/_METADATA", b"{}")
    put("grid/w/.zarray", grid)
    for i in range(1500):
        put(f"grid/w/{i * 7}.1", b"\0" * 4)
    n = 30000
    index_of = b"".join(struct.pack("<QQ", 0, 4) if i % 2 else b"\xff" * 16 for i in range(n))
    put("shard/_METADATA", b"{}")
    put("shard/w/zarr.json", bad_orbax.sharded(inner=(1, 1), shape=[n, 1], chunk_grid=bad_orbax.codec(
        "regular", chunk_shape=[n, 1])))
    put("shard/w/c/0/0", b"\0" * 4 + index_of + bad_orbax.crc32c(index_of))
    names = [[{"key": "k" * 40, "key_type": 2}] * 20 + [{"key": f"{i}", "key_type": 2}] for i in range(400)]
    tree = {f"{i}": {"key_metadata": keys, "value_metadata": {"value_type": "None"}} for i, keys in enumerate(names)}
    put("tree/_METADATA", json.dumps({"tree_metadata": tree}).encode())
    put("strings/_METADATA", b"{}")
    put("strings/_strings.json", json.dumps({f"{i}": "\1" * 100 for i in range(1000)}).encode())
    zeros = [(b"\0", 1 << 17)] * 3000
    body = zstd(*zeros, (b"\0", 1))
    database("compressed_node", bad_orbax.frame(0x0CDB20DE, body, compression=1))
    count = 1 << 20
    body = b"\0" + b"\0" + bad_orbax.varint(count)
    body = zstd(body, *[(b"\0", 1 << 17)] * 200)
    database("compressed_keys", bad_orbax.frame(0x0CDB20DE, body, compression=1))
    names = b"x" * 1000
    n = 60000
    body = (b"\0" + bad_orbax.table() + bad_orbax.varint(n) + bad_orbax.column([1000] * (n - 1)) +
            bad_orbax.column([1003] + [3] * (n - 1)))
    keys = names + b"".join(b"%c%c%c" % (33 + i // 3600, 33 + i // 60 % 60, 33 + i % 60) for i in range(n))
    database("shared_keys", bad_orbax.frame(0x0CDB20DE, body + keys + b"\0" * n + b"\0" * n))


# ---- compressed items ----


def windows():
    """Frames that ask for windows of 2 GiB, and frames in frames."""
    for log in (27, 30, 31, 41):
        item = zstd(b"x" * 100, window=min(log, 41))
        transforms = listed(*[text("stream.zstd")])
        tensors = [f"{i}" for i in range(64)]
        memo = Memo()
        where, again = memo.keep(info(length=len(item), transforms=transforms))
        dcp(f"window_{log}", mapped(*(text(t) + meta((8,), (((0,), (8,)),)) for t in tensors)),
            mapped(*(index(t, (0,)) + (again if i else where) for i, t in enumerate(tensors))), data=item)


def main():
    for make in (overlaps, meshes, links, optimizers, trainers, old_files, joined, numbers, headers, orbax, windows):
        make()


if __name__ == "__main__":
    main()
