"""What a run decides by the estimate of its memory (``models.memory``) before anything is loaded, and what it
says of it: how batches are cut into microbatches, what is computed again in the backward, what a rank holds
at most, and what it held in the end."""

from __future__ import annotations

import math
import resource
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from common.errors import ConfigError, UserError
from config.schema import Config, card_memory
from config.schema_model import AUTO, SELECTIVE, ModelConfig
from data.balance import row_tokens, share_tokens
from data.batches import Segment, Size, deal, heaviest, size_of
from data.examples import longest
from data.types import Example
from models.attention import packable
from models.distributed import World, gather_objects
from models.memory import MARGIN, Estimate, Load, Shape
from models.shapes import architecture, layer_work
from trainers.assembly import trainer_class

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
PROBE = 8192
"""Tokens of a microbatch that selective checkpointing has to leave room for."""
FREE = 0.2
"""Share of a card that is worth using."""
NEAR = 0.9
"""Share of the widest planned microbatch from which on one counts as it."""
LESS = 2 / 3
"""Share of a microbatch's tokens that is left of one that was too large."""
SHORT = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Beginnings of messages of errors that are no torch.OutOfMemoryError."""


# -- what a rank holds -----------------------------------------------------------------------------


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
    asked: int = 0
    """Held-out prompts; the KL divergence of an evaluation has some of them answered."""
    checked: int = 0
    """Answers that a verifier checks in an evaluation, of the set with the most."""

    @classmethod
    def of(cls, config: Config, ranks: int, card: Card | None, **answered: int) -> Self:
        """Raises ConfigError for an architecture that cannot be loaded."""
        hf_config, on_gpu = architecture(config.model), card is not None
        return cls(config, hf_config, Shape.of(config.model, hf_config), ranks, on_gpu, card, **answered)

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

    @property
    def answers(self) -> float:
        """Return the bytes that it takes while the policy itself answers prompts, besides its weights: for
        rounds with sampler=embedded, and for an evaluation's verifier and KL divergence."""
        config, model = self.config, self.config.model
        prompts, longest = config.retention.counts("cuda" if self.card else "cpu")
        kl = min(self.asked, prompts) if config.retention.kl and model.head != "reward" else 0
        shares = [(self.checked, model.max_length - model.max_prompt_length), (kl, longest)]
        drawn = [(min(model.eval_batch_size, math.ceil(n / self.ranks)), tokens) for n, tokens in shares]
        if config.online and not config.sampler.separate:
            drawn.append((config.sampler.batch_size or model.eval_batch_size, config.max_tokens))
        first, at_most = model.max_prompt_length, model.max_length
        return max(self._answers(rows, first, min(at_most, first + tokens)) for rows, tokens in drawn)

    def _answers(self, rows: int, prompt: int, tokens: int) -> float:
        """Return the bytes of ``rows`` answers: the key-value cache of ``tokens`` tokens each, the work of a
        layer on all prompts at once, and the logits of one token each.

        Logits exist twice in float32, as they are and at the temperature. To draw a token, their
        probabilities and cumulative sums exist in float64."""
        shape, layer = self.shape, self.shape.layer
        cache = 2 * layer.keys * shape.layers * tokens * self.width
        prefill = prompt * self.width * layer_work(self.hf_config)
        return MARGIN * rows * (cache + prefill + (4 + 4 + 8 + 8) * shape.vocabulary)

    def situations(self, step: Load, evaluation: Load | None) -> list[Situation]:
        """Return what the rank holds in every situation of a run, the training step first. ``evaluation``:
        None without held-out examples."""
        beside, resident = self.neighbours, in_gib(self.resident)
        found = [Situation("training step", in_gib(self.step(step)) | beside)]
        if evaluation is not None:
            found.append(Situation("evaluation", in_gib(self.evaluation(evaluation)) | beside))
        if answers := self.answers:
            whole = self.width * self.shape.parameters if self.ranks == 1 else self.gathered(1)
            parts = {"gathered blocks": whole, "keys, values and logits": answers}
            found.append(Situation("own answers", resident | in_gib(parts) | beside))
        if self.shares_gpu:
            outside = {part: count * ASSUMED[part] for part, count in self._outside.items()}
            found.append(Situation("sampling", resident | outside | self.engine))
        return found


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: size / GIB for part, size in parts.items() if size}


