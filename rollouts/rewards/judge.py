"""A reward from a language model as a judge, behind any OpenAI-compatible endpoint. Requests go to ``POST
{base_url}/chat/completions``."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.types import Prompt
from rollouts.rewards.base import Missing, Scorer
from rollouts.rewards.endpoint import Endpoint, FailedError
from rollouts.rewards.settings import JudgeConfig

_MAX_REPLY_BYTES = 4_000_000
_MOST_TOKENS = 100_000_000
"""Highest token count accepted for one call. An endpoint that reports more counts something else."""
_CHARACTERS_PER_TOKEN = 4


@dataclass
class Spent:
    """Calls and tokens that this process has spent at the endpoint so far."""

    calls: int = 0
    tokens: int = 0
    """the endpoint's own count, or ``_estimate`` of a call for which it gives none"""


class JudgeReward(Scorer):
    """Scores completions with a judge model."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ConfigError for an address or a key that cannot be sent."""
        self.config, self.spent = config, Spent()
        self._endpoint = Endpoint(
            "reward.judge", config.base_url, "/chat/completions", config, _MAX_REPLY_BYTES
        )
        self._pattern = re.compile(config.pattern)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return one verdict for each completion. Raises RewardError if every further call would fail too,
        because of a wrong key, address or model."""
        verdicts = self._endpoint.map(self._ask, zip(prompts, completions, strict=True))
        self.metrics = {"calls": float(self.spent.calls), "tokens": float(self.spent.tokens)}
        return verdicts

    def close(self) -> None:
        self._endpoint.close()

    def _body(self, prompt: Prompt, completion: str) -> bytes:
        shown = (
            prompt.turns[0].content
            if len(prompt.turns) == 1
            else "\n\n".join(f"{t.role}: {t.content}" for t in prompt.turns)
        )
        parts = {"{prompt}": shown, "{completion}": completion, "{reference}": prompt.reference_answer or ""}
        filled = re.sub(
            "|".join(map(re.escape, parts)), lambda match: parts[match.group()], self.config.prompt
        )  # one pass, so that placeholders within these texts stay
        system_text = self.config.system
        system = [] if system_text is None else [{"role": "system", "content": system_text}]
        return json.dumps(
            {
                "model": self.config.model,
                "messages": [*system, {"role": "user", "content": filled}],
                "temperature": self.config.temperature,
                self.config.max_tokens_field: self.config.max_tokens,
            }
        ).encode()

    # Spending

    def _reserve(self, body: bytes) -> None:
        """Count one call before it is made, so that concurrent calls cannot exceed a cap together. Raises
        FailedError if the call would exceed a cap."""
        if self.spent.calls >= self.config.max_calls:
            reason = f"reward.judge.max_calls={self.config.max_calls} is used up"
            raise FailedError(reason, again=False)
        if self.spent.tokens + self._estimate(body) > self.config.max_total_tokens:
            reason = f"reward.judge.max_total_tokens={self.config.max_total_tokens} is used up"
            raise FailedError(reason, again=False)
        self.spent.calls += 1
        self.spent.tokens += self._estimate(body)

    def _estimate(self, body: bytes) -> int:
        """Estimate the most tokens that a call may cost."""
        return len(body) // _CHARACTERS_PER_TOKEN + self.config.max_tokens

    def _settle(self, body: bytes, reply: dict[str, Any]) -> None:
        """Replace the estimate by the endpoint's own count, if that is plausible."""
        usage = reply.get("usage")
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(total) is int and 0 <= total <= _MOST_TOKENS:
            self.spent.tokens += total - self._estimate(body)

    # One call

    async def _ask(self, pair: tuple[Prompt, str]) -> float:
        """Return the score in the judge's reply. Raises FailedError, RewardError."""
        prompt, completion = pair
        body = self._body(prompt, completion)
        self._reserve(body)
        reply = await self._endpoint.post(body)
        try:
            self._settle(body, reply)
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise FailedError("the endpoint's reply is no chat completion", again=True) from None
        return self._rating(text if isinstance(text, str) else "", completion)

    def _rating(self, text: str, completion: str) -> float:
        """Return the one rating in the judge's reply ``text``. Raises FailedError if there is none, and if it
        may be a quotation of the answer: several different ratings, or a rating among other words that also
        occurs in the answer."""
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise FailedError("no score in the judge's reply", again=True)
        try:
            ratings = {float(match[1]) for match in matches}
        except (TypeError, ValueError):
            raise FailedError("what reward.judge.pattern finds is no number", again=True) from None
        if len(ratings) > 1:
            raise FailedError("the judge's reply has several different ratings", again=True, endpoint=False)
        (score,) = ratings
        alone = text.strip() == matches[0].group().strip()
        if not alone and score in self._ratings_in(completion):
            reason = "the judge's reply has no rating but one that stands in the answer"
            raise FailedError(reason, again=True, endpoint=False)
        if not self.config.min_score <= score <= self.config.max_score:
            raise FailedError("the judge's score is out of range", again=True)
        return score

    def _ratings_in(self, completion: str) -> set[float]:
        ratings = set()
        for match in self._pattern.finditer(completion):
            with contextlib.suppress(TypeError, ValueError):
                ratings.add(float(match[1]))
        return ratings


def make(settings: JudgeConfig, device: object, log_dir: Path | None) -> JudgeReward:
    """The reward of config/reward/judge.yaml; neither device nor log is used."""
    return JudgeReward(settings)
