#!/usr/bin/env python3
"""Writes tests/bad: checkpoints that break one rule each, named after it.

Each is made from a good one by one change, so that a reader sees how it is wrong; bad.txt has what the
library must say about it. Nothing but the standard library is used, and the output is always the same: run
this again after a change, and commit both.
"""

import json
import shutil
import struct
import zlib

import bad_orbax
import bad_trainers
from bad_parts import (
    about, archive, call, chunk, compressed, dcp, dct, glob, index, info, legacy, lst, meta, metadata, num,
    obj, pickle, pieces, place, placed, mesh, layout_mesh, dtensor, sharded, ranks, record, safe, saved,
    shards, state, storage, streamed, tensor, text, tup, value, write, zstd, DATA, FALSE, FOLDER, GOOD,
    ITEM, NONE, ONE, STREAM, SYSTEM, TRUE, VALUE, ZSTD,
)


def good_ones():
    dcp("good_dcp")
    write("good.pt", saved(state(w=tensor())))
    write("good.safetensors", safe(GOOD))
    compressed("good_zstd")
    compressed("good_zstd_short", STREAM[:-600])
    value("good_value")
    legacy("good_legacy.pt")


def names_that_leave():
    for what, path in dict(parent="../secret", absolute="/etc/passwd", empty="", dot="./__0_0.distcp",
                           middle="a/../../secret", twice="a//b", nul="__0_0.distcp\0.txt").items():
        dcp(f"dcp_path_{what}", path=path)
        if what != "nul":
            write(f"index_path_{what}/model.safetensors.index.json",
                  json.dumps({"weight_map": {"w": path}}).encode())
    write("index_path_torch/pytorch_model.bin.index.json", b'{"weight_map": {"w": "../a.bin"}}')
    dcp("dcp_path_missing", path="__9_0.distcp")


def indices():
    for what, content in dict(not_json=b"weight_map", no_map=b"{}", number=b'{"weight_map": {"w": 1}}',
                              missing=b'{"weight_map": {"w": "none.safetensors"}}',
                              deep=b'{"metadata": ' + b"[" * 100 + b"]" * 100 + b"}").items():
        write(f"index_{what}/model.safetensors.index.json", content)
    for name in "ab":
        write(f"index_two/{name}.safetensors.index.json", b"{}")


def extents_of_items():
    dcp("dcp_offset_beyond", offset=1000000)
    dcp("dcp_offset_huge", offset=2**62, length=2**62)
    dcp("dcp_offset_negative", offset=-1)
    dcp("dcp_offset_shifted", offset=1, length=len(ITEM) - 1)
    dcp("dcp_length_beyond", length=1000000)
    dcp("dcp_length_short", length=len(ITEM) - 1)
    dcp("dcp_length_zero", length=0)
    dcp("dcp_item_truncated", data=ITEM[:200], length=len(ITEM))


def boxes():
    dcp("dcp_box_outside", [("w", meta(chunks=[((1, 0), (2, 4))]))])
    dcp("dcp_box_negative", [("w", meta(chunks=[((-1, 0), (2, 4))]))])
    dcp("dcp_box_ndim", [("w", meta(chunks=[((0,), (2,))]))])
    dcp("dcp_box_hole", [("w", meta(chunks=[((0, 0), (1, 4))]))])
    dcp("dcp_box_overlap", [("w", meta(chunks=[((0, 0), (2, 4)), ((1, 0), (1, 4))]))])
    dcp("dcp_box_without_storage", stored=[])
    dcp("dcp_box_elsewhere", stored=[(index("w", (1, 0)), info())])
    dcp("dcp_chunk_no_chunk", [("w", meta(chunk_list=lst(NONE)))])
    dcp("dcp_chunks_no_list", [("w", meta(chunk_list=dct((num(1), num(2)))))])
    dcp("dcp_box_huge", [("w", meta(chunks=[((0, 0), (2**62, 2**62))]))])
    dcp("dcp_box_empty_far", [("w", meta(chunks=[((0, 0), (2, 4)), ((2**62, 2**62), (0, 2**62))]))])


