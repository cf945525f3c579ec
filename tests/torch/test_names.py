"""Maps of names: Megatron's and Hugging Face's names of one model, both ways. transformers loads the result."""
import argparse
import json
import os
import unittest

import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

import llama
import reshard
import tap
import worlds
from tensors import same


def groups(parts, config):
    """Fuses queries, keys and values as Megatron does: one group of heads after the other."""
    head = parts[1].shape[0] // config.num_key_value_heads
    queries = head * config.num_attention_heads // config.num_key_value_heads
    cut = [part.split(rows) for part, rows in zip(parts, (queries, head, head))]
    return torch.cat([torch.cat(one) for one in zip(*cut)])


def megatron(model, padding, core=True, fused_norms=True):
    """Megatron's tensors of a model of transformers."""
    config, state = model.config, llama.state(model)
    top = "" if core else "language_model."
    stack = "decoder.layers" if core else "language_model.encoder.layers"
    words = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    if core:
        words = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
    norms = ((f"{words[0]}.layer_norm_weight", f"{words[2]}.layer_norm_weight") if core and fused_norms else
             ("input_layernorm.weight", "pre_mlp_layernorm.weight" if core else "post_attention_layernorm.weight"))

    def padded(tensor):
        return torch.cat([tensor, torch.zeros(padding, tensor.shape[1], dtype=tensor.dtype)])

    found = {f"{top}embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"])}
    for i in range(config.num_hidden_layers):
        old, new = f"model.layers.{i}", f"{stack}.{i}"
        for end in "weight", "bias":
            if f"{old}.self_attn.q_proj.{end}" in state:
                parts = [state[f"{old}.self_attn.{k}_proj.{end}"] for k in "qkv"]
                found[f"{new}.{words[0]}.{end}"] = groups(parts, config)
        found[f"{new}.{norms[0]}"] = state[f"{old}.input_layernorm.weight"]
        found[f"{new}.{norms[1]}"] = state[f"{old}.post_attention_layernorm.weight"]
        found[f"{new}.{words[1]}.weight"] = state[f"{old}.self_attn.o_proj.weight"]
        found[f"{new}.{words[2]}.weight"] = torch.cat([state[f"{old}.mlp.{k}_proj.weight"] for k in ("gate", "up")])
        found[f"{new}.{words[3]}.weight"] = state[f"{old}.mlp.down_proj.weight"]
    found[f"{top}{'decoder' if core else 'encoder'}.final_layernorm.weight"] = state["model.norm.weight"]
    if not config.tie_word_embeddings:
        found[f"{top}output_layer.weight"] = padded(state["lm_head.weight"])
    return found


def write_ranks(folder, tensors, config, world, stages):
    """Writes mp_rank_TT_PPP, cut over tensor-parallel ranks and pipeline stages."""
    args = argparse.Namespace(
        tensor_model_parallel_size=world, pipeline_model_parallel_size=stages, num_layers=config.num_hidden_layers,
        swiglu=True, ffn_hidden_size=config.intermediate_size, num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads, group_query_attention=True)
    nlayers = config.num_hidden_layers // stages
    for rank in range(world):
        for stage in range(stages):
            part = {}
            for name, tensor in tensors.items():
                words = name.split(".")
                if "layers" in words:
                    at = words.index("layers") + 1
                    if int(words[at]) // nlayers != stage:
                        continue
                    words[at] = str(int(words[at]) % nlayers)
                elif stage != (0 if "embedding" in words else stages - 1):
                    continue
                if "fc1.weight" in name:
                    gate, up = tensor.chunk(2)
                    tensor = torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]])
                elif "linear_proj" in name or "fc2" in name:
                    tensor = tensor.chunk(world, 1)[rank]
                elif "norm" not in name:
                    tensor = tensor.chunk(world)[rank]
                part[".".join(words)] = tensor.clone()
            path = folder(f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            os.makedirs(path)
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": part},
                       f"{path}/model_optim_rng.pt")


def qwen():
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)).to(torch.bfloat16)


