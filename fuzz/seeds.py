#!/usr/bin/env python3
"""Writes the corpus of fuzz_checkpoint: small checkpoints, one for each way in which bytes are read."""

import hashlib
import json
import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests"))

from bad_parts import (  # noqa: E402 (the path is set above)
    about, archive, built, call, dct, dtensor, glob, index, info, lst, meta, metadata, num, obj, pickle, place, record,
    safe, saved, size, state, storage, streamed, tensor, text, tup, zstd, DATA, TRUE, VALUE, ZSTD,
)
import bad_trainers  # noqa: E402
from pack import pack, packed_file  # noqa: E402

CORPUS = os.path.join(HERE, "corpus", "checkpoint")
BAD = os.path.join(os.path.dirname(HERE), "tests", "bad")
TAKE_RANK_0, MODEL_DTYPE, UNSTACK, AS_IS, FEW_FILES, CAST, SPLIT, PACK, FROM_MESH, FROM_RULES, LITTLE_MEMORY = (
    1 << i for i in range(11))


def keep(content):
    os.makedirs(CORPUS, exist_ok=True)
    with open(os.path.join(CORPUS, hashlib.sha1(content).hexdigest()[:12]), "wb") as file:
        file.write(content)


def seed(options=0, **files):
    """Keeps an input with these files: their names and contents."""
    out = struct.pack("<HB", options, 0)
    for name, content in files.items():
        part = packed_file(name, content)
        assert part, name
        out += part
    keep(out)


def dcp(options, tensors, stored, files, file=".metadata"):
    seed(options, **{file: pickle(metadata(tensors, stored))}, **files)


def item(shape=(2, 4), strides=(4, 1), order=b"little", data=DATA, **more):
    return archive(record("archive/data.pkl", pickle(tensor(shape=shape, strides=strides, **more))),
                   record("archive/byteorder", order), record("archive/data/0", data),
                   record("archive/version", b"3\n"))


def distributed():
    whole = [("w", meta())]
    for name, data in dict(plain=item(), big=item(order=b"big"), transposed=item((4, 2), (1, 4))).items():
        shape = (4, 2) if name == "transposed" else (2, 4)
        dcp(CAST, [("w", meta(shape, (((0, 0), shape),)))], [(index("w", (0, 0)), info(length=len(data)))],
            {"__0_0.distcp": data})
    shape, data = (64, 64), item((64, 64), (1, 64), data=DATA * 512, count=4096)
    dcp(LITTLE_MEMORY, [("w", meta(shape, (((0, 0), shape),)))], [(index("w", (0, 0)), info(length=len(data)))],
        {"__0_0.distcp": data})
    stream = streamed(tensor())
    blocks = zstd(*(stream[i:i + 40] for i in range(0, len(stream), 40)))
    dcp(SPLIT, whole, [(index("w", (0, 0)), info(length=len(blocks), transforms=ZSTD))], {"__0_0.distcp": blocks})
    twice = zstd(blocks)
    both = lst(text("stream.zstd/1"), text("stream.zstd"))
    dcp(0, whole, [(index("w", (0, 0)), info(length=len(twice), transforms=both))], {"__0_0.distcp": twice})
    value = zstd(VALUE)
    dcp(PACK, [("v", obj("BytesStorageMetadata")), ("u", obj("BytesStorageMetadata"))],
        [(index("v"), info(length=len(VALUE))), (index("u"), info(offset=len(VALUE), length=len(value),
                                                                   transforms=ZSTD))],
        {"__0_0.distcp": VALUE + value})
    blob = safe({"w": about(), "u": about(begin=32, end=64)}, data=DATA * 2)
    dcp(CAST | SPLIT, [(name, meta()) for name in "wu"],
        [(index(name, (0, 0)), info(length=len(blob))) for name in "wu"], {"__0_0.distcp": blob})
    parts = {}
    for rank in range(2):
        row = meta(chunks=(((rank, 0), (1, 4)),))
        part = item((1, 4), data=DATA[:16], count=4)
        parts[f"__{rank}.metadata"] = pickle(metadata(
            [("w", row)], [(index("w", (rank, 0)), info(f"__{rank}_0.distcp", length=len(part)))]))
        parts[f"__{rank}_0.distcp"] = part
    seed(SPLIT, **parts)
    rows = 24
    part = item((1, 4), data=DATA[:16], count=4)
    stored = [(index("w", (i, 0)), info(f"__{i}_0.distcp", length=len(part))) for i in range(rows)]
    dcp(FEW_FILES, [("w", meta((rows, 4), [((i, 0), (1, 4)) for i in range(rows)]))], stored,
        {f"__{i}_0.distcp": part for i in range(rows)})
    stacked = meta((2, 2, 4), (((0, 0, 0), (1, 2, 4)), ((1, 0, 0), (1, 2, 4))))
    dcp(UNSTACK, [("decoder.layers.w", stacked), ("word_embeddings.weight", meta((4, 2), (((0, 0), (4, 2)),)))],
        [(index("decoder.layers.w", (i, 0, 0)), info(length=len(item()))) for i in range(2)] +
        [(index("word_embeddings.weight", (0, 0)), info(length=len(item())))],
        {"__0_0.distcp": item(), "metadata.json": b'{"sharded_backend": "torch_dist"}'})


