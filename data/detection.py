"""Detection of a table's format from its columns, and of the columns that the format reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common.errors import ConfigError
from common.imports import import_function
from config.schema_data import DataConfig
from data import conventions, formats, published
from data.formats import Format, Values
from data.groups import groups as groups_format
from data.rows import Row

FORMATS: dict[str, Format] = {
    "preference": formats.preference,
    "prompt_completion": formats.prompt_completion,
    "unpaired": formats.unpaired,
    "prompt_only": formats.prompt_only,
    "feedback": formats.feedback,
    "groups": groups_format,
    "alpaca": conventions.alpaca,
    "sharegpt": conventions.sharegpt,
    "ultrafeedback": conventions.ultrafeedback,
    "language_modelling": conventions.language_modelling,
    "hh": published.hh,
    "alpacaeval": published.alpacaeval,
    "gsm8k": published.gsm8k,
    "gsm8k_solutions": published.gsm8k_solutions,
    "math": published.math,
    "s1k": published.s1k,
    "safe_rlhf": published.safe_rlhf,
    "wildbench": published.wildbench,
    "shp": published.shp,
    "oasst": published.oasst,
}
"""The formats that ``data.format`` may name. Any other format is given by its import path."""


def format_of(config: DataConfig, first: Row) -> tuple[str, Format]:
    """Return (the name of the format, the format) of these rows."""
    for ours, theirs in (config.columns or {}).items():
        if theirs not in first.values:
            raise ConfigError(
                f"data.columns.{ours}",
                theirs,
                f"{first.file} has no such column; it has {', '.join(first.values)}",
            )
    name = detect(first) if config.format == "auto" else config.format
    if name in FORMATS:
        return name, FORMATS[name]
    if "." not in name:
        raise ConfigError(
            "data.format", name, f"use auto, {', '.join(FORMATS)}, or the import path of a function"
        )
    found: Format = import_function("data.format", name)
    return name, found


def detect(row: Row) -> str:
    """Return the name of the format whose columns ``row`` has. Raises ConfigError if there is none."""
    has = row.values.keys()
    if is_feedback(row.values):
        return "feedback"
    if {"prompt", "completions", "labels"} <= has and "rewards" not in has:
        raise ConfigError(
            "data.path",
            row.file,
            "rows are labelled steps (TRL's stepwise supervision), which no loss here trains on; give one "
            "answer a row: prompt, completion, label",
        )
    for name, columns, fits in _BY_COLUMNS:
        if columns <= has and fits(row.values):
            return name
    raise ConfigError(
        "data.columns",
        dict.fromkeys(has, "?"),
        f"the columns of {row.file} are those of no known format; say which "
        "are which, as in data.columns={prompt: question, completion: answer}",
    )


def _any(values: Values) -> bool:
    return True


def _is_transcript(values: Values) -> bool:
    chosen = values["chosen"]
    return "prompt" not in values and isinstance(chosen, str) and chosen.startswith("\n\nHuman:")


def _is_instruction(values: Values) -> bool:
    """Return whether the answers are texts, as Alpaca's are. Lists of messages contain the question
    themselves."""
    return "prompt" not in values and not isinstance(values["chosen"], list)


def _is_conversation(values: Values) -> bool:
    return isinstance(values["conversations"], list) and "prompt" not in values


def _has_responses(values: Values) -> bool:
    found = values["completions"]
    return isinstance(found, list) and all(isinstance(one, dict) and "response" in one for one in found)


_BY_COLUMNS: tuple[tuple[str, set[str], Callable[[Values], bool]], ...] = (
    ("ultrafeedback", {"instruction", "completions"}, _has_responses),
    ("ultrafeedback", {"instruction", "generations", "ratings"}, _any),
    ("ultrafeedback", {"instruction", "chosen_response", "rejected_response"}, _any),
    ("groups", {"completions", "rewards"}, _any),
    ("sharegpt", {"conversations"}, _is_conversation),
    ("alpaca", {"instruction", "chosen", "rejected"}, _is_instruction),
    ("hh", {"chosen", "rejected"}, _is_transcript),
    ("preference", {"chosen", "rejected"}, _any),
    ("unpaired", {"prompt", "completion", "label"}, _any),
    ("prompt_completion", {"prompt", "completion"}, _any),
    ("alpacaeval", {"instruction", "output_1", "output_2", "preference"}, _any),
    ("alpacaeval", {"instruction", "output", "generator"}, _any),
    ("prompt_completion", {"messages"}, _any),
    ("alpaca", {"instruction", "output"}, _any),
    ("prompt_only", {"prompt"}, _any),
    ("language_modelling", {"text"}, _any),
)
"""Format, the columns that it has, and a further condition; the first row that fits is chosen."""


def is_feedback(values: Values) -> bool:
    kind = values.get("type")
    return isinstance(kind, str) and kind.endswith("_feedback")


class Columns:
    """Record of the columns that a format reads in the first rows."""

    MOST = 64
    """Number of rows that are watched. A column that the format reads in none of them is hardly read in the
    others."""

    def __init__(self, columns: dict[str, str] | None) -> None:
        self.rows, self.there, self.read = 0, dict[str, None](), set[str]()
        self.theirs = columns or {}

    def watched(self, row: Row) -> Row:
        """Return the row; one of the first rows is returned as a mapping that records which columns are
        read."""
        self.rows += 1
        if self.rows > self.MOST:
            return row
        self.there.update(dict.fromkeys(row.values))
        return replace(row, values=_Watched(row.values, self.read))

    def unused(self) -> tuple[str, ...]:
        """Return the columns that were never read, in their order. A column that ``data.columns`` renames
        counts as read if it was read under its new name."""
        renamed = {theirs for ours, theirs in self.theirs.items() if ours in self.read}
        return tuple(c for c in self.there if c not in self.read | renamed and c not in self.theirs)


class _Watched(dict[str, Any]):
    """Values of a row that record which columns are read."""

    def __init__(self, values: Values, read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)
