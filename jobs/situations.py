"""What a rank of a run holds in every situation: the trainer's tensors (``models.memory``) and what lies
beside them, as the sampler of rounds, the reward models, and the key-value cache while the policy itself
answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from config.schema import Config
from config.schema_model import SELECTIVE, ModelConfig
from config.schema_rewards import RewardModelConfig, WeightedConfig
from config.sections import with_defaults
from models.memory import MARGIN, Estimate, Load, Shape
from models.shapes import architecture, layer_work, parameters_of

GIB = 2.0**30
GAPS = 0.05
"""Share of a card that is reserved for fragmentation by the allocator."""
CONTEXT, NCCL, ASLEEP, GRAPHS = "CUDA context", "NCCL", "sampler asleep", "its CUDA graphs"
ASSUMED = {CONTEXT: 1.0, NCCL: 0.5, ASLEEP: 1.5, GRAPHS: 1.5}
"""GiB of a GPU that hold no tensor of the trainer, not measured: NCCL's for each of its groups of ranks, and
once more where these are more than a NODE has."""
NODE = 8
LIBRARIES = 0.6
"""GiB that torch and the other libraries take in a process without a GPU, measured."""
VARIABLE = ("activations", "work", "logits", "evaluation", "keys, values and logits")
"""The parts that grow with the tokens of a microbatch; all others are fixed."""
CLOSE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
"""Dense architectures whose variable parts are at most 30 % too large; elsewhere, 60 %."""
HANDED = 1.0
"""GiB in which vLLM takes weights from a trainer on the same GPU, unless one weight is larger."""


@dataclass(frozen=True)
class Card:
    """A GPU, or the memory of a machine without one."""

    name: str
    memory: float
    """GiB"""

    @property
    def room(self) -> float:
        """GiB that an estimate may use. GPUs of one kind differ by a few MiB, which decide nothing."""
        return (math.floor(10 * self.memory) / 10 if self.memory >= 1 else self.memory) * (1 - GAPS)


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
        return sum(size for part, size in self.parts.items() if part not in (*ASSUMED, "libraries"))

    @property
    def variable(self) -> float:
        """GiB of what grows with the tokens of a microbatch."""
        return sum(size for part, size in self.parts.items() if part in VARIABLE)

    def __str__(self) -> str:
        digits = 2 if self.total >= 1 else 4
        shown = [f"{part} {size:.{digits}f}" for part, size in self.parts.items() if round(size, digits)]
        return f"{self.name}: {self.total:.{digits}f} GiB = " + " + ".join(shown)


@dataclass(frozen=True)
class RankMemory(Estimate):
    """The memory of the fullest rank, on ``card`` or on a CPU."""

    card: Card | None

    @classmethod
    def of(cls, config: Config, ranks: int, card: Card | None) -> Self:
        """Raises ConfigError for an architecture that cannot be loaded."""
        hf_config = architecture(config.model)
        return cls(config, hf_config, Shape.of(config.model, hf_config), ranks, card is not None, card)

    @property
    def overshoot(self) -> float:
        """By what share the variable parts may be too large at most."""
        model = self.config.model
        windowed = getattr(self.hf_config.get_text_config(), "sliding_window", None)
        plain = self.hf_config.model_type in CLOSE and not model.use_peft and not windowed
        return 0.3 if plain and model.activation_checkpointing != SELECTIVE else 0.6

    def step_total(self, load: Load) -> float:
        """GiB of a training step."""
        return sum(self.step(load).values()) / GIB + sum(self.neighbours.values())

    def fits(self, load: Load) -> bool:
        """Return whether a training step fits the card, always without one."""
        return self.card is None or self.step_total(load) <= self.card.room

    @property
    def neighbours(self) -> dict[str, float]:
        """Return the GiB that are beside the trainer in every situation but while an engine is awake."""
        if self.card is None:
            return {"libraries": LIBRARIES}
        asleep = {ASLEEP: 1} | ({} if self.config.sampler.enforce_eager else {GRAPHS: 1})
        counts = self._outside | (asleep if self.shares_gpu else {})
        return {part: count * ASSUMED[part] for part, count in counts.items()}

    @property
    def _outside(self) -> dict[str, int]:
        groups = (self.ranks > 1) + 2 * (self.config.replicas > 1) + (self.ranks > NODE)
        return {CONTEXT: 1} | ({NCCL: groups} if groups else {})

    @property
    def shares_gpu(self) -> bool:
        """Whether an engine is on the trainer's GPUs."""
        sampler = self.config.sampler
        return self.card is not None and self.config.online and sampler.separate and sampler.shares_devices

    @property
    def engine(self) -> dict[str, float]:
        """The GiB of an engine that is awake on the trainer's GPU, and of weights on their way to it: a layer
        and the largest weight, whole and in float32, and the buffer."""
        sampler, shape = self.config.sampler, self.shape
        width = getattr(torch, sampler.dtype or self.config.model.dtype).itemsize
        buffer = max(HANDED, width * shape.largest / GIB)
        assert self.card is not None
        return {
            "sampler": self.card.memory * sampler.gpu_memory_utilization,
            "weights' hand-over": 4 * (shape.layer_numbers + shape.largest) / GIB + buffer,
        }

    def answers(self, evaluates: bool) -> float:
        """Return the bytes that it takes while the policy itself answers prompts, besides its weights: for
        rounds with sampler=embedded, and for the KL divergence of an evaluation."""
        config, model, most = self.config, self.config.model, 0.0
        if config.online and not config.sampler.separate:
            rows = config.sampler.batch_size or model.eval_batch_size
            most = self._answers(rows, model.max_prompt_length, model.max_prompt_length + config.max_tokens)
        if evaluates and config.retention.kl and model.head != "reward":
            prompts, longest = config.retention.counts("cuda" if self.card else "cpu")
            rows = min(model.eval_batch_size, math.ceil(prompts / self.ranks))
            tokens = min(model.max_length, model.max_prompt_length + longest)
            most = max(most, self._answers(rows, model.max_prompt_length, tokens))
        return most

    def _answers(self, rows: int, prompt: int, tokens: int) -> float:
        """Return the bytes of ``rows`` answers: the key-value cache of ``tokens`` tokens each, the work of a
        layer on all prompts at once, and the logits of one token each.

        Logits exist twice in float32, as they are and at the temperature. To draw a token, their
        probabilities and cumulative sums exist in float64."""
        shape, layer = self.shape, self.shape.layer
        cache = 2 * layer.keys * shape.layers * tokens * self.width
        prefill = prompt * self.width * layer_work(self.hf_config)
        return MARGIN * rows * (cache + prefill + (4 + 4 + 8 + 8) * shape.vocabulary)

    # -- everything --------------------------------------------------------------------------------

    def situations(self, step: Load, evaluation: Load | None) -> list[Situation]:
        """Return what the rank holds in every situation of a run, the training step first. ``evaluation``:
        None without held-out examples."""
        beside, resident = self.neighbours, in_gib(self.resident)
        found = [Situation("training step", in_gib(self.step(step)) | beside)]
        if evaluation is not None:
            found.append(Situation("evaluation", in_gib(self.evaluation(evaluation)) | beside))
        if answers := self.answers(evaluation is not None):
            whole = self.width * self.shape.parameters if self.ranks == 1 else self.gathered(1)
            parts = {"gathered blocks": whole, "keys, values and logits": answers}
            found.append(Situation("own answers", resident | in_gib(parts) | beside))
        if self.shares_gpu:
            outside = {part: count * ASSUMED[part] for part, count in self._outside.items()}
            found.append(Situation("sampling", resident | outside | self.engine))
        if models := reward_models(self.config):
            found.append(Situation("scoring", resident | beside | models))
        return found


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: size / GIB for part, size in parts.items() if size}


def reward_models(config: Config) -> dict[str, float]:
    """Return the GiB that each reward model takes, by its weights and the work of one layer on the tokens of
    one batch; {} where the reward loads no model. While a round is scored, every rank's GPU holds the models,
    and those of a weighted sum all at once. Raises ConfigError where an architecture cannot be loaded."""
    alone = config.reward_config.models_alone() if config.online and config.reward is not None else None
    if alone is None:
        return {}
    if isinstance(alone.settings, WeightedConfig):
        rewards = {f"reward model of {name}": part.reward for name, part in alone.settings.typed().items()}
    else:
        name = getattr(alone.settings, "name_or_path", alone.name)
        rewards = {f"reward model {name}": alone}
    found = {}
    for name, one in rewards.items():
        if isinstance(settings := one.settings, RewardModelConfig):
            words = {"name_or_path": settings.name_or_path, "revision": settings.revision}
            hf_config = architecture(with_defaults(ModelConfig, name="reward", **words))
            numbers = parameters_of(hf_config) + settings.batch_tokens * layer_work(hf_config)
            found[name] = getattr(torch, settings.dtype).itemsize * numbers / GIB
    return found
