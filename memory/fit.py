"""The number of tokens that a microbatch may have so that a step fits on the card, found by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from config.schema import Config
from config.schema_model import AUTO, SELECTIVE
from data.balance import row_tokens, share_tokens
from data.batches import size_of, widest
from data.types import Example
from memory.parts import GIB, peak
from memory.simulate import MemoryNeed, MemoryRequest
from models.attention import packs_rows, shares_prompts
from models.simulated import simulated_gpu
from trainers.assembly import trainer_class

Ask = Callable[[MemoryRequest], MemoryNeed]

PROBE = 8192
"""Tokens of the smaller of two microbatches that show how memory grows. Small ones are simulated in seconds,
a whole batch may take a minute."""
SPARE = 1.1
"""A batch is not simulated whole if it would fit with this many times its tokens."""
RETREAT, TRIES = 0.9, 4
"""An estimate that does not fit in the simulation is multiplied by RETREAT, at most TRIES times."""


def with_tokens(asked: MemoryRequest, tokens: int) -> MemoryRequest:
    """The same question of a run that has ``model.microbatch_tokens=tokens``."""
    return with_settings(asked, microbatch_tokens=tokens, microbatches=1)


def with_settings(asked: MemoryRequest, **changes: Any) -> MemoryRequest:
    """The same question of a run with other settings of its model."""
    return replace(asked, config=replace(asked.config, model=replace(asked.config.model, **changes)))


def step_size(answer: MemoryNeed) -> float:
    """GiB of a training step at its fullest moment."""
    return sum(peak(answer, evaluation=False).values()) / GIB


def fitting_tokens(
    asked: MemoryRequest, longest: int, whole: int, room: float, ask: Ask, fewest: float = 0
) -> int | None:
    """Return the ``model.microbatch_tokens`` under which a step takes at most ``room`` GiB. None: the batch
    fits in one pass, or not even its longest example fits. 0: it takes microbatches of less than ``fewest``.

    ``longest``: tokens of the longest example, which a microbatch must be able to hold. ``whole``: tokens of
    the widest microbatch where a batch goes in one pass. Memory grows about linearly with tokens: two small
    microbatches give the line, and a size that fits by the line is simulated before it is returned.
    """
    small = max(longest, min(PROBE, whole // 4))
    if small >= whole:
        return None
    first = ask(with_tokens(asked, small))
    if fewest and step_size(first) > room:
        return 0
    second = ask(with_tokens(asked, min(2 * small, whole)))
    slope = (step_size(second) - step_size(first)) / max(second.tokens - first.tokens, 1)
    most = whole if slope <= 0 else first.tokens + (room - step_size(first)) / slope
    if slope > 0 and most >= whole * SPARE:
        return None
    if most >= whole:
        if step_size(ask(asked)) <= room:
            return None
        most = whole * RETREAT
    if 0 < fewest > most:  # the line may end below zero
        return 0
    least = small if step_size(first) <= room else longest
    return first_that_fits(asked, most, least, room, ask)


def first_that_fits(asked: MemoryRequest, most: float, least: int, room: float, ask: Ask) -> int | None:
    """Return the first number of tokens whose simulated step fits, from ``most`` to ``least``, or None."""
    for _ in range(TRIES):
        tokens = int(most) // 1000 * 1000 or int(most)
        if tokens <= least:
            break
        if step_size(ask(with_tokens(asked, tokens))) <= room:
            return tokens
        most *= RETREAT
    return least if step_size(ask(with_tokens(asked, least))) <= room else None


def what_helps(asked: MemoryRequest) -> str:
    """Return a sentence on how a step that does not fit could."""
    if not (model := asked.config.model).cut_by_plan:
        key = "microbatch_tokens" if model.microbatch_tokens else "microbatches"
        return f"model.{key}={getattr(model, key)} cuts the batch; leave it out, and the plan cuts it"
    longest = max(map(row_tokens, asked.batch))
    ways = ["model.activation_checkpointing=true", "a lower model.max_length", "more ranks"]
    ways = ways[model.activation_checkpointing is True :]
    return f"not even one example of {longest:,} tokens fits; what would help: {', '.join(ways)}"


def filled(asked: MemoryRequest, hf_config: PretrainedConfig) -> MemoryRequest:
    """The same question of two microbatches for every rank, as wide as ``model.microbatch_tokens`` lets the
    batch's examples make them: the heaviest batch of the data may be cut into narrower ones than a light
    one. Of a batch that is not cut, and of examples that are all alike, the same question."""
    joined, part = how_rows_are_joined(asked.config, hf_config, asked.gpu), list[Example]()
    most = asked.config.model.microbatch_tokens
    alike = len(set(map(row_tokens, asked.batch))) == 1
    if most is None or alike or share_tokens(asked.batch, *joined) <= most * asked.ranks:
        return asked
    for example in sorted(asked.batch, key=row_tokens, reverse=True):
        if share_tokens([*part, example], *joined) <= most:
            part.append(example)
    batch = []
    for i in range(2 * asked.ranks):  # with other prompts; a simulation reads no tokens
        for e in part:
            rows = tuple(replace(row, prompt_ids=row.prompt_ids + (i << 20)) for row in e.rows)
            batch.append(replace(e, prompt_id=f"{e.prompt_id} {i}", rows=rows))
    return replace(asked, batch=batch)


def remembered(ask: Ask, hf_config: PretrainedConfig) -> Ask:
    """Return ``ask`` of ``filled`` questions, with a memory: it simulates each size of microbatches once."""
    answers: dict[Any, MemoryNeed] = {}

    def once(asked: MemoryRequest) -> MemoryNeed:
        model = asked.config.model
        how = model.activation_checkpointing, model.reshard_after_forward
        key = model.microbatch_tokens, how, bool(asked.held_out)
        if key not in answers:
            answers[key] = ask(filled(asked, hf_config))
        return answers[key]

    return once


def chosen(
    asked: MemoryRequest, hf_config: PretrainedConfig, room: float, ask: Ask, longest: int
) -> tuple[MemoryRequest, int | None]:
    """Return (the question with the cut and the activation checkpointing that are chosen, the tokens of the
    cut or None). ``room``: GiB of a GPU for the step's own parts; 0 without a GPU.

    With model.activation_checkpointing=auto nothing is computed twice where a batch fits in one pass, what is
    cheap in a layer where microbatches of PROBE tokens fit, and else every layer."""
    model, tokens = asked.config.model, None
    given, every = model.activation_checkpointing, {False: math.inf, SELECTIVE: PROBE, True: 0}
    for way, fewest in every.items() if given == AUTO and room else [(given == AUTO or given, 0)]:
        cut = asked = with_settings(asked, activation_checkpointing=way)
        if room and model.cut_by_plan:
            tokens = planned_tokens(asked, hf_config, room, ask, longest, fewest)
            cut = with_tokens(asked, tokens) if tokens else asked
        if not fewest or (tokens != 0 and step_size(ask(cut)) <= room):
            break
    return cut, tokens


def planned_tokens(
    asked: MemoryRequest, hf_config: PretrainedConfig, room: float, ask: Ask, longest: int, fewest: float = 0
) -> int | None:
    """Return ``fitting_tokens`` for the batch of the question. ``room``: GiB for the step's own parts."""
    config, batch, trainer = asked.config, asked.batch, trainer_class(asked.config)
    packing, shared = how_rows_are_joined(config, hf_config, asked.gpu)
    size, work = size_of(config.model, asked.ranks), trainer.work_of(config, hf_config)
    whole = widest(batch, asked.ranks, size, trainer.rows_per_example, packing, shared, work)
    most = max(longest, *(share_tokens([example], packing) for example in batch))
    return fitting_tokens(asked, most, whole, room, ask, fewest)


def how_rows_are_joined(config: Config, hf_config: PretrainedConfig, gpu: bool) -> tuple[bool, bool]:
    """Return whether rows are packed, and whether they share prompts, with a GPU or without one."""
    with simulated_gpu(gpu):
        packing, _ = packs_rows(config.model, hf_config)
        return packing, shares_prompts(config.model, hf_config, packing)
