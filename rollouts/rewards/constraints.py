"""The reward of ``reward=constraints``, the share of a prompt's constraints that an answer meets, times a
guard of its fluency.

A heap of words meets constraints as well. The guard takes its reward away, and the guard's parts are reported
beside the reward, so that one sees when a policy goes there.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from data.constraints import all_met, met, wanted_of, words_of
from data.types import Prompt
from rollouts.rewards.base import Missing, Scorer
from rollouts.rewards.settings import ConstraintsConfig

WORDS = Path("assets/constraints/words.txt.gz")
SHORT_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
SHORTEST = 4
"""Words below which nothing can be said about fluency, and the guard is 0."""

UNKNOWN = (
    "the prompt's reference names no known constraints: it is JSON text of kinds and values as in "
    'data/constraints.py, such as {"words_at_most": 20, "no_comma": null}'
)


@cache
def english_words() -> frozenset[str]:
    """Return English words in lower case, the 47,267 that are frequent in subtitles (from pyspellchecker
    0.9.1, MIT)."""
    return frozenset(gzip.decompress(WORDS.read_bytes()).decode().split())


def repetition(answer: str) -> float:
    """Return the share of an answer's three-word sequences that occurred in it before, in [0, 1]."""
    words = [word.lower() for word in words_of(answer)]
    threes = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(threes)) / len(threes) if threes else 0.0


def share_of_words(answer: str) -> float:
    """Return the share of an answer's letters and digits, in [0, 1], that stand in English words or in
    numbers of at most six digits: a policy that is asked for digits may write nothing else."""
    vocab = english_words()
    words = (word.lower().replace("’", "'") for word in words_of(answer))
    kept = [w for w in words if w in vocab or w.removesuffix("'s") in vocab] + SHORT_NUMBER.findall(answer)
    whole = sum(map(str.isalnum, answer))
    return sum(map(str.isalnum, "".join(kept))) / whole if whole else 0.0


def fluency(answer: str, enough: float) -> float:
    """Return the guard, in [0, 1]: 1 for a text of whose three-word sequences the share ``enough`` is new
    and of whose letters that share stands in known words, less in proportion below that, and 0 below four
    words."""
    if len(words_of(answer)) < SHORTEST:
        return 0.0
    return min(1.0, (1 - repetition(answer)) / enough) * min(1.0, share_of_words(answer) / enough)


def share_of_reward(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Return each answer's reward as a share of the largest, in [0, 1], by the numbers of the reward's yaml;
    None where the reference names no constraints. A verifier: its accuracy is the mean reward."""
    enough = ConstraintsConfig().enough  # type: ignore[call-arg]
    return [
        None
        if (wanted := wanted_of(reference)) is None
        else fmean(met(text, wanted).values()) * fluency(text, enough)
        for text, reference in zip(completions, references, strict=True)
    ]


def fluent_and_met(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Return 1.0 for an answer that meets all constraints and which the guard leaves whole, else 0.0; None
    where the reference names no constraints. A verifier."""
    enough = ConstraintsConfig().enough  # type: ignore[call-arg]
    verdicts = zip(completions, all_met(completions, references), strict=True)
    return [None if v is None else v * (fluency(text, enough) == 1) for text, v in verdicts]


class ConstraintReward(Scorer):
    """Scores answers in this process. A round of 640 takes a tenth of a second."""

    def __init__(self, config: ConstraintsConfig) -> None:
        self.config = config

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return each reward, in [0, points]; Missing for a prompt whose reference names no known
        constraints. ``metrics`` gets the means of the share of constraints that are met, ``reward_met``, of
        the guard, ``reward_fluency``, and of what it is made of, ``reward_repetition`` and
        ``reward_known_words``."""
        wanted = [wanted_of(prompt.reference_answer) for prompt in prompts]
        guards = [fluency(text, self.config.enough) for text in completions]
        shares = [
            None if one is None else fmean(met(text, one).values())
            for text, one in zip(completions, wanted, strict=True)
        ]
        if completions:
            self.metrics = {
                "reward_met": fmean(share or 0.0 for share in shares),
                "reward_fluency": fmean(guards),
                "reward_repetition": fmean(map(repetition, completions)),
                "reward_known_words": fmean(map(share_of_words, completions)),
            }
        return [
            Missing("the prompt has no reference answer" if prompt.reference_answer is None else UNKNOWN)
            if share is None
            else self.config.points * share * guard
            for prompt, share, guard in zip(prompts, shares, guards, strict=True)
        ]


def make(settings: ConstraintsConfig, device: object, log_dir: Path | None) -> ConstraintReward:
    """The reward of config/reward/constraints.yaml."""
    return ConstraintReward(settings)
