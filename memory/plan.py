"""The memory plan of a run: what the fullest of its ranks holds in every situation, whether that fits the
card, and how batches are cut and layers gathered where no setting says so.

``python -m memory.plan`` is the worker process of dry runs, of runs on GPUs and of ``launch.sweep``, because
a simulation needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from common.worker_process import serve
from config.machine import memory_here
from config.schema import Config, card_memory
from config.schema_model import AUTO, SELECTIVE
from data.balance import row_tokens
from data.types import Example
from memory.bound import MARGIN, bound
from memory.fit import Ask, chosen, remembered, what_helps, with_settings
from memory.parts import (
    GAPS,
    GIB,
    Card,
    Neighbours,
    Situation,
    handed_over,
    in_gib,
    neighbours,
    on_host,
    own_answers,
    peak,
)
from memory.simulate import MemoryNeed, MemoryRequest, answer
from models.shapes import architecture
from trainers.assembly import longest_batch, trainer_class


@dataclass(frozen=True)
class MemoryPlan:
    """What a rank holds in every situation, and what the plan decides."""

    ranks: int
    answer: MemoryNeed
    card: Card | None
    situations: tuple[Situation, ...]
    notes: tuple[str, ...]
    """Further lines: what could not be counted, and what would fit."""
    microbatch_tokens: int | None = None
    """Largest number of tokens of a microbatch, if the plan splits a batch that does not fit in one pass."""
    checkpointing: bool | str = False
    """model.activation_checkpointing, as it is given or chosen."""
    stays_gathered: bool = False
    """Whether the plan keeps layers gathered until their backward, since there is room."""

    @property
    def over(self) -> list[Situation]:
        """The situations that do not fit the card."""
        return [s for s in self.situations if self.card is not None and s.total > self.card.room]

    def lines(self) -> list[str]:
        count = self.answer
        where = "on the CPU" if self.card is None else f"on {self.card.name} ({self.card.memory:.1f} GiB)"
        said = [
            f"{size_in_words(count.parameters)}. Memory of the fullest of {self.ranks} rank(s) "
            f"{where}, microbatches of {count.tokens:,} tokens at most:",
            *(f"  {situation}" for situation in self.situations),
        ]
        if self.card is not None:
            most = max(s.total for s in self.situations)
            verdict = "too much" if self.over else "fits"
            said.append(
                f"  {verdict}: {most:.1f} GiB at most; {self.card.room:.1f} are left when {GAPS:.0%} of the "
                "card are kept for gaps"
            )
        return [*said, *(f"  {note}" for note in self.notes)]


def size_in_words(parameters: float) -> str:
    return f"{parameters / 1e6:,.{1 if parameters >= 1e5 else 6}f} M parameters"


def cut_in_words(tokens: int) -> str:
    return f"microbatches of {tokens:,} tokens at most (model.microbatch_tokens=auto)"


def gathered_in_words() -> str:
    return "layers stay gathered from their forward to their backward (model.reshard_after_forward=auto)"


def checkpointing_in_words(way: bool | str) -> str:
    what = {False: "nothing", SELECTIVE: "what is cheap in a layer (selective)", True: "every layer (true)"}
    return f"computed again in the backward: {what[way]}, by model.activation_checkpointing=auto"


def unplanned(why: str) -> dict[str, Any]:
    """Return the answer of ``of_examples`` where there is no plan."""
    said = f"The memory could not be planned: {why}"
    decided = {"microbatch_tokens": None, "stays_gathered": False, "checkpointing": True}
    return {"text": said, "over": None, "predicted": None} | decided


def last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# -- without a simulation --------------------------------------------------------------------------


def of_shapes(config: Config, longest: int, ranks: int, card: Card | None) -> dict[str, Any] | None:
    """Return the plan by a bound from the shapes, in the form of ``of_examples``; None where the shapes do
    not say. Its ``fits`` says whether the bound fits ``MARGIN`` times over: then nothing need be simulated.

    ``longest``: tokens of the longest example. ``card``: None for a CPU, whose ranks share this machine.
    Raises ConfigError for an architecture that cannot be loaded."""
    memory_bound = bound(config, architecture(config.model), longest, ranks, card)
    if memory_bound is None:
        return None
    most, parameters, notes = memory_bound
    room = (card or Card("this machine's memory", memory_here() / ranks / GIB)).room
    gathered = ranks > 1 and card is not None and config.model.reshard_after_forward is None
    where = "on the CPU" if card is None else f"on {card.name} ({card.memory:.1f} GiB)"
    lines = [
        f"{size_in_words(parameters)}. A bound from the shapes, of a rank of {ranks} {where} that "
        "computes the whole batch at once:",
        f"  {most}",
        f"  fits: {room:.1f} GiB are left, more than {MARGIN} times as much, so no step was simulated",
        *(f"  {note}" for note in [*notes, *([gathered_in_words()] if gathered else [])]),
    ]
    return {
        "text": "\n".join(lines),
        "over": [],
        "microbatch_tokens": None,
        "stays_gathered": gathered,
        "checkpointing": not (fits := MARGIN * most.total <= room),
        "predicted": most.tensors,
        "fits": fits,
    }


# -- with one --------------------------------------------------------------------------------------


def of_settings(config: Config, ranks: int, card: str) -> dict[str, Any]:
    """Return the plan of a run whose data are not available, with every row as long as allowed.

    The result is that of ``of_shapes`` where that fits, else that of ``of_examples``. Raises ConfigError for
    an architecture that cannot be loaded."""
    trainer, on = trainer_class(config), Card(card, card_memory("slurm.card", card))
    batch = longest_batch(config, trainer, config.model.batch_size)
    held_out = longest_batch(config, trainer, config.model.eval_batch_size)
    bounded = of_shapes(config, row_tokens(batch[0]), ranks, on)
    return bounded if bounded and bounded["fits"] else of_examples(config, batch, held_out, ranks, on)


def of_examples(
    config: Config,
    batch: list[Example],
    held_out: list[Example],
    ranks: int,
    card: Card | None,
    longest_example: int = 0,
) -> dict[str, Any]:
    """Return the plan of a run that trains on the global batch ``batch`` and evaluates ``held_out`` at once.

    ``longest_example``: tokens of the longest training example, if ``batch`` does not contain it. The result
    has the plan as ``text``; a sentence for each situation that does not fit in ``over`` (None: there is no
    plan, and ``text`` says why); ``microbatch_tokens``, a number if the plan splits the batch;
    ``stays_gathered``, whether it keeps layers gathered until their backward; ``checkpointing``, the model's
    activation_checkpointing that it chooses or is given; and ``predicted``, GiB of the trainer's own tensors.
    """
    hf_config = architecture(config.model)
    own = type(hf_config).__module__.startswith("transformers.")
    asked = MemoryRequest(config, batch, held_out, ranks, card is not None, hf_config if own else None)
    try:
        plan = make_plan(asked, hf_config, card, answer, longest_example)
    except Exception as error:  # code of a model, a loss or torch may need tensors with values
        return unplanned(f"{type(error).__name__}: {last_line(error)}")
    own_tensors = ("training step", "evaluation", "own answers")
    return {
        "text": "\n".join(plan.lines()),
        "over": [str(situation) for situation in plan.over],
        "microbatch_tokens": plan.microbatch_tokens,
        "stays_gathered": plan.stays_gathered,
        "checkpointing": plan.checkpointing,
        "predicted": max(one.tensors for one in plan.situations if one.name in own_tensors),
    }


def make_plan(
    asked: MemoryRequest, hf_config: PretrainedConfig, card: Card | None, ask: Ask, longest_example: int = 0
) -> MemoryPlan:
    """Return the memory of a rank in every situation, with notes on what would fit."""
    notes: list[str] = []
    beside = neighbours(asked.config, asked.ranks, card, notes)
    gathered, ask, model = False, remembered(ask, hf_config), asked.config.model
    room = 0.0 if card is None else card.room - sum(beside.always.values())
    asked, tokens = chosen(asked, hf_config, room, ask, longest_example)
    given, way = ask(asked), asked.config.model.activation_checkpointing
    situations = all_situations(asked, hf_config, given, beside)
    undecided = asked.ranks > 1 and asked.config.model.reshard_after_forward is None
    # A batch that is cut fills the card with its microbatches.
    if undecided and card is not None and tokens is None and fit(situations, card):
        stays = with_settings(asked, reshard_after_forward=False)
        then = all_situations(stays, hf_config, ask(stays), beside)
        if gathered := fit(then, card):
            asked, given, situations = stays, ask(stays), then
    sampler = asked.config.sampler
    width = getattr(torch, sampler.dtype or model.dtype).itemsize / sampler.tensor_parallel
    weights = width * given.parameters / GIB  # on one GPU of an engine
    if beside.sampler is not None and weights > 0.9 * beside.sampler:
        notes.append(
            f"sampler.gpu_memory_utilization={sampler.gpu_memory_utilization} gives the sampler "
            f"{beside.sampler:.1f} GiB, and its weights alone take {weights:.1f}"
        )
    if card is not None:
        notes += map(str, on_host(asked.config, given, beside))
    if model.activation_checkpointing == AUTO:
        notes.append(checkpointing_in_words(way))
    if gathered:
        notes.append(gathered_in_words())
    if tokens is not None:
        notes.append(f"{cut_in_words(tokens)}: one pass would not fit")
    elif card is not None and situations[0].total > card.room:
        notes.append(what_helps(asked))
    return MemoryPlan(asked.ranks, given, card, tuple(situations), tuple(notes), tokens, way, gathered)


def all_situations(
    asked: MemoryRequest, hf_config: PretrainedConfig, given: MemoryNeed, beside: Neighbours
) -> list[Situation]:
    """Return every situation of a run, the training step first."""
    step = Situation("training step", in_gib(peak(given, evaluation=False)) | beside.always)
    situations = [step]
    if asked.held_out:
        situations.append(Situation("evaluation", in_gib(peak(given, evaluation=True)) | beside.always))
    resident = in_gib(given.resident)
    answers = own_answers(asked.config, hf_config, asked.ranks, bool(asked.held_out))
    if answers:
        gathered = max(parts.get("gathered blocks", 0) for parts in given.peaks.values())
        if asked.ranks == 1:  # models.distributed.gathered_once; a step's moments have whole gradients too
            gathered = given.parameters * getattr(torch, asked.config.model.dtype).itemsize
        parts = resident | {"gathered blocks": gathered / GIB, "keys, values and logits": answers}
        situations.append(Situation("own answers", parts | beside.always))
    if beside.sampler is not None:
        engine = {"sampler": beside.sampler, "weights' hand-over": handed_over(asked.config, hf_config)}
        situations.append(Situation("sampling", resident | beside.outside | engine))
    if beside.models:
        situations.append(Situation("scoring", resident | beside.always | beside.models))
    return situations


def fit(situations: Iterable[Situation], card: Card) -> bool:
    return all(situation.total <= card.room for situation in situations)


if __name__ == "__main__":
    serve({"of_examples": of_examples, "of_settings": of_settings, "answer": answer})
