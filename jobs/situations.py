"""What a rank of a run holds while it trains, evaluates and samples: the trainer's tensors
(``models.memory``) and what lies beside them, as the engine of rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from config.schema import Config
from config.schema_model import SELECTIVE
from models.memory import Estimate, Load, Shape
from models.shapes import architecture

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

    # -- everything --------------------------------------------------------------------------------

    def situations(self, step: Load, evaluation: Load | None) -> list[Situation]:
        """Return what the rank holds in every situation of a run, the training step first. ``evaluation``:
        None without held-out examples."""
        beside, resident = self.neighbours, in_gib(self.resident)
        found = [Situation("training step", in_gib(self.step(step)) | beside)]
        if evaluation is not None:
            found.append(Situation("evaluation", in_gib(self.evaluation(evaluation)) | beside))
        if self.shares_gpu:
            outside = {part: count * ASSUMED[part] for part, count in self._outside.items()}
            found.append(Situation("sampling", resident | outside | self.engine))
        return found


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: size / GIB for part, size in parts.items() if size}
