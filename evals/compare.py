"""``kind=compare``, which compares two models' answers to the same prompts by a reward.

It reports wins, ties, losses, the mean difference of rewards, and paired tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import ConfigError, StoppedError, require
from common.files import lines_of
from config.schema_stages import EvalStage
from data.types import Prompt
from evals import answers
from evals.answers import check_answering, described
from evals.base import Evaluation, Target, fingerprints
from models.distributed import World, on_main
from reports import statistics
from rollouts.answers import Request
from rollouts.files import read_samples
from rollouts.rewards.base import make_reward
from rollouts.round_builder import score_samples
from rollouts.rounds import SampledPrompt
from rollouts.samplers import SamplingSettings


@dataclass(frozen=True)
class Judged:
    """One prompt's answers from both sides with their rewards (None: no verdict), ours first."""

    sampled: tuple[SampledPrompt, SampledPrompt]
    scores: tuple[list[float | None], list[float | None]]

    @property
    def means(self) -> tuple[float, float] | None:
        """Each side's mean reward over its answers with a reward; None if a side has no such answer."""
        rewards = [[score for score in side if score is not None] for side in self.scores]
        return (fmean(rewards[0]), fmean(rewards[1])) if all(rewards) else None


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError or DataError if the comparison cannot be done.

    The reasons are: no reward is set, a side cannot answer, or the files of answers share no prompt."""
    reward = target.config.reward
    assert reward is not None and target.other is not None
    sides = (target, target.other)
    prompts: list[Prompt] | None = None
    if all(side.answers is None for side in sides):
        for side in sides:
            check_answering(side)
        prompts, _ = answers.prompts(target, stage, check_answering(target))
    read = [answers_in(side.answers) for side in sides if side.answers is not None]
    if len(read) == 2:
        in_common(read[0], read[1])
    if prompts is not None:
        require(
            not target.config.reward_config.needs_reference
            or any(p.reference_answer is not None for p in prompts),
            "reward",
            reward["name"],
            f"compares with reference answers, of which data={target.config.data.name} has none; choose "
            "another, as in reward=armorm",
        )
    make_reward(target.config.reward_config).close()


def answers_in(path: Path) -> list[SampledPrompt]:
    """Return the answers in a file: of sample.py in any format, of an evaluation (.jsonl), or AlpacaEval's
    outputs.

    Raises DataError, and ConfigError for a file with both greedy and sampled answers, because their rewards
    must not be averaged."""
    if path.suffix == ".jsonl":
        drawn = {
            json.loads(line).get("drawn")
            for line in lines_of(path.read_text(encoding="utf-8"))
            if '"drawn"' in line
        }
        if len(drawn) > 1:
            raise ConfigError(
                "answers",
                path,
                f"holds {' and '.join(sorted(map(str, drawn)))} answers: keep one kind, as with "
                "accuracy.greedy=false or accuracy.samples=0",
            )
    return read_samples(path)


def in_common(
    ours: Sequence[SampledPrompt], theirs: Sequence[SampledPrompt]
) -> list[tuple[SampledPrompt, SampledPrompt]]:
    """Return both sides' answers to each prompt that both have, in the order of ours.

    Raises ConfigError if they share no prompt."""
    by_id = {one.prompt.id: one for one in theirs}
    pairs = [(one, by_id[one.prompt.id]) for one in ours if one.prompt.id in by_id]
    require(
        bool(pairs),
        "against",
        "…",
        f"no prompt of the {len(by_id)} there is among the {len(ours)} of ours: nothing can be compared",
    )
    return pairs


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Score and compare both sides' answers.

    Raises WorkerError, RewardError, and StoppedError if no prompt got a reward on both sides."""
    assert target.other is not None and target.config.reward is not None
    ours, theirs = _answers(target, target, stage, world), None
    if target.other.answers is None and target.answers is not None:
        theirs = _sampled(target.other, [one.prompt for one in ours], stage, world)
    theirs = theirs or _answers(target.other, target, stage, world)
    return on_main(lambda: judge(target, ours, theirs, stage, world))


def judge(
    target: Target, ours: list[SampledPrompt], theirs: list[SampledPrompt], stage: EvalStage, world: World
) -> Evaluation:
    """Compute the rewards and the result on rank 0.

    Raises StoppedError if no prompt got a reward on both sides."""
    assert target.other is not None and target.config.reward is not None
    pairs = in_common(ours, theirs)
    reward = make_reward(target.config.reward_config, world.device, (target.run or target.out) / "logs")
    print(f"{2 * len(pairs)} prompts' answers are scored by {target.config.reward_config.name}", flush=True)
    try:
        reward.check_prompts([one.prompt for one, _ in pairs])
        scores = score_samples(reward, [side for pair in pairs for side in pair])
    finally:
        reward.close()
    judged = [Judged(pair, (scores[2 * i], scores[2 * i + 1])) for i, pair in enumerate(pairs)]
    means = {one.sampled[0].prompt.id: one.means for one in judged if one.means is not None}
    if not means:
        raise StoppedError(
            f"reward {target.config.reward_config.name} gave no verdict on any prompt's both sides"
        )
    items = {
        "reward": {i: a for i, (a, _) in means.items()},
        "reward_against": {i: b for i, (_, b) in means.items()},
        "mean_difference": {i: a - b for i, (a, b) in means.items()},
    }
    counts = {
        "prompts": len(means),
        "only_one_side": len(ours) + len(theirs) - 2 * len(pairs),
        "no_verdict": len(pairs) - len(means),
    }
    settings = described(target, stage) | {
        "against": target.other.name,
        "samples": stage.compare.samples,
        "tie": stage.compare.tie,
        "reward": target.config.reward,
    }
    digests = {
        "ours": fingerprints(target, [pair[0].prompt for pair in pairs]),
        "against": fingerprints(target.other),
    }
    title = f"against {target.other.name}, by {target.config.reward_config.name}"
    values = measured(items, stage) | {"counts": counts}
    values |= {"length": _length([ours for ours, _ in pairs])}
    values |= {"length_against": _length([theirs for _, theirs in pairs])}
    table = printed(values, title, counts, stage.confidence)
    return Evaluation(values, table, [row_of(one) for one in judged], settings, digests)


