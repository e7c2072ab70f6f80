"""The tables and facts of data_report.json, which describe the data that a run trained on: for the run's report,
and as a page of their own."""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common import markdown
from common.markdown import literal

Facts = Mapping[str, Any]

SPREAD = ("mean", "minimum", "lower_quartile", "median", "upper_quartile", "maximum")
"""Keys of a distribution in the file, after its ``count``."""
COLUMNS = ("count", "mean", "minimum", "25 %", "median", "75 %", "maximum")
COUNTS = (
    ("dropped", "Rows dropped", "rows"),
    ("untrainable", "Groups without an example", "groups"),
    ("cut", "Shortened", "times"),
)


@dataclass(frozen=True)
class Table:
    """A table with a heading. The first column is text, the others are numbers."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def facts(data: Facts) -> list[tuple[str, str]]:
    """Return (label, value) of the facts that need only a word or two; facts missing from the report are left
    out. Raises AttributeError, LookupError, TypeError or ValueError for data that is no data report, as
    ``tables`` and ``example`` do."""
    return [(label, value) for label, value in _facts(data) if value]


def _facts(data: Facts) -> Iterator[tuple[str, str]]:
    yield "trained on", _text(data.get("origin"))
    yield "evaluated on", _text(data.get("evaluation_origin"))
    yield "read as", _text(data.get("format"))
    yield "columns read", ", ".join(map(str, list_of(data, "columns")))
    reader = "only a reward function" if data.get("format") == "prompt_only" else "nothing"
    yield f"columns that {reader} reads", ", ".join(map(str, list_of(data, "unused")))
    yield "read back", "; ".join(map(str, list_of(data, "read_back")))
    if "read" in data:
        counts = (f"{data.get(key) or 0:,}" for key in ("read", "groups", "prompts", "examples"))
        yield "to train on", "{} rows read, {} groups of {} prompts, {} examples".format(*counts)
    if labels := data.get("labels"):
        yield "labels", "{:,} answers desirable, {:,} not".format(*labels)
    named = (f"{row['file']}, row {row['row']}: {row['reason']}" for row in list_of(data, "named"))
    yield "first of the rows dropped", "; ".join(named)
    if data.get("evaluation_groups") is not None:
        yield "to evaluate on", f"{data['evaluation_groups']:,} groups"
    if data.get("shared_prompts"):
        yield "prompts on both sides", f"{data['shared_prompts']:,}"
    if chosen := data.get("selection"):
        kept, below, above = (chosen[key] for key in ("kept", "below", "above"))
        left_out = f"{below:,} were less likely, {above:,} more likely"
        yield "kept by log-probability", f"{kept:,} of {kept + below + above:,} groups; {left_out}"
    if data.get("poor_share") is not None:
        than = (
            "less likely than nine in ten of the model's own answers"
            if data.get("own")
            else "as unlikely as the paper's lowest quarter"
        )
        yield f"completions {than}", f"{data['poor_share']:.1%}"
    if data.get("clippable_share") is not None:
        yield "tokens that can be clipped from above at first, at most", f"{data['clippable_share']:.1%}"


def tables(data: Facts) -> list[Table]:
    """Return the reasons with their counts, then lengths and log-probabilities; empty tables are left out."""
    all_tables = [
        Table(
            title,
            ("reason", unit),
            [(str(why), f"{count:,}") for why, count in (data.get(key) or {}).items()],
        )
        for key, title, unit in COUNTS
    ]
    lengths = {"prompt": data.get("prompt_tokens"), "completion": data.get("completion_tokens")}
    all_tables.append(_spreads("Lengths", "tokens", lengths, "{:,.0f}"))
    title = "Mean token log-probability of a completion under the initial model"
    all_tables.append(_spreads(title, "nats", data.get("logprob") or {}, "{:.3f}"))
    every = (data.get("selection") or {}).get("all")
    title = "Mean token log-probability of a group, before data.logprob_range chose"
    all_tables.append(_spreads(title, "nats", {"every group": every}, "{:.3f}"))
    return [table for table in all_tables if table.rows]


def page(data: Facts) -> str:
    """Return everything as Markdown, with headings from level 2 on."""
    lines = ["## Data", "", *(f"- {label}: {literal(value)}" for label, value in facts(data)), ""]
    for table in tables(data):
        rows = [tuple(map(literal, row)) for row in table.rows]
        lines += [f"### {table.title}", "", markdown.table(table.header, rows), ""]
    if shown := example(data):
        lines += ["### The first example, as the model reads it", ""]
    for title, text in shown:
        lines += [f"{title}:", "", *(f"    {line}" for line in text.splitlines() or [""]), ""]
    return "\n".join([*lines, *(f"**Warning.** {warning}.\n" for warning in list_of(data, "warnings"))])


def _spreads(title: str, unit: str, spreads: Mapping[str, Any], form: str) -> Table:
    """Return a table of distributions. ``form`` formats its numbers other than the count."""
    rows = [
        (name, f"{spread['count']:,}", *(form.format(spread[key]) for key in SPREAD))
        for name, spread in spreads.items()
        if spread
    ]
    return Table(title, (unit, *COLUMNS), rows)


def example(data: Facts) -> list[tuple[str, str]]:
    """Return ("prompt", text), then ("completion", text) for each answer, of the first example."""
    shown = [str(text) for text in list_of(data, "example")]
    return list(zip(["prompt"] + ["completion"] * len(shown), shown, strict=False))


def list_of(data: Facts, key: str) -> list[Any]:
    """Return the list under ``key``; [] if the report has none. Raises TypeError if the value is no list."""
    value = data.get(key) or []
    if not isinstance(value, list | tuple):  # a file has lists, the report itself tuples
        raise TypeError(f"{key} is no list")
    return list(value)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