def shapes():
    dcp("dcp_ndim_17", [("w", meta(shape=[1] * 17, chunks=[([0] * 17, [1] * 17)]))])
    dcp("dcp_shape_2_62", [("w", meta(shape=(2**62, 1), chunks=[]))])
    dcp("dcp_shape_2_63", [("w", meta(shape=(2**63, 1), chunks=[]))])
    dcp("dcp_shape_product", [("w", meta(shape=(2**31, 2**31, 2**31), chunks=[]))])
    dcp("dcp_shape_negative", [("w", meta(shape=(-2, 4), chunks=[]))])
    dcp("dcp_dtype_unknown", [("w", meta(dtype="qint8"))])
    dcp("dcp_size_no_tuple", [("w", obj("TensorStorageMetadata", dct((text("size"), text("x" * 20)))))])
    dcp("dcp_dtype_differs", [("w", meta(dtype="int32"))])
    dcp("dcp_shape_differs", [("w", meta(shape=(4, 2), chunks=[((0, 0), (4, 2))]))])
    dcp("dcp_shape_claims_more", [("w", meta(shape=(2**40, 4), chunks=[((0, 0), (2**40, 4))]))])


def names_and_classes():
    value_meta = obj("BytesStorageMetadata")
    dcp("dcp_name_twice", [("w", meta()), ("w", meta())])
    dcp("dcp_name_of_two_kinds", [("w", value_meta), ("w", meta())])
    dcp("dcp_name_of_two_kinds_again", [("a", meta()), ("b", meta()), ("w", meta()), ("w", value_meta)])
    dcp("dcp_name_empty", [("", meta())])
    dcp("dcp_name_nul", [("w\0x", meta())])
    dcp("dcp_name_of_two_lines", [("w\n\x1b[31m", num(1))])
    dcp("dcp_class_unknown", [("w", call("numpy", "ndarray"))])
    dcp("dcp_class_plain", [("w", num(1))])
    other = b"cos\nsystem\n"
    for what, name in dict(tensor="TensorStorageMetadata", chunk="ChunkStorageMetadata", properties="TensorProperties",
                           index="MetadataIndex", info="_StorageInfo").items():
        known = obj(name)[:-2]
        dcp(f"dcp_class_of_{what}", pickled=ONE.replace(known, other))
    dcp("dcp_storage_key", stored=[(text("w"), info())])
    dcp("dcp_storage_info", stored=[(index("w", (0, 0)), NONE)])
    dcp("dcp_storage_none", pickled=pickle(obj("Metadata", dct((text("state_dict_metadata"), dct())))))
    dcp("dcp_no_metadata", pickled=pickle(dct()))
    two = pickle(metadata([("w", meta(shape=(4, 2)))], []))
    dcp("dcp_ranks_disagree", file="__0.metadata")
    write("dcp_ranks_disagree/__1.metadata", two)
    dcp("dcp_ranks_of_two_kinds", [("w", value_meta)], file="__0.metadata")
    write("dcp_ranks_of_two_kinds/__1.metadata", ONE)


def what_must_never_run():
    dcp("never_run_planner", planner=dct((text("w"), SYSTEM)))
    dcp("never_run_root", pickled=pickle(SYSTEM))
    dcp("never_run_beside", pickled=ONE[:2] + SYSTEM + b"0" + ONE[2:])
    dcp("never_run_tensor", [("w", SYSTEM)])
    dcp("never_run_item", data=saved(SYSTEM))
    value("never_run_value", data=saved(SYSTEM))
    write("never_run_build.pt", saved(state(w=tensor(), v=SYSTEM + dct() + b"b")))
    write("never_run_dtype.pt", saved(state(w=tensor(rebuild="_rebuild_tensor_v3", count=32, more=[SYSTEM]))))
    dcp("never_run_inst", pickled=pickle(b"(" + text("id") + b"ios\nsystem\n"))
    dcp("never_run_obj", pickled=pickle(b"(" + glob("os", "system") + text("id") + b"o"))
    dcp("never_run_ext", pickled=pickle(b"\x82\x01"))


def streams():
    for what, stream in dict(
            empty=b"", text=b"hello", protocol_0=b"(dp0\n.", protocol_9=b"\x80\x09N.",
            truncated=ONE[:-300], stop_missing=ONE[:-1], deep=pickle(b")" + b"\x85" * 1000),
            string_2_40=pickle(b"\x8d" + struct.pack("<Q", 2**40) + b"x"),
            bytes_2_63=pickle(b"\x8e" + struct.pack("<Q", 2**63) + b"x"),
            long_2_31=pickle(b"\x8b\xff\xff\xff\x7f\x01"), memo_2_31=pickle(b"Nr\xff\xff\xff\x7f"),
            utf8=pickle(text(b"\xc0\x80"))).items():
        write(f"pickle_{what}/.metadata", stream)
    many = lst(*[b"h\x01"] * 200)  # one chunk 200 times, in a tensor that is there 100 times
    shared = meta(chunk_list=chunk((0, 0), (2, 4)) + b"q\x010" + many) + b"q\x02"
    dcp("pickle_shared_chunks", [("w", shared)] + [(f"w{i}", b"h\x02") for i in range(100)])
    path = text("x" * 1000) + b"q\x010" + tup(*[b"h\x01"] * 500) + b"q\x02"  # long, and given 200 times
    dcp("pickle_shared_paths", planner=dct((text("w"), path), *[(text("w"), b"h\x02")] * 200))


