#!/usr/bin/env python3
"""Writes more inputs of fuzz_checkpoint: what trainers and Orbax write in other ways, and what is refused.

more_seeds.py DIRECTORY. They are not part of the corpus, since they are made in a moment.
"""

import itertools
import json
import struct
import sys

import seeds
from seeds import CAST, FROM_MESH, FROM_RULES, MODEL_DTYPE, SPLIT, TAKE_RANK_0, UNSTACK, seed
from bad_parts import (
    archive, built, call, dct, dtensor, glob, info, index, layout_mesh, lst, mesh, meta, metadata, num, obj, pickle,
    placed, record, saved, size, state, tensor, text, tup, wrapped, zstd, DATA, FALSE, NONE, TRUE, ZSTD,
)
import bad_orbax
import bad_trainers

RANKS = record("archive/data/ranks01", struct.pack("<2i", 0, 1))


def floating(x):
    return b"G" + struct.pack(">d", x)


def rank_file(body, *more, data=DATA[:16]):
    return archive(record("archive/data.pkl", pickle(body)), record("archive/data/0", data), RANKS, *more)


def ranks(options=0, model=None, optim=None, config=None, extra=None):
    """The files of two ranks: what each has is a function of the rank."""
    files = {}
    model = model or (lambda rank: state(w=dtensor(rank)))
    for rank in range(2):
        files[f"model_world_size_2_rank_{rank}.pt"] = rank_file(model(rank))
        if optim:
            files[f"optim_world_size_2_rank_{rank}.pt"] = rank_file(optim(rank))
    if extra:
        files["extra_state_world_size_2_rank_0.pt"] = rank_file(extra)
    if config is not None:
        files["fsdp_config.json"] = json.dumps(config).encode()
    seed(options, **files)


def optimizers():
    """Parameters that the file names, that the model names, and that keep their numbers."""
    def optim(states, *groups):
        return dct((text("state"), states), (text("param_groups"), lst(*groups)))

    def group(params, names=None, **more):
        pairs = [(text("params"), lst(*params)), (text("lr"), floating(0.1))]
        pairs += [(text("param_names"), lst(*names))] if names is not None else []
        return dct(*pairs, *((text(k), v) for k, v in more.items()))

    flat = tensor((4,), (1,), count=4)
    square = tensor((2, 2), (2, 1), count=4)
    two = lambda rank: state(w=dtensor(rank), u=dtensor(rank))  # noqa: E731
    for names in ([text("w"), text("u")], [text(""), text("u")], [num(1), text("u")], [text("w")], None):
        for params in ([num(0), num(1)], [num(1), num(0)], [text("w"), num(1)], [num(0), num(1), num(2)]):
            ranks(TAKE_RANK_0, two, lambda rank, params=params, names=names: optim(dct(
                (num(0), state(step=num(1), exp_avg=dtensor(rank))), (num(1), state(exp_avg=dtensor(rank)))),
                group(params, names)))
    for key in (text("w"), num(7), num(-1), NONE):
        ranks(0, two, lambda rank, key=key: optim(dct((key, state(exp_avg=dtensor(rank), flat=flat, square=square))),
                                                  group([num(0), num(1)]), group([num(2)])))
    for version in (1, 2):
        for part in (flat, square, tensor((), (), count=4)):
            ranks(SPLIT, two, lambda rank, part=part: optim(dct((num(0), state(exp_avg=part))), group([num(0)])),
                  {"FSDP_version": version, "world_size": 2})
    tied = lambda rank: (lambda one: state(w=one + b"q\1", u=b"h\1"))(dtensor(rank))  # noqa: E731
    ranks(0, tied, lambda rank: optim(dct((num(0), state(exp_avg=dtensor(rank)))), group([num(0)], betas=tup(
        floating(0.9), floating(0.99)), note=NONE)))
    ranks(0, two, lambda rank: optim(lst(), group([num(0)])))
    ranks(0, two, lambda rank: optim(dct(), dct((text("params"), num(1)))))
    ranks(0, two, lambda rank: lst())


