"""A language model as a judge, behind any OpenAI-compatible endpoint (``POST
{base_url}/chat/completions``)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from common.http_client import TooLongError, WholeExchange, check_endpoint
from config.schema_rewards import JudgeConfig
from data.types import Prompt
from rollouts.rewards.base import Missing, RewardError

LONGEST_WAIT_S = 60.0
"""Between two tries, whatever the endpoint asks for."""

_MAX_REPLY_BYTES = 4_000_000
_MOST_TOKENS = 100_000_000
"""Of one call: an endpoint that counts more counts something else."""
_CHARACTERS_PER_TOKEN = 4
_STOP = {301, 302, 307, 308, 401, 403, 404, 405}
"""HTTP errors that every further call would get too: a wrong key, address or model."""


class _FailedError(Exception):
    """One call without a score. ``again``: whether another try may have one; ``wait``: seconds that the
    endpoint asked to wait; ``endpoint``: whether it speaks against the endpoint, rather than against the one
    completion."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0, endpoint: bool | None = None) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait
        self.endpoint = again if endpoint is None else endpoint


@dataclass
class Spent:
    """What the endpoint was asked so far, by this process."""

    calls: int = 0
    tokens: int = 0
    """the endpoint's own count, or four characters a token where it gives none"""


class JudgeReward:
    """Scores by a judge. An endpoint that fails now and then is asked again; one that does nothing else is
    given up."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ConfigError for an address or a key that cannot be sent."""
        self.config, self.spent = config, Spent()
        self.metrics: dict[str, float] = {}
        self.log_dir: Path | None = None
        self._key = os.environ[config.api_key_env].strip() if config.api_key_env is not None else None
        check_endpoint("reward.judge", config.base_url, config.api_key_env, self._key)
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._client = httpx2.Client(transport=WholeExchange(config.timeout, _MAX_REPLY_BYTES), timeout=None)
        self._pattern = re.compile(config.pattern)
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._dead_after = max(50, 5 * config.concurrency)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        """Raises RewardError where every further call would fail too: a wrong key, address or model."""
        self._failures_in_a_row = 0
        with ThreadPoolExecutor(
            self.config.concurrency
        ) as threads:  # map cancels what has not begun when one raises
            verdicts = list(threads.map(self._judge, prompts, completions))
        self.metrics = {"calls": float(self.spent.calls), "tokens": float(self.spent.tokens)}
        return verdicts

    def release(self) -> None:
        """It uses no accelerator."""

    def close(self) -> None:
        self._client.close()

    def _judge(self, prompt: Prompt, completion: str) -> float | Missing:
        body = self._body(prompt, completion)
        for attempt in range(self.config.retries + 1):
            if (refusal := self._reserve(body)) is not None:
                return Missing(refusal)
            try:
                score = self._ask(body, completion)
            except _FailedError as failed:
                with self._lock:
                    self._failures_in_a_row += failed.endpoint
                if not failed.again or attempt == self.config.retries:
                    return Missing(str(failed))
                pause = max(failed.wait, self.config.backoff * 2**attempt * random.uniform(0.5, 1.5))
                time.sleep(min(pause, LONGEST_WAIT_S))
            else:
                self._failures_in_a_row = 0
                return score
        raise AssertionError("the last attempt returns")

    def _body(self, prompt: Prompt, completion: str) -> bytes:
        shown = (
            prompt.turns[0].content
            if len(prompt.turns) == 1
            else "\n\n".join(f"{t.role}: {t.content}" for t in prompt.turns)
        )
        parts = {"{prompt}": shown, "{completion}": completion, "{reference}": prompt.reference_answer or ""}
        filled = re.sub(
            "|".join(map(re.escape, parts)), lambda match: parts[match.group()], self.config.prompt
        )  # in one pass
        return json.dumps(
            {
                "model": self.config.model,
                "messages": [{"role": "user", "content": filled}],
                "temperature": self.config.temperature,
                "max_tokens": self.config.max_tokens,
            }
        ).encode()

    # Spending

    def _reserve(self, body: bytes) -> str | None:
        """Count one call before it is made, so that calls at once cannot pass a cap together; or the reason
        why it is not made."""
        with self._lock:
            if self._failures_in_a_row >= self._dead_after:
                return f"the endpoint was given up after {self._dead_after} failures in a row"
            if self.spent.calls >= self.config.max_calls:
                return f"reward.judge.max_calls={self.config.max_calls} is used up"
            if self.spent.tokens + self._estimate(body) > self.config.max_total_tokens:
                return f"reward.judge.max_total_tokens={self.config.max_total_tokens} is used up"
            self.spent.calls += 1
            self.spent.tokens += self._estimate(body)
            return None

    def _estimate(self, body: bytes) -> int:
        """The most tokens that a call may cost, about."""
        return len(body) // _CHARACTERS_PER_TOKEN + self.config.max_tokens

    def _settle(self, body: bytes, reply: dict[str, Any]) -> None:
        """Put the endpoint's own count in the place of the estimate, if it can be one."""
        usage = reply.get("usage")
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(total) is int and 0 <= total <= _MOST_TOKENS:
            with self._lock:
                self.spent.tokens += total - self._estimate(body)

    # One call

    def _ask(self, body: bytes, completion: str) -> float:
        """The score in the judge's reply. Raises _FailedError, RewardError."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        try:
            response = self._client.post(self._url, content=body, headers=headers)
        except httpx2.TimeoutException:
            reason = f"the endpoint did not answer within {self.config.timeout:g} s"
            raise _FailedError(reason, again=True) from None
        except httpx2.HTTPError as error:
            raise _FailedError(f"the endpoint did not answer ({_kind(error)})", again=True) from None
        if not response.is_success:
            raise self._refused(response)
        try:
            reply = json.loads(response.content)
            self._settle(body, reply)
            text = reply["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise _FailedError("the endpoint's reply is no chat completion", again=True) from None
        return self._rating(text if isinstance(text, str) else "", completion)

    def _rating(self, text: str, completion: str) -> float:
        """The one rating in the judge's reply ``text``. Raises _FailedError where there is none, and where it
        may be a quotation of the answer: several different ratings, or one that the answer has too, among
        other words."""
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise _FailedError("no score in the judge's reply", again=True)
        try:
            ratings = {float(match[1]) for match in matches}
        except (TypeError, ValueError):
            raise _FailedError("what reward.judge.pattern finds is no number", again=True) from None
        if len(ratings) > 1:
            raise _FailedError("the judge's reply has several different ratings", again=True, endpoint=False)
        (score,) = ratings
        alone = text.strip() == matches[0].group().strip()
        if not alone and score in self._ratings_in(completion):
            reason = "the judge's reply has no rating but one that stands in the answer"
            raise _FailedError(reason, again=True, endpoint=False)
        if not self.config.min_score <= score <= self.config.max_score:
            raise _FailedError("the judge's score is out of range", again=True)
        return score

    def _ratings_in(self, completion: str) -> set[float]:
        found = set()
        for match in self._pattern.finditer(completion):
            with contextlib.suppress(TypeError, ValueError):
                found.add(float(match[1]))
        return found

    def _refused(self, response: httpx2.Response) -> _FailedError | RewardError:
        """What an HTTP error means for this call, or for all of them. What the endpoint says may repeat the
        key: it is cut out."""
        code, said = response.status_code, response.content[:2000].decode(errors="replace")
        if self._key:
            said = said.replace(self._key, "***")
        if code in _STOP:
            return RewardError(
                f"reward.judge.base_url={self.config.base_url} refuses model={self.config.model}: "
                f"HTTP {code} {said[:300]}; mend the address, the model or the key"
            )
        again = code in (408, 409, 425, 429) or code >= 500
        return _FailedError(
            f"HTTP {code} from the endpoint", again, _seconds(response.headers.get("Retry-After"))
        )


def _kind(error: httpx2.HTTPError) -> str:
    """The error's class; its words may be the endpoint's, and different at each call."""
    return str(error) if isinstance(error, TooLongError) else type(error).__name__


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; 0 where there is none, or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def make(settings: JudgeConfig, device: object, log_dir: Path | None) -> JudgeReward:
    """The reward of config/reward/judge.yaml; neither device nor log is used."""
    return JudgeReward(settings)
