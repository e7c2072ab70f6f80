"""Detection of a table's format from the columns of its first rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import ConfigError, require
from common.imports import import_function
from config.schema_data import DataConfig
from data import formats, published
from data.columns import READ, TO_CONVERT, Propose, Values, named, of_choices, two_answers
from data.formats import Format
from data.groups import groups as groups_format
from data.json_values import unpacked
from data.rows import Row

GENERIC: dict[str, Format] = {
    "preference": formats.preference,
    "compared": formats.compared,
    "prompt_completion": formats.prompt_completion,
    "unpaired": formats.unpaired,
    "scored": formats.scored,
    "prompt_only": formats.prompt_only,
    "groups": groups_format,
    "ultrafeedback": published.ultrafeedback,
    "language_modelling": published.language_modelling,
}
"""The formats of people's own rows. What they read of a row is all that decides (``data.columns``)."""
FORMATS: dict[str, Format] = GENERIC | {
    "feedback": formats.feedback,
    "hh": formats.preference,
    "gsm8k": published.gsm8k,
    "gsm8k_solutions": published.gsm8k_solutions,
    "math": published.math,
    "s1k": published.s1k,
    "safe_rlhf": formats.compared,
    "wildbench": published.wildbench,
    "shp": published.shp,
    "oasst": published.oasst,
}
"""The formats that ``data.format`` may name. Any other format is given by its import path."""
OF_COLUMNS = ("auto", "alpaca", "sharegpt", "ultrafeedback", "alpacaeval")
"""Formats of which the columns say everything."""


def format_of(config: DataConfig, first: Sequence[Row], propose: Propose) -> tuple[str, Format]:
    """Return (the name of the format, the format) of the rows that begin with ``first``. ``propose`` says
    what to type for columns that are those of no format."""
    name = detect(first, config.columns, propose) if config.format in OF_COLUMNS else config.format
    if name in FORMATS:
        return name, FORMATS[name]
    why = f"use auto, {', '.join(FORMATS)}, or the import path of a function"
    require("." in name, "data.format", name, why)
    custom_format: Format = import_function("data.format", name)
    return name, custom_format


FORMS: tuple[tuple[str, set[str]], ...] = (
    ("feedback", {"<feedback>"}),
    ("ultrafeedback", {"<prompt>", "<rated answers>"}),
    ("groups", {"<completions>", "<rewards>"}),
    ("oasst", {"message_id", "parent_id", "role", "text", "lang", "rank"}),
    ("shp", {"history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"}),
    ("preference", {"<chosen>", "<rejected>"}),
    ("compared", {"<two answers>", "<winner>"}),
    ("unpaired", {"<prompt>", "<completion>", "<label>"}),
    ("scored", {"<prompt>", "<completion>", "<reward>"}),
    ("prompt_completion", {"<prompt>", "<completion>"}),
    ("prompt_only", {"<prompt>"}),
    ("language_modelling", {"text"}),
)
"""Format, and what its rows have: columns by name, and <parts of a row>, which several columns may be (READ).
The first form of which the rows have everything is theirs."""


def detect(first: Sequence[Row], columns: dict[str, str] | None, propose: Propose) -> str:
    """Return the name of the format whose columns the first rows have together. Raises ConfigError if there
    is none."""
    has = _parts([row.values for row in first])
    why = (
        "rows are labelled steps (TRL's stepwise supervision), which no loss here trains on; give one answer "
        "a row: prompt, completion, label"
    )
    steps = {"prompt", "completions", "labels"} <= has and "rewards" not in has
    require(not steps, "data.path", first[0].file, why)
    for name, needed in FORMS:
        if needed <= has:
            return name
    names = list(dict.fromkeys(name for row in first for name in row.values))
    choices = of_choices(first[0].values)
    convert = TO_CONVERT.format(", ".join(choices)) if choices else "data.columns={name here: name there}"
    way = f"type {way}" if (way := propose(names)) else convert
    why = f"the columns of {first[0].file} ({', '.join(names)}) are those of no known format"
    raise ConfigError("data.columns", columns, f"{why}; say which are which: {way}")


def _parts(rows: Sequence[Values]) -> set[str]:
    """Return the columns that any of the rows fills, and the parts of a row that FORMS names."""
    has = {name for values in rows for name, parts in values.items() if parts is not None}
    parts = has | {f"<{part}>" for part, names in READ.items() if has & set(names)}
    of_values: dict[str, Callable[[Values], bool]] = {
        "<feedback>": lambda values: str(values.get("type")).endswith("_feedback"),
        "<rated answers>": _has_responses,
        "<completion>": _ends_with_an_answer,
    }
    parts |= {part for part, holds in of_values.items() if 2 * sum(map(holds, rows)) >= len(rows)}
    return parts | ({"<two answers>"} if two_answers(has) else set())


def _has_responses(values: Values) -> bool:
    completions = unpacked(values.get("completions"))
    listed = completions if isinstance(completions, list) else []
    keys = [set(one) if isinstance(one, dict) else set() for one in listed]
    return bool(keys) and all(those & {*published.ANSWERS} and those & {*published.RATINGS} for those in keys)


def _ends_with_an_answer(values: Values) -> bool:
    """Return whether a conversation ends with the assistant's turn, in a row without an answer of its own."""
    column = named(values, "conversation")
    try:
        return column is not None and formats.turns(values[column], column)[-1].role == "assistant"
    except formats.RowError:
        return False