def placements():
    """Meshes of several axes, strided shards, orders of shards, and parameters around distributed tensors."""
    def axes(rank, shape, **more):
        return mesh(rank, shape=shape, strides=[1] * len(shape), at=(rank,) + (0,) * (len(shape) - 1), **more)

    shard = placed("Shard", dim=0)
    for places in ([shard], [placed("_StridedShard", dim=0, split_factor=1)], [placed("Replicate")],
                   [placed("Shard", dim=1)], [placed("_StridedShard", dim=1, split_factor=2)], [shard, shard],
                   [shard, placed("Replicate")], [placed("_StridedShard", dim=0, split_factor=2), shard]):
        n = len(places)
        for whole in (tensor(count=4, shape=(1, 4)), tensor(count=4, shape=(2, 2), strides=(2, 1))):
            ranks(0, lambda rank, n=n, places=places, whole=whole: state(w=dtensor(
                rank, axes(rank, (2,) + (1,) * (n - 1)), tup(*places), whole)))
    for order in (lst(tup(num(0), tup(num(0)))), tup(tup(num(0), tup(num(0)))), tup(built("a", "ShardOrderEntry")),
                  tup(glob("a", "ShardOrderEntry") + tup(num(0), tup(num(0))) + b"\x81"), tup(tup(num(1), tup(num(0)))),
                  tup(tup(num(0), tup(num(5)))), tup(tup(num(0), lst(num(0))))):
        ranks(0, lambda rank, order=order: state(w=dtensor(rank, order=order)))
    for one in (layout_mesh(0), built("torch.distributed.device_mesh", "DeviceMesh", _layout=built(
            "a", "_MeshLayout", shape=tup(num(2)), stride=tup(num(1))), _rank_map=tensor(
            shape=(2,), strides=(1,), key="ranks01", count=2, cls="IntStorage")),
            built("torch.distributed.device_mesh", "DeviceMesh", _layout=built("a", "_MeshLayout", shape=num(2),
                  stride=num(1)), _rank_map=tensor(shape=(2,), strides=(1,), key="ranks01", count=2, cls="IntStorage")),
            built("torch.distributed.device_mesh", "DeviceMesh", _layout=built("a", "_MeshLayout", shape=tup(tup(num(
                2), num(1))), stride=tup(tup(num(1), num(1))))), NONE):
        ranks(0, lambda rank, one=one: state(w=dtensor(rank, one)))
    hooks = call("collections", "OrderedDict")
    ranks(0, lambda rank: state(w=call("torch._utils", "_rebuild_parameter", dtensor(rank), TRUE, hooks),
                                u=call("torch._utils", "_rebuild_parameter", dtensor(rank), TRUE, hooks)))
    ranks(0, lambda rank: dct((text("module.w"), dtensor(rank)), (text("module.b"), tensor((4,), (1,), count=4))))
    ranks(0, lambda rank: dct((text("_orig_mod.w"), dtensor(rank)), (text("_fsdp_wrapped_module.w"), dtensor(rank))))
    ranks(TAKE_RANK_0, lambda rank: state(w=dtensor(rank), only=tensor((4,), (1,), count=4)) if rank else state(
        w=dtensor(rank)), extra=dct((text("lr_scheduler"), state(x=num(1))), (num(3), num(4)), (text("rng"), num(1))))
    for part in (tup(NONE), tup(lst(), NONE, NONE), lst(), tup(lst(num(1)), NONE, NONE, NONE, FALSE)):
        ranks(0, lambda rank, part=part: state(w=wrapped(
            ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), (2, 4), part)))


# ---- Megatron ----


def megatron(options, names, files=("mp_rank_00", "mp_rank_01"), says=None, **given):
    body = state(args=bad_trainers.args(swiglu=TRUE, **(says or {})), model=dct(*((text(n), v) for n, v in names)),
                 **given)
    seed(options, **{f"{file}/model_optim_rng.pt": saved(body) for file in files})


