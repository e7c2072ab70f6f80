"""Environments that tests name by their path."""

from __future__ import annotations

import os
import time
from typing import Any


def twice(conversation: list[dict[str, str]], turn: int) -> str | None:
    """Goes on after the first and the second turn."""
    return "1" * turn if turn < 3 else None


def forever(conversation: list[dict[str, str]], **fields: Any) -> dict[str, str]:
    return {"role": "user", "content": str(fields["seed"] % 10) + (fields["reference"] or "")}


def hanging(conversation: list[dict[str, str]]) -> None:
    time.sleep(60)


def broken(conversation: list[dict[str, str]]) -> str:
    raise KeyError("nothing here")


def dying(conversation: list[dict[str, str]]) -> None:
    os._exit(3)


def number(conversation: list[dict[str, str]]) -> int:
    return 7


def half_a_letter(conversation: list[dict[str, str]]) -> str:
    return "\ud800"


def tool(conversation: list[dict[str, str]]) -> dict[str, str]:
    return {"role": "tool", "content": "7"}


class Counting:
    """A class: made once with the options, called for every turn."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, conversation: list[dict[str, str]], turn: int) -> str | None:
        return str(turn) if turn <= self.most else None


def interrupted(conversation: list[dict[str, str]], turn: int) -> str | None:
    """As ``twice``, but broken while there is the file that the environment names."""
    if turn == 2 and os.path.exists(os.environ.get("ENVIRONMENT_FLAG", "")):
        raise RuntimeError("out of order")
    return twice(conversation, turn)