@dataclass(frozen=True)
class MemoryPlan:
    """What the fullest rank holds, and what is decided by it."""

    situations: tuple[Situation, ...]
    card: Card | None
    load: Load
    """The widest microbatch of the run."""
    least: int
    """Tokens of the longest example, which a microbatch must be able to hold."""
    decided: dict[str, Any]
    """Settings of the model where they are ``auto`` -> what they are set to."""
    cut: str
    """How batches are cut into microbatches, and why."""
    text: str
    refusal: ConfigError | None
    """Set where the fixed parts and the longest example do not fit."""

    @property
    def predicted(self) -> float:
        """GiB of the trainer's own tensors, and without a GPU of the whole process."""
        training = [s for s in self.situations if s.name != "sampling"]
        return max(s.tensors if self.card else s.total for s in training)

    @property
    def record(self) -> dict[str, Any]:
        """What a run's run.json has."""
        size = f"{self.predicted:.2f} GiB"
        takes = f"a rank's tensors take {size} at most" if self.card else f"the process takes about {size}"
        return {
            "predicted": f"{takes} (by the shapes)",
            "predicted_gib": self.predicted,
            "microbatch_tokens": self.load.tokens,
            "cut": self.cut,
            "decided": self.decided,
            "parts": {
                s.name: {part: round(gib, 3) for part, gib in s.parts.items()} for s in self.situations
            },
        }

    def applied(self, config: Config) -> Config:
        """Return the settings with what is decided."""
        return replace(config, model=replace(config.model, **self.decided))


# -- the batches -----------------------------------------------------------------------------------


class Batches:
    """How examples lie in microbatches with the settings of an estimate."""

    def __init__(self, estimate: RankMemory) -> None:
        config, hf_config = estimate.config, estimate.hf_config
        self.estimate, self.trainer = estimate, trainer_class(config)
        self.packed, self._shared = joined(config.model, hf_config, estimate.gpu)
        self._work = self.trainer.work_of(config, hf_config)

    def tokens(self, share: list[Example]) -> int:
        return share_tokens(share, self.packed, self._shared)

    def load(self, share: list[Example], several: bool) -> Load:
        """Return a microbatch of these examples."""
        lengths = [len(row) for example in share for row in example.rows]
        counted = sum(len(row.counted) for example in share for row in example.rows)
        return Load(self.tokens(share), counted, max(lengths), several, self.packed)

    def dealt(self, batch: list[Example], size: Size) -> Load:
        """Return the widest microbatch that ``batch`` is dealt into."""
        ranks, rows = self.estimate.ranks, self.trainer.rows_per_example
        slots = deal(batch, ranks, size, rows, self.packed, self._shared, self._work)
        return self.load(max((share for slot in slots for share in slot), key=self.tokens), len(slots) > 1)

    def trained(self, batch: list[Example], most: int | None) -> Load:
        """Return the widest microbatch of a step where it has ``most`` tokens at most (None: as many examples
        as the settings say). One that is cut by tokens is filled with the batch's examples: the heaviest
        batch may be cut into narrower ones than another."""
        model = replace(self.estimate.config.model, microbatch_tokens=None)
        whole = self.dealt(batch, size_of(model, self.estimate.ranks))
        if most is None or whole.tokens <= most:
            return whole
        share = list[Example]()
        for example in sorted(batch, key=row_tokens, reverse=True):
            if self.tokens([*share, example]) <= most:
                share.append(example)
        return self.load(share, several=True)

    def evaluated(self, batch: list[Example]) -> Load | None:
        """Return the widest microbatch of an evaluation; None without held-out examples."""
        at_once = self.estimate.ranks * self.trainer.rows_per_example
        size = max(1, self.estimate.config.model.eval_batch_size // at_once)
        return replace(self.dealt(batch, size), several=False) if batch else None


def joined(model: ModelConfig, hf_config: PretrainedConfig, gpu: bool) -> tuple[bool, bool]:
    """Return whether rows are packed, and whether they share prompts, on a GPU whose kernel for uneven
    lengths works, or without one."""
    able = packable(hf_config, model.attn_implementation)
    packed = able and (model.dtype != "float32" if gpu else not model.compile)
    packed = packed if model.packing is None else model.packing
    alike = model.router_aux_loss_coef is None and model.head != "reward"
    return packed, packed and able and alike and model.share_prompts is not False


# -- what is decided -------------------------------------------------------------------------------


def card_of(config: Config) -> Card | None:
    """Return the GPU that a run has, or a dry run plans for; None for a CPU."""
    if config.dry_run and config.plan.card is not None:
        return Card(config.plan.card, card_memory("plan.card", config.plan.card))
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, properties.total_memory / GIB)


