"""What else stands on a training rank's GPU, beside what a step takes: the sampler of rounds, the reward
model, and the cache of answers that the policy itself gives. Counted, not simulated."""

from __future__ import annotations

import math

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig

from config.defaults import with_defaults
from config.schema import Config
from config.schema_model import ModelConfig
from config.schema_rewards import RewardModelConfig, TeacherConfig
from config.schema_weighted import WeightedConfig
from jobs.retention import PROMPTS, TOKENS
from models.shapes import architecture

GIB = 2.0**30


def reward_models(config: Config) -> dict[str, float]:
    """Part -> GiB of a reward model's weights and of one layer's work over the tokens that go through it at
    once; {} where the reward loads none. They stand on every rank's GPU while a round is scored, those of a
    weighted sum together.

    Raises ConfigError where an architecture cannot be had.
    """
    alone = config.reward_config.models_alone() if config.online and config.reward is not None else None
    if alone is None:
        return {}
    if isinstance(alone.settings, WeightedConfig):
        found = {f"reward model of {name}": part.reward for name, part in alone.settings.found().items()}
    else:
        name = getattr(alone.settings, "name_or_path", alone.name)
        found = {f"reward model {name}": alone}
    known = RewardModelConfig, TeacherConfig
    return {
        name: of_model(config, one.settings) for name, one in found.items() if isinstance(one.settings, known)
    }


def of_model(config: Config, settings: RewardModelConfig | TeacherConfig) -> float:
    """GiB of one reward model. Raises ConfigError."""
    if isinstance(settings, TeacherConfig):
        tokens = settings.batch_size * config.model.max_length
    else:
        tokens = settings.batch_tokens
    model = with_defaults(
        ModelConfig, name="reward", name_or_path=settings.name_or_path, revision=settings.revision
    )
    found, width = architecture(model), getattr(torch, settings.dtype).itemsize
    weights = parameters_of(found) * width
    return (weights + tokens * layer_work(found) * width) / GIB


def parameters_of(found: PretrainedConfig) -> int:
    """Parameters of the language model of this architecture."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(found)
    return sum(p.numel() for p in model.parameters())


def layer_work(found: PretrainedConfig) -> int:
    """Numbers that a layer holds for a token at once, about: its input, its norm, queries, keys, values and
    attention; or its input, its norm and the three of a gated MLP."""
    text = found.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(2 * text.hidden_size + max(4 * text.hidden_size, 3 * inner))


def engine_weights(config: Config, parameters: int) -> float:
    """GiB of the sampled model on one GPU of the engine."""
    dtype = getattr(torch, config.sampler.dtype or config.model.dtype)
    return parameters * dtype.itemsize / config.sampler.tensor_parallel / GIB


def own_answers(config: Config, found: PretrainedConfig, ranks: int, evaluates: bool) -> float:
    """GiB of keys, values and logits while the policy itself answers prompts: a round's with
    sampler=embedded, or those of an evaluation."""
    model, most = config.model, 0.0
    if config.online and not config.sampler.separate:
        rows = config.sampler.batch_size or model.eval_batch_size
        most = answers(found, rows, model.max_prompt_length + config.max_tokens, model)
    if evaluates and config.retention.kl and model.head != "reward":
        rows = min(model.eval_batch_size, math.ceil(PROMPTS / ranks))
        most = max(most, answers(found, rows, min(model.max_length, model.max_prompt_length + TOKENS), model))
    return most


def answers(found: PretrainedConfig, rows: int, tokens: int, model: ModelConfig) -> float:
    """GiB of the cache of so many rows, and of float32 logits and two copies of them."""
    text = found.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    cache = 2 * keys * size * text.num_hidden_layers * tokens * getattr(torch, model.dtype).itemsize
    return rows * (cache + 3 * 4 * text.vocab_size) / GIB
