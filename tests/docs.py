"""The commands of README.md and docs/*.md, and the settings that their tables name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = re.compile(
    r"(python|torchrun|accelerate|make|pip|export|sbatch|srun|git|curl|hf|wandb|tensorboard) +\S"
)
"""First words of what is typed: in a block, all its lines are then commands; in a sentence, the code in
backquotes is one."""
NO_COMMANDS = {
    "README.md": ("before      after", "config/      every setting"),
    "data.md": ('{"id": "…"',),
    "distributed.md": ("runs/NAME/",),
    "off-policy.md": ('{"prompt": "1+1=',),
}
"""Blocks without a language that show something else, by how they begin."""
GUIDE = "from-halos-and-trl.md"
"""Its tables' first columns are other projects' commands."""
FROZEN = "git checkout "
"""How a command begins that is of an earlier commit, named behind it: that commit's tests typed it. What made
a page that stays as it is (docs/study/, figures that were measured) is given so, and is not typed here."""
_SETTING = re.compile(r"^[a-zA-Z_]\w*(\.\w+)*=\S")
_MARKDOWN = MarkdownIt().enable("table")


@dataclass(frozen=True)
class Block:
    """An indented or fenced piece of a page."""

    page: str
    language: str
    lines: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    pieces = [token for token in _MARKDOWN.parse(page.read_text()) if token.type in ("fence", "code_block")]
    return [Block(page.name, token.info.strip(), tuple(token.content.splitlines())) for token in pieces]


def is_command(text: str) -> bool:
    return bool(PROGRAMS.match(text.strip()))


def in_blocks(page: Path) -> list[str]:
    """The lines of blocks that are typed. Raises ValueError for a block of which nobody has said what it
    is."""
    found = []
    for block in blocks(page):
        joined = "\n".join(block.lines).replace("\\\n", " ").split("\n")
        lines = [line for line in joined if line.strip() and not line.lstrip().startswith("#")]
        begins = lines[0].strip() if lines else ""
        if block.language not in ("", "bash", "sh", "console", "shell"):
            continue
        if block.language == "" and begins.startswith(NO_COMMANDS.get(page.name, ())):
            continue
        for line in lines:
            if not is_command(line):
                raise ValueError(f"{page.name}: {line!r} is no command that is known: see tests/docs.py")
            found.append(re.sub(r"\s+#.*$", "", line).strip())
    return found


def spans(page: Path, in_tables: bool) -> Iterator[str]:
    """The code in a page's sentences and tables, or in its tables alone; of the guide's tables in their last
    columns."""
    tokens = _MARKDOWN.parse(page.read_text())
    for i, token in enumerate(tokens):
        cell = tokens[i - 1].type in ("td_open", "th_open")
        theirs = page.name == GUIDE and cell and tokens[i + 2].type != "tr_close"
        if token.type == "inline" and (cell or not in_tables) and not theirs:
            yield from (" ".join(c.content.split()) for c in token.children or () if c.type == "code_inline")


def commands() -> dict[str, str]:
    """Every command, as it is typed -> the pages that give it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in (*in_blocks(page), *filter(is_command, spans(page, in_tables=False))):
            if not command.startswith(FROZEN):
                found.setdefault(command, []).append(page.name)
    return {command: ", ".join(dict.fromkeys(pages)) for command, pages in found.items()}


def settings(page: str) -> list[str]:
    """The settings that a page's tables name in code, such as ``loss=kto lr=1e-5``. Where something is left
    open (…), nothing."""
    code = spans(ROOT / "docs" / page, in_tables=True)
    return list(dict.fromkeys(span for span in code if _SETTING.match(span) and "…" not in span))


def write_examples(page: str) -> None:
    """Write the files that a page shows, each of which begins with its own name in a comment."""
    for block in blocks(ROOT / "docs" / page):
        named = next(
            (found for line in block.lines[:2] if (found := re.match(r"# (\S+\.(?:py|yaml))$", line))), None
        )
        if block.language in ("python", "yaml") and named:
            assert not Path(named[1]).exists(), named[1]
            Path(named[1]).write_text("\n".join(block.lines) + "\n")