def experts():
    rows = tensor((2, 2), (2, 1))
    layer = "decoder.layers.0.mlp.experts."
    names = [(layer + end, rows) for end in ("local_experts.0.linear_fc1.weight", "local_experts.1.linear_fc2.weight",
                                             "linear_fc1.weight0", "linear_fc2.weight12", "linear_fc1.weight.3", "7")]
    names += [("decoder.layers.0.mlp.linear_fc1.weight1", rows), ("output_layer._extra_state", rows),
              ("language_model.encoder.layers.0.w", rows), ("language_model.transformer.layers.0.w", rows),
              ("encoder.layers.1x.w", rows), ("embedding_word_embeddings.weight", rows), ("final_norm.weight", rows)]
    two = ("mp_rank_00_000", "mp_rank_00_001")
    for says, files in (dict(expert_model_parallel_size=num(2), num_experts=num(4)), two), (
            dict(expert_model_parallel_size=num(2), num_experts=num(3)), two), (
            dict(expert_model_parallel_size=num(2), num_experts=num(4), expert_tensor_parallel_size=num(2)), two), (
            dict(pipeline_model_parallel_size=num(2), expert_model_parallel_size=num(2), num_experts=num(4)),
            ("mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_00_000_001", "mp_rank_00_001_001")), ({}, two):
        for n in (2, 4, len(names)):
            megatron(MODEL_DTYPE, names[:n], files, dict(tensor_model_parallel_size=num(1)) | says)
    state_dict = dct((text("optimizer"), dct((text("optimizer"), dct((text("state"), dct((num(0), rows))))))))
    for optimizer in (NONE, state_dict, dct((text("optimizer"), num(1))), lst(rows)):
        megatron(0, [("w", rows)], optimizer=optimizer, rng_state=lst(), opt_param_scheduler=state(lr=num(1)),
                 iteration=num(2), num_floating_point_operations_so_far=floating(1e30))
    megatron(FROM_RULES, [("alpha", rows), ("x.fc1.weight", rows), ("b.c", rows), ("z", tensor((0,), (1,)))])
    megatron(0, [("w", tensor((0, 4), (4, 1))), ("word_embeddings.weight", tensor((0, 4), (4, 1)))])
    for tag in (b"release", b"3", b"release\n", b"x"):
        body = saved(state(args=bad_trainers.args(tensor_model_parallel_size=num(1)), model=dct((text("w"), rows))))
        where = "release" if tag[:1] == b"r" else "iter_0000003"
        seed(0, **{"latest_checkpointed_iteration.txt": tag, f"{where}/mp_rank_00/model_optim_rng.pt": body,
                   f"{where}/mp_rank_00/distrib_optim.pt": body})
    common = saved(state(iteration=num(1), args=bad_trainers.args(), optimizer=state(param_state=num(1)), rng=lst(),
                         content_metadata=state(a=TRUE)))
    names = ["decoder.layers.w", "optimizer.distributed.dp_group_idx_0.gbuf_idx_0", "word_embeddings.weight",
             "optimizer.state.exp_avg.decoder.layers.w"]
    for backend, beside, options in (("torch_dist", common, UNSTACK), ("zarr", common, 0),
                                     ("torch_dist", saved(lst()), 0)):
        item = seeds.item()
        tensors = [(n, meta((2, 2, 4), (((0, 0, 0), (1, 2, 4)), ((1, 0, 0), (1, 2, 4)))) if i % 2 == 0 else meta())
                   for i, n in enumerate(names)]
        stored = [(index(n, (k, 0, 0) if i % 2 == 0 else (0, 0)), info(length=len(item)))
                  for i, n in enumerate(names) for k in range(2 if i % 2 == 0 else 1)]
        seed(options, **{".metadata": pickle(metadata(tensors, stored)), "__0_0.distcp": item, "common.pt": beside,
                         "metadata.json": json.dumps({"sharded_backend": backend, "x": [1]}).encode()})


# ---- DeepSpeed ----


