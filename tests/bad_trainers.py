"""The part of make_bad.py about checkpoints of DeepSpeed and Megatron: the tensor w of shape [2, 4] over two ranks."""

import struct

from bad_parts import (
    dct, glob, lst, num, saved, size, state, tensor, text, write, DATA, FALSE, NONE, SYSTEM, TRUE,
)

HALVES = [DATA[:16], DATA[16:]]
EMPTY = tensor(shape=(0,), strides=(1,), count=4)
ROWS_OF_4 = tensor(strides=(0, 1), count=4)
SHAPE = state(w=size(2, 4))


def flat(count=4, **kept):
    return tensor(shape=(count,), strides=(1,), **(dict(count=4) | kept))


# ---- DeepSpeed ----


def model(module=None, shapes=None, **more):
    module = state(w=EMPTY) if module is None else module
    return state(**(dict(module=module, buffer_names=lst(), param_shapes=shapes or lst(SHAPE)) | more))


def vectors(fp32=None, count=num(2), states=None, **more):
    """Of a rank of stage 3."""
    optimizer = state(state=states or dct((num(0), state(step=num(3), exp_avg=flat()))), param_groups=lst())
    return state(**(dict(zero_stage=num(3), partition_count=count, optimizer_state_dict=optimizer,
                         fp32_flat_groups=fp32 or lst(flat())) | more))


def whole_vectors(fp32=None, count=None, **more):
    """Of a rank of stage 1 or 2."""
    base = state(state=dct((num(0), state(exp_avg=flat()))), param_groups=lst(state(params=lst(num(0)))))
    return state(**(dict(partition_count=count or lst(num(2)), base_optimizer_state=base,
                         single_partition_of_fp32_groups=fp32 or lst(flat())) | more))


