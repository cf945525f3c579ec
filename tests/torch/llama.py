"""A Llama too small to be of use, made on the spot."""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def config():
    return LlamaConfig(vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                       tie_word_embeddings=False)


def tiny(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return LlamaForCausalLM(config()).to(dtype)


def state(model):
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