def plan_run(
    config: Config, train: Segment, held_out: list[Segment], ranks: int, **answered: int
) -> MemoryPlan:
    """Return the plan for the data of a run. ``answered``: ``asked`` and ``checked`` of RankMemory. Raises
    ConfigError for an architecture that cannot be loaded."""
    batches = Batches(RankMemory.of(config, ranks, card_of(config), **answered))
    batch = heaviest(train, lambda one: batches.trained(one, config.model.microbatch_tokens).tokens)
    evaluated = (part.batch(i) for part in held_out for i in range(part.steps))
    held = max(evaluated, key=lambda one: sum(map(row_tokens, one)), default=[])
    return make_plan(batches, batch, longest(train.groups, batches.packed), held)


def make_plan(batches: Batches, batch: list[Example], most: Example, held_out: list[Example]) -> MemoryPlan:
    """Return the plan for the heaviest batch. ``most``: the longest example; ``held_out``: the heaviest batch
    of an evaluation, or []."""
    estimate, model = batches.estimate, batches.estimate.config.model
    whole, evaluated = batches.trained(batch, model.microbatch_tokens), batches.evaluated(held_out)
    least = whole.cut(share_tokens([most], batches.packed))
    chosen, load = choose(estimate, whole, least)
    decided: dict[str, Any] = {}
    if model.activation_checkpointing == AUTO:
        decided["activation_checkpointing"] = chosen.config.model.activation_checkpointing
    if model.cut_by_estimate and load.several:
        decided["microbatch_tokens"] = load.tokens
        load = batches.trained(batch, load.tokens)
    situations = tuple(chosen.situations(load, evaluated))
    refusal = refused(chosen, least)
    cut = why_cut(model, chosen, decided.get("microbatch_tokens"), whole)
    text = "\n  ".join([*described(chosen, load, least, situations, refusal), cut])
    return MemoryPlan(situations, estimate.card, load, least.tokens, decided, cut, text, refusal)


def choose(estimate: RankMemory, whole: Load, least: Load) -> tuple[RankMemory, Load]:
    """Return the estimate with the activation checkpointing that is chosen, and the widest microbatch.

    A batch that fits stays whole. With model.activation_checkpointing=auto nothing is computed twice where
    the batch fits, what is cheap in a layer where PROBE tokens fit, and else every layer. Without a GPU
    nothing is cut, and every layer is."""
    model = estimate.config.model
    ways: dict[Any, float] = {model.activation_checkpointing: 0}
    if model.activation_checkpointing == AUTO:
        ways = {False: math.inf, SELECTIVE: PROBE, True: 0} if estimate.card else {True: 0}
    for way, fewest in ways.items():
        estimate = estimate.with_model(activation_checkpointing=way)
        if estimate.fits(whole):
            return estimate, whole
        if model.cut_by_estimate and fewest < math.inf:
            load = widest_that_fits(estimate, whole, least)
            if load.tokens >= fewest and estimate.fits(load):
                return estimate, load
    return estimate, least if model.cut_by_estimate else whole