def headers():
    files = [safe({"w": about(begin=0), "b": about("BF16", (4,), 32, 40)}, data=DATA + DATA[:8]),
             safe({"u": about("F64", (4,))}, metadata={"format": "pt"})]
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    keys = {"w": names[0], "b": names[0], "u": names[1]}
    seed(CAST, **{"model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": keys}).encode()},
         **dict(zip(names, files)))
    halves = [safe({"w": about(shape=(1, 4), end=16)}, data=DATA[:16], metadata=place([i, 0], shape))
              for shape in (None, [2, 4]) for i in range(2)]
    for pair in halves[:2], halves[2:]:
        seed(SPLIT, **{f"shard-0000{i + 1}-model-00001-of-00001.safetensors": file for i, file in enumerate(pair)})
    bins = [saved(state(w=tensor())), saved(dct((text("u"), tensor((4, 2), (1, 4))), (text("n"), num(3))))]
    names = [f"pytorch_model-0000{i + 1}-of-00002.bin" for i in range(2)]
    seed(CAST, **{"pytorch_model.bin.index.json": json.dumps({"weight_map": dict(zip("wu", names))}).encode()},
         **dict(zip(names, bins)))
    seed(0, **{"pytorch_model.bin": archive(
        record("archive/data.pkl", pickle(state(w=tensor(), e=tensor((4, 4), (0, 1))))),
        record("archive/byteorder", b"big"), record("archive/data/0", DATA))})


def ranks():
    rows = record("archive/data/ranks01", struct.pack("<2i", 0, 1))
    files = {}
    for rank in range(2):
        part = record("archive/data/0", DATA[16 * rank:][:16])
        files[f"model_world_size_2_rank_{rank}.pt"] = archive(
            record("archive/data.pkl", pickle(state(w=dtensor(rank), b=tensor((4,), (1,), count=4)))), part, rows)
        states = dct((num(0), dct((text("step"), num(3)), (text("exp_avg"), dtensor(rank)))))
        groups = lst(dct((text("lr"), b"G" + struct.pack(">d", 0.001)), (text("params"), lst(num(0)))))
        files[f"optim_world_size_2_rank_{rank}.pt"] = archive(
            record("archive/data.pkl", pickle(dct((text("state"), states), (text("param_groups"), groups)))),
            part, rows)
    files["extra_state_world_size_2_rank_0.pt"] = saved(state(lr_scheduler=state(last=num(1)), rng=state()))
    files["fsdp_config.json"] = b'{"FSDP_version": 2, "world_size": 2}'
    seed(TAKE_RANK_0 | SPLIT, **files)


