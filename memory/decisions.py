"""What a run and a dry run ask of the memory plan: how batches are cut into microbatches, whether layers stay
gathered until their backward, and what a rank holds at most, in words."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from common.worker_process import WorkerError, WorkerProcess
from config.schema import Config, card_memory
from config.schema_model import AUTO, ModelConfig
from data.balance import row_tokens, share_tokens
from data.batches import Segment, heaviest, size_of, widest
from data.examples import longest
from data.types import Example
from memory.fit import how_rows_are_joined
from memory.parts import GIB, Card
from memory.plan import (
    checkpointing_in_words,
    cut_in_words,
    gathered_in_words,
    last_line,
    of_examples,
    of_shapes,
    unplanned,
)
from models.distributed import World, gather_objects, on_main
from models.policy import Policy, decoder_blocks, set_up_layers
from models.shapes import architecture
from models.sharding import keep_gathered
from trainers.basic import BasicTrainer

SECONDS = 1800.0
"""Time that a simulation may take."""


# -- a dry run -------------------------------------------------------------------------------------


def describe_memory(
    config: Config,
    train: Segment,
    held_out: list[Segment],
    trainer: type[BasicTrainer],
    ranks: int,
    here: bool = False,
) -> str:
    """Return the plan in words for the data of a dry run, or a sentence that says why there is no plan.
    ``here``: simulate in this process, which has no process group and no GPU; another one would import all
    anew."""
    card = card_of(config)
    bounded = bounded_plan(config, train, held_out, ranks, card)
    if bounded is not None and bounded["fits"]:
        return str(bounded["text"])
    held = heaviest_evaluated(held_out)
    return str(simulated_plan(config, train, held, trainer, ranks, card, here)["text"])


def card_of(config: Config) -> Card | None:
    """Return the GPU that a dry run plans for; None for a CPU."""
    if config.plan.card is not None:
        return Card(config.plan.card, card_memory("plan.card", config.plan.card))
    return gpu_here()


def gpu_here() -> Card | None:
    """Return this machine's first GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, properties.total_memory / GIB)


# -- a run -----------------------------------------------------------------------------------------


def decided_by_plan(model: ModelConfig, ranks: int) -> bool:
    """Return whether the plan decides anything of a run on so many GPUs."""
    undecided = model.reshard_after_forward is None and ranks > 1
    return undecided or model.cut_by_plan or model.activation_checkpointing == AUTO


class PlannedSettings:
    """Settings that the memory plan decides on rank 0 while the weights load.

    It does so on GPUs alone. Batches are cut where the heaviest does not fit in one pass, and neither
    ``model.microbatch_tokens`` nor ``model.microbatches`` says how. ``model.reshard_after_forward=auto``
    lets layers be gathered until their backward if there is room. ``model.activation_checkpointing=auto``
    computes no more twice than must be; without a GPU or a plan, whole layers.
    """

    def __init__(
        self,
        config: Config,
        train: Segment,
        held_out: list[Segment],
        trainer: type[BasicTrainer],
        world: World,
    ) -> None:
        """Begin to plan. ``train`` and ``held_out``: what the run trains on and evaluates."""
        self._config, self._ranks = config, world.size
        self._plan: Future[dict[str, Any]] | None = None
        self._bounded: dict[str, Any] | None = None
        self.record: dict[str, Any] = {}
        """What was predicted, and how batches are cut and why, once ``apply`` was called."""
        if not world.is_main:
            return
        card = gpu_here()
        self._bounded = bounded_plan(config, train, held_out, world.size, card)
        fits = self._bounded is not None and self._bounded["fits"]
        if card is not None and decided_by_plan(config.model, world.size) and not fits:
            # A batch is cut for the training step alone; layers may stay gathered if evaluations fit too.
            undecided = world.size > 1 and config.model.reshard_after_forward is None
            held = heaviest_evaluated(held_out) if undecided else []
            # Rows are joined as this machine's GPU allows; where the plan is made, no kernel can be tried.
            packing, shared = how_rows_are_joined(config, architecture(config.model), gpu=False)
            asked = replace(config, model=replace(config.model, packing=packing, share_prompts=shared))
            pool = ThreadPoolExecutor(1)
            self._plan = pool.submit(simulated_plan, asked, train, held, trainer, world.size, card)
            pool.shutdown(wait=False)

    def apply(self, policy: Policy, say: Callable[[str], None]) -> Config:
        """Wait for the plan, set up the policy's layers, say what is predicted and how batches are cut, and
        return the settings with what was decided. A collective: every rank calls it. The run's config.yaml
        keeps what the user gave."""
        plan = on_main(lambda: self._bounded if self._plan is None else self._plan.result())
        plan = plan or unplanned("its shapes do not say") | {"text": None}
        if plan["over"] is None and plan["text"] is not None:  # there is no plan, and the sentence says why
            say(plan["text"])
        decided: dict[str, Any] = {}
        if plan["microbatch_tokens"] is not None:
            decided["microbatch_tokens"] = plan["microbatch_tokens"]
        if self._config.model.activation_checkpointing == AUTO:
            decided["activation_checkpointing"] = way = plan["checkpointing"]
            say(checkpointing_in_words(way))
            set_up_layers(policy, way, self._config.model.compile)
        if plan["stays_gathered"] and plan.get("fits", True):
            say(f"{gathered_in_words()}: by the memory plan, there is room")
            decided["reshard_after_forward"] = False
            keep_gathered(decoder_blocks(policy))
        cut = why_cut(self._config, self._ranks, plan)
        predicted = "not predicted"
        if plan["predicted"] is not None:
            by = "a bound from the shapes" if "fits" in plan else "by simulation"
            predicted = f"a rank's tensors take {plan['predicted']:.2f} GiB at most ({by})"
        self.record = {"predicted": predicted, "predicted_gib": plan["predicted"], "cut": cut}
        say(f"memory: {predicted}; {cut}")
        return replace(self._config, model=replace(self._config.model, **decided))


