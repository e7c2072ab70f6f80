"""Equality of mathematical answers by math-verify. Runs in worker processes alone, which are killed when it does not return: its
own time limit is a ``signal.alarm``, which works on the main thread only and otherwise makes every verdict a 0."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rollouts.rewards.base import Missing

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANCHORS = ("$", "\\boxed", "\\(", "\\[")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def load(_: None) -> Callable[[tuple[str | None, str]], float | Missing]:
    """``check``, once math-verify is there. Raises ImportError."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it warns at every call that its time limit is off
    return check


def check(task: tuple[str | None, str]) -> float | Missing:
    """1.0 where the completion's final answer equals the reference answer, 0.0 where it does not or where there is none.

    ``task``: (reference answer, completion). Missing where the reference is none, or cannot be read: that is not the completion's
    fault. What the comparison raises is left to the caller, for whom it is no verdict either.
    """
    from math_verify import verify

    reference, completion = task
    if reference is None:
        return Missing("the prompt has no reference answer")
    answer, expected = final_answer(completion), final_answer(reference)
    if _plain(answer) == _plain(expected) and _plain(answer):
        return 1.0
    if _NUMBER.fullmatch(_plain(answer)) and _NUMBER.fullmatch(_plain(expected)):
        return float(float(_plain(answer)) == float(_plain(expected)))
    gold = _parsed(expected)
    if not gold:
        return Missing("the reference answer cannot be read")
    answers = _parsed(answer)
    return float(bool(answers) and bool(verify(gold, answers, timeout_seconds=None, raise_on_error=True)))


def final_answer(text: str) -> str:
    """What is given as the answer: the last ``<answer>`` block, else what follows the last ``####`` (GSM8K), else all of it."""
    blocks = _ANSWER.findall(text)
    if blocks:
        return str(blocks[-1]).strip()
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else text.strip()


def _plain(text: str) -> str:
    """Numbers as people write them: without dollar signs, thousands separators and the full stop of a sentence."""
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.strip().strip("$").rstrip(".")).strip()


def _parsed(text: str) -> list[Any]:
    """math-verify's readings of an answer, which is LaTeX or not, between dollar signs or bare."""
    from math_verify import parse

    if not any(anchor in text for anchor in _ANCHORS) and len(text) < 200:
        boxed = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        if boxed:
            return boxed + parse(text, parsing_timeout=None)
    return parse(text, parsing_timeout=None)