def vectors():
    """Scalars of every dtype, groups, shared and frozen parameters, and parts of other shapes."""
    flat, rows = bad_trainers.flat, bad_trainers.ROWS_OF_4

    def zero(options, model, optim, stage=3):
        files = {}
        for rank in range(2):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            files[f"{name}_model_states.pt"] = saved(model, data=DATA[:16])
            files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = saved(
                state(optimizer_state_dict=optim), data=DATA[:16])
        seed(options, **files)

    scalars = {cls: tensor((), (), count=4 * 4 // width, cls=cls) for cls, width in dict(
        FloatStorage=4, DoubleStorage=8, HalfStorage=2, BFloat16Storage=2, LongStorage=8, IntStorage=4,
        ByteStorage=1).items()}
    for cls, scalar in scalars.items():
        states = dct((num(0), dct((text("step"), scalar), (text("exp_avg"), flat()), (text("n"), num(3)))))
        zero(MODEL_DTYPE if cls == "HalfStorage" else 0, bad_trainers.model(), bad_trainers.vectors(states=states))
        base = dct((text("state"), states), (text("param_groups"), lst(dct((text("params"), lst(num(0))), (text("lr"),
                                                                           floating(0.5)), (num(1), num(2))))))
        zero(0, bad_trainers.model(state(w=rows)), dct(
            (text("partition_count"), lst(num(2))), (text("base_optimizer_state"), base),
            (text("single_partition_of_fp32_groups"), lst(flat()))), 1)
    shared = bad_trainers.model(state(w=rows, v=rows), shared_params=dct((text("v"), text("w")), (text("x"), text(
        "nowhere"))), ds_version=text("0.19"), buffer_names=lst(text("b"), num(1)))
    for options in (0, MODEL_DTYPE):
        zero(options, shared, bad_trainers.vectors())
        zero(options, shared, bad_trainers.whole_vectors(), 1)
    buffers = bad_trainers.model(state(w=bad_trainers.EMPTY, b=flat(2)), buffer_names=lst(text("b")),
                                 lr_scheduler=state(last=num(1)), global_steps=num(3), dp_world_size=num(2), args=NONE)
    zero(0, buffers, bad_trainers.vectors())
    two = bad_trainers.model(shapes=lst(state(w=size(2, 2)), state(u=size(4))))
    for optim in (bad_trainers.whole_vectors(lst(flat(2), flat(2)), lst(num(2), num(2))),
                  bad_trainers.whole_vectors(lst(flat(2), flat(2)), lst(num(2), num(2)), group_paddings=lst(num(0))),
                  bad_trainers.whole_vectors(lst(flat(2)), param_alignment_paddings=lst(num(1)))):
        zero(0, two, optim, 1)


# ---- torch.save ----


def keys():
    one = tensor()
    frozen = call("builtins", "frozenset", lst(num(1), text("a")))
    odd = [FALSE, tup(num(1)), tup(), tup(text("a"), tup(NONE, floating(2.5))), frozen, glob("torch", "float32"),
           b"\x8a\x09" + b"\x7f" * 9, b"C\2ab", call("builtins", "frozenset", num(1)), text("a\0b")]
    for key in odd:
        seed(0, **{"pytorch_model.bin": saved(dct((key, one), (text("w"), one)))})
    deep = one
    for _ in range(70):
        deep = lst(deep)
    long = dct((text("x" * 1500), dct((text("y" * 1500), one))))
    call_of = glob("a", "B") + tup(num(1)) + b"R"
    objects = [deep, long, lst(lst(lst(dct((text("a"), one))))), tup(one, lst(one)),
               call_of + tup(NONE, dct((text("w"), one))) + b"b", call_of + tup(dct((text("w"), one)), dct()) + b"b",
               call_of + lst(one) + b"b", call_of + b"(" + text("k") + one + b"u", call_of + b"(" + one + b"e",
               glob("torch.nn", "Module") + b")\x81" + tup(dct((text("_modules"), dct()), (text("_parameters"), dct(
                   (text("w"), one)))), NONE) + b"b",
               call("collections", "OrderedDict") + b"(" + text("w") + one + b"u" + state(_metadata=one) + b"b",
               call("collections", "OrderedDict", lst(tup(text("w"), one))),
               call("torch._tensor", "_rebuild_from_type_v2", glob("torch._utils", "_rebuild_tensor_v2"), glob(
                   "torch", "Tensor"), tup(seeds.storage(), num(0), tup(num(8)), tup(num(1)), FALSE, NONE), dct()),
               call("torch._utils", "_rebuild_tensor_v3", seeds.storage(), num(0), tup(num(8)), tup(num(1)), FALSE,
                    NONE, glob("torch", "float32"), dct((text("neg"), TRUE))),
               call("torch._utils", "_rebuild_tensor_v2", seeds.storage(), num(0), tup(num(2**62)), tup(num(2**62)),
                    FALSE, NONE), call("torch._utils", "_rebuild_parameter", num(1), TRUE, NONE),
               tensor((2**31, 2**31), (0, 0))]
    for value in objects:
        seed(CAST, **{"pytorch_model.bin": saved(dct((text("v"), value), (text("w"), one)))})
        seed(0, **{"pytorch_model.bin": saved(value)})
    values = [b"\x8b" + struct.pack("<i", 300) + b"\x7f" * 300,
              call("_codecs", "encode", text("\u0100"), text("latin1")),
              call("_codecs", "encode", num(1), text("latin1")), call("_codecs", "encode", text("a")),
              lst(*[floating(x) for x in (float("nan"), float("inf"), -float("inf"), 5e-324)]), b"C\3\0\xff\x80",
              dct((dct(), num(1))), dct((b"\x8b" + struct.pack("<i", 300) + b"\x7f" * 300, num(1))), b"\x8a\0"]
    for value in values:
        seed(0, **{"pytorch_model.bin": saved(state(w=one, v=value))})
    for name in ("model_rank_0.pt", "mp_rank_03.pt", "consolidated.00.pth", "rank_1.bin"):
        seed(0, **{name: saved(state(w=one)), name.replace("0", "1").replace("3", "4"): saved(state(w=one))})
    seed(0, **{"pytorch_model.bin": saved(state(w=one, args=built("argparse", "Namespace",
                                                                  tensor_model_parallel_size=num(2))))})


