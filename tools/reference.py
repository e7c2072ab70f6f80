"""Write the parts of docs/ that are made from the code: settings.md from the yaml comments, the tables of
settings in from-halos-and-trl.md from config/foreign_names.yaml, and the lines that tour.md links to.

python -m tools.reference
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from config.unknown_keys import guide_table, sources

ROOT = Path(__file__).resolve().parents[1]
GUIDE = "from-halos-and-trl.md"
TOUR = "tour.md"
MADE = "<!-- made by python -m tools.reference; do not edit -->\n"
GROUPS = {
    "model": "what is trained",
    "data": "what it is trained on",
    "loss": "the objective",
    "sampler": "who samples, online",
    "reward": "what scores samples",
}
OWN = ("loss", "trainer")
"""Sections that the files of config/loss alone have; other sections in them change a default."""


PROGRAMS = {
    "config.yaml": "A run",
    "eval.yaml": "`eval.py`",
    "sample.yaml": "`sample.py`",
    "label.yaml": "`label.py`",
}


class Setting(NamedTuple):
    """One key of a yaml file: its dotted name, default as written, and comment."""

    key: str
    default: str
    comment: str


_LINE = re.compile(
    r"^(?P<indent> *)(?P<key>[\w-]+):(?: +(?P<value>[^#\s'\"|][^#]*?|'[^']*'|\"[^\"]*\"))?\s*(?:# "
    r"?(?P<comment>.*))?$"
)


def settings_of(text: str) -> Iterator[tuple[str, Setting | None]]:
    """Yield (section heading, setting) of a yaml file in order; the setting is None where a section begins.
    Lines below ``hydra:`` are skipped, because they are Hydra's own settings."""
    stack: list[tuple[int, str]] = []
    current: list[str] | None = None
    section = ""
    for line in [*text.partition("\nhydra:")[0].splitlines(), "end: end"]:
        continued = re.match(r"^\s{8,}# (.*)$", line)
        if continued and current is not None:
            current[2] += f" {continued[1].strip()}"
            continue
        if current is not None:
            yield section, Setting(*current)
            current = None
        if heading := re.match(r"^# -- (.+?) -+$", line):
            section = heading[1]
            yield section, None
        match = _LINE.match(line)
        if match is None or match["key"] in ("defaults", "end"):
            continue
        depth = len(match["indent"])
        stack = [(at, key) for at, key in stack if at < depth]
        stack.append((depth, match["key"]))
        if match["value"] is not None or match["comment"]:
            current = [".".join(key for _, key in stack), match["value"] or "", match["comment"] or ""]


def table(settings: list[Setting], prefix: str = "") -> list[str]:
    """Return a markdown table of settings."""

    def cell(text: str) -> str:
        return text.strip().replace("|", "\\|").replace("<", "&lt;").replace('"off"', "off")

    rows = [
        f"| `{prefix}{s.key}` | {f'`{cell(s.default)}`' if s.default else ''} | {cell(s.comment)} |"
        for s in settings
    ]
    return ["| setting | default | meaning |", "|---|---|---|", *rows, ""]


def settings_page() -> str:
    """Return docs/settings.md: every key of config/ with its default and its comment."""
    out = [
        MADE,
        "# Settings\n",
        "Every setting can be given on the command line: `python train.py loss=kto lr=1e-5`. A setting that "
        "nothing reads, or that",
        "cannot be honoured, is refused before anything is loaded. `python train.py --cfg job` shows them "
        "as a run would have them.",
        "`auto`, `all` and `off` may also be written `null`, as the `config.yaml` of a run has them.\n",
    ]
    for file, title in PROGRAMS.items():
        out.append(f"## {title}\n")
        rows: list[Setting] = []
        for section, setting in settings_of((ROOT / "config" / file).read_text()):
            if setting is None:
                out += [*(table(rows) if rows else []), f"### {section[0].upper()}{section[1:]}\n"]
                rows = []
            else:
                rows.append(setting)
        out += table(rows)
    for group, what in GROUPS.items():
        out += [f"## `{group}=`: {what}\n", *group_part(group), ""]
    return "\n".join(out)


