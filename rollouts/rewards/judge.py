"""A language model as a judge, behind any OpenAI-compatible endpoint (``POST {base_url}/chat/completions``)."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from config.schema_rewards import JudgeConfig
from data.types import Prompt
from rollouts.rewards.base import Missing, RewardError

LONGEST_WAIT_S = 60.0
"""Between two tries, whatever the endpoint asks for."""

_MAX_REPLY_BYTES = 4_000_000
_CHARACTERS_PER_TOKEN = 4
_STOP = {301, 302, 307, 308, 401, 403, 404, 405}
"""HTTP errors that every further call would get too: a wrong key, address or model."""
_PASSING = (TimeoutError, ConnectionError, urllib.error.URLError, http.client.HTTPException)


class _FailedError(Exception):
    """One call without a score. ``again``: whether another try may have one; ``wait``: seconds that the endpoint asked to wait."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait


@dataclass
class Spent:
    """What the endpoint was asked so far, by this process."""

    calls: int = 0
    tokens: int = 0
    """the endpoint's own count, or four characters a token where it gives none"""


class JudgeReward:
    """Scores by a judge. An endpoint that fails now and then is asked again; one that does nothing else is given up."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config, self.spent = config, Spent()
        self.metrics: dict[str, float] = {}
        self.log_dir = None
        self._key = os.environ[config.api_key_env].strip() if config.api_key_env is not None else None
        self._opener = urllib.request.build_opener(_NoRedirect)
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
        """It keeps no connection."""

    def _judge(self, prompt: Prompt, completion: str) -> float | Missing:
        body = self._body(prompt, completion)
        for attempt in range(self.config.retries + 1):
            if (refusal := self._reserve(body)) is not None:
                return Missing(refusal)
            try:
                score = self._ask(body)
            except _FailedError as failed:
                self._count_failure(failed.again)
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
        parts = {"{prompt}": shown, "{completion}": completion, "{reference}": prompt.reference or ""}
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
        """Count one call before it is made, so that calls at once cannot pass a cap together; or the reason why it is not made."""
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
        """Put the endpoint's own count in the place of the estimate."""
        usage = reply.get("usage")
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(total, int):
            with self._lock:
                self.spent.tokens += total - self._estimate(body)

    def _count_failure(self, again: bool) -> None:
        with self._lock:
            self._failures_in_a_row += (
                again  # what is wrong with one completion says nothing about the endpoint
            )

    # One call

    def _ask(self, body: bytes) -> float:
        """The score in the judge's reply. Raises _FailedError, RewardError."""
        try:
            reply = json.loads(self._post(body))
            self._settle(body, reply)
            text = reply["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except _PASSING as error:
            raise _FailedError(f"the endpoint did not answer ({type(error).__name__})", again=True) from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _FailedError("the endpoint's reply is no chat completion", again=True) from None
        found = self._pattern.findall(text) if isinstance(text, str) else []
        if not found:
            raise _FailedError("no score in the judge's reply", again=True)
        return self._in_range(found[-1])

    def _in_range(self, text: str) -> float:
        try:
            score = float(text)
        except ValueError:
            raise _FailedError("what reward.judge.pattern finds is no number", again=True) from None
        if not self.config.min_score <= score <= self.config.max_score:
            raise _FailedError("the judge's score is out of range", again=True)
        return score

    def _post(self, body: bytes) -> bytes:
        """The reply within ``timeout`` seconds; urllib's own limit is for each read, which an endpoint that drips never meets."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        request = urllib.request.Request(
            f"{self.config.base_url.rstrip('/')}/chat/completions", body, headers
        )
        deadline = time.monotonic() + self.config.timeout
        received = bytearray()
        with self._opener.open(request, timeout=self.config.timeout) as response:
            while chunk := response.read1(65536):
                received += chunk
                if time.monotonic() > deadline or len(received) > _MAX_REPLY_BYTES:
                    raise TimeoutError
        return bytes(received)

    def _refused(self, error: urllib.error.HTTPError) -> _FailedError | RewardError:
        """What an HTTP error means for this call, or for all of them. What the endpoint says may repeat the key: it is cut out."""
        try:
            said = error.read(2000).decode(errors="replace")
        except _PASSING:
            said = ""
        if self._key:
            said = said.replace(self._key, "***")
        if error.code in _STOP:
            return RewardError(
                f"reward.judge.base_url={self.config.base_url} refuses model={self.config.model}: "
                f"HTTP {error.code} {said[:300]}; mend the address, the model or the key"
            )
        again = error.code in (408, 409, 425, 429) or error.code >= 500
        return _FailedError(
            f"HTTP {error.code} from the endpoint", again, _seconds(error.headers.get("Retry-After"))
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; 0 where there is none, or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