# ---- Orbax ----


def scalars():
    """Values of every dtype and storage, shards, large chunks, and fill values."""
    types = ["<f8", "<f4", "<f2", "bfloat16", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "|u1", "|b1", ">f4", ">i8",
             "<c8"]
    for i, dtype in enumerate(types):
        tree = bad_orbax.tree("w", w="scalar")
        about = bad_orbax.zarray(shape=[], chunks=[], dtype=dtype, compressor={"id": "zstd"} if i % 3 == 0 else None)
        width = {"bfloat16": 2}.get(dtype) or int(dtype[2:])
        chunk = DATA[5:5 + width]
        seed(0, **{"_METADATA": tree, "w/.zarray": about, "w/0": zstd(chunk) if i % 3 == 0 else chunk})
        node = bad_orbax.leaf([("w/.zarray", bad_orbax.zarray(shape=[], chunks=[], dtype=dtype)), ("w/0", chunk)])
        seed(0, **{"_METADATA": tree, "manifest.ocdbt": bad_orbax.manifest((0, 0, 0, len(node), 2)), "d/0": node})
    fills = ["NaN", "Infinity", "-Infinity", "0x3f800000", "0x3f80000g", True, False, 1, -1, 2**63, 1.5, 1e400, None,
             [1, 2], [1], [1, 2, 3], "x", 2**64]
    for fill, dtype in itertools.product(fills, ["<f4", "<f2", "<i8", "<u8", "|b1", "<c8", "<c16"]):
        if (fills.index(fill) + types.index("<f4") + len(dtype)) % 2:
            continue
        seed(0, **{"_METADATA": bad_orbax.tree("w"), "w/.zarray": bad_orbax.zarray(dtype=dtype, fill_value=fill)})
    large = 300 << 10
    zeros = [(b"\0", 1 << 17), (b"\0", 1 << 17), (b"\0", large - (2 << 17))]
    single = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", large) + zstd(*zeros)[6:]
    short = b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 32 - 256 & 0xffff) + zstd(DATA)[6:]
    skipped = struct.pack("<II", 0x184D2A50, 0)
    for frame in (zstd(*zeros), zstd(*zeros, window=25), single, skipped + zstd(*zeros), short,
                  zstd(*zeros[:2]), zstd(*zeros) + zstd(b"x")):
        about = bad_orbax.zarray(shape=[large // 4], chunks=[large // 4], compressor={"id": "zstd"})
        seed(SPLIT, **{"_METADATA": bad_orbax.tree("w"), "w/.zarray": about, "w/0": frame})
    little = bad_orbax.codec("bytes", endian="little")
    for codecs, raw in ([little, bad_orbax.codec("crc32c")], True), ([little, bad_orbax.codec("zstd", level=1),
                                                                      bad_orbax.codec("crc32c")], False):
        about = bad_orbax.zarr_json(codecs=codecs)
        body = DATA if raw else zstd(DATA)
        for chunk in (body + bad_orbax.crc32c(body), body + b"\0\0\0\0", body, b"ab", b""):
            seed(0, **{"_METADATA": bad_orbax.tree("w"), "w/zarr.json": about, "w/c/0/0": chunk})
    for key in ("00.0", "0.00", "c", "0.0x", "", "0"):
        seed(0, **{"_METADATA": bad_orbax.tree("w"), "w/.zarray": bad_orbax.zarray(), f"w/{key or 'x'}": DATA,
                   "v/zarr.json": bad_orbax.zarr_json(), "v/c": DATA, "v/c/0/00" if key != "c" else "v/d": DATA})
    keys_of = [{"key": "a", "key_type": 2}, {"key": "0", "key_type": 1}, {"key": "01", "key_type": 1},
               {"key": "9" * 20, "key_type": 1}, {"key": "", "key_type": 1}, {"key": 3, "key_type": 1}]
    for last in keys_of:
        tree = {"t": {"key_metadata": [keys_of[0], last], "value_metadata": {"value_type": "None"}}}
        seed(0, **{"_METADATA": json.dumps({"tree_metadata": tree}).encode(), "_strings.json": b'{"a.0": "x"}'})
    seed(0, **{"_METADATA": b'{"tree_metadata": 1}', ".zarray": bad_orbax.zarray(), "0.0": DATA})
    steps = {f"{step}/{item}/_METADATA": bad_orbax.tree("w") for step in (1, 20) for item in ("default", "other")}
    arrays = {f"{step}/{item}/w/{name}": content for step in (1, 20) for item in ("default", "other")
              for name, content in ((".zarray", bad_orbax.zarray()), ("0.0", DATA))}
    seed(0, **steps, **arrays, **{"20/_CHECKPOINT_METADATA": b"{}",
                                  "20/extra/metadata": b'{"a": [1, "\\ud83d\\ude00"]}'})


# ---- DCP ----


def items():
    """Large items that several tensors refer to, transforms, hints and paths."""
    many = [record(f"archive/extra/{i}", b"x" * 200) for i in range(60)]
    large = saved(tensor(), *many)
    for data in (large, large[:-40], saved(num(1), *many)):
        names = "wu"
        seeds.dcp(0, [(n, meta()) for n in names], [(index(n, (0, 0)), info(length=len(data))) for n in names],
                  {"__0_0.distcp": data})
    item = seeds.item()
    for transforms in (lst(), lst(text("a/1")), lst(text("stream.zstd/x")), lst(text("b"), text("stream.zstd")), NONE,
                       lst(*[text("stream.zstd")] * 3), lst(*[text("stream.zstd")] * 6), lst(num(1))):
        packed = item
        for _ in range(transforms.count(b"stream.zstd")):
            packed = zstd(packed)
        seeds.dcp(CAST, [("w", meta()), ("u", meta())], [(index(n, (0, 0)), info(
            length=len(packed), transforms=transforms)) for n in "wu"], {"__0_0.distcp": packed})
    for hint in (num(0), num(1), num(-1), text("x")):
        key = obj("MetadataIndex", dct((text("fqn"), text("w")), (text("index"), hint), (text("offset"), NONE)))
        seeds.dcp(0, [("w", meta())], [(key, info(length=len(item)))], {"__0_0.distcp": item})
    for path in (tup(text("a"), num(1)), lst(text("a")), tup(*[text("a")] * 70), tup(tup()), num(1), tup(NONE)):
        planner = dct((text("w"), path), (num(1), path))
        stored = [(index("w", (0, 0)), info(length=len(item)))]
        seed(0, **{".metadata": pickle(metadata([("w", meta())], stored, planner)),
                   "__0_0.distcp": item})
    for first, last in (b"\x28\xb5\x2f\xfd", b""), (b"PK", b"\5\6"):
        seeds.dcp(0, [("w", meta())], [(index("w", (0, 0)), info(length=64, transforms=ZSTD))],
                  {"__0_0.distcp": (first + b"\0" * 60 + last)[:64]})
    for a, b in itertools.product(("F32", "I64"), ((1, 4), (4,), (2, 2))):
        files = [seeds.safe({"w": seeds.about(a if rank else "F32", b if rank else (1, 4), end=16)}, data=DATA[:16])
                 for rank in range(2)]
        seed(FROM_MESH, **{f"consolidated.0{rank}.safetensors": file for rank, file in enumerate(files)})


def main():
    seeds.CORPUS = sys.argv[1]
    for make in (optimizers, placements, experts, vectors, keys, scalars, items):
        make()


if __name__ == "__main__":
    main()
