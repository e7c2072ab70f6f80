"""The construction of a round in the stages of sampling, scoring, and keeping or dropping (paper, Algorithm
1, lines 4 to 12). Each stage is on disk before the next begins.

Rank 0 alone builds. A stage that is already on disk, made from the same inputs, is not repeated.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

from common.progress import SOON, phase
from config.schema import Config
from data.chat import Renderer
from data.groups import answered_dict, to_dict, to_line
from data.types import Completion, Group, Prompt
from data.views import varies
from rollouts.answers import Request, draw
from rollouts.ledger import Line, RoundFolder, sampled_of
from rollouts.rewards.base import Reward
from rollouts.rounds import (
    PromptSchedule,
    SampledPrompt,
    feedback,
    overlong_penalties,
    with_threshold,
)
from rollouts.samplers import Sampler, SamplingSettings
from rollouts.stop_strings import facts_of

Facts = dict[str, Any]
_SHOWN_CONTEXTS = 8


class RoundBuilder:
    """Makes the rounds of one run."""

    def __init__(
        self,
        config: Config,
        contexts: PromptSchedule,
        renderer: Renderer,
        sampler: Sampler,
        reward: Reward,
        pause: Callable[[], None],
    ) -> None:
        """``pause`` is called between stages, and may raise to stop the run there."""
        self.config, self.contexts, self.renderer = config, contexts, renderer
        self.sampler, self.reward, self.pause = sampler, reward, pause
        self.settings = SamplingSettings.from_config(config)

    def needs_weights(self, folder: RoundFolder, first: int, wanted: int, weights: str) -> bool:
        """Return whether anything is left to sample for the round."""
        end = min(first + wanted, self.contexts.planned)
        whole = folder.done("samples", self._sampling_inputs(first, end, weights))
        return not (whole and (not self.config.rounds.fill or folder.done("groups")))

    def build(self, folder: RoundFolder, first: int, wanted: int, weights: str) -> None:
        """Make the round of the ``wanted`` contexts from number ``first`` on, up to ``groups.jsonl``.
        ``weights``: the fingerprint of the weights that it is sampled from."""
        end = first
        groups: list[list[Group]] = []
        dropped: Counter[str] = Counter()
        parts: list[str] = []
        completions: list[Completion] = []
        scores: list[list[list[float | None]]] = []
        while end < self.contexts.planned and len(groups) < wanted and (not parts or self.config.rounds.fill):
            begin, end = end, min(end + wanted - len(groups), self.contexts.planned)
            suffix = f".{len(parts)}" if parts else ""
            sampled = self._sample(folder, f"samples{suffix}", begin, end, weights)
            scored = self._score(folder, suffix, sampled)
            taken = self._penalised(sampled, scored)
            rounds = with_threshold(self.config.rounds, taken)
            for one, values in zip(sampled, taken, strict=True):
                outcome = feedback(one, values, rounds, self.config.seed)
                if isinstance(outcome, str):
                    dropped[outcome] += 1
                else:
                    groups.append(outcome)
            parts.append(suffix)
            completions += [completion for one in sampled for completion in one.completions]
            scores.append(taken)
        settings = asdict(self.config.rounds)
        inputs = {
            "scores": [folder.checksum(f"scores{suffix}") for suffix in parts],
            # how a round is kept on disk changes no group
            "feedback": {k: v for k, v in settings.items() if k not in ("compress", "keep_weights")},
        }
        if not folder.done("groups", inputs):
            trained_on = [group for of_context in groups for group in of_context]
            facts = {"contexts": len(groups), "dropped": dropped}
            folder.write("groups", (to_line(to_dict(group)) for group in trained_on), inputs, facts)
        if self.config.rounds.fill:  # only the file of groups shows that nothing more will be sampled
            self._sampled(folder)
        folder.note(
            {
                "contexts": [first, end],
                "parts": parts,
                "kept": len(groups),
                "dropped": dropped,
                "metrics": self._metrics(folder.record["stages"], parts, completions, scores),
            }
        )

    def _penalised(self, sampled: list[SampledPrompt], scored: list[Line]) -> list[list[float | None]]:
        """Return the scores of each prompt's samples, less what long samples lose."""
        rounds, longest = self.config.rounds, self.config.max_tokens
        if rounds.overlong is None:
            return [line["scores"] for line in scored]
        return [
            [
                None if score is None else score - penalty
                for score, penalty in zip(
                    line["scores"], overlong_penalties(one, rounds, longest), strict=True
                )
            ]
            for one, line in zip(sampled, scored, strict=True)
        ]

    def _sampled(self, folder: RoundFolder) -> None:
        """Free what is no longer needed once all samples of the round are on disk: the weights that they came
        from, unless ``rounds.keep_weights``, and the sampler's memory."""
        if not self.config.rounds.keep_weights:
            shutil.rmtree(folder.weights, ignore_errors=True)
        self.sampler.sleep()

    # -- stages ------------------------------------------------------------------------------------

    def _sampling_inputs(self, first: int, end: int, weights: str) -> Facts:
        prompts = [(seed, [p.id for p in prompts]) for seed, prompts in self.contexts.take(first, end)]
        return {
            "weights": weights,
            "text": self.renderer.fingerprint,
            "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest(),
            "sampler": self.config.sampler.name,
            "samples": self.config.rounds.samples,
            **asdict(self.settings),
            **facts_of(self.config),
            **self.sampler.layout(),
        }

    def _sample(
        self, folder: RoundFolder, stage: str, first: int, end: int, weights: str
    ) -> list[SampledPrompt]:
        inputs = self._sampling_inputs(first, end, weights)
        lines = folder.lines(stage, inputs)
        if lines is not None:
            return [sampled_of(line) for line in lines]
        start, drawn, hows = time.monotonic(), list[SampledPrompt](), list[Facts]()
        for seed, prompts in self.contexts.take(first, end):
            drawn += self._draw(prompts, seed)
            how = {"sampler": self.config.sampler.name, **asdict(self.settings), "seed": seed}
            hows += [{"sampling": how | facts_of(self.config)}] * len(prompts)
        facts = {
            "seconds": time.monotonic() - start,
            "contexts": [first, end],
            "tokens": sum(len(c.token_ids or ()) for one in drawn for c in one.completions),
            **self.sampler.dealt(),
        }
        keyed = zip(drawn, hows, strict=True)
        lined = (to_line(answered_dict(one.prompt, one.completions) | how) for one, how in keyed)
        folder.write(stage, lined, inputs, facts)
        self.pause()
        return drawn

    def _draw(self, prompts: list[Prompt], seed: int) -> list[SampledPrompt]:
        """Return the prompts with their answers."""
        n, temperature = self.config.rounds.samples, self.config.model.logit_temperature
        request = Request(f"sample {n} answers each (rounds.samples)", n, self.settings, seed)
        answers = draw(self.sampler, prompts, request, shown=None, delay=SOON, leave=False)
        return [
            SampledPrompt(prompt, tuple(sample.completion(self.renderer, temperature) for sample in samples))
            for prompt, samples in zip(prompts, answers, strict=True)
        ]

    def _score(self, folder: RoundFolder, suffix: str, sampled: list[SampledPrompt]) -> list[Line]:
        """Return one line for each prompt with its samples' scores. Raises RewardError."""
        reward = self.config.reward_config  # its settings decide a score besides the samples
        used = {"name": reward.name, "max_missing": reward.max_missing, reward.kind: asdict(reward.settings)}
        stage, inputs = f"scores{suffix}", {"samples": folder.checksum(f"samples{suffix}"), "reward": used}
        lines = folder.lines(stage, inputs)
        if lines is None:
            if not self.config.rounds.fill:  # with fill, more samples from the same weights may be needed
                self._sampled(folder)
            start = time.monotonic()
            with phase(f"score {sum(len(one.completions) for one in sampled)} answers", "reward"):
                scores = score_samples(self.reward, sampled)
            lines = [
                {"id": one.prompt.id, "scores": values} for one, values in zip(sampled, scores, strict=True)
            ]
            folder.write(
                stage, lines, inputs, {"seconds": time.monotonic() - start, "metrics": self.reward.metrics}
            )
            self.pause()
        return lines

    def _metrics(
        self,
        stages: Facts,
        parts: list[str],
        completions: list[Completion],
        scores: list[list[list[float | None]]],
    ) -> Facts:
        """Return the metrics that are logged for the round's samples. ``scores``: indexed by part, prompt and
        sample."""
        of_prompts = [[s for s in values if s is not None] for part in scores for values in part]
        rewards = [s for values in of_prompts for s in values]
        prompts = len(of_prompts)
        seconds = {
            stage: sum(stages[f"{stage}{suffix}"]["seconds"] for suffix in parts)
            for stage in ("samples", "scores")
        }
        lengths = [len(c.token_ids or ()) for c in completions]
        return {
            "reward": fmean(rewards) if rewards else None,
            "lowest_reward": min(rewards, default=None),
            "highest_reward": max(rewards, default=None),
            "zero_variance": fmean(not varies(values) for values in of_prompts),
            "no_verdict": 1 - len(rewards) / len(completions),
            "keep_rate": stages["groups"]["contexts"] / prompts,
            "contexts": prompts,
            "length": fmean(lengths),
            "finished": fmean(c.finished for c in completions),
            "sample_seconds": seconds["samples"],
            "score_seconds": seconds["scores"],
            "sample_tokens_per_second": sum(lengths) / max(seconds["samples"], 1e-9),
            **part_means(stages, parts, [sum(map(len, part)) for part in scores]),
        }


