"""Judge answers against a baseline's with a language model behind an endpoint, through the alpaca_eval
library.

The prompts, the parsing and the cache of judgements are the library's. This module adds that a failure costs
one judgement and not the run, that the cache file is always complete, and an estimate of the cost.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml  # type: ignore[import-untyped]

from common.errors import StoppedError
from common.files import write_whole
from common.progress import progress
from config.schema_benchmarks import AlpacaEvalConfig
from evals.alpaca_files import Row
from evals.alpaca_library import annotator_settings, library, quiet
from rollouts.rewards.endpoint import Client

CHARACTERS_PER_TOKEN = 4
SECONDS_PER_CALL = 2.0
"""Assumed duration of a call in the estimate."""
DEAD_AFTER = 50
"""Failures in a row after which an endpoint is given up; five per concurrent call if that is more."""
_CALLS_PER_WORKER = 8
"""Judgements are written to the cache whenever every worker has done about this many."""
_STOP = (301, 302, 307, 308, 401, 403, 404, 405)
"""HTTP errors that every further call would get too: a wrong key, address or model."""
_MOST_REPLY_BYTES = 4_000_000
NO_KEY = "none"
"""Key that is sent where there is none, because the client insists on one."""


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


def key_of(own: AlpacaEvalConfig) -> str:
    """Return the judge's key from the environment, or NO_KEY."""
    return (os.environ.get(own.api_key_env or "") or NO_KEY).strip()


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


class _FailedError(Exception):
    """Raised for a call that gave no judgement; the message says why."""


class _Endpoint:
    """The annotator's source of completions: the library's own function, one prompt per call, with concurrent
    calls."""

    def __init__(self, own: AlpacaEvalConfig, done: Any) -> None:
        self.own, self.spent, self._done = own, Spent(), done
        self._key = key_of(own)
        self._client = _limited(own)
        self._lock, self._in_a_row = threading.Lock(), 0
        self._dead_after = max(DEAD_AFTER, 5 * own.concurrency)
        self.stopped: StoppedError | None = None
        """the reason why no further call is made; None while calls continue"""

    def close(self) -> None:
        self._client.close()

    def complete(self, prompts: Sequence[str], **settings: Any) -> dict[str, list[Any]]:
        """Return the library's ``openai_completions`` of all prompts.

        A failed call gives an empty completion, which the library reads as no judgement. If ``stopped`` is
        set meanwhile, the remaining completions are empty too, so that the library stores the judgements made
        so far; the next call of this method raises ``stopped``.
        """
        if self.stopped is not None:
            raise self.stopped
        with ThreadPoolExecutor(self.own.concurrency) as threads:
            made = list(threads.map(lambda prompt: self._one(prompt, settings), prompts))
        return {key: [value for one in made for value in one[key]] for key in made[0]} if made else {}

    def _one(self, prompt: str, settings: dict[str, Any]) -> dict[str, list[Any]]:
        if self.stopped is not None:
            return _nothing()
        try:
            made = self._ask(prompt, settings)
        except StoppedError as stop:
            self.stopped = stop
            return _nothing()
        except _FailedError as failed:
            self._count(str(failed), 0)
            made = _nothing()
        else:
            self._count(None, made["completions_all"][0]["total_tokens"])
        self._done()
        return made

    def _count(self, failure: str | None, tokens: float) -> None:
        with self._lock:
            self.spent.calls += 1
            self.spent.tokens += tokens
            self._in_a_row = 0 if failure is None else self._in_a_row + 1
            if failure is not None:
                self.spent.failures[failure] += 1
            if self._in_a_row >= self._dead_after and self.stopped is None:
                self.stopped = StoppedError(
                    f"alpacaeval.base_url={self.own.base_url} was given up after {self._in_a_row} failures "
                    "in a "
                    f"row, the last: {failure}; what is judged is kept, the same command goes on"
                )

    def _ask(self, prompt: str, settings: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the completion of one prompt. Raises _FailedError, StoppedError."""
        import openai

        own, price = self.own, self.own.dollars_per_million_tokens
        try:
            made: dict[str, list[Any]] = library().decoders.openai.openai_completions(
                [prompt],
                num_procs=1,
                batch_size=1,
                requires_chatml=True,
                n_retries=1,
                sleep_time=0,
                price_per_token=float("nan") if price is None else price / 1e6,
                client_config_path=os.devnull,
                openai_api_keys=[self._key],
                openai_organization_ids=None,
                openai_api_base=own.base_url.rstrip("/"),
                client_kwargs={
                    "timeout": own.timeout,
                    "max_retries": own.retries,
                    "http_client": self._client,
                },
                **settings,
            )
            reply = made["completions_all"][0]
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.OpenAIError as error:
            raise _FailedError(f"the endpoint did not answer ({type(error).__name__})") from None
        except (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise _FailedError("the endpoint's reply is no chat completion with its usage") from None
        if "message" not in reply:  # the library's own way to give up
            raise _FailedError("the endpoint's limit of calls or of length")
        if settings.get("logprobs") and not reply.get("logprobs"):
            raise _FailedError(
                "the endpoint gives no log-probabilities, which this annotator reads (alpaca_eval_gpt4 "
                "reads text)"
            )
        return made

    def _refused(self, error: Any) -> Exception:
        """Return the error to raise for an HTTP error: StoppedError if every call would get it.

        The endpoint's message may repeat the key, which is cut out of it."""
        said = " ".join(str(error.message).split())
        said = (said if self._key == NO_KEY else said.replace(self._key, "***"))[:300]
        if error.status_code in _STOP:
            return StoppedError(
                f"alpacaeval.base_url={self.own.base_url} refuses alpacaeval.model={self.own.model}: "
                f"HTTP {error.status_code} {said}; mend the address, the model or the key"
            )
        return _FailedError(f"HTTP {error.status_code} from the endpoint")


def _limited(own: AlpacaEvalConfig) -> Any:
    """Return an HTTP client for the ``openai`` package that exchanges by our own ``Client``. The package's
    own has a time limit of each read, and none of a reply's size."""
    import httpx2
    import openai

    client = Client(own.base_url, own.timeout, _MOST_REPLY_BYTES)

    class Limited(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            headers = {k: v for k, v in request.headers.items() if k not in ("host", "accept-encoding")}
            asked = client.exchange(request.method, str(request.url), request.read(), headers)
            try:
                reply = client.submit(asked).result()
            except TimeoutError:
                raise httpx2.ReadTimeout(f"took longer than {own.timeout:g} s", request=request) from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise httpx2.RemoteProtocolError(str(error), request=request) from None
            return httpx2.Response(
                reply.status, headers=reply.headers, content=reply.content, request=request
            )

        def close(self) -> None:
            client.close()

    return openai.DefaultHttpxClient(timeout=None, transport=Limited())


def _nothing() -> dict[str, list[Any]]:
    """Return an empty completion in the library's format."""
    return {
        "completions": [""],
        "price_per_example": [0.0],
        "time_per_example": [0.0],
        "completions_all": [{"text": "", "total_tokens": 0}],
    }
