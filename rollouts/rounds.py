"""Pure functions that choose the prompts of a round and turn its scored samples into groups (paper, Algorithm
1)."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.schema_sampler import CENTRES, RoundsConfig
from data.chat import Renderer
from data.quality import check_vocabulary
from data.types import Completion, Group, Prompt
from data.views import best_and_worst, exceeds, varies

TOO_FEW, TOO_EQUAL = "fewer than 2 samples have a score", "the scores differ by less than rounds.tau"
EQUAL, SILENT = "all scores are equal", "no sample has a score"


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt with its samples."""

    prompt: Prompt
    completions: tuple[Completion, ...]


# The order of prompts


class PromptSchedule:
    """The contexts of a run, numbered from 0: all prompts in an order that depends on the seed alone, then
    all again in another order."""

    def __init__(self, prompts: Sequence[Prompt], planned: int, seed: int) -> None:
        """``prompts``: distinct, at least one. ``planned``: number of contexts of the whole run."""
        self.prompts, self.planned, self.seed = prompts, planned, seed

    def take(self, first: int, end: int) -> list[tuple[int, list[Prompt]]]:
        """Return contexts ``first`` to ``end`` (exclusive) as (sampling seed, prompts), one pair for each
        pass over the prompts to which they belong.

        A prompt occurs once in a pass, and each pass has its own sampling seed. So no two contexts of a run
        share random numbers.
        """
        size, parts = len(self.prompts), []
        while first < end:
            which, offset = divmod(first, size)
            count = min(size - offset, end - first)
            order = np.random.default_rng([self.seed, which]).permutation(size)[offset : offset + count]
            parts.append((derived_seed(self.seed, f"pass {which}"), [self.prompts[i] for i in order]))
            first += count
        return parts


def derived_seed(seed: int, what: str) -> int:
    """Return 63 bits that depend on a run's seed and on ``what`` they are used for."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=8).digest()) >> 1


def replayed(earlier: Sequence[Sequence[str]], count: int, index: int, seed: int) -> list[list[str]]:
    """Return, for each earlier round, the prompt ids that round ``index`` trains on again. ``earlier`` has
    the prompt ids that each earlier round sampled and kept.

    ``count`` of these are drawn without replacement, each as likely as any other however old it is. If there
    are no more than ``count``, all are taken.
    """
    places = [(r, prompt_id) for r, prompts in enumerate(earlier) for prompt_id in prompts]
    rng = np.random.default_rng(derived_seed(seed, f"replay {index}"))
    chosen = sorted(rng.permutation(len(places))[:count].tolist())
    out: list[list[str]] = [[] for _ in earlier]
    for place in chosen:
        r, prompt_id = places[place]
        out[r].append(prompt_id)
    return out


# Groups from scored samples


def feedback(
    sampled: SampledPrompt, scores: Sequence[float | None], config: RoundsConfig, seed: int
) -> list[Group] | str:
    """Return the groups to train on that a context gives, or the reason why it is dropped. A sample without a
    score is left out of everything, because no verdict is not a bad verdict.

    ``pair``: the best and the worst sample, best first, with their scores, if these differ by at least tau
    (Algorithm 1, lines 8 to 10). ``random``: two samples whose scores differ by at least tau, drawn by the
    seed and the prompt. ``min``: of these the two whose scores differ least. ``threshold``: each sample
    alone, with 1.0 if its score is at least the threshold, else -1.0. ``group``: all samples with their
    scores. With ``rounds.truncated=drop`` a sample that was cut
    is left out as well.
    """
    if config.truncated == "drop":
        ended = zip(sampled.completions, scores, strict=True)
        scores = [score if completion.finished else None for completion, score in ended]
    group = with_scores(sampled, scores)
    if config.feedback == "threshold":
        labelled = [
            Group(group.prompt, (c,), (1.0 if r >= config.threshold else -1.0,))
            for c, r in zip(group.completions, group.rewards, strict=True)
        ]
        return labelled or SILENT
    if len(group.rewards) < 2:
        return TOO_FEW
    if config.feedback == "group":
        return [group] if varies(group.rewards) or config.keeps_equal else EQUAL
    if config.feedback == "pair":
        two = best_and_worst(group, config.tau)
    elif config.feedback == "min":
        by = group.rewards
        two = min(_pairs(by, config.tau), key=lambda pair: by[pair[0]] - by[pair[1]], default=None)
    else:
        two = _random_pair(group, config.tau, seed)
    if two is None:
        return TOO_EQUAL
    completions, rewards = zip(*((group.completions[i], group.rewards[i]) for i in two), strict=True)
    return [replace(group, completions=completions, rewards=rewards)]


def with_scores(sampled: SampledPrompt, scores: Sequence[float | None]) -> Group:
    """Return a group of the samples that have a score, with their scores."""
    kept = [(c, float(s)) for c, s in zip(sampled.completions, scores, strict=True) if s is not None]
    return Group(sampled.prompt, tuple(c for c, _ in kept), tuple(s for _, s in kept))


def overlong_penalties(sampled: SampledPrompt, config: RoundsConfig, longest: int) -> list[float]:
    """Return what the score of each completion is less by: ``rounds.overlong_penalty`` times how far it
    reaches into the last ``rounds.overlong`` of ``longest`` tokens, from 0 to 1 (DAPO's soft overlong
    punishment, Yu et al. 2025, arXiv 2503.14476, equation 13)."""
    if config.overlong is None:
        return [0.0] * len(sampled.completions)
    over = [len(c.token_ids or ()) - (longest - config.overlong) for c in sampled.completions]
    return [config.overlong_penalty * min(max(tokens / config.overlong, 0.0), 1.0) for tokens in over]


def _pairs(rewards: Sequence[float], tau: float) -> list[tuple[int, int]]:
    """Return the indices of every two completions whose rewards differ, by ``tau`` or more, the better one
    first."""
    both = itertools.permutations(range(len(rewards)), 2)
    return [(i, j) for i, j in both if exceeds(rewards[i], rewards[j], tau)]


def _random_pair(group: Group, tau: float, seed: int) -> tuple[int, int] | None:
    """Return one of the group's ``_pairs``, each equally likely; None if there is none."""
    far = _pairs(group.rewards, tau)
    if not far:
        return None
    rng = np.random.default_rng(derived_seed(seed, f"pair {group.prompt.id}"))
    return far[int(rng.integers(len(far)))]


def with_threshold(config: RoundsConfig, scores: Iterable[Sequence[float | None]]) -> RoundsConfig:
    """Return settings whose ``threshold`` is a number: the mean or the median of all these scores where it is
    one of these words."""
    if config.threshold not in CENTRES:
        return config
    flat = [score for values in scores for score in values if score is not None]
    if not flat:
        return replace(config, threshold=0.0)
    return replace(config, threshold=float(np.mean(flat) if config.threshold == "mean" else np.median(flat)))


def usable_prompts(prompts: list[Prompt], renderer: Renderer) -> tuple[list[Prompt], Counter[str]]:
    """Return the prompts that can be rendered, and a count of the others by reason. Raises ConfigError for
    prompts that the tokenizer cannot read."""
    rendered = renderer.prompts(prompts)
    usable = [ids for ids in rendered if not isinstance(ids, str)]
    tokens = [np.concatenate(usable)] if usable else []
    check_vocabulary(renderer.tokenizer, tokens, f"these {len(usable)} prompts")
    return (
        [prompt for prompt, ids in zip(prompts, rendered, strict=True) if not isinstance(ids, str)],
        Counter(ids for ids in rendered if isinstance(ids, str)),
    )
