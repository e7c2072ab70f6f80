"""Simulate two optimizer steps of a run with tensors that have shapes but no values, and record what every
moment takes on rank 0.

The steps are the project's own, with its model, sharding, loss and optimizer. The simulation needs a process
of its own (memory.plan), because it makes a process group of ranks that do not exist and follows the
code paths of a GPU where there is none.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from common.errors import ConfigError
from config.schema import Config
from config.schema_model import ModelConfig
from data.balance import share_tokens
from data.batches import Segment, Size
from data.types import Example, Microbatch
from memory.tracker import Moment, StorageTracker
from models.attention import packs_rows
from models.distributed import simulated_ranks
from models.policy import Policy, decoder_blocks
from models.pretrained import FLASH_ATTENTION, empty_policy, export_dtype, kernels_of
from models.quantization import count_weights
from models.reference import Reference, sequences_of
from models.sharding import rounded, shard, to_empty
from models.simulated import simulated_gpu
from trainers.assembly import make_loss, trainer_class
from trainers.basic import BasicTrainer
from trainers.humanline import Humanline

STEPS = 2
"""Number of simulated steps. Only from the second step on does the optimizer hold its moments."""
LEAST = 4
"""Smallest number of layers of the smaller model: two first and two last ones."""

Peaks = dict[Moment, dict[str, int]]
Slots = list[list[list[Example]]]


@dataclass(frozen=True)
class MemoryRequest:
    """The input of a simulation: a run's settings and the examples of a global batch."""

    config: Config
    batch: list[Example]
    held_out: list[Example]
    """The examples that are evaluated at once over all ranks; empty without evaluation."""
    ranks: int
    gpu: bool
    """Whether the ranks have GPUs."""
    hf_config: PretrainedConfig | None
    """The architecture; None if the model's own code makes it from the settings."""
    whole: bool = False
    """Simulate all layers instead of extrapolating from two smaller numbers of layers."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that rank 0 takes, in bytes."""

    parameters: int
    """Number of parameters of the whole model, shared ones counted once."""
    tokens: int
    """Tokens of the widest microbatch."""
    peaks: Peaks
    """Moment -> bytes by part when their sum was largest."""
    resident: dict[str, int]
    """Part -> bytes between two steps."""


def answer(question: MemoryRequest) -> MemoryNeed:
    """Return what every moment of two steps takes.

    Raises whatever a model's own code raises when tensors have no values."""
    question = replace(question, config=replace(question.config, optimizer="AdamW"))  # others need values
    hf_config = question.hf_config
    if hf_config is None:
        return simulated(question, None)
    with as_folder(question, hf_config) as whole:
        layers = layers_of(empty_policy(whole.config.model), hf_config)
    if question.whole or layers.few is None:
        with as_folder(question, hf_config) as all_of_it:
            return simulated(all_of_it, layers.count)
    answers = []
    for count in layers.few:
        with as_folder(question, with_layers(hf_config, count)) as part:
            answers.append(simulated(part, count, edge=layers.edge))
    return carried_on(answers[0], answers[1], layers)


def exported_in(given: ModelConfig, hf_config: PretrainedConfig) -> Any:
    """Return the dtype of the exported model, which the temporary folder's missing weights cannot tell."""
    try:
        dtype: str | torch.dtype = export_dtype(given)
    except ConfigError:  # an architecture without files
        dtype = hf_config.dtype or torch.float32
    return str(dtype).removeprefix("torch.")


@contextmanager
def as_folder(question: MemoryRequest, hf_config: PretrainedConfig) -> Iterator[MemoryRequest]:
    """Yield the question with the architecture saved in a temporary folder that its settings name."""
    given = question.config.model
    kernel, hf_config = given.attn_implementation, copy.deepcopy(hf_config)
    with simulated_gpu(question.gpu):
        packing, _ = packs_rows(given, hf_config)
    if kernel in FLASH_ATTENTION:  # it exists on a GPU alone; other kernels take at least as much memory
        kernel = "sdpa" if "sdpa" in kernels_of(hf_config) else "eager"
        hf_config.get_text_config().attn_logit_softcapping = None  # sdpa has none
    with tempfile.TemporaryDirectory() as folder:
        hf_config.save_pretrained(folder)
        model = replace(
            given,
            name_or_path=folder,
            tokenizer_name_or_path=given.tokenizer_name_or_path or given.name_or_path,
            revision=None,
            export_dtype=exported_in(given, hf_config),
            packing=packing,
            attn_implementation=kernel,
            compile=False,  # eager layers take at least as much memory
        )
        yield replace(question, config=replace(question.config, model=model))


# -- the steps -------------------------------------------------------------------------------------


