"""Verification of sampled answers by the verifier that a data set names, and the accuracy that evaluation
reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.imports import import_function
from config.schema import Config
from config.schema_data import DataConfig
from data.chat import Renderer
from data.types import Group, Prompt
from data.views import prompts_of
from models.distributed import World, gather_objects
from models.policy import Policy
from rollouts.answers import Answers, Request
from rollouts.embedded import EmbeddedSampler
from rollouts.rewards.base import Missing, finite, verdict_of
from rollouts.rewards.blame import describe
from rollouts.rounds import usable_prompts
from rollouts.samplers import Sample, Sampler, SamplingSettings
from rollouts.stop_strings import StopStrings, facts_of

Verifier = Callable[[list[str], list[str | None]], list[float | None]]
"""Function (completions, reference answers) -> verdicts in [0, 1]. None is no verdict, which is not a 0."""

TEMPERATURE = 0.7
"""Temperature of sampled accuracy. Top-p is 1, so that answers come from the policy's own distribution and
not from its truncation (spec of the verifiable setting, §5.2)."""
MOST_FAILURES = 32
"""How many calls of a verifier may raise while the answers are sought on which it does."""
COLUMNS = ("kind", "prompt", "answer", "reference", "verdict")
AnswerRow = tuple[str, str, str, str | None, float | None]
READ = 3
"""How many held-out prompts are answered to be read where no verifier judges the answers."""


class Shown:
    """Greedy answers to the first few prompts by id, for people to read before and after training. Every rank
    calls it and gets the same rows of ``COLUMNS``."""

    def __init__(self, sampler: Sampler, prompts: Sequence[Prompt], renderer: Renderer, tokens: int) -> None:
        """``tokens``: the length of an answer at most."""
        self.renderer = renderer
        first = usable_prompts(sorted(prompts, key=lambda prompt: prompt.id), renderer)[0][:READ]
        self.answers = Answers(sampler, first, Request("", 1, SamplingSettings(0.0, 1.0, tokens)))

    def use_cache(self, cache_dir: Path, parts: Mapping[str, str]) -> None:
        self.answers.use_cache(cache_dir, parts)

    def __call__(self, initial: bool) -> list[AnswerRow]:
        """Return the rows. ``initial``: whether the policy has its initial weights."""
        return [
            ("read", conversation(p), text_of(samples[0], self.renderer), p.reference_answer, None)
            for p, samples in zip(self.answers.prompts, self.answers(initial), strict=True)
        ]


class Accuracy:
    """Measures ``accuracy_sampled`` (``samples`` answers per prompt at temperature 0.7 and top-p 1, always
    with the same seed), ``accuracy_greedy`` (one answer) and ``length_sampled``, the mean number of tokens of
    the sampled answers. An accuracy is the mean verdict over ``prompts``, or None if there is no verdict at
    all.

    Every rank calls it and verifies its own share. The result is the same on every rank.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: list[Prompt],
        verifier: Verifier,
        renderer: Renderer,
        world: World,
        max_tokens: int,
        seed: int = 0,
        samples: int = 1,
        facts: Mapping[str, Any] | None = None,
        kept: int | None = None,
    ) -> None:
        """``facts``: what answers depend on besides the ``parts`` that ``use_cache`` is given. ``kept``: how
        many answers of each kind ``samples`` has; None: all."""
        self.verifier, self.renderer, self.facts, self.kept = verifier, renderer, facts or {}, kept
        self.world = world
        sampled = SamplingSettings(TEMPERATURE, 1.0, max_tokens)
        greedy = SamplingSettings(0.0, 1.0, max_tokens)
        self.answers = {
            "sampled": Answers(sampler, prompts, Request("", samples, sampled, seed)),
            "greedy": Answers(sampler, prompts, Request("", 1, greedy, seed)),
        }
        self.samples: list[AnswerRow] = []
        """Rows of ``COLUMNS`` from the last call."""
        self.drawn: dict[str, list[Sample]] = {}
        """This rank's answers of each kind from the last call."""
        self._drawn_by: Accuracy | None = None

    def with_verifier(self, verifier: Verifier) -> Accuracy:
        """Return the accuracy, by another verifier, of the answers that this one drew last."""
        other = copy(self)
        other.verifier, other._drawn_by = verifier, self
        return other

    def use_cache(self, cache_dir: Path, parts: Mapping[str, str]) -> None:
        """Make calls with ``initial`` read the initial weights' answers from ``cache_dir`` and store them
        there. ``parts``: what answers depend on besides the sampling."""
        for answers in self.answers.values():
            answers.use_cache(cache_dir, {**parts, **self.facts})

    def __call__(self, initial: bool = False) -> dict[str, float | None]:
        """Return the metrics. ``initial``: whether the policy has its initial weights."""
        self.samples = []
        share = slice(self.world.rank, None, self.world.size)
        if self._drawn_by is None:
            answered = {kind: answers(initial)[share] for kind, answers in self.answers.items()}
            self.drawn = {
                kind: [one for samples in part for one in samples] for kind, part in answered.items()
            }
        else:
            self.drawn = self._drawn_by.drawn
        measurements = {kind: self._measure(kind) for kind in self.answers}
        accuracies = {f"accuracy_{kind}": accuracy for kind, (accuracy, _) in measurements.items()}
        return accuracies | {"length_sampled": measurements["sampled"][1]}

    def _measure(self, kind: str) -> tuple[float | None, float]:
        """Return (the mean verdict, the mean number of tokens per answer)."""
        answers, share = self.answers[kind], slice(self.world.rank, None, self.world.size)
        flat = self.drawn[kind]
        mine = [prompt for prompt in answers.prompts[share] for _ in range(answers.request.n)]
        texts = [text_of(sample, self.renderer) for sample in flat]
        verdicts, reasons = verdicts_of(self.verifier, texts, [p.reference_answer for p in mine])
        judged = list(zip(mine, texts, verdicts, strict=True))[: self.kept]
        rows = [(kind, conversation(p), text, p.reference_answer, verdict) for p, text, verdict in judged]
        gathered = gather_objects((verdicts, [len(sample.token_ids) for sample in flat], reasons, rows))
        decided = [v for part, *_ in gathered for v in part if v is not None]
        lengths = [n for _, part, *_ in gathered for n in part]
        self.samples += [row for *_, part in gathered for row in part][: self.kept]
        if self.world.is_main:
            failed: Counter[str] = sum((part for _, _, part, _ in gathered), Counter())
            say_failures(failed, len(lengths), f"{kind} answers")
        return sum(decided) / len(decided) if decided else None, sum(lengths) / len(lengths)


