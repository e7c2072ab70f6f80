"""A page of sections, as markdown and as HTML that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from launch.results import markdown

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


def as_html(title: str, sections: Sequence[Section], out: Path) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    pictures = {
        s.figure[0]: base64.b64encode((out / f"{s.figure[0]}.svg").read_bytes()).decode()
        for s in sections
        if s.figure
    }
    return environment.get_template("report.html.j2").render(
        title=title, sections=sections, pictures=pictures
    )