def simulated(question: MemoryRequest, layers: int | None, edge: int = 10**9) -> MemoryNeed:
    """Simulate two steps and, where the question has held-out examples, an evaluation.

    The moments of the first ``edge`` blocks have the block's number, those of the last ``edge`` blocks a
    negative number counted from the last block, and those of the blocks between have None."""
    tracker, config = StorageTracker(), question.config
    with (
        quick_collections(),
        simulated_gpu(question.gpu),
        simulated_ranks(question.ranks, config.replicas) as world,
    ):
        policy = empty_policy(config.model)
        dtype = getattr(torch, config.model.dtype)
        shard(policy, decoder_blocks(policy), world, dtype, config.model.shards_again)
        with FakeTensorMode(allow_non_fake_inputs=True), tracker:
            to_empty(policy, world.device)
            parameters = count_weights(policy)
            trainer = trainer_class(config)(config, policy, make_loss(config), world)
            assign_states(tracker, trainer)
            watch_blocks(tracker, decoder_blocks(policy), edge)
            deal_heaviest(trainer)
            segment = Segment((tuple(question.batch),), len(question.batch), len(question.batch) * 3, seed=0)
            tokens = take_steps(tracker, trainer, segment)
            resident = tracker.now
            if question.held_out:
                evaluate(tracker, trainer, question.held_out)
    return MemoryNeed(parameters, tokens, tracker.peaks, resident)


@contextmanager
def quick_collections() -> Iterator[None]:
    """Leave the objects that are there already out of garbage collections, for as long as this process lives.
    Most belong to imported modules, and going through them once takes longer than a small simulation."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()


def take_steps(tracker: StorageTracker, trainer: BasicTrainer, segment: Segment) -> int:
    """Take two steps as training does, and return the tokens of the widest microbatch."""
    tracker.peaks.clear()
    if trainer.config.has_reference:
        for step, micros in trainer.reference.upcoming(segment, 0, 0):
            keep_scores(trainer.reference, step, micros)
    if trainer.reference.anchor is not None:
        for step in range(segment.steps):
            keep_scores(trainer.reference.anchor, step, trainer.dealer.microbatches(segment.batch(step)))
    trainer.optimizer.register_step_pre_hook(lambda *_: tracker.enter(("update", None)))
    for _ in range(STEPS):
        gc.collect()
        tracker.enter(("beginning", None))
        trainer.step(trainer.dealer.dealt(segment, trainer.progress.position))
        assign_states(tracker, trainer)
    gc.collect()
    (slot, *_) = trainer.dealer.deal(trainer.arrange(segment.batch(0)), trainer.dealer.size)
    return share_tokens(slot[0], trainer.dealer.packing, trainer.dealer.shares_prompts)


def keep_scores(reference: Reference, step: int, micros: list[Microbatch]) -> None:
    """Store placeholder scores of these microbatches in the reference, without a forward pass."""
    reference.scores = dict(reference.scores) | {
        reference.key(step, row): torch.zeros(len(row.counted))
        for sequences in sequences_of(micros)
        for row in sequences.rows
    }


@torch.no_grad()
def evaluate(tracker: StorageTracker, trainer: BasicTrainer, examples: list[Example]) -> None:
    """Simulate the forward pass of an evaluation on one slot of its examples."""
    tracker.enter(("evaluation", None))
    size = max(1, trainer.config.model.eval_batch_size // (trainer.world.size * trainer.rows_per_example))
    reference = Reference()
    scorer = trainer.scorer_with(reference, Humanline())
    own = export_dtype(trainer.config.model)
    computed = getattr(torch, trainer.config.model.dtype)
    with rounded(trainer.policy, torch.float32 if own == computed else own):
        micro = trainer.dealer.share(trainer.arrange(examples), size)[0]
        keep_scores(reference, 0, [micro])
        scorer.score_without_gradient(0, micro.sequences)


def deal_heaviest(trainer: BasicTrainer) -> None:
    """Make the trainer deal only the heaviest slot of every batch, with its heaviest share on rank 0.

    Where a batch has more slots, the heaviest is dealt twice, so that its second pass runs with accumulated
    gradients in memory."""
    dealer, dealt = trainer.dealer, trainer.dealer.deal

    def deal(arranged: list[Example], size: Size) -> Slots:
        slots = [
            sorted(slot, key=lambda share: -share_tokens(share, dealer.packing, dealer.shares_prompts))
            for slot in dealt(arranged, size)
        ]
        heaviest = max(slots, key=lambda slot: share_tokens(slot[0], dealer.packing, dealer.shares_prompts))
        return [heaviest] * min(len(slots), 2)

    dealer.deal = deal  # type: ignore[method-assign]


# -- what is told apart ----------------------------------------------------------------------------


def assign_states(tracker: StorageTracker, trainer: BasicTrainer) -> None:
    """Tell the tracker which tensors are weights, gradients, optimizer state and a second reference."""
    parameters = list(trainer.policy.parameters())
    tracker.assign("weights", [p.detach() for p in parameters])
    for held in (trainer.reference.soft, trainer.reference.initial):
        if held is not None:
            tracker.assign("reference", held.buffers())
    assign_gradients(tracker, parameters)
    states = trainer.optimizer.state.values()
    tracker.assign("optimizer", [v for state in states for v in state.values() if isinstance(v, Tensor)])


def assign_gradients(tracker: StorageTracker, parameters: list[nn.Parameter]) -> None:
    tracker.assign("gradients", [p.grad for p in parameters if p.grad is not None])


def watch_blocks(tracker: StorageTracker, blocks: list[nn.Module], edge: int) -> None:
    """Register hooks that tell the tracker when each block's forward and backward begin.

    New tensors count as activations during the blocks' forwards with gradient, and as work otherwise."""
    parameters = [p for block in blocks for p in block.parameters()]

    def enter(doing: str, i: int) -> None:
        place = i if i < edge else i - len(blocks) if i >= len(blocks) - edge else None
        tracker.enter((doing if place is not None else f"{doing}, between", place))

    def begins(i: int, *_: Any) -> None:
        trains = torch.is_grad_enabled()
        tracker.making = "activations" if trains else "work"
        enter("forward" if trains else "evaluation" if evaluates(tracker.moment) else "scoring", i)

    def ends(i: int, module: nn.Module, args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if i == len(blocks) - 1:
            tracker.making = "work"
            tracker.enter(("head" if torch.is_grad_enabled() else tracker.moment[0], None))
        if hidden.requires_grad:
            hidden.register_hook(partial(goes_back, i))

    def goes_back(i: int, gradient: Tensor) -> None:
        assign_gradients(tracker, parameters)
        enter("backward", i)

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(begins, i))
        block.register_forward_hook(partial(ends, i))


