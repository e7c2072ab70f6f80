"""Plan the memory that a run takes on the fullest of its ranks, before anything is loaded.

The training step and the evaluation are simulated, everything beside them is computed from sizes, and the
sums are compared with the card's memory. ``python -m jobs.memory_plan`` is the worker process of dry
runs, of runs on GPUs and of ``launch.sweep``, because the simulation needs a process of its own.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from common.errors import ConfigError
from common.worker_process import WorkerError, WorkerProcess, serve
from config.schema import Config
from config.schema_plan import card_memory
from data.balance import row_tokens, share_tokens
from data.batches import Segment, Size, deal, size_of
from data.examples import longest
from data.types import Example, Sequence
from jobs.assembly import trainer_class
from jobs.memory_neighbours import GIB, engine_weights, own_answers, reward_models
from jobs.memory_parts import GAPS, Card, Situation, in_gib, largest
from jobs.memory_simulation import Answer, Question, answer
from jobs.microbatch_fit import Ask, fitting_tokens, what_fits, with_settings, with_tokens
from models.attention import packs_rows, shares_prompts
from models.shapes import architecture
from models.simulated import simulated_gpu
from trainers.basic import BasicTrainer

CONTEXT, ASLEEP = 1.5, 1.5
"""Assumed GiB of a GPU that hold no tensor of the trainer: CONTEXT for its CUDA context, libraries and NCCL,
ASLEEP for a sleeping engine."""
CANDIDATES = 32
"""Number of batches with the most tokens, and number of batches with the longest examples, that are dealt to
ranks to find the widest microbatch."""
SECONDS = 1800.0
NOTHING: dict[str, float] = {}


@dataclass(frozen=True)
class MemoryPlan:
    ranks: int
    answer: Answer
    card: Card | None
    situations: tuple[Situation, ...]
    notes: tuple[str, ...]
    """Further lines: what could not be counted, and what would fit."""
    microbatch_tokens: int | None = None
    """Largest number of tokens of a microbatch, if the plan splits a batch that does not fit in one pass."""
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
            f"{count.parameters / 1e6:,.1f} M parameters. Memory of the fullest of {self.ranks} rank(s) "
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


# -- asking ----------------------------------------------------------------------------------------


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
    of = (config, train, heaviest_evaluated(held_out), trainer, ranks, card_of(config))
    text: str = planned(*of, here)["text"]
    return text


def heaviest_evaluated(held_out: list[Segment]) -> list[Example]:
    """Return the batch of an evaluation with the most tokens; [] without held-out examples."""
    evaluated = (part.batch(i) for part in held_out for i in range(part.steps))
    return max(evaluated, key=lambda batch: sum(map(row_tokens, batch)), default=[])


def cut_in_words(tokens: int) -> str:
    return f"microbatches of {tokens:,} tokens at most (model.microbatch_tokens=null)"


def gathered_in_words() -> str:
    return "layers stay gathered from their forward to their backward (model.reshard_after_forward=null)"


def planned(
    config: Config,
    train: Segment,
    held_out: list[Example],
    trainer: type[BasicTrainer],
    ranks: int,
    card: tuple[str, float] | None,
    here: bool = False,
) -> dict[str, Any]:
    """Return the answer of ``of_examples`` for the heaviest batch of ``train``, computed in a process of its
    own unless ``here``. ``card``: name and GiB; None for a CPU."""
    batch = heaviest_batch(config, train, trainer, ranks, card is not None)
    most = row_tokens(longest(train.groups))
    if here:
        try:
            return of_examples(config, batch, held_out, ranks, card, most)
        finally:
            gc.unfreeze()  # what the simulation froze; libraries complain of what is frozen at the very end
    try:
        worker = WorkerProcess("jobs.memory_plan", log=None, env={"CUDA_VISIBLE_DEVICES": ""})
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


def unplanned(why: str) -> dict[str, Any]:
    """Return the answer of ``of_examples`` where there is no plan."""
    said = f"The memory could not be planned: {why}"
    return {"text": said, "over": None, "microbatch_tokens": None, "stays_gathered": False}


def card_of(config: Config) -> tuple[str, float] | None:
    """Return (name, GiB) of the GPU that a dry run plans for; None for a CPU."""
    if config.plan.card is not None:
        return config.plan.card, card_memory("plan.card", config.plan.card)
    return gpu_here()


def gpu_here() -> tuple[str, float] | None:
    """Return (name, GiB) of this machine's first GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / GIB


