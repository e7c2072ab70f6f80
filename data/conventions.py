"""Formats that many data sets have although no library defines them: Alpaca's, ShareGPT's, UltraFeedback's,
bare texts.

The table of docs/data.md has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.errors import ConfigError
from config.schema_data import DataConfig
from data.formats import (
    RowError,
    Values,
    answered,
    demonstration,
    each_row,
    number,
    pair,
    prompt_of,
    text,
    turns,
    value,
)
from data.types import Completion, Group, Prompt, Turn

RATINGS = ("overall_score", "fine-grained_score")
"""Keys under which an UltraFeedback completion may have its score; the first one found is used."""


def asked(values: Values) -> tuple[Turn, ...]:
    """Return Alpaca's question as turns: ``system``, ``history`` (pairs of question and answer),
    ``instruction`` and, after an empty line, ``input``."""
    head: list[Turn] = []
    if values.get("system"):
        head.append(Turn("system", text(values, "system")))
    history = values.get("history") or []
    if not isinstance(history, list):
        raise RowError("'history' is not a list of pairs, question and answer")
    for exchange in history:
        if not isinstance(exchange, list | tuple) or len(exchange) != 2:
            raise RowError("'history' is not a list of pairs, question and answer")
        if not all(isinstance(said, str) for said in exchange):
            raise RowError("'history' is not a list of pairs, question and answer")
        head += [Turn("user", exchange[0]), Turn("assistant", exchange[1])]
    question = text(values, "instruction")
    if values.get("input"):
        question = f"{question}\n\n{text(values, 'input')}"
    return (*head, Turn("user", question))


@each_row
def alpaca(values: Values, config: DataConfig) -> Group:
    """``instruction, output``, or ``instruction, chosen, rejected``; with ``input``, ``system`` and
    ``history`` if a row has them."""
    prompt = prompt_of(asked(values), values.get("reference"))
    if "output" in values:
        return demonstration(prompt, text(values, "output"))
    return pair(prompt, text(values, "chosen"), text(values, "rejected"))


@each_row
def sharegpt(values: Values, config: DataConfig) -> Group:
    """``conversations`` of ``{from, value}`` (or role and content) that end with the answer. Alternatively,
    ``conversations`` end with the question, and ``chosen`` and ``rejected`` are its answers. A ``system``
    column comes first."""
    found = turns(value(values, "conversations"), "conversations")
    head = (Turn("system", text(values, "system")),) if values.get("system") else ()
    reference = values.get("reference")
    if "chosen" not in values:
        conversation, answer = answered((), value(values, "conversations"), "conversations")
        return demonstration(prompt_of(_led(head, conversation), reference), answer)
    _, good = answered(found, value(values, "chosen"), "chosen")
    _, bad = answered(found, value(values, "rejected"), "rejected")
    return pair(prompt_of(_led(head, found), reference), good, bad)


def _led(head: tuple[Turn, ...], conversation: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the conversation with the system turn of ``head`` before it, unless it has its own."""
    return conversation if conversation[:1] and conversation[0].role == "system" else head + conversation


@each_row
def ultrafeedback(values: Values, config: DataConfig) -> Group:
    """UltraFeedback in three forms: as published (openbmb/UltraFeedback), ``instruction`` and
    ``completions``, each with its ``response`` and ``overall_score``; as distilabel writes it, ``instruction,
    generations, ratings``; or as one pair, ``instruction, chosen_response, rejected_response``."""
    prompt = prompt_of((Turn("user", text(values, "instruction")),))
    if "chosen_response" in values:
        return pair(prompt, text(values, "chosen_response"), text(values, "rejected_response"))
    if "generations" in values:
        answers, scores = value(values, "generations"), value(values, "ratings")
        if not isinstance(answers, list) or not isinstance(scores, list) or len(answers) != len(scores):
            raise RowError("'generations' and 'ratings' are not two lists of one length")
        rated = [
            {"response": answer, "overall_score": score}
            for answer, score in zip(answers, scores, strict=True)
        ]
    else:
        rated = value(values, "completions")
    if not isinstance(rated, list) or not all(isinstance(one, Mapping) for one in rated):
        raise RowError("'completions' is not a list of objects with a response")
    rated = [one for one in rated if any(one.get(key) is not None for key in RATINGS)]
    if len(rated) < 2:
        raise RowError("fewer than two of the completions have a score")
    scores = [number(one, next(key for key in RATINGS if one.get(key) is not None)) for one in rated]
    return Group(prompt, tuple(Completion(text(one, "response")) for one in rated), tuple(scores))


_WORDS = re.compile(r"\s*\S+")


@each_row
def language_modelling(values: Values, config: DataConfig) -> Group:
    """``text``, a document. Its first word becomes the prompt, and the rest the completion. Raises
    ConfigError if a chat template would turn the text into an answer."""
    if config.apply_chat_template:
        raise ConfigError(
            "data.apply_chat_template",
            True,
            "rows are texts without a prompt (language modelling), which no chat template is for: type "
            "data.apply_chat_template=false to train on them as they are",
        )
    found = text(values, "text")
    first = _WORDS.match(found)
    if first is None or not found[first.end() :].strip():
        raise RowError("'text' has fewer than two words")
    return demonstration(Prompt((Turn("user", found[: first.end()]),)), found[first.end() :])
