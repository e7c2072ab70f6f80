"""A reward from a Python function with TRL's signature. The signature is ``f(completions, **columns) ->
list[float | None]``."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, require
from common.imports import import_function
from data.adder import rewards
from data.types import Prompt
from rollouts.rewards.base import Missing, RewardError, Scorer, verdict_of
from rollouts.rewards.pool import Pool
from rollouts.rewards.settings import FunctionConfig

Columns = dict[str, list[Any]]
REFERENCE = ("reference", "answer", "solution")
"""Names under which a function gets the prompt's reference answer."""
PASSED = ("completions", "prompts", *REFERENCE)
_OF_MESSAGES = re.compile(r"(?i)list\[[\w.]*(list|sequence)\[|dict|mapping|message")
"""An annotation of completions that are lists of messages."""
_TAKES_FIELDS = re.compile("string indices must be integers|'str' object has no attribute 'get'")
_OWN = "rollouts.rewards."
"""The functions that come with the project are not shown at work."""
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60
_BRIEF.maxlist, _BRIEF.maxdict = 2, 4


class FunctionReward(Scorer):
    """A user's function, run in separate processes. If it raises, returns something invalid or never returns,
    only the verdicts of one batch are lost."""

    def __init__(self, config: FunctionConfig, log_dir: Path | None = None) -> None:
        """Raises ConfigError if the function cannot be imported."""
        self.config, self.log_dir = config, log_dir
        self._shown = False
        self._pool = Pool(
            "rollouts.rewards.function.load",
            Call(config.path, config.conversational),
            workers=config.workers,
            timeout=config.timeout,
            log_dir=log_dir,
        )
        try:
            self._asks: Asks = self._pool.start()
        except RewardError as error:
            raise ConfigError("reward.function.path", config.path, str(error)) from error

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for a column that the function asks for by name and that is None for every
        prompt."""
        rows = [_others(prompt) for prompt in prompts]
        others = {name for row in rows for name, value in row.items() if value is not None}
        has_references = any(prompt.reference_answer is not None for prompt in prompts)
        for name in self._asks.needed:
            if name in REFERENCE and not has_references and name not in others:
                raise ConfigError(
                    "data.columns",
                    None,
                    f"{self.config.path} asks for {name}, the reference answer, and no row has one; name its "
                    "column, as in data.columns={reference: answer}",
                )
            require(
                name in (*others, *PASSED),
                "reward.function.path",
                self.config.path,
                f"asks for {name}, and no row has such a column; it may ask for "
                f"{', '.join(sorted({*PASSED, *others}))}",
            )

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        batches = batches_of(prompts, completions, self.config.batch_size, conversational=True)
        scores: list[float | Missing] = []
        for batch, result in zip(batches, self._pool.map(batches), strict=True):
            if not (isinstance(result, Missing) or self._shown or self.config.path.startswith(_OWN)):
                self._show(batch, conversational=result[0])
            scores += [result] * len(batch["completions"]) if isinstance(result, Missing) else result[1]
        return scores

    def _show(self, batch: Columns, conversational: bool) -> None:
        """Print the arguments of the first call, which say at a glance what the function works on."""
        self._shown = True
        arguments = _arguments(batch, conversational, self._asks)
        firsts = ", ".join(f"{name}=[{_BRIEF.repr(column[0])}, …]" for name, column in arguments.items())
        print(
            f"{self.config.path} gets {'lists of messages' if conversational else 'texts'} "
            f"(reward.function.conversational={'true' if conversational else 'false'}); its first call: "
            f"{firsts}, {len(batch['completions'])} of each",
            flush=True,
        )

    def close(self) -> None:
        self._pool.close()


class Call(NamedTuple):
    """The function that a worker loads, and whether it gets messages; None: as it asks."""

    path: str
    conversational: bool | None

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Asks:
    """The columns that a function asks for: ``names`` by parameters, ``needed`` without a default, all with
    ``everything``; and whether its parameter ``completions`` is annotated as lists of messages."""

    names: tuple[str, ...]
    needed: tuple[str, ...]
    everything: bool
    messages: bool


def batches_of(
    prompts: Sequence[Prompt], completions: Sequence[str], size: int, conversational: bool
) -> list[Columns]:
    starts = range(0, len(completions), size)
    return [columns(prompts[i : i + size], completions[i : i + size], conversational) for i in starts]


def columns(prompts: Sequence[Prompt], completions: Sequence[str], conversational: bool) -> Columns:
    """Return the arguments of a reward function, as TRL passes them: lists of messages if ``conversational``,
    else texts. Every other column of a prompt's row is passed under its own name, and its reference answer
    under each of the names that data sets use for it and that no column has."""
    references = [prompt.reference_answer for prompt in prompts]
    others = [_others(prompt) for prompt in prompts]
    names = dict.fromkeys(name for row in others for name in row)
    messages: Columns = {
        "completions": [[{"role": "assistant", "content": text}] for text in completions],
        "prompts": [[turn.message for turn in prompt.turns] for prompt in prompts],
    }
    conversations = messages if conversational else as_texts(messages)
    extra = {name: [row.get(name) for row in others] for name in names if name not in conversations}
    return conversations | dict.fromkeys(REFERENCE, references) | extra


def as_texts(batch: Columns) -> Columns:
    """Return the batch with texts in place of messages: a prompt's turns with an empty line between them."""
    return batch | {
        "prompts": ["\n\n".join(turn["content"] for turn in prompt) for prompt in batch["prompts"]],
        "completions": [answer[0]["content"] for answer in batch["completions"]],
    }


