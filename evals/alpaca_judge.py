"""Judge answers against a baseline's with a language model behind an endpoint, through the alpaca_eval
library.

The prompts, the parsing and the cache of judgements are the library's. This module adds that a failure costs
one judgement and not the run, that the cache file is always complete, and an estimate of the cost.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import StoppedError
from common.files import write_whole
from common.progress import progress
from config.schema_eval import AlpacaEvalConfig
from evals.alpaca_files import Row
from evals.alpaca_library import annotator_settings, library, quiet
from rollouts.rewards.base import Missing, RewardError
from rollouts.rewards.endpoint import Endpoint, FailedError

CHARACTERS_PER_TOKEN = 4
SECONDS_PER_CALL = 2.0
"""Assumed duration of a call in the estimate."""
DEAD_AFTER = 50
"""Failures in a row after which an endpoint is given up; five per concurrent call if that is more."""
_CALLS_PER_WORKER = 8
"""Judgements are written to the cache whenever every worker has done about this many."""
_MOST_REPLY_BYTES = 4_000_000
_API_DEFAULTS = {"max_tokens": 2048, "temperature": 0.7, "top_p": 1.0}
"""What the library asks for where an annotator does not say."""


@dataclass
class Spent:
    """The calls of this process to the endpoint, and their outcome."""

    calls: int = 0
    """number of answers to be judged; a call that was retried counts once"""
    tokens: float = 0
    """tokens, by the endpoint's own count"""
    failures: Counter[str] = field(default_factory=Counter)
    """number of calls without a judgement, by reason"""


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of judging. Tokens are estimated as characters / 4."""

    calls: int
    tokens: int
    seconds: float
    dollars: float | None

    def __str__(self) -> str:
        money = "" if self.dollars is None else f", about ${self.dollars:.2f}"
        return (
            f"{self.calls} calls, about {self.tokens:,} tokens{money}, about {self.seconds / 60:.0f} min "
            f"(at {SECONDS_PER_CALL:g} s a call)"
        )


def judge_name(own: AlpacaEvalConfig) -> str:
    """Return the name under which the judgements are stored: the library's annotator and the judge model."""
    return f"{own.annotator}-{own.model}"