def transforms():
    compressed("transform_unknown", transforms=lst(text("stream.rot13/1")))
    compressed("transform_version", transforms=lst(text("stream.zstd/2")))
    compressed("transform_nine", transforms=lst(*[text("stream.zstd/1")] * 9))
    compressed("transform_no_list", transforms=tup(text("stream.zstd/1")))
    compressed("transform_no_text", transforms=lst(num(1)))
    both = [(index("v", (0, 0)), info(transforms=lst(text("first.one")))),
            (index("w", (0, 0)), info(transforms=lst(text("other.one"))))]
    dcp("transform_two", [("v", meta()), ("w", meta())], both)


def zstd_streams():
    compressed("zstd_storage_large", streamed(tensor(count=1 << 20)))
    compressed("zstd_byteorder", streamed(tensor(), order=b"middle"))
    dcp("zstd_is_none", data=b"x" * 300, transforms=ZSTD)
    dcp("zstd_truncated", data=zstd(STREAM)[:250], transforms=ZSTD)
    dcp("zstd_empty", data=b"", transforms=ZSTD)
    compressed("zstd_window", window=31)
    compressed("zstd_no_descriptors", ITEM)
    mebibytes = [(b"\0", 1 << 17)] * 800
    compressed("zstd_bomb_behind", STREAM, *mebibytes)
    compressed("zstd_bomb_before", *mebibytes)
    compressed("zstd_bomb_record", archive(record("archive/x"))[:39], *mebibytes)
    value("zstd_bomb_value", data=zstd(*mebibytes), transforms=ZSTD)


def legacy_files():
    legacy("legacy_magic.pt", magic=2**77 + 1)
    legacy("legacy_storage_beyond.pt", count=9)
    legacy("legacy_storage_2_62.pt", count=2**62 + 8)
    legacy("legacy_storage_short.pt", count=7, data=DATA[:28])
    legacy("legacy_storage_unknown.pt", keys=lst(text("1")))
    legacy("legacy_storage_missing.pt", keys=lst())
    legacy("legacy_no_storage.pt", data=b"")
    two = state(a=tensor(), b=tensor(key="1"))
    data = DATA + struct.pack("<Q", 8) + DATA
    legacy("legacy_keys_dict.pt", body=two, keys=dct((text("0"), text("1"))), data=data)
    legacy("legacy_keys_text.pt", keys=text("0"))


def views():
    for what, given in dict(
            stride_beyond=dict(strides=(5, 1)), offset_beyond=dict(offset=1), offset_2_62=dict(offset=2**62),
            stride_2_62=dict(strides=(2**62, 1)),
            stride_zero=dict(shape=(2**40,), strides=(0,)), extent_negative=dict(shape=(-2, 4)),
            stride_negative=dict(strides=(-4, 1)), storage_count=dict(count=9),
            storage_2_62=dict(count=2**62),
            ndim_17=dict(shape=[1] * 17, strides=[1] * 17), ndim_strides=dict(strides=(1,)),
            storage_missing=dict(key="7"), storage_class=dict(cls="QInt8Storage"),
            conjugated=dict(more=[dct((text("conj"), TRUE))]), arguments=dict(more=[NONE] * 5)).items():
        write(f"view_{what}.pt", saved(state(w=tensor(**given))))
    long_key = saved(state(w=tensor(key="0" * 250)), record("archive/data/" + "0" * 200, DATA))
    write("view_storage_long_key.pt", long_key)
    write("view_strides_zero.pt", saved(state(w=tensor(shape=(2**40, 2**40), strides=(0, 0)))))
    rows = tensor(shape=(5 << 21, 1), strides=(0, 1))
    write("view_rows_repeated.pt", saved(state(w=tensor(), a=rows, b=rows)))
    write("view_stride_unused.pt", saved(state(w=tensor(shape=(1, 8), strides=(2**62, 1)))))
    write("view_empty_far.pt", saved(state(w=tensor(shape=(0, 2**62), strides=(2**62, 2**62), offset=2**62))))
    write("view_stride_overflow.pt", saved(state(w=tensor(shape=(3, 4), strides=(2**62, 1)))))
    write("view_no_storage.pt", saved(state(w=call("torch._utils", "_rebuild_tensor_v2", *[NONE] * 6))))
    parameter = call("torch._utils", "_rebuild_parameter", tensor(), FALSE, NONE)
    write("view_parameter_twice.pt", saved(state(w=call("torch._utils", "_rebuild_parameter", parameter))))
    dcp("view_quantized", data=saved(call("torch._utils", "_rebuild_qtensor", storage())))