def part_means(stages: Facts, parts: list[str], counts: list[int]) -> dict[str, float]:
    """Return the mean over the round's completions of each metric that the reward reports for its own parts
    (``reward_...``). ``counts``: the number of completions in each of ``parts``."""
    sums: dict[str, list[tuple[float, int]]] = {}
    for suffix, count in zip(parts, counts, strict=True):
        for name, value in stages[f"scores{suffix}"]["metrics"].items():
            if name.startswith("reward_"):
                sums.setdefault(name, []).append((value, count))
    return {name: sum(v * n for v, n in terms) / sum(n for _, n in terms) for name, terms in sums.items()}


def score_samples(reward: Reward, sampled: list[SampledPrompt]) -> list[list[float | None]]:
    """Return every sample's reward, None for no verdict, and release the reward model's memory. Raises
    RewardError."""
    pairs = [(one.prompt, c.text or "") for one in sampled for c in one.completions]
    try:
        flat = iter(reward.score([prompt for prompt, _ in pairs], [text for _, text in pairs]))
    finally:
        reward.release()
    return [[next(flat) for _ in one.completions] for one in sampled]


def samples_table(folder: RoundFolder) -> list[list[Any]]:
    """Return rows of (prompt, completion, reward, tokens, finished) of the round's first contexts, for the
    tracker."""
    scores = folder.first("scores", _SHOWN_CONTEXTS)
    samples = folder.first("samples", _SHOWN_CONTEXTS)
    return [
        [
            line["prompt"][-1]["content"],
            completion["text"],
            value,
            len(completion["token_ids"]),
            completion["finished"],
        ]
        for line, scored in zip(samples, scores, strict=True)
        for completion, value in zip(line["completions"], scored["scores"], strict=True)
    ]


TABLE_COLUMNS = ("prompt", "completion", "reward", "tokens", "finished")