def estimate(
    outputs: Sequence[Row], reference: Sequence[Row], own: AlpacaEvalConfig, cache: Path
) -> Estimate:
    """Estimate the cost of judging ``outputs``, without the answers that are already judged."""
    settings = annotator_settings(own.annotator)
    frame, reply = (
        len(Path(settings["prompt_template"]).read_text("utf-8")),
        int(settings["completions_kwargs"]["max_tokens"]),
    )
    theirs = {row["instruction"]: row["output"] for row in reference}
    done = {
        (row["instruction"], row["output_1"], row["output_2"])
        for row in _cached(cache)
        if row["annotator"] == judge_name(own)
    }
    asked = [(o["instruction"], theirs[o["instruction"]], o["output"]) for o in outputs]
    asked = [
        pair for pair in asked if pair not in done and pair[1] != pair[2]
    ]  # two equal answers are a tie without a call
    tokens = sum((frame + sum(map(len, pair))) // CHARACTERS_PER_TOKEN + reply for pair in asked)
    price = own.dollars_per_million_tokens
    return Estimate(
        len(asked),
        tokens,
        len(asked) * SECONDS_PER_CALL / own.concurrency,
        None if price is None else tokens * price / 1e6,
    )


def judge(
    outputs: Sequence[Row], reference: Sequence[Row], own: AlpacaEvalConfig, cache: Path, shown: str
) -> tuple[list[Row], Spent]:
    """Return (the library's annotations in the order of ``reference``, the calls that were made).

    A row without a judgement has preference None. ``cache``: the library's file of judgements; these are not
    requested again, and the file is complete whenever the process ends. ``shown``: label of the progress bar.
    Raises StoppedError where every further call would fail too, and when more than ``own.max_missing`` of the
    answers got no judgement; running the same command again continues with the missing ones.
    """
    import pandas as pd

    about = estimate(outputs, reference, own, cache)
    write_whole(
        cache, _text([row for row in _cached(cache) if row["preference"] not in (None, -1)])
    )  # failed judgements are requested again
    wanted = {row["instruction"] for row in outputs}
    with (
        tempfile.TemporaryDirectory(prefix="alpacaeval-") as folder,
        progress(about.calls, shown, unit="answer") as bar,
    ):
        endpoint = _Endpoint(own, lambda: bar.update())
        annotator = _annotator(own, cache, Path(folder))
        annotator.annotators[judge_name(own)].fn_completions = endpoint.complete
        with quiet():
            try:
                rows: list[Row] = annotator.annotate_head2head(
                    outputs_1=pd.DataFrame([row for row in reference if row["instruction"] in wanted]),
                    outputs_2=pd.DataFrame(list(outputs)),
                    chunksize=_CALLS_PER_WORKER * own.concurrency,
                )
            finally:
                endpoint.close()
    if endpoint.stopped is not None:
        raise endpoint.stopped
    rows = [
        {key: None if isinstance(value, float) and value != value else value for key, value in row.items()}
        for row in rows
    ]
    _check_missing(rows, endpoint.spent, own)
    return rows, endpoint.spent


def _annotator(own: AlpacaEvalConfig, cache: Path, folder: Path) -> Any:
    """Return the library's annotator with the judge model of the settings; it reads and writes ``cache``.

    The annotator takes its settings from a file, which is written to ``folder``."""
    settings = annotator_settings(own.annotator)
    settings["completions_kwargs"]["model_name"] = own.model
    file = folder / "annotator" / "configs.yaml"
    write_whole(file, yaml.safe_dump({judge_name(own): settings}))
    with quiet():
        annotator = library().annotators.PairwiseAnnotator(
            annotators_config=str(file), caching_path=str(cache)
        )
    if annotator.df_annotations is not None and annotator.df_annotations.empty:
        annotator.df_annotations = None
    save = annotator.save

    def save_whole(
        path: str | None = None,
    ) -> None:  # the library writes in place: a kill would leave half a file
        part = cache.with_name(f".{cache.name}.part")
        save(str(part))
        os.replace(part, cache)

    annotator.save = save_whole
    return annotator


def _cached(cache: Path) -> list[Row]:
    if not cache.exists():
        return []
    rows: list[Row] = json.loads(cache.read_text(encoding="utf-8"))
    return rows


def _text(rows: Sequence[Row]) -> str:
    return json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n"


def _check_missing(rows: Sequence[Row], spent: Spent, own: AlpacaEvalConfig) -> None:
    missing = sum(row["preference"] is None for row in rows)
    unread = missing - spent.failures.total()
    if unread > 0:
        spent.failures["no verdict in the judge's reply"] += unread
    if missing > own.max_missing * len(rows):
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in spent.failures.most_common(5))
        raise StoppedError(
            f"{missing} of {len(rows)} answers got no judgement, more than "
            f"alpacaeval.max_missing={own.max_missing:g}"
            f"{reasons}\nthe others are kept: the same command asks for these alone. Mend the endpoint, or "
            "raise "
            "alpacaeval.max_missing"
        )