def rank_files():
    """Two ranks with one row each of w, as verl writes them."""
    ranks("good_ranks")
    ranks("good_ranks_layout", mesh=lambda rank: layout_mesh(rank))
    ranks("good_ranks_sharded", local=lambda rank: sharded(rank))
    ranks("good_ranks_listed", local=lambda rank: sharded(rank, listed=(0, 1)))
    ranks("ranks_missing", skip=1)
    ranks("ranks_swapped", mesh=lambda rank: mesh(1 - rank))
    ranks("ranks_swapped_layout", mesh=lambda rank: layout_mesh(1 - rank))
    ranks("ranks_twice", mesh=lambda rank: mesh(rank, at=(0,), ids=(rank, 7)))
    ranks("ranks_more", names=("model_world_size_2_rank_0.pt", "model_world_size_2_rank_2.pt"))
    ranks("ranks_two_sizes", names=("model_world_size_2_rank_0.pt", "model_world_size_3_rank_1.pt"))
    ranks("ranks_config", config={"FSDP_version": 2, "world_size": 3})
    ranks("ranks_config_good", config={"FSDP_version": 2, "world_size": 2})
    ranks("ranks_config_text", config="two")
    ranks("ranks_huge_world", names=("model_world_size_2000000000_rank_0.pt",))
    ranks("ranks_outside", mesh=lambda rank: mesh(rank, at=None))
    ranks("ranks_not_in_mesh", mesh=lambda rank: mesh(rank, ids=(7, 8)))
    ranks("ranks_no_mesh", mesh=lambda rank: NONE)
    ranks("ranks_mesh_float", mesh=lambda rank: mesh(rank, cls="FloatStorage"))
    ranks("ranks_mesh_axes", mesh=lambda rank: mesh(rank, shape=(1,) * 16 + (2,), at=(0,) * 16 + (rank,)))
    ranks("ranks_mesh_huge", mesh=lambda rank: mesh(rank, shape=(2**40,), strides=(0,)))
    ranks("ranks_mesh_stride", mesh=lambda rank: layout_mesh(rank, stride=0))
    ranks("ranks_mesh_count", mesh=lambda rank: layout_mesh(rank, count=2**40))
    ranks("ranks_partial", places=tup(placed("Partial")))
    ranks("ranks_dim_far", places=tup(placed("Shard", dim=2)))
    ranks("ranks_dim_negative", places=tup(placed("Shard", dim=-1)))
    ranks("ranks_places_two", places=tup(placed("Shard", dim=0), placed("Replicate")))
    ranks("ranks_replicated", places=tup(placed("Replicate")))
    ranks("ranks_factor_zero", places=tup(placed("_StridedShard", dim=0, split_factor=0)))
    ranks("ranks_factor_huge", places=tup(placed("_StridedShard", dim=0, split_factor=2**40)))
    ranks("ranks_order", order=tup(tup(num(0), tup(num(3)))))
    ranks("ranks_order_dim", order=tup(tup(num(5), tup(num(0)))))
    ranks("ranks_shape", shape=(3, 4))
    ranks("ranks_shape_2_62", shape=(2**62, 4))
    ranks("ranks_shapes_differ", shape=lambda rank: (2 + 2 * rank, 4),
          local=lambda rank: tensor(count=4 + 4 * rank, shape=(1 + rank, 4)))
    ranks("ranks_meta_shape", meta=(4, 2))
    ranks("ranks_local_shape", local=lambda rank: tensor(count=4, shape=(4, 1), strides=(1, 1)))
    ranks("ranks_local_dtype", local=lambda rank: tensor(count=4, shape=(1, 4), cls="IntStorage"))
    ranks("ranks_local_none", local=lambda rank: NONE)
    for rank in range(2):
        write(f"ranks_values_joined/consolidated.0{rank}.pth",
              saved(state(w=tensor(), step=num(7), seed=num(rank))))
    ranks("ranks_plain_differ", whole=lambda rank: tensor(count=4, shape=(4,), strides=(1,)))
    for rank in range(2):
        whole = tensor(count=8), tensor(count=8, offset=0, strides=(1, 2))
        state = dct(*zip(map(text, ("_orig_mod.w", "w")), whole))
        write(f"ranks_wrapped/model_world_size_2_rank_{rank}.pt", saved(state))
    ranks("ranks_plain_shapes", whole=lambda rank: tensor(count=4, shape=(1 + 3 * rank,), strides=(1,)))
    ranks("ranks_plain_missing", whole=lambda rank: tensor(count=4, shape=(4,), strides=(1,)), skip=1)
    ranks("ranks_kinds",
          whole=lambda rank: tensor(count=4, shape=(2, 4), strides=(0, 1)) if rank else dtensor(rank))
    ranks("ranks_shards_overlap",
          local=lambda rank: sharded(rank, offset=0, rows=2, count=8) if rank else sharded(0))
    ranks("ranks_shards_outside", local=lambda rank: sharded(rank, offset=2 * rank))
    ranks("ranks_shards_negative", local=lambda rank: sharded(rank, offset=-rank))
    ranks("ranks_shards_rows", local=lambda rank: sharded(rank, sizes=(2, 4)))
    ranks("ranks_shards_turned", local=lambda rank: sharded(rank, offset=1 - rank, listed=(0, 1)))
    ranks("ranks_shards_unlisted", local=lambda rank: sharded(rank, listed=(0,)))
    ranks("ranks_shards_size", local=lambda rank: sharded(rank, listed=(0, 1), whole=(4, 4)))
    ranks("ranks_class", local=lambda rank: dtensor(rank, cls=("torchao.dtypes", "Tensor")))
    def optimizer(state, params):
        groups = lst(dct((text("params"), params)))
        return dct((text("state"), state), (text("param_groups"), groups))

    ranks("ranks_optim_params", optim=lambda rank: optimizer(dct(), text("w")))
    ranks("ranks_optim_text", optim=lambda rank: text("x"))
    ranks("ranks_optim_missing", skip_optim=1,
          optim=lambda rank: optimizer(dct((num(0), dct((text("m"), dtensor(rank))))), lst(num(0))))
    def states(rank, shape=(2, 4), **given):
        return dct((num(0), dct((text("m"), dtensor(rank, shape=shape, **given)))))

    ranks("ranks_optim_good", optim=lambda rank: optimizer(states(rank), lst(num(0))))
    ranks("ranks_optim_shapes", optim=lambda rank: optimizer(states(rank, (4,), local=tensor(
        shape=(2,), strides=(1,), count=4)), lst(num(0))))
    ranks("ranks_optim_numbers", optim=lambda rank: optimizer(states(rank), lst(num(rank))))
    ranks("ranks_optim_names", optim=lambda rank: dct((text("state"), states(rank)), (text("param_groups"), lst(
        dct((text("params"), lst(num(0))), (text("param_names"), lst(text("wu"[rank]))))))))
    write("rank_alone/model_world_size_2_rank_0.pt", saved(state(w=tensor())))