def heaviest_batch(
    config: Config, segment: Segment, trainer: type[BasicTrainer], ranks: int, gpu: bool
) -> list[Example]:
    """Return the batch of the segment with the widest microbatch, by tokens.

    Only the CANDIDATES batches with the most tokens and those with the longest examples are dealt to ranks,
    so the result is a good guess."""
    packing, shared = how_rows_are_joined(config, architecture(config.model), gpu)
    size = size_of(config.model, ranks)
    steps = range(segment.steps if any_id(segment) else 1)
    lengths = [[row_tokens(example) for example in segment.batch(i)] for i in steps]
    by_sum = heapq.nlargest(CANDIDATES, steps, key=lambda i: sum(lengths[i]))
    by_longest = heapq.nlargest(CANDIDATES, steps, key=lambda i: max(lengths[i]))
    heaviest = [segment.batch(i) for i in (*by_sum, *by_longest)]
    candidates = [[told_apart(i, example) for i, example in enumerate(batch)] for batch in heaviest]
    return max(
        candidates,
        key=lambda batch: widest(batch, ranks, size, trainer.rows_per_example, packing, shared),
    )


def how_rows_are_joined(config: Config, found: PretrainedConfig, gpu: bool) -> tuple[bool, bool]:
    """Return whether rows are packed, and whether they share prompts, with a GPU or without one."""
    with simulated_gpu(gpu):
        packing, _ = packs_rows(config.model, found)
        return packing, shares_prompts(config.model, found, packing)


def any_id(segment: Segment) -> bool:
    """Return whether the examples are real; the placeholders for future rounds are all alike."""
    return bool(segment.groups[0][0].prompt_id)


def told_apart(i: int, example: Example) -> Example:
    """Return a placeholder example made distinct from its neighbours; a real example is returned unchanged.

    The placeholder gets a prompt that it shares with no other example of the batch, and a label."""
    if example.prompt_id:
        return example
    rows = tuple(replace(row, prompt_ids=np.full_like(row.prompt_ids, i)) for row in example.rows)
    return replace(example, prompt_id=f"p{i}", rows=rows, label=1.0 - 2 * (i % 2))


def widest(batch: list[Example], ranks: int, size: Size, rows: int, packing: bool, shared: bool) -> int:
    """Return the tokens of the widest share that a batch is dealt into."""
    turns = deal(batch, ranks, size, rows, packing, shared)
    return max(share_tokens(share, packing, shared) for turn in turns for share in turn)


def last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# -- what the worker answers -----------------------------------------------------------------------


def of_settings(config: Config, ranks: int, card: str) -> dict[str, object]:
    """Return the plan of a run whose data are not available, with every row as long as allowed.

    The result is that of ``of_examples``. Raises ConfigError for an architecture that cannot be loaded."""
    trainer = trainer_class(config)
    batch = longest_batch(config, trainer, config.model.batch_size)
    held_out = longest_batch(config, trainer, config.model.eval_batch_size)
    return of_examples(config, batch, held_out, ranks, (card, card_memory("slurm.card", card)))


def longest_batch(config: Config, trainer: type[BasicTrainer], count: int) -> list[Example]:
    """Return ``count`` examples, each as long as allowed."""
    first, model = config.model.max_prompt_length, config.model
    rest = config.max_tokens if config.online else model.max_length - first
    rows = (Sequence(np.zeros(first, np.int32), np.zeros(rest, np.int32)),) * trainer.rows_per_example
    return [told_apart(i, Example("", rows)) for i in range(count)]


def of_examples(
    config: Config,
    batch: list[Example],
    held_out: list[Example],
    ranks: int,
    card: tuple[str, float] | None,
    longest_example: int = 0,
) -> dict[str, Any]:
    """Return the plan of a run that trains on the global batch ``batch`` and evaluates ``held_out`` at once.

    ``longest_example``: tokens of the longest training example, if ``batch`` does not contain it. The result
    has the plan as ``text``; a sentence for each situation that does not fit in ``over`` (None: there is no
    plan, and ``text`` says why); ``microbatch_tokens``, a number if the plan splits the batch; and
    ``stays_gathered``, whether it keeps layers gathered until their backward.
    """
    found = architecture(config.model)
    own = type(found).__module__.startswith("transformers.")
    asked = Question(config, batch, held_out, ranks, card is not None, found if own else None)
    try:
        plan = make_plan(asked, found, None if card is None else Card(*card), answer, longest_example)
    except Exception as error:  # code of a model, a loss or torch may need tensors with values
        return unplanned(f"{type(error).__name__}: {last_line(error)}")
    over = [str(situation) for situation in plan.over]
    return {
        "text": "\n".join(plan.lines()),
        "over": over,
        "microbatch_tokens": plan.microbatch_tokens,
        "stays_gathered": plan.stays_gathered,
    }