def evaluates(moment: Moment) -> bool:
    """Return whether the moment belongs to an evaluation rather than to a step."""
    return moment[0].startswith("evaluation")


# -- from a few layers to all ----------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """How an architecture's layers repeat."""

    count: int
    period: int
    """Each layer is like the one this many layers before it."""

    @property
    def edge(self) -> int:
        """Number of layers at either end of a smaller model that stand for those of the whole one."""
        return max(LEAST // 2, self.period)

    @property
    def few(self) -> tuple[int, int] | None:
        """Two smaller numbers of layers, with which a model ends as the whole model does; None where together
        they are not fewer than the whole model's."""
        below = 2 * self.edge
        below += (self.count - below) % self.period
        above = below + self.period
        return (below, above) if below + above < self.count else None


def layers_of(policy: Policy, hf_config: PretrainedConfig) -> Layers:
    """Return how the layers of ``policy``, which may lie on the meta device, repeat."""
    kinds = getattr(hf_config.get_text_config(), "layer_types", None)
    blocks = decoder_blocks(policy)
    looks = [
        (
            tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()),
            kinds[i] if kinds else None,
        )
        for i, block in enumerate(blocks)
    ]
    count = len(looks)
    period = next(n for n in range(1, count + 1) if looks[n:] == looks[: count - n])
    return Layers(count, period)


def with_layers(hf_config: PretrainedConfig, count: int) -> PretrainedConfig:
    """Return the architecture with its first ``count`` layers alone."""
    made = copy.deepcopy(hf_config)
    text = made.get_text_config()
    every = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, key, value[:count])
    text.num_hidden_layers = count
    return made


def carried_on(few: MemoryNeed, more: MemoryNeed, layers: Layers) -> MemoryNeed:
    """Return the answer for ``layers.count`` layers, extrapolated from answers for two smaller numbers.

    Every moment grows linearly with the number of layers, and the moments of the blocks between the first
    and the last ones lie between theirs."""
    below, above = layers.few or (0, 1)
    times = (layers.count - above) / (above - below)

    def grown(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        return {
            part: max(0, round(b.get(part, 0) + times * (b.get(part, 0) - a.get(part, 0)))) for part in a | b
        }

    peaks = {
        moment: grown(few.peaks[moment], parts) for moment, parts in more.peaks.items() if moment in few.peaks
    }
    parameters = round(more.parameters + times * (more.parameters - few.parameters))
    return MemoryNeed(parameters, more.tokens, peaks, grown(few.resident, more.resident))