def measured(world: World, predicted: float | None) -> dict[str, Any]:
    """Return the most that the fullest rank has held so far, as words, beside ``predicted`` (GiB of its
    tensors), and as GiB; a collective."""
    if world.device.type == "cuda":
        own, description = torch.cuda.max_memory_allocated(world.device) / GIB, "tensors on the GPU"
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts in KiB
        description = "the whole process"
    most = max(gather_objects(own))
    if predicted is not None and world.device.type == "cuda":
        description += f", {most / predicted:.0%} of what was predicted"
    return {"measured": f"{most:.2f} GiB ({description})", "measured_gib": most}


def why_cut(config: Config, ranks: int, plan: dict[str, Any]) -> str:
    """Return in words how a rank's share of a batch is cut into microbatches, and why."""
    model, tokens = config.model, plan["microbatch_tokens"]
    if tokens is not None:
        return f"{cut_in_words(tokens)}: by the memory plan, one pass would not fit"
    if model.microbatch_tokens is not None:
        return f"microbatches of {model.microbatch_tokens:,} tokens at most (model.microbatch_tokens)"
    if model.microbatches > 1:
        return f"{model.microbatches} microbatches a step (model.microbatches)"
    rest = "model.microbatch_tokens cuts them" if "fits" in plan else "no setting cuts them"
    rest = "there is room" if plan.get("fits", plan["over"] == []) else rest
    return f"{model.batch_size // ranks} examples a step and rank in one microbatch: {rest}"


# -- the plan --------------------------------------------------------------------------------------


def bounded_plan(
    config: Config, train: Segment, held_out: list[Segment], ranks: int, card: Card | None
) -> dict[str, Any] | None:
    """Return ``of_shapes`` for the longest example that is trained on or evaluated."""
    most = max(row_tokens(longest(part.groups)) for part in [train, *held_out])
    return of_shapes(config, most, ranks, card)


def simulated_plan(
    config: Config,
    train: Segment,
    held_out: list[Example],
    trainer: type[BasicTrainer],
    ranks: int,
    card: Card | None,
    here: bool = False,
) -> dict[str, Any]:
    """Return ``memory.plan.of_examples`` for the heaviest batch of ``train``, computed in a process of its
    own unless ``here``. ``card``: None for a CPU."""
    batch = heaviest_batch(config, train, trainer, ranks, card is not None)
    packed, _ = how_rows_are_joined(config, architecture(config.model), card is not None)
    most = share_tokens([longest(train.groups, packed)], packed)
    if here:
        try:
            return of_examples(config, batch, held_out, ranks, card, most)
        finally:
            gc.unfreeze()  # what the simulation froze; libraries complain of what is frozen at the very end
    try:
        worker = WorkerProcess("memory.plan", log=None, env={"CUDA_VISIBLE_DEVICES": ""})
    except OSError as error:  # no room for the worker's output
        return unplanned(str(error))
    try:
        said: dict[str, Any] = worker.call(
            "of_examples", config, batch, held_out, ranks, card, most, timeout=SECONDS
        )
        return said
    except WorkerError as error:
        return unplanned(last_line(error))
    finally:
        worker.close()


def heaviest_evaluated(held_out: list[Segment]) -> list[Example]:
    """Return the batch of an evaluation with the most tokens; [] without held-out examples."""
    evaluated = (part.batch(i) for part in held_out for i in range(part.steps))
    return max(evaluated, key=lambda batch: sum(map(row_tokens, batch)), default=[])


def heaviest_batch(
    config: Config, segment: Segment, trainer: type[BasicTrainer], ranks: int, gpu: bool
) -> list[Example]:
    """Return the batch of the segment with the widest microbatch, by tokens."""
    hf_config, size = architecture(config.model), size_of(config.model, ranks)
    joined = how_rows_are_joined(config, hf_config, gpu)
    dealt = ranks, size, trainer.rows_per_example, *joined, trainer.work_of(config, hf_config)
    return heaviest(segment, lambda batch: widest(batch, *dealt))