def torch_files():
    write("torch_script.pt", saved(state(w=tensor()), record("archive/constants.pkl", pickle(tup()))))
    write("torch_no_pickle.pt", archive(record("archive/data/0", DATA)))
    write("torch_byteorder.pt", archive(record("archive/data.pkl", pickle(num(1))),
                                        record("archive/byteorder", b"?")))
    write("torch_names_twice.pt", saved(dct((text("1"), tensor()), (num(1), tensor()))))
    write("torch_cycle.pt", saved(b"}q\x00(" + text("w") + tensor() + text("d") + b"h\x00u"))
    write("torch_cycle_wide.pt", saved(b"]q\x00(" + tensor() + b"h\x00" * 20 + b"e"))
    write("torch_deep.pt", saved(b"}" + (text("d") + b"}") * 200 + b"s" * 200))
    shared = text("x" * 5000) + b"q\x01"  # a text that 1000 keys refer to, and a name that 500 keys have
    write("torch_shared_text.pt", saved(dct((num(0), shared), *((num(i), b"h\x01") for i in range(1, 1000)))))
    write("torch_shared_name.pt", saved(state(**{"n" * 1900: dct(*((num(i), NONE) for i in range(500)))})))
    wrapped = call("a", "b")  # in seven calls, to which a list of 3000 entries refers; 300 entries refer to that
    for _ in range(7):
        wrapped = call("torch._utils", "_rebuild_parameter", wrapped, TRUE, NONE)
    once = b"](" + wrapped + b"q\x01" + b"h\x01" * 3000 + b"eq\x02"
    write("torch_shared_wrapped.pt", saved(lst(once, b"h\x02" * 300)))
    others = text("n" * 1999 + "a") + b"q\x01" + b"h\x01" * 300 + text("n" * 1999 + "b") + b"q\x02"
    module = dct((text("_parameters"), b"}"), (text("_modules"), b"}"),
                 (text("_non_persistent_buffers_set"), b"](" + others + b"e"),
                 (text("_buffers"), b"}(h\x02" + tensor() + b"q\x03" + b"h\x02h\x03" * 300 + b"u"))
    write("torch_shared_buffer.pt", saved(glob("a", "B") + b")\x81" + module + b"b"))
    write("torch_names_empty.pt", saved(dct((text(""), dct((text(""), tensor()), (text("w"), tensor()))))))
    write("torch_key_bytes.pt", saved(state(a=dct((text("w"), tensor()), (b"C\x01x", NONE)))))
    write("torch_name_nul.pt", saved(dct((text("w\0x"), tensor()))))
    write("torch_values_twice.pt", saved(dct((text("1"), num(5)), (num(1), num(6)))))
    write("torch_two_kinds.pt", saved(dct((text("a.b"), tensor()), (text("a"), state(b=num(6))))))
    write("torch_empty.pt", b"")
    write("torch_text.pt", b"not an archive, and long enough to be looked at from its end")


