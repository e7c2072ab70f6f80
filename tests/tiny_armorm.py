"""ArmoRM, the paper's reward model, with a few random weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from rollouts.rewards.armorm import ArmoRM
from tests.tiny import TINY
from tests.tiny_tokenizers import tiny_tokenizer


def save_armorm(path, **settings):
    torch.manual_seed(0)
    head = {"num_objectives": 5, "gating_hidden_dim": 16, "gating_n_hidden": 2}
    model = ArmoRM(LlamaConfig(**(TINY | head | settings)))
    with torch.no_grad():
        model.reward_transform_matrix += 0.3 * torch.randn(5, 5)
        model.gating.logit_scale.fill_(1.7)
        for parameter in [model.regression_layer.weight, *model.gating.layers.parameters()]:
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(path)
    tiny_tokenizer("llama3").save_pretrained(path)
    return str(path)
