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
from transformers import PretrainedConfig

from common.errors import ConfigError
from config.schema import Config
from config.schema_model import ModelConfig
from config.schema_rewards import RewardModelConfig, WeightedConfig
from config.sections import with_defaults
from memory.simulate import MemoryNeed, evaluates
from memory.tracker import WORKSPACE
from models.attention import heads_of
from models.policy import decoder_blocks
from models.shapes import architecture, layer_work, parameters_of, without_weights

GIB = 2.0**30
GAPS = 0.05
"""Share of a card that is reserved for fragmentation by the allocator."""
ASSUMED = {"CUDA context": 1.0, "NCCL": 0.5, "sampler asleep": 1.5, "its CUDA graphs": 1.5}
"""GiB of a GPU that hold no tensor of the trainer, not measured: NCCL's for each of its groups of ranks, and
once more where these are more than a NODE has."""
NODE = 8
LIBRARIES = 1.5
"""Assumed GiB of the host's memory that torch and the other libraries take in a process with a GPU."""
SAVED = ("weights", "reference", "optimizer")
HANDED = 1.0
"""GiB in which vLLM takes weights from a trainer on the same GPU, unless one weight is larger."""
ORDER = (*SAVED, "gradients", "gathered blocks", "activations", "work", "head", WORKSPACE, "communication")


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
        return sum(size for part, size in self.parts.items() if part not in ASSUMED)

    def __str__(self) -> str:
        digits = 2 if self.total >= 1 else 4
        shown = [f"{part} {size:.{digits}f}" for part, size in self.parts.items() if round(size, digits)]
        return f"{self.name}: {self.total:.{digits}f} GiB = " + " + ".join(shown)


# -- simulated parts -------------------------------------------------------------------------------


def peak(given: MemoryNeed, evaluation: bool) -> dict[str, int]:
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
    """What is on a rank's GPU beside the trainer, in GiB by part: memory of no tensor (``outside``); beside
    everything but an engine that is awake (``always``); reward models, while a round is scored
    (``models``); an engine that is awake; what the host's memory keeps."""

    outside: dict[str, float]
    always: dict[str, float]
    models: dict[str, float]
    sampler: float | None
    host: dict[str, float]


def neighbours(config: Config, ranks: int, card: Card | None, notes: list[str]) -> Neighbours:
    """Return what is on the fullest rank's GPU beside the trainer; ``card`` is None for a CPU. A note is
    added if some of it could not be counted."""
    groups = (ranks > 1) + 2 * (config.replicas > 1) + (ranks > NODE)
    held = {"CUDA context": 1} | ({"NCCL": groups} if groups else {})
    shares = card is not None and config.online and config.sampler.separate
    shares = shares and config.sampler.shares_devices
    sleeping = {"sampler asleep": 1} | ({} if config.sampler.enforce_eager else {"its CUDA graphs": 1})
    outside, asleep = ({part: n * ASSUMED[part] for part, n in counts.items()} for counts in (held, sleeping))
    outside = {} if card is None else outside
    try:
        models = reward_models(config)
    except ConfigError as error:
        models = {}
        notes.append(f"the reward model is not counted: {error}")
    return Neighbours(
        outside,
        outside | (asleep if shares else {}),
        models,
        card.memory * config.sampler.gpu_memory_utilization if shares and card is not None else None,
        {f"{name}, between rounds": size for name, size in models.items()},
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
        rewards = {f"reward model of {name}": part.reward for name, part in alone.settings.typed().items()}
    else:
        name = getattr(alone.settings, "name_or_path", alone.name)
        rewards = {f"reward model {name}": alone}
    return {
        name: of_model(one.settings)
        for name, one in rewards.items()
        if isinstance(one.settings, RewardModelConfig)
    }


def of_model(settings: RewardModelConfig) -> float:
    """Return the GiB of one reward model. Raises ConfigError."""
    model = with_defaults(
        ModelConfig, name="reward", name_or_path=settings.name_or_path, revision=settings.revision
    )
    hf_config, width = architecture(model), getattr(torch, settings.dtype).itemsize
    weights = parameters_of(hf_config) * width
    return (weights + settings.batch_tokens * layer_work(hf_config) * width) / GIB


def handed_over(config: Config, hf_config: PretrainedConfig) -> float:
    """Return the GiB that weights take on their way to an engine on the same GPU: a layer and the largest
    weight, whole and in float32, and the buffer."""
    model = without_weights(hf_config)
    largest = max(p.numel() for p in model.parameters())
    layer = max(sum(p.numel() for p in block.parameters()) for block in decoder_blocks(model))
    width = getattr(torch, config.sampler.dtype or config.model.dtype).itemsize
    return 4 * (layer + largest) / GIB + max(HANDED, width * largest / GIB)


def on_host(config: Config, given: MemoryNeed, beside: Neighbours) -> list[Situation]:
    """Return what rank 0 holds in the host's memory: while weights are read or exported, when it has all of
    them (in float32, but for those under adapters), and while async_save writes from a copy."""
    kept = {"libraries": LIBRARIES} | beside.host
    width = getattr(torch, config.model.dtype).itemsize if config.model.use_peft else 4
    whole = {"all weights": width * given.parameters / GIB}
    said = [Situation("rank 0's host memory, loading and exporting", kept | whole)]
    if config.async_save:
        copy = {f"copy of {part}": size for part, size in in_gib(given.resident).items() if part in SAVED}
        said.append(Situation("rank 0's host memory, saving (every rank's)", kept | copy))
    return said


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
        prompts, longest = config.retention.counts("cuda")
        rows = min(model.eval_batch_size, math.ceil(prompts / ranks))
        tokens = min(model.max_length, model.max_prompt_length + longest)
        most = max(most, answers(hf_config, rows, model.max_prompt_length, tokens, model))
    return most


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
