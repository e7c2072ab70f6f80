"""Write the parts of docs/ that are made from the code: settings.md from the yaml comments, the tables of
settings in from-halos-and-trl.md from config/elsewhere.yaml, and the lines that tour.md links to.

python -m tools.reference            # write them
python -m tools.reference --check    # exit 1 if any is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.options import options_of
from config.elsewhere import guide_table, sources

ROOT = Path(__file__).resolve().parents[1]
GUIDE = "from-halos-and-trl.md"
TOUR = "tour.md"
MADE = "<!-- made by python -m tools.reference; do not edit -->\n"
GROUPS = {
    "model": ("base", "what is trained"),
    "data": ("_base", "what it is trained on"),
    "loss": (None, "the objective"),
    "trainer": (None, "what a trainer accepts; the loss chooses it"),
    "sampler": (None, "who samples, online"),
    "reward": (None, "what scores samples"),
}


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
    for group, (base, what) in GROUPS.items():
        out.append(f"## `{group}=`: {what}\n")
        files = sorted(
            (ROOT / "config" / group).glob("*.yaml"), key=lambda p: p.stem not in (base, f"_{base}")
        )
        for path in files:
            out += group_file(group, path, base)
        out.append("")
    return "\n".join(out)


def group_file(group: str, path: Path, base: str | None) -> Iterator[str]:
    """Yield the part of settings.md for one file of a group: all of its settings, or only its description if
    the group has a base file and this is another one."""
    text = path.read_text()
    about = " ".join(m[1] for m in re.finditer(r"^# (?!@package)(.*)$", text.split("\n\n")[0], re.MULTILINE))
    if base is not None and path.stem not in (base, f"_{base}"):
        if not path.stem.startswith("_"):
            yield f"- `{group}={path.stem}`: {about}"
        return
    title = f"Every file of config/{group}" if base is not None else f"`{group}={path.stem}`"
    yield f"### {title}\n\n{about}\n"
    settings = [setting for _, setting in settings_of(text) if setting is not None]
    inside = [s for s in settings if s.key.startswith(f"{group}.")]
    yield from table(inside or settings, "" if inside else f"{group}.")


def guide_page() -> str:
    """Return docs/from-halos-and-trl.md with its tables of settings made from config/elsewhere.yaml; the rest
    of the page is unchanged."""
    text = (ROOT / "docs" / GUIDE).read_text()
    for whose, rows in sources().items():
        begin = f"<!-- {whose}: made by python -m tools.reference from config/elsewhere.yaml -->\n"
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


def main() -> int:
    parser = options_of("python -m tools.reference", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    pages = {"settings.md": settings_page, GUIDE: guide_page, TOUR: tour_page}
    for name, made in pages.items():
        text = made()
        path = ROOT / "docs" / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m tools.reference", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