def widest_that_fits(estimate: RankMemory, whole: Load, least: Load) -> Load:
    """Return the widest microbatch whose step fits, in thousands of tokens, and no less than ``least``."""
    sizes = range(least.tokens, whole.tokens)
    count = bisect_left(sizes, True, key=lambda tokens: not estimate.fits(whole.cut(tokens)))
    return whole.cut(max(least.tokens, (least.tokens + count - 1) // 1000 * 1000))


def refused(estimate: RankMemory, least: Load) -> ConfigError | None:
    """Return why not even one example fits, with the first remedy that works; None where one does."""
    card, config = estimate.card, estimate.config
    if card is None or estimate.step_total(least) <= card.memory:
        return None
    fitting = (name for name, one in remedies(estimate) if one.step_total(least) <= card.memory)
    works = next(fitting, "a larger card, or more ranks with a larger model.batch_size")
    return ConfigError(
        "model.name_or_path",
        config.model.name_or_path,
        f"needs {estimate.step_total(least):.1f} GiB on each of {estimate.ranks} rank(s) for its weights, "
        f"gradients and moments and for one example of {least.tokens:,} tokens, and {card.name} has "
        f"{card.memory:.1f}: use {works}",
    )


def remedies(estimate: RankMemory) -> Iterator[tuple[str, RankMemory]]:
    """Yield what may help, as it is typed, with its estimate: layers that are computed again, more ranks
    as far as the batch goes, adapters on weights of 4 bits."""
    again, words = estimate.with_model(activation_checkpointing=True), "model.activation_checkpointing=true"
    yield words, again
    ranks, model = 2 * estimate.ranks, again.config.model
    while model.batch_size % (ranks * model.microbatches) == 0:
        yield f"torchrun --nproc-per-node {ranks} with {words}", replace(again, ranks=ranks)
        ranks *= 2
    if not model.use_peft and model.head != "reward":
        config = replace(again.config, model=replace(model, use_peft=True, quantization="nf4"))
        adapters = RankMemory.of(config, estimate.ranks, estimate.card)
        yield f"model.use_peft=true model.quantization=nf4 {words}", adapters


# -- words -----------------------------------------------------------------------------------------


def why_cut(model: ModelConfig, chosen: RankMemory, tokens: int | None, whole: Load) -> str:
    """Return in words how a rank's share of a batch is cut into microbatches, and why. ``tokens``: of a cut
    that is decided here."""
    if model.microbatch_tokens is not None:
        return f"microbatches of {model.microbatch_tokens:,} tokens at most (model.microbatch_tokens)"
    if model.microbatches > 1:
        return f"{model.microbatches} microbatches a step (model.microbatches)"
    if tokens is not None and chosen.card is not None:
        return (
            f"microbatches of {tokens:,} tokens at most (model.microbatch_tokens=auto): one pass would "
            f"take {chosen.step_total(whole):.1f} GiB, and {chosen.card.room:.1f} are left"
        )
    rest = "there is room" if chosen.card else "model.microbatch_tokens cuts it"
    return f"{model.batch_size // chosen.ranks} examples a step and rank in one microbatch: {rest}"


def described(
    chosen: RankMemory, load: Load, least: Load, situations: Seq[Situation], refusal: ConfigError | None
) -> Iterator[str]:
    """Yield the plan in lines, the first without the others' indent. For a step that does not fit, and
    without a GPU, they have the number to type with which it takes less."""
    card, parameters = chosen.card, chosen.shape.parameters
    where = "on the CPU" if card is None else f"on {card.name} ({card.memory:.1f} GiB)"
    yield (
        f"{parameters / 1e6:,.{1 if parameters >= 1e5 else 6}f} M parameters. Memory of the fullest of "
        f"{chosen.ranks} rank(s) {where}, microbatches of {load.tokens:,} tokens at most; what grows with "
        f"tokens is at most {chosen.overshoot:.0%} above what is taken:"
    )
    yield from map(str, situations)
    most = max(situation.total for situation in situations)
    if card is None:
        yield f"the process takes about {most:.2f} GiB"
        narrower = load.cut(max(least.tokens, load.tokens // 2))
    else:
        verdict = "fits" if most <= card.room else "warning, may not fit" if refusal is None else "too much"
        yield f"{verdict}: {most:.1f} GiB at most; {card.room:.1f} are left when {GAPS:.0%} are kept for gaps"
        yield f"model.activation_checkpointing={str(chosen.config.model.activation_checkpointing).lower()}"
        narrower = load if chosen.fits(load) else widest_that_fits(chosen, load, least)
    total = chosen.step_total(narrower)
    if total < chosen.step_total(load):  # several passes keep the gradients, which may be more
        yield f"model.microbatch_tokens={narrower.tokens} model.microbatches=1: a step takes {total:.2f} GiB"


# -- afterwards ------------------------------------------------------------------------------------


def measured(world: World, plan: MemoryPlan) -> dict[str, Any]:
    """Return the most that the fullest rank has held so far, in words beside what was planned, and as GiB; a
    collective."""
    if world.device.type == "cuda":
        held, what = torch.cuda.max_memory_allocated(world.device) / GIB, "tensors on the GPU"
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts in KiB
        what = "the whole process"
    most = max(gather_objects(held))
    beside = ""
    if (world.device.type == "cuda") == (plan.card is not None):
        beside = f", {most / plan.predicted:.0%} of what was predicted"
    return {"measured": f"{most:.2f} GiB ({what}{beside})", "measured_gib": most}


def to_use(plan: MemoryPlan, taken: float, widest: int) -> str:
    """Return the number of tokens with which microbatches would use what is free of the GPU; "" where it is
    less than FREE of it. ``taken``: GiB; ``widest``: tokens of the widest microbatch so far."""
    step = plan.situations[0]
    if plan.card is None or not plan.load.several:
        return ""
    free = plan.card.room - (step.total - step.tensors) - taken
    variable = sum(step.parts.get(part, 0.0) for part in ("activations", "work", "logits"))
    growing = taken - (step.tensors - variable)
    if free < FREE * plan.card.memory or growing <= 0:
        return ""
    tokens = math.floor(widest * (1 + free / growing)) // 1000 * 1000
    return f"; {free:.1f} GiB are free: model.microbatch_tokens={tokens} would use them"


class ShortOfMemoryError(RuntimeError):
    """A rank ran out of memory; the message has the numbers to type."""


def short_of_memory(plan: MemoryPlan, config: Config, error: Exception) -> Exception:
    """Return ShortOfMemoryError with what to type in place of an error of a GPU or a CPU without room; any
    other error as it is."""
    found = any(words in str(error) for words in SHORT)
    explained = isinstance(error, UserError | ShortOfMemoryError)
    if explained or not (found or isinstance(error, torch.OutOfMemoryError)):
        return error
    tokens = max(plan.least, math.floor(LESS * plan.load.tokens) // 1000 * 1000)
    step = f"model.microbatch_tokens={tokens} model.microbatches=1"
    if tokens >= plan.load.tokens:
        step = "model.activation_checkpointing=true, or a lower model.max_length"
    first = str(error).strip().partition("\n")[0]
    sizes = {
        "model.eval_batch_size": config.model.eval_batch_size,
        "reference_batch_size": config.reference_batch_size,
        "sampler.batch_size": None if config.sampler.separate else config.sampler.batch_size,
    }
    halves = " ".join(f"{key}={size // 2}" for key, size in sizes.items() if size is not None and size > 1)
    elsewhere = f"; in scores before training, an evaluation or a round, use {halves}" if halves else ""
    return ShortOfMemoryError(f"out of memory ({first}): in a step, use {step}{elsewhere}")
