"""A reward from a Python function with TRL's signature. The signature is ``f(completions, **columns) ->
list[float | None]``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.imports import import_function
from config.schema_rewards import FunctionConfig
from data.types import Prompt
from rollouts.rewards.base import Missing, RewardError
from rollouts.rewards.pool import Pool

Columns = dict[str, list[Any]]


class FunctionReward:
    """A user's function, run in separate processes. If it raises, returns something invalid or never returns,
    only the verdicts of one batch are lost."""

    def __init__(self, config: FunctionConfig, log_dir: Path | None = None) -> None:
        """Raises ConfigError if the function cannot be imported."""
        self.config, self.log_dir = config, log_dir
        self.metrics: dict[str, float] = {}
        self._pool = Pool(
            "rollouts.rewards.function.load",
            config.path,
            workers=config.workers,
            timeout=config.timeout,
            log_dir=log_dir,
        )
        try:
            self._pool.start()
        except RewardError as error:
            raise ConfigError("reward.function.path", config.path, str(error)) from error

    @property
    def chunk(self) -> int:
        return self.config.batch_size

    def begin(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> None:
        self._pool.begin(columns(prompts, completions, self.config.conversational))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        batches = batches_of(prompts, completions, self.chunk, self.config.conversational)
        verdicts: list[float | Missing] = []
        for batch, result in zip(batches, self._pool.map(batches), strict=True):
            verdicts += [result] * len(batch["completions"]) if isinstance(result, Missing) else result
        return verdicts

    def release(self) -> None:
        """Does nothing: the function's memory belongs to its own processes."""

    def close(self) -> None:
        self._pool.close()


def batches_of(
    prompts: Sequence[Prompt], completions: Sequence[str], size: int, conversational: bool
) -> list[Columns]:
    starts = range(0, len(completions), size)
    return [columns(prompts[i : i + size], completions[i : i + size], conversational) for i in starts]


def columns(prompts: Sequence[Prompt], completions: Sequence[str], conversational: bool) -> Columns:
    """Return the arguments of a reward function, as TRL passes them: lists of messages if ``conversational``,
    else texts. The prompt's reference answer is passed under each of the names that data sets use for it."""
    references = [prompt.reference_answer for prompt in prompts]
    if conversational:
        asked: list[Any] = [[turn.message for turn in prompt.turns] for prompt in prompts]
        answers: list[Any] = [[{"role": "assistant", "content": text}] for text in completions]
    else:
        asked, answers = (
            ["\n\n".join(t.content for t in prompt.turns) for prompt in prompts],
            list(completions),
        )
    return {
        "prompts": asked,
        "completions": answers,
        "reference": references,
        "answer": references,
        "solution": references,
    }


# In the worker process


def load(path: str) -> Callable[[Columns], list[float | Missing]]:
    """Return the function at an import path, wrapped so that it returns one verdict for each completion.
    Raises ConfigError."""
    function = import_function("reward.function.path", path)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def call(batch: Columns) -> list[float | Missing]:
        returned = function(**{name: column for name, column in batch.items() if takes_all or name in names})
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return verdicts(returned, len(batch["completions"]))

    return call


def verdicts(returned: Any, expected: int) -> list[float | Missing]:
    """Convert what a function returned to verdicts. Raises TypeError or ValueError if it is not a list of
    ``expected`` values."""
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Iterable):
        raise TypeError(f"it returned a {type(returned).__name__}, not a list of rewards")
    values = list(returned)
    if len(values) != expected:
        raise ValueError(f"it returned {len(values)} rewards for {expected} completions")
    return [_verdict(value) for value in values]


def _verdict(value: Any) -> float | Missing:
    if value is None:
        return Missing("the function gave no verdict (None)")
    if isinstance(value, (str, bytes)):  # float("1") would pass, and "nan" too
        return Missing(f"the function returned {value[:40]!r}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        return Missing(f"the function returned a {type(value).__name__}, not a number")


def make(settings: FunctionConfig, device: object, log_dir: Path | None) -> FunctionReward:
    """The reward of config/reward/function.yaml and adder.yaml; no device is used."""
    return FunctionReward(settings, log_dir)