BODY = state(w=tensor())
FLIPPED = bytes([DATA[0] ^ 1]) + DATA[1:]


def records():
    large = dict(size=0xFFFFFFFF, stored=0xFFFFFFFF)
    for what, says in dict(
            two_sizes=dict(size=33), size_beyond=dict(size=10**6, stored=10**6), compressed=dict(method=8),
            encrypted=dict(flags=0x0801), header_beyond=dict(header=10**6), header_inside=dict(header=40),
            header_none=dict(header=1), local_name=dict(local_name=b"archive/data/1"),
            local_name_length=dict(local_name=b"archive/data/00"), local_compressed=dict(local_method=8),
            in_next=dict(local_extra=20), zip64_missing=large,
            extra_short=large | dict(extra=b"\x09\0\xff\0"),
            zip64_short=large | dict(extra=struct.pack("<HHQ", 1, 8, 32)),
            zip64_size=large | dict(extra=struct.pack("<HHQQ", 1, 16, 2**62, 2**62))).items():
        write(f"zip_{what}.pt", saved(BODY, data_says=says))
    write("zip_in_directory.pt", archive(record("archive/data.pkl", pickle(BODY)),
                                         record("archive/data/0", DATA, local_extra=20)))
    write("zip_names_twice.pt", saved(BODY, record("archive/data/0", DATA)))
    write("zip_records_overlap.pt", saved(BODY, record("archive/data/1", DATA, header=0)))
    write("zip_name_nul.pt", saved(BODY, record("archive/data/0\0x", DATA)))
    write("zip_name_utf8.pt", saved(BODY, dict(record("x"), name=b"archive/\xff")))
    write("zip_no_records.pt", archive())


def directories():
    for what, says in dict(directory_beyond=dict(at=10**6), directory_short=dict(nbytes=60),
                           directory_none=dict(nbytes=0), count_more=dict(count=5), count_less=dict(count=3),
                           count_65535=dict(count=65535), comment_missing=dict(comment=5)).items():
        write(f"zip_{what}.pt", saved(BODY, end=says))
    for what, says in dict(zip64_end_beyond=dict(end_at=2**40), zip64_end_elsewhere=dict(end_at=0),
                           zip64_count=dict(count=2**40), zip64_directory=dict(at=2**63, nbytes=2**63),
                           zip64_nbytes=dict(nbytes=2**62)).items():
        saturated = dict(count=0xFFFF, nbytes=0xFFFFFFFF, at=0xFFFFFFFF)
        write(f"zip_{what}.pt", saved(BODY, end64=says, end=saturated))
    write("zip_zip64_lies.pt", saved(BODY, end=dict(count=3), end64={}))
    entry = saved(BODY).rindex(b"PK\1\2")
    for what, at in dict(name=28, extra=30, comment=32).items():
        whole = saved(BODY)
        write(f"zip_entry_{what}.pt", whole[:entry + at] + b"\xff\xff" + whole[entry + at + 2:])
    write("zip_directory_longer.pt", saved(BODY, directory=b"junk"))
    write("zip_comment.pt", saved(BODY, end=dict(comment=5), after=b"hello"))
    write("zip_truncated.pt", saved(BODY)[:-30])
    write("zip_end_only.pt", saved(BODY)[-22:])


