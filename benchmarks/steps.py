"""Models, trainers, data and operation counts of the benchmarks: random weights in the shape of a model, rows
of drawn lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from config.cli import compose_config
from config.schema import Config
from data.batches import Segment
from data.types import Example, Sequence
from data.views import mismatched
from models.distributed import start
from models.policy import Policy, decoder_blocks, set_up_layers
from models.shapes import known_shapes, without_weights
from models.sharding import shard
from trainers.assembly import make_loss, trainer_class
from trainers.basic import BasicTrainer, StepRecord

Pair = tuple[Sequence, Sequence]


# -- models ----------------------------------------------------------------------------------------


def llama(
    vocabulary: int, width: int, layers: int, heads: int, key_heads: int, inner: int, tied: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )


def shape(name: str) -> PretrainedConfig:
    """Return the architecture of that name: ``tiny``, ``small`` (4.8 M weights), or a published one."""
    shapes = {
        "tiny": llama(512, 64, 2, 4, 2, 128),
        "small": llama(8192, 192, 4, 6, 3, 512),
        "smollm2-135m": llama(49152, 576, 30, 9, 3, 1536, tied=True),
        "qwen2.5-1.5b": AutoConfig.for_model(**known_shapes()["Qwen/Qwen2.5-1.5B-Instruct"]),
    }
    return shapes[name]


def random_policy(config: PretrainedConfig, device: torch.device) -> Policy:
    """Return a policy with random float32 weights of this architecture, made on the device."""
    torch.manual_seed(0)
    with device:
        return Policy(
            AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        )


# -- trainers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a run that the benchmarks vary."""

    loss: str = "dpo"
    batch_size: int = 8
    """Units of the loss: pairs (dpo) or sequences."""
    micro_size: int = 4
    humanline: bool = False
    packing: bool | None = None
    """model.packing; None: its default, rows end to end wherever they can be."""
    dtype: str = "float32"
    max_length: int = 2048
    checkpointing: bool | str = False

    def config(self) -> Config:
        model = {
            "name_or_path": "random",
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "packing": "auto" if self.packing is None else self.packing,
            "microbatches": self.batch_size // self.micro_size,
            "max_length": self.max_length,
            "max_prompt_length": self.max_length - 1,
            "activation_checkpointing": self.checkpointing,
        }
        words = [f"loss={self.loss}", "model=hub", "warmup=0", "lr=1e-5", f"humanline={self.humanline}"]
        return compose_config([*words, *(f"model.{key}={value}" for key, value in model.items())])


def make_trainer(settings: Settings, policy: Policy) -> BasicTrainer:
    """Return a trainer on ``policy`` itself, which is sharded here; copy the policy first to train it
    again."""
    world, config = start(), settings.config()
    policy.use_packed_attention()
    set_up_layers(policy, settings.checkpointing, False)
    shard(policy, decoder_blocks(policy), world, getattr(torch, settings.dtype))
    return trainer_class(config)(config, policy, make_loss(config), world)


def score_all(trainer: BasicTrainer, segment: Segment) -> None:
    """Score every row of the plan under the current weights, as the reference of offline training."""
    trainer.reference.segment = segment
    trainer.reference.refresh(trainer.policy, 0, trainer.reference.upcoming(segment, 0, 0))


class Stepper:
    """A callable that does one step of ``segment`` for timing. It reads each step's numbers a step late, as a
    run does, and makes no check before step 0."""

    def __init__(self, trainer: BasicTrainer, segment: Segment) -> None:
        self.trainer, self.segment = trainer, segment
        self.losses: list[float | None] = []
        self.waiting: StepRecord | None = None

    def __call__(self) -> list[float | None]:
        """Do one step and return the losses of the steps read so far."""
        record = self.trainer.step(self.trainer.dealer.dealt(self.segment, self.trainer.progress.position))
        last = self.trainer.progress.position == self.segment.steps
        done = filter(None, (self.waiting, record if last else None))
        self.losses += [step.pending.read()["loss"] for step in done]
        self.waiting = None if last else record
        return self.losses