def verdicts_of(
    verifier: Verifier, texts: list[str], references: list[str | None]
) -> tuple[list[float | None], Counter[str]]:
    """Return one verdict for each of ``texts``, and how often the verifier failed for which reason.

    Where it raises, which must not end a training, it is asked about halves of the answers, so that those on
    which it raises are the only ones without a verdict; after ``MOST_FAILURES`` such calls the others that
    are left have none either. Raises UserError if the verifier does."""
    reasons: Counter[str] = Counter()
    failures = 0

    def ask(first: int, end: int) -> list[float | None]:
        nonlocal failures
        try:
            return _valid(verifier(texts[first:end], references[first:end]), end - first, reasons)
        except UserError:
            raise
        except Exception as error:
            failures += 1
            if end - first == 1 or failures > MOST_FAILURES:
                reasons[describe(error)] += end - first
                return [None] * (end - first)
        middle = (first + end) // 2
        return ask(first, middle) + ask(middle, end)

    return (ask(0, len(texts)), reasons) if texts else ([], reasons)


def _valid(returned: Any, expected: int, reasons: Counter[str]) -> list[float | None]:
    """Return what a verifier returned, without the verdicts that are no finite numbers, which are counted.
    Raises ValueError unless there are ``expected`` verdicts."""
    values = list(returned)
    if len(values) != expected:
        raise ValueError(f"it returned {len(values)} verdicts for {expected} answers")
    verdicts = [None if value is None else finite(verdict_of(value)) for value in values]
    reasons.update(verdict.reason for verdict in verdicts if isinstance(verdict, Missing))
    return [None if isinstance(verdict, Missing) else verdict for verdict in verdicts]


def say_failures(reasons: Counter[str], answers: int, kind: str) -> None:
    """Print on how many of the answers the verifier failed, and where. ``kind``: what they are called."""
    if reasons:
        summary = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        failed = f"{reasons.total()} of {answers} {kind}"
        print(f"the verifier failed on {failed}, which have no verdict: {summary}", flush=True)


def conversation(prompt: Prompt) -> str:
    """Return a prompt's only turn as it is, or all its turns, each after its role and on lines of its own."""
    turns = [f"{turn.role}: {turn.content}" for turn in prompt.turns]
    return "\n".join(turns) if len(turns) > 1 else prompt.turns[0].content


def text_of(sample: Sample, renderer: Renderer) -> str:
    """Return the text that is verified."""
    return sample.completion(renderer).text or ""


def checked_prompts(config: Config, held_out: Sequence[Group], data: DataConfig) -> list[Prompt]:
    """Return the held-out prompts to which answers are checked: those with a reference answer, if ``data``
    names a verifier. They are in order of their ids, so that a smaller number of them is a fair draw."""
    answered = [] if data.verifier is None else prompts_of(held_out)
    prompts = sorted((p for p in answered if p.reference_answer is not None), key=lambda p: p.id)
    return prompts[: config.n_eval_prompts]


def make_accuracy(
    config: Config,
    policy: Policy,
    renderer: Renderer,
    held_out: Sequence[Group],
    world: World,
    task: DataConfig | None = None,
    stops: StopStrings | None = None,
    section: str = "data",
) -> Accuracy | None:
    """Return the accuracy that evaluation measures, or None if answers cannot be checked: ``task`` (None:
    ``data``) names no verifier, or no held-out prompt has a reference answer. ``stops``: ends answers; None:
    only an end token does. ``section``: where ``task`` stands among the settings. Raises ConfigError."""
    data = task or config.data
    if not (prompts := checked_prompts(config, held_out, data)):
        return None
    verifier: Verifier = import_function(f"{section}.verifier", str(data.verifier))
    return Accuracy(
        embedded_sampler(config, policy, renderer, world, f"answers to {section} (n_eval_prompts)", stops),
        prompts,
        verifier,
        renderer,
        world,
        config.model.max_length - config.model.max_prompt_length,
        samples=config.n_eval_samples,
        facts={} if stops is None else facts_of(config),
        kept=config.n_kept_answers,
    )


def embedded_sampler(
    config: Config,
    policy: Policy,
    renderer: Renderer,
    world: World,
    what: str,
    stops: StopStrings | None = None,
) -> EmbeddedSampler:
    """Return a sampler for evaluation. ``what``: its bar's words. Without ``stops`` an end token ends it."""
    rows = config.model.eval_batch_size
    return EmbeddedSampler(policy, renderer, world, batch_size=rows, stops=stops, what=what)