def _answers(side: Target, target: Target, stage: EvalStage, world: World) -> list[SampledPrompt]:
    """Return a side's answers, read from its file or sampled.

    The prompts for sampling are those of the other side's file of answers if there is one, else those of
    ``target``'s data."""
    if side.answers is not None:
        return answers_in(side.answers)
    if target.other is not None and target.other.answers is not None:
        return _sampled(side, [one.prompt for one in answers_in(target.other.answers)], stage, world)
    prompts, _ = answers.prompts(target, stage, check_answering(target))
    return _sampled(side, prompts, stage, world)


def _sampled(side: Target, prompts: list[Any], stage: EvalStage, world: World) -> list[SampledPrompt]:
    renderer = check_answering(side)
    usable, _ = answers.usable_prompts(answers.limited(prompts, stage.limit), renderer)
    n, settings = stage.compare.samples, SamplingSettings.from_config(side.config)
    request = Request(f"{n} answers each", n, settings)
    (drawn,) = answers.sample(side, renderer, usable, [request], world)
    return [
        SampledPrompt(prompt, tuple(s.completion(renderer) for s in samples))
        for prompt, samples in zip(usable, drawn, strict=True)
    ]


def _length(side: Sequence[SampledPrompt]) -> float | None:
    """Return the mean number of tokens per answer; None if some answer's tokens are not known."""
    every = [c.token_ids for one in side for c in one.completions]
    return (
        fmean(len(ids) for ids in every if ids is not None) if all(ids is not None for ids in every) else None
    )


def row_of(one: Judged) -> dict[str, Any]:
    """Return the record of one prompt."""
    prompt, means = one.sampled[0].prompt, one.means
    texts = [[c.text or "" for c in side.completions] for side in one.sampled]
    return {
        "prompt_id": prompt.id,
        "prompt": [turn.message for turn in prompt.turns],
        "reference": prompt.reference_answer,
        "answers": texts[0],
        "rewards": one.scores[0],
        "answers_against": texts[1],
        "rewards_against": one.scores[1],
        "difference": None if means is None else means[0] - means[1],
    }


def measured(items: dict[str, dict[str, float]], stage: EvalStage) -> dict[str, Any]:
    """Return the numbers of a comparison. ``win_rate`` counts a tie as half a win."""
    tie = stage.compare.tie
    tables = {metric: statistics.table_of([values]) for metric, values in items.items()}
    difference = tables["mean_difference"]
    tables["win"], tables["loss"] = 1.0 * (difference > tie), 1.0 * (difference < -tie)
    tables["tie"] = 1 - tables["win"] - tables["loss"]
    tables["win_rate"] = tables["win"] + tables["tie"] / 2
    spread = statistics.intervals(tables, stage.resamples, stage.confidence)
    values: dict[str, Any] = {}
    for name in ("win_rate", "win", "tie", "loss", "mean_difference", "reward", "reward_against"):
        interval = spread[name]
        values |= {name: statistics.mean_of(tables[name]), f"{name}_ci": list(interval) if interval else None}
    values |= statistics.paired_tests(difference[0].tolist(), tie)
    return values


def printed(values: dict[str, Any], title: str, counts: dict[str, Any], confidence: float) -> list[list[str]]:
    table = [[title, "mean", f"{confidence:.0%} interval"]]
    for name, words, form in (
        ("win_rate", "win rate (a tie is half)", "{:.1%}"),
        ("win", "wins", "{:.1%}"),
        ("tie", "ties", "{:.1%}"),
        ("loss", "losses", "{:.1%}"),
        ("mean_difference", "mean difference of rewards", "{:+.4f}"),
        ("reward", "our reward", "{:.4f}"),
        ("reward_against", "theirs", "{:.4f}"),
    ):
        low, high = values[f"{name}_ci"]
        table.append([words, form.format(values[name]), f"[{form.format(low)}, {form.format(high)}]"])
    for name, words in (("p_t", "p, paired t"), ("p_wilcoxon", "p, Wilcoxon"), ("p_sign", "p, sign test")):
        table.append([words, statistics.shown_p(values[name])])
    table += [
        [words, f"{values[name]:.1f}"]
        for name, words in (("length", "our tokens an answer"), ("length_against", "theirs"))
        if values.get(name) is not None
    ]
    return table + [
        [words, str(counts[name])]
        for name, words in (
            ("prompts", "prompts"),
            ("only_one_side", "answered by one side alone"),
            ("no_verdict", "prompts without two rewards"),
        )
        if counts.get(name)
    ]