def zero(name, models=None, optims=None, stage=3, where="", data=None):
    """A directory; models, optims: what ranks have that is wrong, by rank; data: of the model file, if not as usual."""
    for rank in range(2):
        if stage == 3 or rank == 0:
            file = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            body = (models or {}).get(rank, model() if stage == 3 else model(state(w=ROWS_OF_4)))
            write(f"{name}/{where}{file}_model_states.pt", saved(body, data=data or HALVES[rank]))
        body = (optims or {}).get(rank, vectors() if stage == 3 else whole_vectors())
        if body is not None:
            write(f"{name}/{where}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                  saved(state(optimizer_state_dict=body), data=HALVES[rank]))


def zero_files():
    zero("zero_good")
    zero("zero_good_whole", stage=1)
    for what, tag in dict(parent="../zero_good", absolute="/etc", empty=" \n", missing="step", nul="s\0t").items():
        zero(f"zero_tag_{what}", where="step_1/")
        write(f"zero_tag_{what}/latest", tag.encode())
    zero("zero_tag_good", where="step_1/")
    write("zero_tag_good/latest", b"step_1\n")
    zero("zero_tag_two", where="step_1/")
    write("zero_tag_two/latest", b"step_1")
    write("zero_tag_two/latest_universal", b"step_0_universal")
    zero("zero_rank_missing", optims={0: None})
    zero("zero_rank_missing_last", optims={1: None})
    zero("zero_rank_far")
    write("zero_rank_far/zero_pp_rank_99999999_mp_rank_00_optim_states.pt", b"")
    for what, file in dict(tensor_parallel="zero_pp_rank_0_mp_rank_01_optim_states.pt",
                           twice_named="zero_pp_rank_01_mp_rank_00_optim_states.pt",
                           prefix="bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                           layer="layer_00-model_00-model_states.pt", two_stages="mp_rank_00_model_states.pt",
                           expert="layer_0_expert_0_mp_rank_00_model_states.pt").items():
        zero(f"zero_{what}")
        write(f"zero_{what}/{file}", saved(model()))


def zero_models():
    for what, body in dict(
            not_dict=lst(), module_missing=model(NONE), module_key=model(dct((num(1), EMPTY))),
            shapes_missing=state(module=state(w=EMPTY)), shapes_number=model(shapes=num(1)),
            shapes_numbers=model(shapes=lst(num(1))), shape_number=model(shapes=lst(state(w=num(4)))),
            shape_large=model(shapes=lst(state(w=size(3, 4)))), shape_small=model(shapes=lst(state(w=size(1, 4)))),
            shape_negative=model(shapes=lst(state(w=size(-2, 4)))),
            shape_17=model(shapes=lst(state(w=size(*[1] * 17)))),
            shape_2_62=model(shapes=lst(state(w=size(2**61, 4)))), twice=model(shapes=lst(SHAPE, SHAPE)),
            more=model(shapes=lst(state(w=size(2, 4), u=size(4)))),
            emptied=model(state(w=EMPTY, u=EMPTY)), shared_numbers=model(shared_params=dct((num(1), num(2)))),
            never_run=model(SYSTEM)).items():
        zero(f"zero_{what}", models={0: body})
    frozen = dict(frozen_param_shapes=state(u=size(8)))
    for what, ranks in dict(good=(state(u=flat()),) * 2, missing=(state(u=flat()), state()), none=(state(),) * 2,
                            unlisted=(state(u=flat(), x=flat()),) * 2, short=(state(u=flat(3)),) * 2,
                            differs=(state(u=flat()), state(u=flat(3))), no_tensor=(state(u=num(1)),) * 2).items():
        zero(f"zero_frozen_{what}", models={rank: model(**frozen, frozen_param_fragments=ranks[rank])
                                            for rank in range(2)})


def zero_vectors():
    for what, body in dict(
            count_3=vectors(count=num(3)), count_1=vectors(count=num(1)), vectors_missing=state(partition_count=num(2)),
            vector_number=vectors(lst(num(1))), vector_beyond=vectors(lst(flat(5))),
            vector_strided=vectors(lst(tensor(shape=(2,), strides=(2,), count=4))),
            vectors_two=vectors(lst(flat(), flat())),
            state_key=vectors(states=dct((text("x"), state()))), state_number=vectors(states=dct((num(7), state()))),
            state_name=vectors(states=dct((num(0), dct((num(1), flat())))))).items():
        zero(f"zero_{what}", optims={0: body})
    for what, body in dict(length=vectors(lst(flat(3))), dtype=vectors(lst(flat(cls="IntStorage"))),
                           groups=vectors(lst(flat(), flat())), stage=whole_vectors(),
                           state_missing=vectors(states=dct()), state_length=vectors(
                               states=dct((num(0), state(exp_avg=flat(3))))), count=vectors(count=num(3)),
                           step=vectors(states=dct((num(0), state(step=num(4), exp_avg=flat()))))).items():
        zero(f"zero_other_{what}", optims={1: body})
    zero("zero_state_other", optims={rank: vectors(states=dct((num(0), state(error=flat(1))))) for rank in range(2)})
    counts = lst(num(2), num(1))
    for what, body in dict(counts=whole_vectors(count=counts), group_missing=whole_vectors(lst(flat(), flat())),
                           paddings=whole_vectors(param_alignment_paddings=lst(lst())),
                           padding_negative=whole_vectors(param_alignment_paddings=lst(lst(num(-1)))),
                           padding_huge=whole_vectors(param_alignment_paddings=lst(lst(num(2**62))))).items():
        zero(f"zero_whole_{what}", optims={0: body}, stage=1)
    zero("zero_whole_other_paddings", optims={1: whole_vectors(param_alignment_paddings=lst(lst(num(2))))}, stage=1)
    one = state(exp_avg=flat())
    zero("zero_whole_more_states", optims={0: whole_vectors(base_optimizer_state=lst(one, one))}, stage=1)
    turned = tensor(shape=(4, 2), strides=(0, 1), count=4)
    zero("zero_whole_shape", models={0: model(state(w=turned))}, stage=1)
    zero("zero_whole_shared_shape", models={0: model(state(w=ROWS_OF_4, u=turned), shared_params=state(u=text("w")))},
         stage=1)
    shapes = lst(state(u=size(4, 2)))
    zero("zero_whole_turned_good", models={0: model(state(u=tensor((4, 2), (2, 1)), w=tensor((2, 4), (1, 2))), shapes)},
         stage=1, data=struct.pack("<8f", 0, 4, 1, 5, 2, 6, 3, 7))
    zero("zero_whole_short", optims={0: whole_vectors(lst(flat(3)))}, stage=1)
    zero("zero_whole_long", models={0: model(state(w=flat()), lst(state(w=size(1, 2))))}, stage=1)


def universal(name, files=None, **of_model):
    write(f"{name}/mp_rank_00_model_states.pt", saved(model(state(), **of_model)))
    for file, body in ({"w/fp32": state(param=tensor())} if files is None else files).items():
        write(f"{name}/zero/{file}.pt", saved(body))


def universal_files():
    bare = tensor(shape=(8,), strides=(1,))
    universal("universal_good")
    universal("universal_good_bare", {"w/fp32": bare, "w/exp_avg": bare, "optimizer_state": state()})
    universal("universal_missing", {"u/fp32": state(param=tensor())})
    universal("universal_missing_fp32", {"w/exp_avg": bare})
    universal("universal_unlisted", {"w/fp32": bare, "u/fp32": bare})
    universal("universal_length", {"w/fp32": tensor(shape=(4,), strides=(1,))})
    universal("universal_state_length", {"w/fp32": bare, "w/exp_avg": tensor(shape=(4,), strides=(1,))})
    universal("universal_shape", {"w/fp32": state(param=tensor(shape=(4, 2), strides=(2, 1)))})
    universal("universal_no_tensor", {"w/fp32": state(param=num(1))})


# ---- Megatron ----


def args(**given):
    values = dict(tensor_model_parallel_size=num(2), pipeline_model_parallel_size=num(1), num_layers=num(1),
                  swiglu=FALSE) | given
    return glob("argparse", "Namespace") + b")\x81" + state(**values) + b"b"


ROWS = "word_embeddings.weight"


def megatron(name, ranks=None, says=None, where="", tag=None, only=(0, 1), **given):
    """Two tensor-parallel ranks; w has a row on each. ranks: state dicts by rank; only: which ranks are written."""
    for rank in only:
        parts = (ranks or {}).get(rank, {})
        if parts is None:
            continue
        dicts = [(text(key), value) for key, value in ({"w": tensor()} | parts).items()]
        body = state(**(dict(args=args(**(says or {})), model=dct(*dicts)) | given))
        write(f"{name}/{where}mp_rank_0{rank}/model_optim_rng.pt", saved(body))
    if tag is not None:
        write(f"{name}/latest_checkpointed_iteration.txt", tag)


def megatron_files():
    half = {rank: {ROWS: tensor(shape=(1, 4), offset=4 * rank)} for rank in range(2)}
    megatron("megatron_good", half)
    megatron("megatron_tag_good", half, where="iter_0000003/", tag=b"3\n")
    for what, tag in dict(parent=b"../3", empty=b"", negative=b"-1", missing=b"4").items():
        megatron(f"megatron_tag_{what}", half, where="iter_0000003/", tag=tag)
    megatron("megatron_rank_missing", {0: None})
    megatron("megatron_rank_missing_last", {1: None})
    megatron("megatron_file_missing", {1: None})
    write("megatron_file_missing/mp_rank_01/other.pt", b"")
    megatron("megatron_numbers")
    write("megatron_numbers/mp_rank_01_000/model_optim_rng.pt", b"")
    megatron("megatron_twice_named", half)
    write("megatron_twice_named/mp_rank_1/model_optim_rng.pt", saved(state(model=state())))
    megatron("megatron_chunks_both", half, model0=state(v=tensor()))
    megatron("megatron_version", checkpoint_version=b"G" + b"\x40\0\0\0\0\0\0\0")
    megatron("megatron_no_model", model=NONE)
    for rank in range(2):
        write(f"megatron_chunks_hole/mp_rank_0{rank}/model_optim_rng.pt",
              saved(state(args=args(), model0=state(w=tensor()), model2=state(v=tensor()))))
    megatron("megatron_not_dict")
    write("megatron_not_dict/mp_rank_00/model_optim_rng.pt", saved(lst()))
    for what, ranks in dict(
            unknown={1: {"alpha": tensor()}, 0: {"alpha": tensor(shape=(2, 3))}},
            rule_ndim={0: {"linear_proj.weight": tensor(shape=(8,), strides=(1,))}},
            shapes={0: {ROWS: tensor()}, 1: {ROWS: tensor(shape=(1, 4))}},
            hole={0: {ROWS: tensor()}}, dtypes={0: {ROWS: tensor()}, 1: {ROWS: tensor(cls="IntStorage")}},
            layer={0: {"decoder.layers.0.x": tensor()}, 1: {"decoder.layers.1.x": tensor()}},
            layers={rank: {"decoder.layers.4.x": tensor()} for rank in range(2)},
            gated={rank: {"linear_fc1.weight": tensor(shape=(1, 4))} for rank in range(2)},
            never_run={0: {"x": SYSTEM}}).items():
        megatron(f"megatron_{what}", ranks, dict(swiglu=TRUE))
    other = dict(iteration=dict(iteration=num(4)), version=dict(checkpoint_version=num(2)),
                 layers=dict(says=dict(num_layers=num(2))), gate=dict(says=dict(swiglu=TRUE)))
    for what, given in other.items():
        megatron(f"megatron_other_{what}", half, iteration=num(3))
        megatron(f"megatron_other_{what}", half, only=(1,), **given)
    megatron("megatron_more_ranks", half, dict(tensor_model_parallel_size=num(1)))
    megatron("megatron_copy_missing", {0: {"norm.layernorm.weight": tensor(shape=(4,), strides=(1,))}})
    grouped = {rank: {"mlp.experts.weight1": tensor()} for rank in range(2)}
    megatron("megatron_grouped", grouped)
    experts = {rank: {"local_experts.0.linear_fc1.weight": tensor()} for rank in range(2)}
    megatron("megatron_experts_whole", experts, dict(num_experts=num(1), expert_tensor_parallel_size=num(1)))
    fc1 = {rank: {"linear_fc1.weight": tensor()} for rank in range(2)}
    megatron("megatron_gated_huge", fc1, dict(ffn_hidden_size=num(2**63 - 1), swiglu=TRUE))
    megatron("megatron_gated_rows", fc1, dict(ffn_hidden_size=num(5)))
    megatron("megatron_gated_unknown", fc1, dict(swiglu=b"K\0" + b"0" + NONE), args=glob("a", "B") + b")\x81")
    megatron("megatron_copies", {1: {"norm.layernorm.weight": tensor(shape=(4,), strides=(1,), offset=4)},
                                 0: {"norm.layernorm.weight": tensor(shape=(4,), strides=(1,))}})


MAKERS = (zero_files, zero_models, zero_vectors, universal_files, megatron_files)
