"""A reward from the user's own server, which receives completions as JSON by POST and returns numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.types import Prompt, Turn
from rollouts.rewards.base import Missing, Scorer, verdict_of
from rollouts.rewards.endpoint import Endpoint, FailedError
from rollouts.rewards.function import Columns, batches_of, columns
from rollouts.rewards.settings import HttpConfig

_MAX_REPLY_BYTES = 4_000_000
_FIRST = Prompt((Turn("user", "What is 2 + 2?"),), "4")
"""Prompt that is scored once before a run begins, so that an unreachable server is found at that point."""


class HttpReward(Scorer):
    """Sends completions in batches. The completions of a batch without a reply have no verdicts."""

    def __init__(self, config: HttpConfig) -> None:
        """Raises ConfigError for a server that does not answer as required."""
        self.config = config
        self._endpoint = Endpoint("reward.http", config.base_url, "", config, _MAX_REPLY_BYTES)
        self._endpoint.check(self._ask, columns([_FIRST], ["4"], config.conversational))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Return one verdict for each completion. Raises RewardError if every further call would fail too,
        because of a wrong key or address."""
        batches = batches_of(prompts, completions, self.config.batch_size, self.config.conversational)
        verdicts: list[float | Missing] = []
        for batch, scores in zip(batches, self._endpoint.map(self._ask, batches), strict=True):
            verdicts += [scores] * len(batch["completions"]) if isinstance(scores, Missing) else scores
        return verdicts

    def close(self) -> None:
        self._endpoint.close()

    async def _ask(self, batch: Columns) -> list[float | Missing]:
        """Return one number for each completion of the batch. Raises FailedError, RewardError."""
        reply = await self._endpoint.post(json.dumps(batch).encode())
        rewards = reply.get("rewards") if isinstance(reply, dict) else None
        wanted = len(batch["completions"])
        if not isinstance(rewards, list) or len(rewards) != wanted:
            raise FailedError('the reply is not {"rewards": [one a completion]}', again=True)
        return [verdict_of(value) for value in rewards]


def make(settings: HttpConfig, device: object, log_dir: Path | None) -> HttpReward:
    """The reward of config/reward/http.yaml. Raises ConfigError."""
    return HttpReward(settings)
