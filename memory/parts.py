"""The parts of the memory that a rank takes in every situation of a run, and the card that they must fit on.

The parts of the training step and of the evaluation are simulated (``memory.simulate``). What lies beside
them is computed from sizes: the sampler of rounds, the reward models, and the key-value cache and logits
while the policy itself answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from common.errors import ConfigError
from config.schema import Config, RetentionConfig
from config.schema_model import ModelConfig
from config.schema_rewards import RewardModelConfig, TeacherConfig
from config.schema_weighted import WeightedConfig
from config.typed import with_defaults
from memory.simulate import Answer, evaluates
from models.attention import heads_of
from models.shapes import architecture

GIB = 2.0**30
GAPS = 0.05
"""Share of a card that is reserved for fragmentation by the allocator."""
CONTEXT, ASLEEP = 1.5, 1.5
"""Assumed GiB of a GPU that hold no tensor of the trainer: CONTEXT for its CUDA context, libraries and NCCL,
ASLEEP for a sleeping engine."""
OUTSIDE, SLEEPING = "outside tensors", "sampler asleep"
ORDER = (
    "weights",
    "reference",
    "optimizer",
    "gradients",
    "gathered blocks",
    "activations",
    "work",
    "head",
    "communication",
)


@dataclass(frozen=True)
class Card:
    """A GPU, or the memory of a machine without one."""

    name: str
    memory: float
    """GiB"""

    @property
    def room(self) -> float:
        """GiB that a plan may use."""
        return self.memory * (1 - GAPS)


@dataclass(frozen=True)
class Situation:
    """The memory that a rank holds at once during one activity, such as a training step."""

    name: str
    parts: Mapping[str, float]
    """Part -> GiB"""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors(self) -> float:
        """GiB of the trainer's own tensors, which torch's allocator counts."""
        return sum(size for part, size in self.parts.items() if part not in (OUTSIDE, SLEEPING))

    def __str__(self) -> str:
        digits = 2 if self.total >= 1 else 4
        shown = [f"{part} {size:.{digits}f}" for part, size in self.parts.items() if round(size, digits)]
        return f"{self.name}: {self.total:.{digits}f} GiB = " + " + ".join(shown)


# -- simulated parts -------------------------------------------------------------------------------


def peak(given: Answer, evaluation: bool) -> dict[str, int]:
    """Return bytes by part at the moment of the largest sum.

    ``evaluation``: consider the moments of the evaluation instead of those of the training step."""
    moments: Iterable[dict[str, int]] = (
        parts for moment, parts in given.peaks.items() if evaluates(moment) is evaluation
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def in_gib(parts: Mapping[str, int]) -> dict[str, float]:
    return {part: parts[part] / GIB for part in ORDER if parts.get(part)}


# -- beside the trainer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbours:
    """What is on a rank's GPU beside the trainer, in GiB by part."""

    outside: dict[str, float]
    """Memory of no tensor."""
    always: dict[str, float]
    """Beside everything but an engine that is awake."""
    models: dict[str, float]
    """Reward models, while a round is scored."""
    scored: dict[str, float]
    """The reward models that are there beside a training step too."""
    sampler: float | None
    """An engine on this GPU that is awake."""