def _others(prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(prompt.columns) if prompt.columns else {}
    return row


def _arguments(batch: Columns, conversational: bool, asks: Asks) -> Columns:
    """Return those columns of a batch of messages that the function asks for."""
    available = batch if conversational else as_texts(batch)
    return {name: column for name, column in available.items() if asks.everything or name in asks.names}


# In the worker process


def load(which: Call) -> Callable[[Columns], tuple[bool, list[float | Missing]]]:
    """Return the function at an import path, wrapped so that it returns whether it was given messages, and
    one verdict for each completion. Raises ConfigError.

    A function gets texts, unless it asks for messages: by the setting, by the annotation of its parameter
    ``completions``, or because it takes fields of a text as only a message has them."""
    function = import_function("reward.function.path", which.path)
    asks = asks_of(function)
    messages = asks.messages if which.conversational is None else which.conversational

    def invoke(batch: Columns, conversational: bool) -> list[float | Missing]:
        returned = function(**_arguments(batch, conversational, asks))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return verdicts(returned, len(batch["completions"]))

    def call(batch: Columns) -> tuple[bool, list[float | Missing]]:
        nonlocal messages
        try:
            return messages, invoke(batch, messages)
        except (TypeError, AttributeError) as error:
            if messages or which.conversational is not None or not _TAKES_FIELDS.search(str(error)):
                raise
            scores = invoke(batch, conversational=True)
            messages = True
            return messages, scores

    call.about = asks  # type: ignore[attr-defined]
    return call


def asks_of(function: Callable[..., Any]) -> Asks:
    """Return what the parameters of a function ask for."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    annotations = [str(p.annotation) for p in named if p.name == "completions"]
    return Asks(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        any(_OF_MESSAGES.search(annotation) for annotation in annotations),
    )


def verdicts(returned: Any, expected: int) -> list[float | Missing]:
    """Convert what a function returned to verdicts. Raises TypeError or ValueError if it is not a list of
    ``expected`` values."""
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Iterable):
        raise TypeError(f"it returned a {type(returned).__name__}, not a list of rewards")
    values = list(returned)
    if len(values) != expected:
        raise ValueError(f"it returned {len(values)} rewards for {expected} completions")
    return [verdict_of(value) for value in values]


def make(settings: FunctionConfig, device: object, log_dir: Path | None) -> FunctionReward:
    """The reward of config/reward/function.yaml and adder.yaml; no device is used."""
    return FunctionReward(settings, log_dir)


def adder(completions: list[str], reference: list[str | None]) -> list[float | None]:
    """Return the reward of the embedded adder task: accuracy, form and separators, weighted 8 : 1 : 1, in [0,
    10]. It has the signature of any reward function."""
    return rewards(completions, reference)
