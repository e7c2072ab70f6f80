"""Equality of mathematical answers by math-verify. Runs in worker processes alone, which are killed when it
does not return: its own time limit is a ``signal.alarm``, which works on the main thread only and otherwise
makes every verdict a 0."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rollouts.rewards.base import Missing

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANCHORS = ("$", "\\boxed", "\\(", "\\[")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_RUN = re.compile(r"\d[\d.,]*\d")
"""Digits with points and commas between them: one number, or several."""
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"\d+,\d+")
_SPACED = re.compile(r"(?<![\d.,])([1-9]\d{0,2}) (?=\d{3}(?: \d{3})*\d)")
"""What math-verify takes for thousands separated by spaces, though a group has more than three digits."""


def load(_: None) -> Callable[[tuple[str | None, str]], float | Missing]:
    """``check``, once math-verify is there. Raises ImportError."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it warns at every call that its time limit is off
    return check


def check(task: tuple[str | None, str]) -> float | Missing:
    """1.0 where the completion's final answer equals the reference answer, 0.0 where it does not or where
    there is none.

    ``task``: (reference answer, completion). Missing where the reference is none, or cannot be read: that is
    not the completion's fault. What the comparison raises is left to the caller, for whom it is no verdict
    either.
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
    """What is given as the answer: the last ``<answer>`` block, else what follows the last ``####`` (GSM8K),
    else all of it."""
    blocks = _ANSWER.findall(text)
    if blocks:
        return str(blocks[-1]).strip()
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else text.strip()


def _plain(text: str) -> str:
    """Numbers as people write them: without dollar signs, thousands separators and the full stop of a
    sentence."""
    whole = text.strip().strip("$").rstrip(".")
    return _RUN.sub(
        lambda run: run[0].replace(",", "") if _THOUSANDS.fullmatch(run[0]) else run[0], whole
    ).strip()


def _parsed(text: str) -> list[Any]:
    """math-verify's readings of an answer, which is LaTeX or not, between dollar signs or bare."""
    from math_verify import LatexExtractionConfig, parse

    if any(anchor in text for anchor in _ANCHORS):
        return parse(_SPACED.sub(r"\1  ", _RUN.sub(_spread, text)), parsing_timeout=None)
    words = parse(_SPACED.sub(r"\1  ", _RUN.sub(_one_number, text)), parsing_timeout=None)
    if len(text) < 200:
        as_latex = [LatexExtractionConfig()]  # what is no LaTeX is read among the words
        boxed = parse(f"\\boxed{{{text}}}", as_latex, parsing_timeout=None)
        if boxed:
            return boxed + words
    return words


# Outside of LaTeX math-verify takes the longest beginning of such a run that it can read as a number: 2125 of
# 2,1251, and 1.2 of 1,2,3.


def _one_number(run: re.Match[str]) -> str:
    """The run if it is one number, with a decimal point for a decimal comma; of several, nothing: no one of
    them is the answer."""
    text = run[0]
    if "," not in text or _THOUSANDS.fullmatch(text):
        return text
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else " "


def _spread(run: re.Match[str]) -> str:
    """The same among LaTeX, to which a list with spaces is what it is without them."""
    text = run[0]
    return text if "," not in text or _THOUSANDS.fullmatch(text) else text.replace(",", ", ")
