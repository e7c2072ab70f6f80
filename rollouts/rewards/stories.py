"""The reward of ``reward=instruct``, which scores stories of the embedded instructions by a judge that may
err."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from config.schema_instruct import StoryJudgeConfig
from data.instruct import judged, text_of
from data.stories import read_language
from data.types import Prompt
from rollouts.rewards.base import Missing, Scorer


class StoryJudge(Scorer):
    """Scores stories in this process. A round of 1,024 stories takes a tenth of a second."""

    def __init__(self, config: StoryJudgeConfig) -> None:
        """Raises ConfigError if ``config.language`` is not a language file."""
        self.config, self.language = config, read_language(config.language, "reward.instruct.language")

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return the judge's reward of each story; Missing for a prompt that is not of this language.
        ``metrics`` gets the mean of each part of the true reward, such as ``reward_tone``, and the mean
        length in words, ``reward_words``."""
        asked = [(text_of(prompt), story) for prompt, story in zip(prompts, completions, strict=True)]
        self.metrics = self._means([one for one in asked if self.language.is_prompt(one[0])])
        return [self._verdict(prompt, story) for prompt, story in zip(prompts, completions, strict=True)]

    def _means(self, stories: Sequence[tuple[str, str]]) -> dict[str, float]:
        if not stories:
            return {}
        parts = [self.language.parts(*one) for one in stories]
        means = {f"reward_{name.lower()}": fmean(shares[name] for shares in parts) for name in parts[0]}
        return means | {"reward_words": fmean(len(story.split()) for _, story in stories)}

    def _verdict(self, prompt: Prompt, story: str) -> float | Missing:
        score = judged(self.language, text_of(prompt), story, self.config.noise, self.config.length_bias)
        return Missing("the prompt is none of this language") if score is None else score


def make(settings: StoryJudgeConfig, device: object, log_dir: Path | None) -> StoryJudge:
    """The reward of config/reward/instruct.yaml. Raises ConfigError."""
    return StoryJudge(settings)