def checksums():
    other = dict(data=FLIPPED, data_says=dict(crc=zlib.crc32(DATA)))
    write("crc_file.pt", saved(BODY, **other))
    dcp("crc_item", data=saved(tensor(), **other))
    wrong = archive(record("archive/data.pkl", pickle(num(7)), crc=1))
    value("crc_value", data=wrong)
    value("crc_value_zstd", data=zstd(wrong), transforms=ZSTD)
    write("crc_pickle.pt", saved(BODY, pickle_says=dict(crc=1)))
    dcp("crc_pickle_of_item", data=saved(tensor(), pickle_says=dict(crc=1)))
    write("crc_unknown.pt", saved(BODY, data_says=dict(crc=0)))
    compressed("crc_zstd", streamed(tensor(), crc=zlib.crc32(FLIPPED)))
    compressed("crc_zstd_pickle", streamed(tensor(), pickle_crc=1))
    compressed("crc_zstd_unknown", streamed(tensor(), crc=0))
    compressed("zstd_storage_elsewhere", streamed(tensor(), name="archive/data/1"))
    compressed("zstd_zip_compressed", streamed(tensor(), method=8))


def values():
    two = archive(record("archive/data.pkl", pickle(num(2))), record("archive/version", b"3\n"))
    dcp("dcp_value_twice", [("v", obj("BytesStorageMetadata"))], [
        (index("v"), info(length=len(VALUE))), (index("v"), info(offset=len(VALUE), length=len(two)))],
        data=VALUE + two)
    other = saved(tensor(), data=DATA[::-1])
    dcp("dcp_box_overlap_differs", [("u", meta((3, 4), (((0, 0), (2, 4)), ((1, 0), (2, 4)))))], [
        (index("u", (0, 0)), info(length=len(ITEM))), (index("u", (1, 0)), info(offset=len(ITEM), length=len(other)))],
        data=ITEM + other)
    dcp("dcp_box_copies_differ", [("u", meta((2, 4), (((0, 0), (2, 4)), ((0, 0), (2, 4)))))], [
        (index("u", (0, 0), 0), info(length=len(ITEM))),
        (index("u", (0, 0), 1), info(offset=len(ITEM), length=len(other)))], data=ITEM + other)
    value("value_record_damaged", data=archive(record("archive/data.pkl", pickle(num(7))),
                                               record("archive/data/0", FLIPPED, crc=zlib.crc32(DATA))))
    for name, damaged in dict(good_part=DATA, part_damaged=DATA[:28] + b"xxxx").items():
        write(f"{name}.pt", saved(state(w=tensor(shape=(1, 4))), data=damaged,
                                  data_says=dict(crc=zlib.crc32(DATA))))
    value("value_beyond", length=10**6)
    value("value_2_40", length=2**40)
    value("value_200_mb", length=200 * 2**20)
    value("value_no_archive", data=b"x" * 100)
    value("value_no_pickle", data=archive(record("archive/version", b"3\n")))
    value("value_deep", data=saved(b")" + b"\x85" * 100))


def headers():
    w = json.dumps(about()).encode()

    def shape(other):
        return b'{"w": ' + w.replace(b"[2, 4]", other) + b"}"

    deep = b"[" * 100 + b"]" * 100
    for what, header in dict(
            not_json=b"x" * 30, list=b"[]", empty=b"", trailing=b'{"w": ' + w + b"} x",
            unfinished=b'{"w": {"dtype": "F32"', deep=b'{"w": {"dtype": ' + deep + b"}}",
            utf8=b'{"w\xff": ' + w + b"}", zero=b'{"w\\u0000": ' + w + b"}",
            surrogate=b'{"\\ud800": ' + w + b"}", shape_2_64=shape(b"[18446744073709551616]"),
            shape_float=shape(b"[2.0, 4]"), shape_negative=shape(b"[-2, -4]"),
            dtype_twice=b'{"w": {"dtype": "F64", ' + w[1:] + b"}",
            metadata_twice=b'{"__metadata__": {}, "__metadata__": {}, "w": ' + w + b"}",
            name_twice=b'{"w": ' + w + b', "w": ' + w + b"}").items():
        write(f"safe_{what}.safetensors", safe(header))
    write("safe_short.safetensors", b"\x02\0\0\0\0\0\0")
    write("safe_header_beyond.safetensors", safe(GOOD, length=10000))
    write("safe_header_100_mb.safetensors", safe(GOOD, length=100000001))
    write("safe_header_2_64.safetensors", safe(GOOD, length=2**64 - 1))
    write("safe_truncated.safetensors", safe(GOOD)[:-1])
    write("safe_data_more.safetensors", safe(GOOD, DATA + b"x"))
    write("safe_metadata_number.safetensors", safe(GOOD, metadata={"x": 1}))


