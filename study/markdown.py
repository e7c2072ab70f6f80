"""A page of sections, as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.results import markdown
from reports.statistics import SeedMean

Table = list[list[str]]


@dataclass(frozen=True)
class Section:
    """A heading with text (markdown paragraphs), then a table, then a figure's stem and caption; any may be
    missing."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    figure: tuple[str, str] | None = None


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}"] if section.title else []
        parts += section.text
        parts += [markdown(section.table)] if section.table else []
        if section.figure:
            parts.append(f"![{section.figure[1]}]({section.figure[0]}.svg)\n\n*{section.figure[1]}*")
    return "\n\n".join(parts) + "\n"


def shown(value: SeedMean) -> list[str]:
    """Return an effect's cells: value, 95 % interval, number of seeds."""
    low, high = value.interval
    inside = f"[{low:+.1f}, {high:+.1f}]" if value.error is not None else "–"
    return [f"{value.value:+.1f}", inside, str(value.n)]