def group_part(group: str) -> Iterator[str]:
    """Yield the part of settings.md for a folder of config/: what each file is, then every setting of theirs
    once. In a folder with a base file, whose settings all files have, these are the settings."""
    files = {path.stem: path.read_text() for path in sorted((ROOT / "config" / group).glob("*.yaml"))}
    base = next((name for name in ("base", "_base") if name in files), None)
    for name, text in files.items():
        head = text.split("\n\n")[0] if name != base else ""
        about = " ".join(m[1] for m in re.finditer(r"^# (?!@package)(.*)$", head, re.MULTILINE))
        if name[0] != "_" and name != base:
            yield f"- `{group}={name}`: {about}"
    yield ""
    found: dict[str, dict[str, Setting]] = {}
    for name, text in files.items() if base is None else [(base, files[base])]:
        for _, setting in settings_of(text):
            if setting is None or (group == "loss" and setting.key.partition(".")[0] not in OWN):
                continue
            key = setting.key if group == "loss" else f"{group}.{setting.key}"
            found.setdefault(key, {})[name] = setting
    yield from table(
        [once(key, by_file, len(by_file) == len(files) or base is not None) for key, by_file in found.items()]
    )


MOST_DEFAULTS = 6
"""Different defaults that a row names; of a setting with more every file has its own."""


def once(key: str, by_file: dict[str, Setting], everywhere: bool) -> Setting:
    """Return a setting that several files have as one row: with the names of those that have it, unless all
    have it (``everywhere``) or its own name says it, and of those that share a default or a comment."""

    def parts(texts: dict[str, str]) -> str:
        groups = {text: [name for name, other in texts.items() if other == text] for text in texts.values()}
        if len(groups) == 1:
            return next(iter(groups))
        return "; ".join(f"{', '.join(names)}: {text}" for text, names in groups.items() if text)

    comments = {name: setting.comment for name, setting in by_file.items()}
    defaults = {name: setting.default for name, setting in by_file.items()}
    comment = parts(comments)
    if len(set(comments.values())) == 1 and not everywhere and f".{next(iter(by_file))}." not in key:
        comment = f"{', '.join(by_file)}: {comment}"
    many = len(set(defaults.values())) > MOST_DEFAULTS
    return Setting(key, "" if many else parts(defaults), comment)


def guide_page() -> str:
    """Return docs/from-halos-and-trl.md with its tables of settings made from config/foreign_names.yaml; the
    rest of the page is unchanged."""
    text = (ROOT / "docs" / GUIDE).read_text()
    for whose, rows in sources().items():
        begin = f"<!-- {whose}: made by python -m tools.reference from config/foreign_names.yaml -->\n"
        before, marker, after = text.partition(begin)
        assert marker, f"{GUIDE} has no place for the table of {whose}"
        text = f"{before}{begin}\n{guide_table(rows)}\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    return text


_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>[\w/]+\.py)(?:#L\d+)?\)")


def tour_page() -> str:
    """Return docs/tour.md with each link to a definition at the line where it is now. Raises LookupError for
    a name that its file does not define."""

    def placed(link: re.Match[str]) -> str:
        line = line_of(ast.parse((ROOT / link["file"]).read_text()), link["name"].split("."))
        if line is None:
            raise LookupError(f"{TOUR}: {link['file']} does not define {link['name']}")
        return f"[`{link['name']}`](../{link['file']}#L{line})"

    return _LINK.sub(placed, (ROOT / "docs" / TOUR).read_text())


def line_of(tree: ast.Module | ast.ClassDef, names: list[str]) -> int | None:
    """Return the line of the class or function that ``names`` lead to; None if there is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            if len(names) == 1:
                return node.lineno
            return line_of(node, names[1:]) if isinstance(node, ast.ClassDef) else None
    return None


PAGES = {"settings.md": settings_page, GUIDE: guide_page, TOUR: tour_page}
"""File of docs/ -> what makes it."""


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