def tensors_in_headers():
    for what, given in dict(
            end_before_begin=dict(begin=32, end=0), beyond=dict(end=64, shape=(4, 4)),
            hole=dict(begin=4, shape=(7,)), nbytes=dict(shape=(2, 3)), ndim_17=dict(shape=[1] * 17),
            shape_2_62=dict(shape=(2**62, 2)), shape_2_63=dict(shape=(2**63,)),
            dtype_unknown=dict(dtype="F7"), half_byte=dict(dtype="F4", shape=(3,)),
            key_unknown=dict(stride=[1])).items():
        write(f"safe_{what}.safetensors", safe({"w": about(**given)}))
    write("safe_dtype_none.safetensors", safe({"w": {"shape": [8], "data_offsets": [0, 32]}}))
    three = {"w": dict(dtype="F32", shape=[8], data_offsets=[0, 32, 32])}
    write("safe_offsets_three.safetensors", safe(three))
    write("safe_name_empty.safetensors", safe({"": about()}))
    write("safe_empty_far.safetensors", safe({"w": about(shape=(2**62, 0), end=0)}, b""))
    write("safe_no_tensors.safetensors", safe({}, b""))
    write("safe_overlap.safetensors", safe({"v": about(), "w": about(begin=16, end=48)}, DATA + DATA[:16]))


def shards_of_one():
    half = {"w": about(shape=(1, 4), end=16)}
    one, two = (safe(half, DATA[16 * i:16 * i + 16], metadata=place([i, 0])) for i in range(2))
    shards("shards_good", one, two)
    shards("shards_unplaced", one, safe(half, DATA[16:]))
    shards("shards_dtype", one, safe({"w": about("I32", (1, 4), end=16)}, DATA[16:], metadata=place([1, 0])))
    shards("shards_ndim", one, safe(half, DATA[16:], metadata=place([1])))
    shards("shards_outside", one, safe(half, DATA[16:], metadata=place([1, 0], [1, 4])))
    shards("shards_missing", safe(half, DATA[:16], metadata=place([0, 0], [2, 4])))
    shards("shards_place_no_json", safe(half, DATA[:16], metadata={"DCP_SHARDING_INFO": "x"}))
    shards("shards_shapes", safe(half, DATA[:16], metadata=place([0, 0], [2, 4])),
           safe(half, DATA[16:], metadata=place([1, 0], [3, 4])))
    for what, given in dict(good=([0, 0, 1, 4, 0, 0], [1, 4]), beyond=([0, 0, 1, 5, 0, 0], [1, 5]),
                            none=([0, 0, 1, 4], [1, 4]), outside=([1, 0, 1, 4, 0, 0], [1, 4]),
                            unsaid=([0, 0, 1, 4, 0, 0], None)).items():
        shards(f"shards_pieces_{what}", safe(half, DATA[:16], metadata=pieces(*given)))
    far = about(shape=(2**62, 2**62, 0), end=0)
    shards("shards_pieces_far", safe({"w": far}, b"", metadata=pieces([0] * 6 + [2**62, 2**62, 0], [1, 1, 1])))
    shards("shards_far", safe({"w": about(shape=(0, 2**62), end=0)}, b"", metadata=place([0, 2**62])))


def blobs():
    for what, blob in dict(good=safe(GOOD), beyond=safe({"w": about(begin=10**6, end=10**6 + 32)}),
                           missing=safe({"v": about()}), dtype=safe({"w": about("I32")}),
                           header=safe(GOOD, length=10**6)).items():
        dcp(f"blob_{what}", data=blob)
    dcp("blob_nbytes", data=safe({"w": about(end=28)}))
    dcp("blob_truncated", data=safe(GOOD)[:-1])


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for make in (good_ones, names_that_leave, indices, extents_of_items, boxes, shapes, names_and_classes,
                 what_must_never_run, streams, transforms, zstd_streams, legacy_files, views, torch_files, rank_files,
                 records, directories, checksums, values, headers, tensors_in_headers, shards_of_one, blobs,
                 *bad_orbax.RULES, *bad_trainers.MAKERS):
        make()


if __name__ == "__main__":
    main()
