"""Names that are gone: settings, values, files of settings, import paths and commands.

config/removed.yaml says what each was and what to type instead; whoever types one is told in one sentence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import cache

from common.errors import ConfigError
from config.files import FOLDER, parsed

LAST = "9f3391e0"
"""The last commit that has all of them, and that reads the runs of its version"""
SENTENCE = "is gone: it was {was}; instead: {instead}; the last commit that has it is " + LAST


@cache
def removed() -> dict[str, str]:
    """Return name -> what is said of it."""
    rows = parsed((FOLDER / "removed.yaml").read_text(encoding="utf-8")) or []
    return {name: SENTENCE.format(**row) for row in rows for name in row["gone"]}


def why_removed(key: str, value: object = "") -> str | None:
    """Return the remedy for ``key=value`` if that setting, its section, that value or a part of it is gone;
    otherwise None. ``value`` is as typed or as read."""
    words = [word for word in re.split(r"[][{},\s'\"]+", str(value)) if word]
    paths = [name for word in words for name in _prefixes(word) if "." in name]  # a word alone is any text
    files = [word for word in words if "/" in word and not os.path.exists(word)]
    for name in (*(f"{key}={word}" for word in words), *_prefixes(key), *paths, *files):
        if name in removed():
            return removed()[name] if name in (key, f"{key}={value}") else f"{name} {removed()[name]}"
    return None


def refuse_removed(settings: Iterable[tuple[str, object]]) -> None:
    """Raise ConfigError for the first of these (key, value) that is gone."""
    for key, value in settings:
        if (remedy := why_removed(key, value)) is not None:
            raise ConfigError(key, value, remedy)


def refuse_command(name: str | None = None) -> None:
    """End the program with exit code 2 if the command ``name`` or an option of it is gone; by default the
    module behind ``-m`` on the command line. A package whose commands went calls this when it is imported,
    which Python does before it looks for the module."""
    argv = sys.orig_argv
    name = name or (argv[argv.index("-m") + 1] if "-m" in argv[:-1] else "")
    options = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for typed in [name, *(f"{name} {option}" for option in options)] if name else []:
        gone = next((part for part in _prefixes(typed) if part in removed()), None)
        if gone is not None:
            command = typed if typed.startswith("make ") else f"python -m {typed}"
            print(f"error: {command} {removed()[gone]}", file=sys.stderr)
            sys.exit(2)


def _prefixes(name: str) -> list[str]:
    """a.b.c -> a.b.c, a.b, a"""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


if __name__ == "__main__":
    refuse_command(" ".join(sys.argv[1:]))