def make_plan(
    asked: Question, found: PretrainedConfig, card: Card | None, ask: Ask, longest_example: int = 0
) -> MemoryPlan:
    """Return the memory of a rank in every situation, with notes on what would fit."""
    notes: list[str] = []
    beside = neighbours(asked, card, notes)
    tokens, gathered, ask = None, False, remembered(ask)
    if card is not None and asked.config.model.cut_by_plan:
        room = card.room - sum((beside.always | beside.scored).values())
        if (tokens := planned_tokens(asked, found, room, ask, longest_example)) is not None:
            asked = with_tokens(asked, tokens)
    given = ask(asked)
    situations = all_situations(asked, found, given, beside)
    undecided = asked.ranks > 1 and asked.config.model.reshard_after_forward is None
    # A batch that is cut fills the card with its microbatches.
    if undecided and card is not None and tokens is None and fit(situations, card):
        stays = with_settings(asked, reshard_after_forward=False)
        then = all_situations(stays, found, ask(stays), beside)
        if gathered := fit(then, card):
            asked, given, situations = stays, ask(stays), then
    if beside.sampler is not None and (
        (weights := engine_weights(asked.config, given.parameters)) > 0.9 * beside.sampler
    ):
        notes.append(
            f"sampler.gpu_memory_utilization={asked.config.sampler.gpu_memory_utilization} gives the "
            f"sampler {beside.sampler:.1f} GiB, and its weights alone take {weights:.1f}"
        )
    if gathered:
        notes.append(gathered_in_words())
    if tokens is not None:
        notes.append(f"{cut_in_words(tokens)}: one pass would not fit")
    elif card is not None:
        notes.append(what_fits(asked, given, card, situations[0], ask))
    return MemoryPlan(asked.ranks, given, card, tuple(situations), tuple(notes), tokens, gathered)


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


def neighbours(asked: Question, card: Card | None, notes: list[str]) -> Neighbours:
    """Return what is on the fullest rank's GPU beside the trainer. A note is added if some of it could not be
    counted."""
    config = asked.config
    outside = NOTHING if card is None else {"outside tensors": CONTEXT}
    shares = card is not None and config.online and config.sampler.separate
    shares = shares and config.sampler.shares_devices
    try:
        models = reward_models(config)
    except ConfigError as error:
        models = NOTHING
        notes.append(f"the reward model is not counted: {error}")
    return Neighbours(
        outside,
        outside | ({"sampler asleep": ASLEEP} if shares else {}),
        models,
        models if scores_while_training(config, asked.ranks) else NOTHING,
        card.memory * config.sampler.gpu_memory_utilization if shares and card is not None else None,
    )


def all_situations(
    asked: Question, found: PretrainedConfig, given: Answer, beside: Neighbours
) -> list[Situation]:
    """Return every situation of a run, the training step first."""
    step = Situation("training step", largest(given, evaluation=False) | beside.always)
    situations = [step]
    if asked.held_out:
        situations.append(Situation("evaluation", largest(given, evaluation=True) | beside.always))
    resident = in_gib(given.resident)
    answers = own_answers(asked.config, found, asked.ranks, bool(asked.held_out))
    if answers:
        gathered = max(parts.get("gathered blocks", 0) for parts in given.peaks.values()) / GIB
        if asked.ranks == 1:  # models.distributed.gathered_once
            whole = given.parameters * getattr(torch, asked.config.model.dtype).itemsize
            gathered = max(gathered, whole / GIB)
        parts = resident | {"gathered blocks": gathered, "keys, values and logits": answers}
        situations.append(Situation("own answers", parts | beside.always))
    if beside.sampler is not None:
        situations.append(Situation("sampling", resident | beside.outside | {"sampler": beside.sampler}))
    if beside.models:
        situations.append(Situation("scoring", resident | beside.always | beside.models))
    if beside.scored:
        situations.append(Situation("scoring beside the training step", {**step.parts, **beside.scored}))
    return situations


def fit(situations: Iterable[Situation], card: Card) -> bool:
    return all(situation.total <= card.room for situation in situations)


def remembered(ask: Ask) -> Ask:
    """Return ``ask`` with a memory: it simulates each size of microbatches once."""
    answers: dict[tuple[int | None, bool | None, bool], Answer] = {}

    def once(asked: Question) -> Answer:
        model = asked.config.model
        key = model.microbatch_tokens, model.reshard_after_forward, bool(asked.held_out)
        if key not in answers:
            answers[key] = ask(asked)
        return answers[key]

    return once


def planned_tokens(
    asked: Question, found: PretrainedConfig, room: float, ask: Ask, longest_example: int
) -> int | None:
    """Return ``fitting_tokens`` for the batch of the question. ``room``: GiB for the step's own parts."""
    config, batch = asked.config, asked.batch
    packing, shared = how_rows_are_joined(config, found, asked.gpu)
    rows = trainer_class(config).rows_per_example
    whole = widest(batch, asked.ranks, size_of(config.model, asked.ranks), rows, packing, shared)
    most = max(longest_example, *map(row_tokens, batch))
    return fitting_tokens(asked, most, whole, room, ask)


def scores_while_training(config: Config, ranks: int) -> bool:
    """Return whether a round is scored while the previous one is trained on.

    A single rank does so when rounds are sampled ahead; several ranks score together between steps."""
    return ranks == 1 and config.rounds.lag > 0 and config.sampler.separate


if __name__ == "__main__":
    serve({"of_examples": of_examples, "of_settings": of_settings, "answer": answer})