# -- data ------------------------------------------------------------------------------------------


def segment(pairs: list[Pair], rows: int, batch_size: int, steps: int | None = None) -> Segment:
    """Return one epoch over ``pairs``, or its first ``steps`` of ``batch_size`` units. ``rows``: of a unit, 2
    (a pair) or 1 (each of its sequences, the first of them the better one)."""
    groups: list[tuple[Example, ...]] = []
    for i, (chosen, rejected) in enumerate(pairs):
        if rows == 2:
            groups.append((Example(f"p{i}", (chosen, rejected)),))
        else:
            groups.append((Example(f"p{i}", (chosen,), 1.0), Example(f"p{i}", (rejected,), -1.0)))
    units = sum(map(len, groups))
    return Segment(tuple(groups), batch_size, min(units, steps * batch_size) if steps else units, seed=1)


def segment_of(settings: Settings, pairs: list[Pair], steps: int | None = None) -> Segment:
    """Return ``segment`` in the unit of the settings' loss."""
    return segment(pairs, 2 if settings.loss == "dpo" else 1, settings.batch_size, steps)


def rows_of(segment: Segment) -> Iterator[Sequence]:
    for i in range(segment.steps):
        yield from (row for example in segment.batch(i) for row in example.rows)


def drawn_pairs(
    count: int,
    vocabulary: int,
    prompt: float = 110.0,
    completion: float = 60.0,
    longest: int = 512,
) -> list[Pair]:
    """Return pairs of random tokens with log-normal lengths (medians in tokens; about those of the preference
    data)."""
    rng = np.random.default_rng(0)

    def some(median: float, most: int) -> np.ndarray:
        n = int(np.clip(median * np.exp(0.7 * rng.standard_normal()), 1, most))
        return rng.integers(3, vocabulary, n).astype(np.int32)

    pairs = []
    for _ in range(count):
        prompt_ids = some(prompt, longest // 2)
        answers = (some(completion, longest - len(prompt_ids)), some(completion, longest - len(prompt_ids)))
        pairs.append((Sequence(prompt_ids, answers[0]), Sequence(prompt_ids, answers[1])))
    return pairs


# -- operations ------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """Floating-point operations of one forward over some rows, none of them padding."""

    products: float
    """Of the blocks, 2 per weight and token; and the logits of the completion tokens alone."""
    attention: float
    """Scores and weighted values under a causal mask: 2 x layers x heads x head size x n^2 for a row of n
    tokens."""


def forward(config: PretrainedConfig, rows: Iterable[Sequence]) -> Forward:
    """Return the operations of one forward over ``rows``; experts that a token skips count as well."""
    lengths = [(len(row), len(row.completion_ids)) for row in rows]
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    blocks = decoder_blocks(without_weights(config))
    weights = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim > 1)
    head = 2.0 * text.vocab_size * text.hidden_size * sum(c for _, c in lengths)
    attention = 2.0 * text.num_hidden_layers * heads * size * sum(n * n for n, _ in lengths)
    return Forward(2.0 * weights * sum(n for n, _ in lengths) + head, attention)


def operations(config: PretrainedConfig, plan: Segment, loss: str, longest: int, scored: bool) -> float:
    """Return the operations that the steps of ``plan`` cannot do without: the policy's forward and backward
    (three forwards), and the forward over KTO's mismatched rows, which are cut at ``longest`` tokens.
    ``scored``: with the reference's forward over all of these."""
    needed = (3 + scored) * sum(forward(config, rows_of(plan)))
    if loss == "kto":
        examples = (e for i in range(plan.steps) for e in mismatched(plan.batch(i), longest))
        needed += (1 + scored) * sum(
            forward(config, [e.mismatched for e in examples if e.mismatched is not None])
        )
    return needed