class Names(unittest.TestCase):
    def equal(self, found, truth):
        self.assertEqual(set(found), set(truth))
        for name, value in truth.items():
            self.assertTrue(same(found[name], value), name)

    def loads(self, path, model):
        """transformers loads the directory, and computes what the model computes."""
        again, report = type(model).from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
        self.assertFalse(report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
        tokens = torch.arange(12).reshape(1, 12)
        self.assertTrue(torch.equal(again(tokens).logits, model(tokens).logits))

    def test_megatron_ranks(self):
        """Megatron's rank files become a directory that transformers loads"""
        for model, world, stages, fused in (
                (llama.tiny(), 2, 2, False), (llama.tiny(), 1, 1, True), (qwen(), 2, 1, True)):
            with worlds.Folder() as folder:
                config, vocab = model.config, model.config.vocab_size
                tensors = megatron(model, 4 - vocab % 4, fused_norms=fused)
                write_ranks(folder, tensors, config, world, stages)
                config.save_pretrained(folder("config"))
                with reshard.open(folder(""), names="megatron-llama", vocab_size=vocab) as checkpoint:
                    reshard.merge(checkpoint, folder("hf"), config_from=folder("config"))
                truth = llama.state(model)
                if config.tie_word_embeddings:
                    del truth["lm_head.weight"]
                self.equal(load_file(folder("hf/model.safetensors")), truth)
                self.loads(folder("hf"), model)
                with reshard.open(folder("hf"), names="megatron-llama", vocab_size=vocab + 4 - vocab % 4,
                                  like="torch") as back:  # heads are those of config.json
                    truth = megatron(model, 4 - vocab % 4)
                    self.equal({name: back[name].torch() for name in back}, truth)
                    reshard.convert(back, folder("dcp"), format="dcp", mesh="tp=2", default="S(0)")
                with reshard.open(folder("dcp"), like="torch") as written:
                    self.equal({name: written[name].torch() for name in written}, truth)

    def test_deepspeed(self):
        """ZeRO's names of Megatron-DeepSpeed, with optimizer state"""
        model = llama.tiny(torch.float32)
        weights = megatron(model, 0, core=False)
        moments = {name: value.square() for name, value in weights.items()}
        with worlds.Folder() as folder:
            flat = torch.cat([value.flatten() for value in weights.values()])
            squares = torch.cat([value.flatten() for value in moments.values()])
            os.makedirs(folder("step"))
            half = (len(flat) + 1) // 2
            for rank in range(2):
                cut = slice(rank * half, (rank + 1) * half)
                torch.save({"optimizer_state_dict": {
                    "zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [flat[cut].clone()],
                    "group_paddings": [0], "base_optimizer_state": {
                        "state": {0: {"step": torch.tensor(3.), "exp_avg": squares[cut].clone()}},
                        "param_groups": [{"lr": 0.1, "params": [0]}]}}, "ds_version": "0.19.8", "ds_config": {}},
                    folder(f"step/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
            torch.save({"module": {name: value.bfloat16() for name, value in weights.items()}, "buffer_names": [],
                        "param_shapes": [{name: value.shape for name, value in weights.items()}],
                        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {},
                        "ds_version": "0.19.8", "dp_world_size": 2, "mp_world_size": 1},
                       folder("step/mp_rank_00_model_states.pt"))
            with open(folder("latest"), "w", encoding="ascii") as file:
                file.write("step")
            heads = model.config.num_attention_heads, model.config.num_key_value_heads
            with self.assertRaisesRegex(reshard.Error, "how many attention heads"):
                reshard.open(folder(""), names="megatron-llama")
            truth = llama.state(model)
            with reshard.open(folder(""), names="megatron-llama", heads=heads, like="torch") as found:
                for name, value in truth.items():
                    self.assertTrue(same(found[name].torch(), value), name)
                    self.assertTrue(same(found[f"optimizer.state.{name}.exp_avg"].torch(), value.square()), name)
                    self.assertEqual(found.plain_values[f"optimizer.state.{name}.step"], 3)
                reshard.merge(found, folder("hf.safetensors"))
            self.equal(load_file(folder("hf.safetensors")), truth)

    def test_experts(self):
        """experts of Mixtral"""
        torch.manual_seed(2)
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_local_experts=3,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16)
        model = MixtralForCausalLM(config)
        with worlds.Folder() as folder:
            model.save_pretrained(folder("hf"))
            stored = load_file(folder("hf/model.safetensors"))
            with reshard.open(folder("hf"), names="megatron-llama", like="torch") as found:
                expert = "decoder.layers.0.mlp.experts.local_experts.2"
                old = "model.layers.0.block_sparse_moe.experts.2"
                self.assertTrue(same(found[f"{expert}.linear_fc1.weight"].torch(),
                                     torch.cat([stored[f"{old}.w1.weight"], stored[f"{old}.w3.weight"]])))
                self.assertIn("decoder.layers.0.mlp.router.weight", found)
                reshard.merge(found, folder("megatron"), everything=True)
            with reshard.open(folder("megatron"), names="megatron-llama", heads=4, like="torch") as back:
                self.equal({name: back[name].torch() for name in back}, stored)

    def test_fused(self):
        """qkv_proj and gate_up_proj, in both directions"""
        model = llama.tiny()
        state = llama.state(model)
        with worlds.Folder() as folder:
            model.save_pretrained(folder("hf"))
            with reshard.open(folder("hf"), names="fused-llama", like="torch") as found:
                layer = "model.layers.1"
                self.assertTrue(same(found[f"{layer}.self_attn.qkv_proj.weight"].torch(),
                                     torch.cat([state[f"{layer}.self_attn.{k}_proj.weight"] for k in "qkv"])))
                reshard.merge(found, folder("fused"), everything=True)
            with reshard.open(folder("fused"), names="fused-llama", heads=(4, 2), like="torch") as back:
                self.equal({name: back[name].torch() for name in back}, state)

    def test_torch_dist(self):
        """stacked layers of torch_dist, with a map of the user"""
        golden = os.path.join(os.path.dirname(__file__), "../golden/mcore_dist_tp")
        truth = load_file(f"{golden}/truth.safetensors")
        with worlds.Folder() as folder:
            with open(folder("mine.names"), "w", encoding="ascii") as file:
                file.write("# two lines are enough\n"
                           "decoder.layers.*.self_attention.linear_qkv.weight h.*.attn.{q,k,v}.weight qkv\n"
                           "  embedding.word_embeddings.weight wte vocab # the vocabulary\n** **\n")
            with reshard.open(f"{golden}/ckpt", names=folder("mine.names"), heads=(4, 2), vocab_size=29,
                              like="torch") as found:
                fused = truth["decoder.layers.self_attention.linear_qkv.weight"][0]
                head = fused.shape[0] // 8
                keys = torch.cat([fused[2 * head:3 * head], fused[6 * head:7 * head]])
                self.assertTrue(same(found["h.0.attn.k.weight"].torch(), keys))
                moment = truth["optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"][0]
                self.assertTrue(same(found["optimizer.state.h.0.attn.v.weight.exp_avg"].torch(),
                                     torch.cat([moment[3 * head:4 * head], moment[7 * head:]])))
                self.assertTrue(same(found["wte"].torch(), truth["embedding.word_embeddings.weight"][:29]))
                self.assertEqual(found.plain_values["args.num_layers"], 1)
                self.assertEqual(found.plain_values["optimizer.param_groups.0.lr"], 0.001)

    def test_refused(self):
        """a name that no line has, parts that are missing, sizes that do not fit, invalid maps"""
        with worlds.Folder() as folder:
            def refuses(tensors, message, text=None, **options):
                save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder("x.safetensors"))
                if text is not None:
                    with open(folder("map"), "w", encoding="ascii") as file:
                        file.write(text)
                names = "megatron-llama" if text is None else folder("map")
                with self.assertRaisesRegex(reshard.Error, message):
                    reshard.open(folder("x.safetensors"), names=names, **options)
            one = torch.zeros(12, 2)
            query = "model.layers.0.self_attn.q_proj.weight"
            refuses({"model.norm.weight": one, "other": one}, "other: no line of megatron-llama has this name")
            refuses({"other": one}, "no tensor has a name of megatron-llama")
            refuses({"model.norm.weight": one, "decoder.final_layernorm.weight": one}, "names of both columns")
            refuses({query: one}, f"{query}: the checkpoint has no model.layers.0.self_attn.k_proj.weight")
            fused = {"decoder.layers.0.self_attention.linear_qkv.weight": one}
            refuses(fused, "how many attention heads")
            refuses(fused, "12 rows cannot be those of 5 heads and of 5 heads", heads=5)
            refuses({"decoder.layers.0.mlp.linear_fc1.weight": one[:3]}, "3 rows cannot be 2 equal parts")
            refuses({"output_layer.weight": one}, "vocab_size is 13; the tensor has 12 rows", vocab_size=13)
            refuses({"lm_head.weight": one}, "vocab_size is 11; the tensor has 12 rows", vocab_size=11)
            for text, message in (
                    ("a", ":1: a line must have a name on each side"), ("\na b c", ":2: 'c' must be vocab"),
                    ("a b rows d", "unexpected 'd' at the end"), ("a.* b", "as many stars"), ("- -", "both sides"),
                    ("a {b,c}", "2 tensors"), ("a {b,c", "no closing brace"), ("a b rows", "1 tensors"),
                    ("a {b,c,d,e,f} rows", "more than 4 parts"), ("*.*.*.*.* *.*.*.*.*", "more than 4 stars")):
                refuses({"a": one}, message, text)
            with self.assertRaisesRegex(reshard.Error, "No such file"):
                reshard.open(folder("x.safetensors"), names="no-such-map")
            with self.assertRaisesRegex(reshard.Error, "applies to checkpoints of Megatron"):
                reshard.open(folder("x.safetensors"), unstack=True)
            with self.assertRaisesRegex(reshard.Error, "applies to checkpoints of Megatron"):
                reshard.open(folder("x.safetensors"), vocab_size=3)

    def test_config(self):
        """heads of config.json: of the directory, or of huggingface/ in it"""
        for place in "", "huggingface/":
            with worlds.Folder() as folder:
                os.makedirs(folder(place), exist_ok=True)
                with open(folder(f"{place}config.json"), "w", encoding="ascii") as file:
                    json.dump({"num_attention_heads": 2, "num_key_value_heads": 1, "other": [1]}, file)
                fused = torch.arange(24.).reshape(12, 2)
                save_file({"decoder.layers.0.self_attention.linear_qkv.weight": fused}, folder("model.safetensors"))
                with reshard.open(folder(""), names="megatron-llama", like="torch") as found:
                    self.assertTrue(same(found["model.layers.0.self_attn.v_proj.weight"].torch(), fused[9:]))


if __name__ == "__main__":
    tap.main()
