"""Plan the memory that a run takes on the fullest of its ranks, before anything is loaded.

The training step and the evaluation are simulated, everything beside them is computed from sizes, and the
sums are compared with the card's memory. ``python -m jobs.memory_plan`` is the worker process that a dry run
and ``launch.sweep`` ask, because the simulation needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PretrainedConfig

from common.errors import ConfigError
from common.worker_process import WorkerError, WorkerProcess, serve
from config.schema import Config
from config.schema_plan import card_memory
from data.balance import row_tokens, share_tokens
from data.batches import Segment, Size, deal, size_of
from data.types import Example, Sequence
from jobs.assembly import trainer_class
from jobs.memory_neighbours import GIB, engine_weights, own_answers, reward_models
from jobs.memory_simulation import Answer, Question, answer
from jobs.memory_simulation import evaluates as of_evaluation
from models.attention import packs_rows, shares_prompts
from models.shapes import architecture
from models.simulated import simulated_gpu
from trainers.basic import BasicTrainer

CONTEXT, ASLEEP = 1.5, 1.5
"""Assumed GiB of a GPU that hold no tensor of the trainer: CONTEXT for its CUDA context, libraries and NCCL,
ASLEEP for a sleeping engine."""
GAPS = 0.05
"""Share of a card that is reserved for fragmentation by the allocator."""
CANDIDATES = 32
"""Number of batches with the most tokens, and number of batches with the longest examples, that are dealt to
ranks to find the widest microbatch."""
SECONDS = 1800.0
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
NOTHING: dict[str, float] = {}


@dataclass(frozen=True)
class Card:
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

    def __str__(self) -> str:
        digits = 2 if self.total >= 1 else 4
        shown = [f"{part} {size:.{digits}f}" for part, size in self.parts.items() if round(size, digits)]
        return f"{self.name}: {self.total:.{digits}f} GiB = " + " + ".join(shown)


@dataclass(frozen=True)
class MemoryPlan:
    ranks: int
    answer: Answer
    card: Card | None
    situations: tuple[Situation, ...]
    notes: tuple[str, ...]
    """Further lines: what could not be counted, and what would fit."""

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
    config: Config, train: Segment, held_out: list[Segment], trainer: type[BasicTrainer], ranks: int
) -> str:
    """Return the plan in words for the data of a dry run, or a sentence that says why there is no plan."""
    card = card_here(config)
    batch = heaviest_batch(config, train, trainer, ranks, card is not None)
    evaluated = (part.batch(i) for part in held_out for i in range(part.steps))
    held = max(evaluated, key=lambda batch: sum(map(row_tokens, batch)), default=[])
    worker = WorkerProcess("jobs.memory_plan", log=None, env={"CUDA_VISIBLE_DEVICES": ""})
    try:
        said: str = worker.call("of_examples", config, batch, held, ranks, card, timeout=SECONDS)["text"]
        return said
    except WorkerError as error:
        return f"The memory could not be planned: {last_line(error)}"
    finally:
        worker.close()


def card_here(config: Config) -> tuple[str, float] | None:
    """Return (name, GiB) of the GPU that is planned for; None for a CPU."""
    if config.plan.card is not None:
        return config.plan.card, card_memory("plan.card", config.plan.card)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return found.name, found.total_memory / GIB
    return None


def heaviest_batch(
    config: Config, segment: Segment, trainer: type[BasicTrainer], ranks: int, gpu: bool
) -> list[Example]:
    """Return the batch of the segment with the widest microbatch, by tokens.

    Only the CANDIDATES batches with the most tokens and those with the longest examples are dealt to ranks,
    so the result is a good guess."""
    with simulated_gpu(gpu):
        found = architecture(config.model)
        packing, _ = packs_rows(config.model, found)
        shared = shares_prompts(config.model, found, packing)
    size = size_of(config.model, ranks)
    batches = [segment.batch(i) for i in range(segment.steps if any_id(segment) else 1)]
    by_sum = sorted(batches, key=lambda batch: -sum(map(row_tokens, batch)))[:CANDIDATES]
    by_longest = sorted(batches, key=lambda batch: -max(map(row_tokens, batch)))[:CANDIDATES]
    candidates = [[told_apart(i, example) for i, example in enumerate(of)] for of in (*by_sum, *by_longest)]
    return max(
        candidates,
        key=lambda batch: widest(batch, ranks, size, trainer.rows_per_example, packing, shared),
    )


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

    The result has the plan as ``text`` and a sentence for each situation that does not fit in ``over``.
    Raises ConfigError for an architecture that cannot be loaded."""
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
) -> dict[str, object]:
    """Return the plan of a run that trains on the global batch ``batch`` and evaluates ``held_out`` at once.

    The result has the plan as ``text`` and a sentence for each situation that does not fit in ``over``."""
    found = architecture(config.model)
    own = type(found).__module__.startswith("transformers.")
    asked = Question(config, batch, held_out, ranks, card is not None, found if own else None)
    try:
        plan = make_plan(asked, found, None if card is None else Card(*card), answer)
    except Exception as error:  # code of a model, a loss or torch may need tensors with values
        reason = last_line(error)
        return {"text": f"The memory could not be planned: {type(error).__name__}: {reason}", "over": []}
    return {"text": "\n".join(plan.lines()), "over": [str(situation) for situation in plan.over]}