class _Endpoint:
    """The annotator's source of completions, in place of the library's own: concurrent calls within limits,
    of which one that fails costs its judgement alone."""

    def __init__(self, own: AlpacaEvalConfig, done: Any) -> None:
        self.own, self.spent, self._done = own, Spent(), done
        self._endpoint = Endpoint("alpacaeval", own.base_url, "/chat/completions", own, _MOST_REPLY_BYTES)
        self._body: dict[str, Any] = {}
        self._in_a_row = 0
        self._dead_after = max(DEAD_AFTER, 5 * own.concurrency)
        self.stopped: StoppedError | None = None
        """the reason why no further call is made; None while calls continue"""

    def close(self) -> None:
        self._endpoint.close()

    def complete(self, prompts: Sequence[str], model_name: str, **settings: Any) -> dict[str, list[Any]]:
        """Return the completions of all prompts as the library's ``openai_completions`` does.

        A failed call gives an empty completion, which the library reads as no judgement. If ``stopped`` is
        set meanwhile, the remaining completions are empty too, so that the library stores the judgements made
        so far; the next call of this method raises ``stopped``.
        """
        if self.stopped is not None:
            raise self.stopped
        self._body = {"model": model_name, **_API_DEFAULTS, **settings}
        made = [
            _nothing() if isinstance(outcome, Missing) else outcome
            for outcome in map(self._counted, self._endpoint.map(self._ask, prompts))
        ]
        price = self.own.dollars_per_million_tokens
        return {
            "completions": [one["text"] for one in made],
            "price_per_example": [
                float("nan") if price is None else one["total_tokens"] * price / 1e6 for one in made
            ],
            "time_per_example": [one["seconds"] for one in made],
            "completions_all": made,
        }

    def _counted(self, outcome: dict[str, Any] | Missing) -> dict[str, Any] | Missing:
        """Count a call with its outcome; too many failures in a row stop the judging."""
        self.spent.calls += 1
        if not isinstance(outcome, Missing):
            self.spent.tokens += outcome["total_tokens"]
            self._in_a_row = 0
            return outcome
        self._done()
        self.spent.failures[outcome.reason] += 1
        self._in_a_row += 1
        if self._in_a_row >= self._dead_after and self.stopped is None:
            self.stopped = StoppedError(
                f"alpacaeval.base_url={self.own.base_url} was given up after {self._in_a_row} failures in a "
                f"row, the last: {outcome.reason}; what is judged is kept, the same command goes on"
            )
        return outcome

    async def _ask(self, prompt: str) -> dict[str, Any]:
        """Return the first choice of the endpoint's reply to one prompt, with its ``text``, ``total_tokens``
        and ``seconds``. Raises FailedError."""
        if self.stopped is not None:
            raise FailedError("no further call is made", again=False)
        began = time.monotonic()
        try:
            body = self._body | {"messages": library().utils.prompt_to_chatml(prompt.strip())}
        except (AssertionError, LookupError, ValueError):
            raise FailedError("an answer has marks of a chat's turns of its own", again=False) from None
        try:
            reply = await self._endpoint.post(json.dumps(body).encode())
        except RewardError as refused:
            self.stopped = StoppedError(str(refused))
            raise FailedError("no further call is made", again=False) from None
        try:
            choice: dict[str, Any] = dict(reply["choices"][0])
            choice |= {
                "text": _said(choice["message"]),
                "total_tokens": float(reply["usage"]["total_tokens"]),
            }
        except (AttributeError, LookupError, TypeError, ValueError):
            raise FailedError(
                "the endpoint's reply is no chat completion with its usage", again=False
            ) from None
        if body.get("logprobs") and not choice.get("logprobs"):
            raise FailedError(
                "the endpoint gives no log-probabilities, which this annotator reads (alpaca_eval_gpt4 "
                "reads text)",
                again=False,
            )
        self._done()
        return choice | {"seconds": time.monotonic() - began}


def _said(message: dict[str, Any]) -> str:
    """Return the text of a reply, or the arguments of its call of a tool. Raises LookupError, TypeError,
    ValueError."""
    calls = message.get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else message["content"]
    if not isinstance(text, str):
        raise TypeError(text)
    return text or " "  # the library takes an empty text for a call that failed


def _nothing() -> dict[str, Any]:
    """Return a completion without a judgement, as the library reads it."""
    return {"text": "", "total_tokens": 0, "seconds": 0.0}
