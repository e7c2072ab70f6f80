"""Estimate the GPU memory of everything that shares a training rank's GPU with the training step.

This is the sampler of rounds, the reward models, and the key-value cache and logits while the policy itself
answers. The numbers are computed from sizes, not simulated.
"""

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
from jobs.retention import own_counts
from models.attention import heads_of
from models.shapes import architecture

GIB = 2.0**30


def reward_models(config: Config) -> dict[str, float]:
    """Return the GiB that each reward model takes; {} where the reward loads no model.

    The number counts the model's weights and the work of one layer on the tokens of one batch. While a round
    is scored, every rank's GPU holds the models, and those of a weighted sum all at once. Raises ConfigError
    where an architecture cannot be loaded.
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
    """Return the GiB of one reward model. Raises ConfigError."""
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
    """Return the number of parameters of the language model of this architecture."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(found)
    return sum(p.numel() for p in model.parameters())


def layer_work(found: PretrainedConfig) -> int:
    """Return about how many numbers a layer holds per token at once.

    These are its input, its norm, and either queries, keys, values and attention output, or the three
    intermediate tensors of a gated MLP."""
    text = found.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(2 * text.hidden_size + max(4 * text.hidden_size, 3 * inner))


def engine_weights(config: Config, parameters: int) -> float:
    """Return the GiB of the sampled model's weights on one GPU of the engine."""
    dtype = getattr(torch, config.sampler.dtype or config.model.dtype)
    return parameters * dtype.itemsize / config.sampler.tensor_parallel / GIB


def own_answers(config: Config, found: PretrainedConfig, ranks: int, evaluates: bool) -> float:
    """Return the GiB that it takes while the policy itself answers prompts, besides its weights.

    It does so for rounds with sampler=embedded, and for the KL divergence of an evaluation. ``ranks``:
    number of ranks; ``evaluates``: whether the run has held-out examples."""
    model, most = config.model, 0.0
    if config.online and not config.sampler.separate:
        rows = config.sampler.batch_size or model.eval_batch_size
        prompt = model.max_prompt_length
        most = answers(found, rows, prompt, prompt + config.max_tokens, model)
    if evaluates and config.retention.kl and model.head != "reward":
        prompts, longest = own_counts(config.retention, "cuda")
        rows = min(model.eval_batch_size, math.ceil(prompts / ranks))
        tokens = min(model.max_length, model.max_prompt_length + longest)
        most = max(most, answers(found, rows, model.max_prompt_length, tokens, model))
    return most


def answers(found: PretrainedConfig, rows: int, prompt: int, tokens: int, model: ModelConfig) -> float:
    """Return the GiB of ``rows`` answers: the key-value cache of ``tokens`` tokens each, the work of one
    layer on all prompts of ``prompt`` tokens at once, and the logits of one token each.

    Logits exist twice in float32, as they are and at the temperature. To draw a token, their probabilities
    and cumulative sums exist in float64."""
    text, width = found.get_text_config(), getattr(torch, model.dtype).itemsize
    _, keys, size = heads_of(found)
    cache = 2 * keys * size * text.num_hidden_layers * tokens * width
    prefill = prompt * layer_work(found) * width
    return rows * (cache + prefill + (4 + 4 + 8 + 8) * text.vocab_size) / GIB