def make_plan(
    asked: Question, found: PretrainedConfig, card: Card | None, ask: Callable[[Question], Answer]
) -> MemoryPlan:
    """Return the memory of a rank in every situation, with notes on what would fit."""
    given, notes = ask(asked), []
    outside = NOTHING if card is None else {"outside tensors": CONTEXT}
    shares = card is not None and asked.config.online and asked.config.sampler.separate
    shares = shares and asked.config.sampler.shares_devices
    beside = outside | ({"sampler asleep": ASLEEP} if shares else {})
    situations = [Situation("training step", largest(given, evaluates=False) | beside)]
    if asked.held_out:
        situations.append(Situation("evaluation", largest(given, evaluates=True) | beside))
    resident = in_gib(given.resident)
    answers = own_answers(asked.config, found, asked.ranks, bool(asked.held_out))
    if answers:
        gathered = in_gib(peak(given, evaluates=False)).get("gathered blocks", 0.0)
        parts = resident | {"gathered blocks": gathered, "keys, values and logits": answers}
        situations.append(Situation("own answers", parts | beside))
    if shares and card is not None:
        share = card.memory * asked.config.sampler.gpu_memory_utilization
        situations.append(Situation("sampling", resident | outside | {"sampler": share}))
        if (weights := engine_weights(asked.config, given.parameters)) > 0.9 * share:
            notes.append(
                f"sampler.gpu_memory_utilization={asked.config.sampler.gpu_memory_utilization} gives the "
                f"sampler {share:.1f} GiB, and its weights alone take {weights:.1f}"
            )
    try:
        models = reward_models(asked.config)
    except ConfigError as error:
        models = NOTHING
        notes.append(f"the reward model is not counted: {error}")
    if models:
        situations.append(Situation("scoring", resident | beside | models))
        if scores_while_training(asked.config, asked.ranks):
            step = situations[0].parts
            situations.append(Situation("scoring beside the training step", {**step, **models}))
    if card is not None:
        notes.append(what_fits(asked, given, card, situations[0], ask))
    return MemoryPlan(asked.ranks, given, card, tuple(situations), tuple(notes))


def scores_while_training(config: Config, ranks: int) -> bool:
    """Return whether a round is scored while the previous one is trained on.

    A single rank does so when rounds are sampled ahead; several ranks score together between steps."""
    return ranks == 1 and config.rounds.lag > 0 and config.sampler.separate


def peak(given: Answer, evaluates: bool) -> dict[str, int]:
    """Return bytes by part at the moment of the largest sum.

    ``evaluates``: consider the moments of the evaluation instead of those of the training step."""
    moments: Iterable[dict[str, int]] = (
        parts for moment, parts in given.peaks.items() if of_evaluation(moment) is evaluates
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def largest(given: Answer, evaluates: bool) -> dict[str, float]:
    return in_gib(peak(given, evaluates))


def in_gib(parts: Mapping[str, int]) -> dict[str, float]:
    return {part: parts[part] / GIB for part in ORDER if parts.get(part)}


def what_fits(
    asked: Question, given: Answer, card: Card, step: Situation, ask: Callable[[Question], Answer]
) -> str:
    """Return a sentence on how many tokens a microbatch may have.

    If the step fits, the estimate scales every part that may grow with the tokens. If it does not, the
    estimate uses a second simulation with half as many tokens."""
    longest = max(map(row_tokens, asked.batch))
    spare = card.room - step.total
    if spare >= 0:
        grows = sum(size for part, size in step.parts.items() if part in ("activations", "work", "head"))
        tokens = given.tokens * (1 + spare / grows)
        fits = f"a step would fit with microbatches of {in_thousands(tokens):,} tokens"
        return fits + stays(asked, given, spare)
    less = given.tokens // 2
    if less >= longest:
        model = replace(asked.config.model, microbatch_tokens=less, gradient_accumulation_steps=1)
        half = ask(replace(asked, config=replace(asked.config, model=model), held_out=[]))
        slope = (sum(peak(given, False).values()) - sum(peak(half, False).values())) / GIB
        slope /= max(given.tokens - half.tokens, 1)
        if slope > 0 and (tokens := given.tokens + spare / slope) >= longest:
            return f"a step would fit with model.microbatch_tokens={in_thousands(tokens)}"
    checkpointing = (
        "" if asked.config.model.activation_checkpointing is True else "model.activation_checkpointing=true, "
    )
    return (
        f"not even microbatches of one example fit, the longest of which has {longest:,} tokens: "
        f"{checkpointing}a lower model.max_length, or more ranks would help"
    )


def stays(asked: Question, given: Answer, spare: float) -> str:
    """Return words on keeping every layer gathered until its backward pass, or "" if that is no option.

    It needs room for the whole model in the compute dtype, which is more than its layers take. ``spare``:
    GiB."""
    whole = given.parameters * getattr(torch, asked.config.model.dtype).itemsize / GIB
    if asked.ranks == 1 or not asked.config.model.reshard_after_forward or spare < whole:
        return ""
    return f", or with model.reshard_after_forward=false ({whole:.1f} GiB more at most)"


def in_thousands(tokens: float) -> int:
    """Return ``tokens`` rounded down to whole thousands, or to an integer below 1000."""
    return int(tokens) // 1000 * 1000 if tokens >= 1000 else int(tokens)


if __name__ == "__main__":
    serve({"of_examples": of_examples, "of_settings": of_settings, "answer": answer})
