"""The commands of README.md and docs/*.md, and the settings that their tables name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    "python",
    "torchrun",
    "accelerate",
    "make",
    "pip",
    "export",
    "sbatch",
    "srun",
    "git",
    "curl",
    "hf",
    "wandb",
    "tensorboard",
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


@dataclass(frozen=True)
class Block:
    """An indented or fenced piece of a page."""

    page: str
    language: str
    lines: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    """Every fenced and every indented block of a page (four spaces, after an empty line or more of them)."""
    found: list[Block] = []
    lines: list[str] = []
    language, inside, before = "", "", ""

    def end() -> None:
        if inside:
            found.append(Block(page.name, language, tuple(lines)))
            lines.clear()

    for line in page.read_text().splitlines():
        if line.startswith("```"):
            end()
            inside, language = ("", "") if inside == "fence" else ("fence", line.removeprefix("```").strip())
        elif inside == "fence":
            lines.append(line)
        elif line.startswith("    ") and (inside or not before.strip()):
            inside = "indent"
            lines.append(line.removeprefix("    "))
        elif inside and line.strip():
            end()
            inside = ""
        before = line
    end()
    return found


def is_command(text: str) -> bool:
    first, _, rest = text.strip().partition(" ")
    return first in PROGRAMS and bool(rest.strip())


def in_blocks(page: Path) -> list[str]:
    """The lines of blocks that are typed. Raises ValueError for a block of which nobody has said what it
    is."""
    found = []
    for block in blocks(page):
        lines = [line for line in joined(block.lines) if line.strip() and not line.lstrip().startswith("#")]
        begins = lines[0].strip() if lines else ""
        if block.language not in ("", "bash", "sh", "console", "shell"):
            continue
        if block.language == "" and begins.startswith(NO_COMMANDS.get(page.name, ())):
            continue
        for line in lines:
            if not is_command(line):
                raise ValueError(f"{page.name}: {line!r} is no command that is known: see tests/docs.py")
            found.append(without_comment(line))
    return found


def joined(lines: tuple[str, ...]) -> list[str]:
    """Lines, with those that end in a backslash made one with the next."""
    return "\n".join(lines).replace("\\\n", " ").split("\n")


def without_comment(line: str) -> str:
    """A command without what a shell would leave out."""
    return re.sub(r"\s+#.*$", "", line).strip()


def sentences(page: Path) -> list[str]:
    """The page's lines outside of blocks; of the guide's tables the last column."""
    found, fence = [], False
    for line in page.read_text().splitlines():
        fence ^= line.startswith("```")
        if not fence and not line.startswith(("    ", "```")):
            other = line.startswith("|") and page.name == GUIDE
            found.append(f"| {line.rstrip('| ').rpartition(' | ')[2]}" if other else line)
    return found


def in_sentences(page: Path) -> list[str]:
    """What is typed according to the code in a page's sentences and tables."""
    text = "\n".join(sentences(page))
    code = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    return [span for span in code if is_command(span)]


def commands() -> dict[str, str]:
    """Every command, as it is typed -> the pages that give it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in (*in_blocks(page), *in_sentences(page)):
            if not command.startswith(FROZEN):
                found.setdefault(command, []).append(page.name)
    return {command: ", ".join(dict.fromkeys(pages)) for command, pages in found.items()}


def settings(page: str) -> list[str]:
    """The settings that a page's tables name in code, such as ``loss=kto lr=1e-5``. Where something is left
    open (…), nothing."""
    rows = "\n".join(line for line in sentences(ROOT / "docs" / page) if line.startswith("|"))
    spans = [span for span in re.findall(r"`([^`]+)`", rows) if _SETTING.match(span) and "…" not in span]
    return list(dict.fromkeys(spans))


def write_examples(page: str) -> None:
    """Write the files that a page shows, each of which begins with its own name in a comment."""
    for block in blocks(ROOT / "docs" / page):
        named = next(
            (found for line in block.lines[:2] if (found := re.match(r"# (\S+\.(?:py|yaml))$", line))), None
        )
        if block.language in ("python", "yaml") and named:
            assert not Path(named[1]).exists(), named[1]
            Path(named[1]).write_text("\n".join(block.lines) + "\n")
