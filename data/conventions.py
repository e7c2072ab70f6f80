"""Formats that many data sets have although no library defines them: UltraFeedback's, bare texts.

The table of docs/data.md has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.errors import ConfigError
from config.schema_data import DataConfig
from data.columns import Values
from data.formats import (
    LeftOutError,
    RowError,
    demonstration,
    each_row,
    listed,
    number,
    pair,
    prompt_of,
    question,
    text,
)
from data.types import Completion, Group, Prompt, Turn

RATINGS = ("overall_score", "fine-grained_score")
"""Keys under which an UltraFeedback completion may have its score; the first one found is used."""


@each_row
def ultrafeedback(values: Values, config: DataConfig) -> Group:
    """UltraFeedback in three forms: as published (openbmb/UltraFeedback), ``instruction`` and
    ``completions``, each with its ``response`` and ``overall_score``; as distilabel writes it, ``instruction,
    generations, ratings``; or as one pair, ``instruction, chosen_response, rejected_response``."""
    prompt = prompt_of(question(values), values.get("reference"))
    if "chosen_response" in values:
        return pair(prompt, text(values, "chosen_response"), text(values, "rejected_response"))
    if "generations" in values:
        answers, scores = listed(values, "generations"), listed(values, "ratings")
        if len(answers) != len(scores):
            raise RowError("'generations' and 'ratings' are not two lists of one length")
        rated = [
            {"response": answer, "overall_score": score}
            for answer, score in zip(answers, scores, strict=True)
        ]
    else:
        rated = listed(values, "completions")
    if not all(isinstance(one, Mapping) for one in rated):
        raise RowError("'completions' is not a list of objects with a response")
    rated = [one for one in rated if any(one.get(key) is not None for key in RATINGS)]
    if len(rated) < 2:
        raise LeftOutError("fewer than two of the completions have a score")
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
    document = text(values, "text")
    first = _WORDS.match(document)
    if first is None or not document[first.end() :].strip():
        raise RowError("'text' has fewer than two words")
    return demonstration(Prompt((Turn("user", document[: first.end()]),)), document[first.end() :])