def parts():
    """Files of ranks that do not say how tensors are cut, and those of Megatron with rules."""
    for suffix, make in dict(pth=lambda rank: saved(state(w=tensor((2, 2), (2, 1), offset=4 * rank), b=tensor())),
                             safetensors=lambda rank: safe({"w": about(shape=(1, 4), end=16),
                                                            "b": about("I64", (2,), 16, 32)}, data=DATA)).items():
        seed(FROM_MESH | SPLIT, **{f"consolidated.0{rank}.{suffix}": make(rank) for rank in range(2)})
    args = bad_trainers.args
    for options in (0, FROM_RULES):
        files = {}
        for stage in range(2):
            for rank in range(2):
                model = dct(*((text(name), tensor((2, 2), (2, 1), offset=4 * rank)) for name in (
                    "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight",
                    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", "word_embeddings.weight", "b")))
                body = state(args=args(swiglu=TRUE, pipeline_model_parallel_size=num(2), num_layers=num(2)),
                             model=model, rng_state=lst(), iteration=num(3), checkpoint_version=b"G" +
                             struct.pack(">d", 3.0))
                files[f"mp_rank_0{rank}_00{stage}/model_optim_rng.pt"] = saved(body)
        seed(options | UNSTACK, **files)
    files = {}
    for rank in range(2):
        chunks = {f"model{i}": dct((text("decoder.layers.0.w"), tensor())) for i in range(2)}
        files[f"mp_rank_00_00{rank}/model_optim_rng.pt"] = saved(state(
            args=args(tensor_model_parallel_size=num(1), expert_model_parallel_size=num(2), num_experts=num(4)),
            **chunks))
    seed(0, **files)


def modules():
    """Objects of torch.save: modules, namedtuples, dicts with attributes, keys that are not text."""
    def module(*children, **parameters):
        ordered = call("collections", "OrderedDict")
        kept = ordered[:-1] + b"R" + dct(*((text(k), v) for k, v in parameters.items()))[1:] if parameters else ordered
        nested = dct(*((text(f"{i}"), child) for i, child in enumerate(children)))
        buffers = dct((text("mean"), tensor()), (text("left"), tensor()))
        return built("torch.nn.modules.linear", "Linear", training=TRUE, _parameters=kept, _buffers=buffers,
                     _non_persistent_buffers_set=call("builtins", "set", lst(text("left"))), _modules=nested)

    seed(0, **{"pytorch_model.bin": saved(module(module(weight=tensor()), weight=tensor(), bias=b"N"))})
    other = glob("a", "B") + tup(tensor(), num(1)) + b"R"
    pair = glob("a", "C") + b")\x81" + tup(b"N", state(w=tensor())) + b"b"
    keys = dct((b"N", tensor()), (tup(text("a"), num(0)), tensor()), (num(7), num(8)), (b"\x88", other),
               (text("p"), pair),
               (b"G" + struct.pack(">d", 1.5), lst(tensor(), dct((text("x"), tensor())))), (text("t"), tup(tensor())))
    seed(CAST, **{"pytorch_model.bin": saved(keys)})
    hooks = call("collections", "OrderedDict")
    odd = dct((text("q"), call("torch._utils", "_rebuild_qtensor", storage())),
              (text("s"), call("torch._utils", "_rebuild_sparse_tensor", num(0))), (text("w"), tensor()),
              (text("p"), call("torch._utils", "_rebuild_parameter", tensor(), TRUE, hooks)))
    seed(0, **{"pytorch_model.bin": saved(odd)})


def values():
    latin = call("_codecs", "encode", text("a\xe9"), text("latin1"))
    keys = dct((num(1), NONE_OF), (b"N", b"\x88"), (b"G" + struct.pack(">d", 0.1), b"\x8a\x0a" + b"\x7f" * 10))
    content = state(w=tensor(), t=lst(text("x\n\"\\"), latin, keys), s=size(2, 3))
    seed(0, **{"pytorch_model.bin": saved(content)})


NONE_OF = b"N"
KEPT = ("blob_good", "good_legacy.pt", "good_ocdbt", "good_ocdbt_inner", "good_ocdbt_shard", "good_ranks_layout",
        "good_ranks_sharded", "good_zarr2", "good_zarr3", "megatron_good", "megatron_tag_good", "orbax_steps",
        "shards_pieces_good", "universal_good", "universal_good_bare", "zarr3_crc_good", "zarr_zstd_good",
        "zero_frozen_good", "zero_good", "zero_good_whole", "zero_tag_good", "dcp_box_overlap")


def main():
    for make in (distributed, headers, ranks, parts, modules, values):
        make()
    for i, name in enumerate(KEPT):
        keep(pack(os.path.join(BAD, name), (CAST, SPLIT, MODEL_DTYPE)[i % 3]))
    print(f"{len(os.listdir(CORPUS))} files")


if __name__ == "__main__":
    main()