def neighbours(config: Config, ranks: int, card: Card | None, notes: list[str]) -> Neighbours:
    """Return what is on the fullest rank's GPU beside the trainer; ``card`` is None for a CPU. A note is
    added if some of it could not be counted."""
    outside = {} if card is None else {OUTSIDE: CONTEXT}
    shares = card is not None and config.online and config.sampler.separate
    shares = shares and config.sampler.shares_devices
    try:
        models = reward_models(config)
    except ConfigError as error:
        models = {}
        notes.append(f"the reward model is not counted: {error}")
    # A single rank scores beside its training where rounds are sampled ahead; several score between steps.
    beside_training = ranks == 1 and config.rounds.lag > 0 and config.sampler.separate
    return Neighbours(
        outside,
        outside | ({SLEEPING: ASLEEP} if shares else {}),
        models,
        models if beside_training else {},
        card.memory * config.sampler.gpu_memory_utilization if shares and card is not None else None,
    )


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
        rewards = {f"reward model of {name}": part.reward for name, part in alone.settings.found().items()}
    else:
        name = getattr(alone.settings, "name_or_path", alone.name)
        rewards = {f"reward model {name}": alone}
    known = RewardModelConfig, TeacherConfig
    return {
        name: of_model(config, one.settings)
        for name, one in rewards.items()
        if isinstance(one.settings, known)
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
    hf_config, width = architecture(model), getattr(torch, settings.dtype).itemsize
    weights = parameters_of(hf_config) * width
    return (weights + tokens * layer_work(hf_config) * width) / GIB


def parameters_of(hf_config: PretrainedConfig) -> int:
    """Return the number of parameters of the language model of this architecture."""
    return sum(p.numel() for p in without_weights(hf_config).parameters())


def without_weights(hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return the language model of this architecture with all tensors on the meta device."""
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config)
    return model


def layer_work(hf_config: PretrainedConfig) -> int:
    """Return about how many numbers a layer holds per token at once.

    These are its input, its norm, and either queries, keys, values and attention output, or the three
    intermediate tensors of a gated MLP."""
    text = hf_config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(2 * text.hidden_size + max(4 * text.hidden_size, 3 * inner))


def engine_weights(config: Config, parameters: int) -> float:
    """Return the GiB of the sampled model's weights on one GPU of the engine."""
    dtype = getattr(torch, config.sampler.dtype or config.model.dtype)
    return parameters * dtype.itemsize / config.sampler.tensor_parallel / GIB


def own_answers(config: Config, hf_config: PretrainedConfig, ranks: int, evaluates: bool) -> float:
    """Return the GiB that it takes while the policy itself answers prompts, besides its weights.

    It does so for rounds with sampler=embedded, and for the KL divergence of an evaluation. ``ranks``:
    number of ranks; ``evaluates``: whether the run has held-out examples."""
    model, most = config.model, 0.0
    if config.online and not config.sampler.separate:
        rows = config.sampler.batch_size or model.eval_batch_size
        prompt = model.max_prompt_length
        most = answers(hf_config, rows, prompt, prompt + config.max_tokens, model)
    if evaluates and config.retention.kl and model.head != "reward":
        prompts, longest = own_counts(config.retention, "cuda")
        rows = min(model.eval_batch_size, math.ceil(prompts / ranks))
        tokens = min(model.max_length, model.max_prompt_length + longest)
        most = max(most, answers(hf_config, rows, model.max_prompt_length, tokens, model))
    return most


def own_counts(retention: RetentionConfig, device: str) -> tuple[int, int]:
    """Return (how many held-out prompts the initial weights answer at most, the tokens of an answer at most).
    A CPU answers few and short, so that a run begins within a minute."""
    prompts, tokens = (8, 64) if device == "cpu" else (64, 256)
    return retention.prompts or prompts, retention.tokens or tokens


def answers(hf_config: PretrainedConfig, rows: int, prompt: int, tokens: int, model: ModelConfig) -> float:
    """Return the GiB of ``rows`` answers: the key-value cache of ``tokens`` tokens each, the work of one
    layer on all prompts of ``prompt`` tokens at once, and the logits of one token each.

    Logits exist twice in float32, as they are and at the temperature. To draw a token, their probabilities
    and cumulative sums exist in float64."""
    text, width = hf_config.get_text_config(), getattr(torch, model.dtype).itemsize
    _, keys, size = heads_of(hf_config)
    cache = 2 * keys * size * text.num_hidden_layers * tokens * width
    prefill = prompt * layer_work(hf_config) * width
    return rows * (cache + prefill + (4 + 4 + 8 + 8) * text.vocab_size) / GIB
