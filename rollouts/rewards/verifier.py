"""A reward for verifiable mathematics from accuracy, format and tag count. The weights are 8 : 1 : 1 (paper,
Table 2), and the definitions are Open-R1's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from common.errors import ConfigError
from config.files import section
from data.types import Prompt
from rollouts.rewards.base import Missing, RewardError, Scorer
from rollouts.rewards.pool import Pool
from rollouts.rewards.settings import VerifierConfig

_FORMAT = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


class VerifierReward(Scorer):
    """The reward ``8 accuracy + 1 format + 1 tag count`` in [0, 10], or the same sum with other weights.
    There is no verdict where accuracy has none."""

    def __init__(self, config: VerifierConfig, log_dir: Path | None = None) -> None:
        """Raises ConfigError if math-verify is not installed."""
        self.config, self.log_dir = config, log_dir
        self._pool = Pool(
            "rollouts.rewards.mathverify.load",
            None,
            workers=config.workers,
            timeout=config.timeout,
            log_dir=log_dir,
        )
        try:
            self._pool.start()
        except RewardError as error:
            remedy = f"needs math-verify: pip install 'math-verify[antlr4_9_3]' ({error})"
            raise ConfigError("reward", "verifier", remedy) from error

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        correct = self.accuracy([prompt.reference_answer for prompt in prompts], completions)
        parts = {
            "accuracy": [v for v in correct if not isinstance(v, Missing)],
            "format": [format_reward(text) for text in completions],
            "tag_count": [tag_count_reward(text) for text in completions],
        }
        self.metrics = {name: fmean(values) for name, values in parts.items() if values}
        return [
            right
            if isinstance(right, Missing)
            else self.config.accuracy * right + self.config.format * form + self.config.tag_count * tags
            for right, form, tags in zip(correct, parts["format"], parts["tag_count"], strict=True)
        ]

    def accuracy(self, references: Sequence[str | None], completions: Sequence[str]) -> list[float | Missing]:
        """Return 1.0 for an answer equal to the reference answer, else 0.0; Missing if equality cannot be
        decided."""
        return self._pool.map(list(zip(references, completions, strict=True)))

    def close(self) -> None:
        self._pool.close()


def format_reward(text: str) -> float:
    r"""Return 1.0 for ``<think>\n…\n</think>\n<answer>\n…\n</answer>`` from the first character on, else
    0.0."""
    return float(_FORMAT.match(text) is not None)


def tag_count_reward(text: str) -> float:
    """Return a quarter for each of the four tags that occurs, with its newlines, exactly once."""
    return sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def accuracy(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Compare completions with the reference answers for evaluation (``data.verifier``): 1.0 if equal, 0.0 if
    not, None for no verdict."""
    verifier = VerifierReward(VerifierConfig(**section("reward/verifier.yaml:verifier")))
    try:
        return [None if isinstance(v, Missing) else v for v in verifier.accuracy(references, completions)]
    finally:
        verifier.close()


def make(settings: VerifierConfig, device: object, log_dir: Path | None) -> VerifierReward:
    """The reward of config/reward/verifier.yaml; no device is used."""
    return VerifierReward(settings, log_dir)
