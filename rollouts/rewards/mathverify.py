"""Comparison of mathematical answers by math-verify. This code runs only in worker processes, which are
killed if it does not return. math-verify's own time limit is a ``signal.alarm``, which works on the main
thread only and otherwise makes every verdict a 0."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rollouts.rewards.base import Missing

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LAST_LINE = re.compile(
    r"(?:^|\n)[ \t*]*(?:A|(?:the +)?(?:final +)?answer(?: +is)?)[ \t*]*:[ \t*]*(\S[^\n]*?)[ \t*]*\s*$",
    re.IGNORECASE,
)
"""A last line that says what it is: "A: 18", "**Final answer:** 18"."""
_ANCHORS = ("$", "\\boxed", "\\(", "\\[")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|operatorname)\w*\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_SYMBOL = re.compile(r"[a-zA-Z^=()\[\]]")
_LABEL = re.compile(r"=|:\s|\n")
"""What may stand before the formula that ends a text: "x = 5", "A: 5", another line."""
_OTHER_SCRIPT = r"[\u0400-\u1eff\u2c00-\ud7ff\uf900-\uffee]"
"""Letters and punctuation of scripts but Latin and Greek; their digits are turned into 0 to 9 before."""
_BESIDE = re.compile(rf"(?<={_OTHER_SCRIPT})(?=[-\da-zA-Z$])|(?<=[\da-zA-Z%])(?={_OTHER_SCRIPT})")
_UNIT = re.compile(r"(?<=\d)[\s*]*((?:[^\W\d_]|°)(?:[^\W\d_]|[^\w\\$%=+,;<>|-]|(?<=[\^{])-|(?<=[\^{-])\d)*)$")
"""What may be a unit behind the number that ends a text: km/h, m^2, s^{-1}."""
_LETTERS = re.compile(r"[^\W\d_]+")
_NO_MATHEMATICS = re.compile(r"(?=.*[^\W\d_]{3}|\W*[A-Z]\W*$|\([a-z]\)$)[^\d\\$^_=+*/<>{}|]+", re.DOTALL)
"""A reference that is a word, or a letter to choose: yes, Paris, B, (b)."""
_SAYS = re.compile(
    r"\b(?:answer|option|choice)(?: +is)?(?: +option)?\b[ *:]*(\S.*)|\*\*([^*]+)\*\*\W*$", re.IGNORECASE
)
_CHOICE = re.compile(r"\W*([a-zA-Z])(?:[).:,*]|\W*$)")
"""An answer that begins with a letter to choose: (B), B: 12 apples."""
_ARTICLE = re.compile(r"^(?:a|an|I)\s+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOXED_NUMBER = re.compile(r"\s*-?[\d.]+\s*%?\s*")
_RUN = re.compile(r"\d[\d.,]*\d")
"""Digits with points and commas between them: one number, or several."""
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"\d+,\d+")
_SPACED = re.compile(r"(?<![\d.,])([1-9]\d{0,2}) (?=\d{3}(?: \d{3})*\d)")
"""Text that math-verify reads as thousands separated by spaces, although one group has more than three
digits."""


def load(_: None) -> Callable[[tuple[str | None, str]], float | Missing]:
    """Return ``check`` after importing math-verify. Raises ImportError if it is not installed."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it warns at every call that its time limit is off
    return check


def check(task: tuple[str | None, str]) -> float | Missing:
    """Return 1.0 if the completion's final answer equals the reference answer, else 0.0 (also if there is no
    answer).

    ``task``: (reference answer, completion). The result is Missing if there is no reference or it cannot be
    read, because that is not the completion's fault. Exceptions of the comparison are left to the caller,
    which treats them as no verdict too.
    """
    from math_verify import verify

    reference, completion = task
    if reference is None:
        return Missing("the prompt has no reference answer")
    answer, expected = (final_answer(_legible(text)) for text in (completion, reference))
    if _plain(answer) == _plain(expected) and _plain(answer):
        return 1.0
    if _NUMBER.fullmatch(_plain(answer)) and _NUMBER.fullmatch(_plain(expected)):
        return float(float(_plain(answer)) == float(_plain(expected)))
    verdict: float | Missing = 0.0
    if _NO_MATHEMATICS.fullmatch(words := _TEXT.sub(r"\1", expected)):
        verdict = _same_words(words, answer)
        if verdict == 1.0 or _NO_MATHEMATICS.fullmatch(answer):
            return verdict
    gold = _parsed(expected, whole=True)
    if not gold:
        return Missing("the reference answer cannot be read")
    answers = [
        expression
        for expression in _parsed(answer)
        if {_kind(expression), _kind(gold[0])} != {"list", "tuple"}
    ]
    right = bool(answers) and verify(gold, answers, timeout_seconds=None, raise_on_error=True)
    return 1.0 if right else verdict


def final_answer(text: str) -> str:
    """Return the part of ``text`` that gives the answer: the last ``<answer>`` block, else what follows the
    last ``####`` (GSM8K), else what a last line calls the answer ("A: 18"), else a number in a box, with its
    unit or per cent sign, else all of it. Amounts of money before that line would make math-verify read the
    text between two dollar signs as a formula."""
    blocks = _ANSWER.findall(text)
    if blocks:
        return str(blocks[-1]).strip()
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip()
    named = _LAST_LINE.search(text)
    if named is None and _BOXED_NUMBER.fullmatch(_without_unit(boxed := _boxed(text))):
        return boxed
    return (named[1] if named else text).strip()


def _boxed(text: str) -> str:
    """Return the content of the last box; "" without one."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    return str(extract_boxed_content(text)) if "\\boxed" in text else ""


def _legible(text: str) -> str:
    """Return a text as math-verify finds numbers in it: the digits of every script as 0 to 9, a space between
    them and letters of scripts but Latin and Greek, and per cent without LaTeX's backslash."""
    return _BESIDE.sub(" ", re.sub(r"\d", lambda digit: str(int(digit[0])), text)).replace("\\%", "%")


def _same_words(expected: str, answer: str) -> float | Missing:
    """Compare a reference that is no mathematics with the last line of an answer: with what is boxed, bold or
    called the answer there, or with all of it. Missing where it is not plainly the reference, nor another."""
    line = (_TEXT.sub(r"\1", answer).strip() or "-").splitlines()[-1]
    boxed, named = _boxed(line), _SAYS.search(line)
    says = boxed or (named[1] or named[2] if named else line)
    wanted, found = (_LETTERS.findall(text.casefold()) for text in (expected, says))
    if found != wanted and len(expected.strip("(.) ")) == 1 and (choice := _CHOICE.match(says)):
        found = [choice[1].casefold()]
    if found == wanted:
        return 1.0
    plain = boxed or named or len(found) == len(wanted) == 1
    if plain and found and not set(wanted) <= set(found):
        return 0.0
    return Missing("the reference answer is no mathematics, and the answer is not plainly it")


def _kind(expression: Any) -> str:
    """Return "list" for numbers in any order, "tuple" for a point or an interval, and "" for anything else.
    math-verify compares a list with a tuple as if both were sets."""
    from sympy import FiniteSet, Interval, Tuple
    from sympy.core.relational import Relational

    if isinstance(expression, FiniteSet):
        return "" if any(isinstance(one, Relational) for one in expression) else "list"
    return "tuple" if isinstance(expression, Interval | Tuple) else ""


def _plain(text: str) -> str:
    """Return a number without dollar signs, thousands separators and the full stop of a sentence."""
    whole = text.strip().strip("$").rstrip(".")
    return _RUN.sub(
        lambda run: run[0].replace(",", "") if _THOUSANDS.fullmatch(run[0]) else run[0], whole
    ).strip()


def _parsed(text: str, whole: bool = False) -> list[Any]:
    """Return math-verify's readings of an answer, which may be LaTeX or not, between dollar signs or bare.

    Without dollar signs, a ``whole`` answer without words, and a formula that is or ends the text, are read
    as LaTeX and as nothing else: the last number of 288 pi or of a polynomial is another answer. Any other
    text is read as LaTeX and as prose, of which the last number counts."""
    from math_verify import LatexExtractionConfig, parse

    text = _without_unit(text.replace("\\$", ""))
    if any(anchor in text for anchor in _ANCHORS):
        return parse(_SPACED.sub(r"\1  ", _RUN.sub(_spread, text)), parsing_timeout=None)
    words = _WORD.search(_COMMAND.sub(" ", _TEXT.sub(" ", text)))
    formula, boxed = text if whole and not words and "%" not in text else _formula(text), []
    if len(shown := formula or text) < 200:
        boxed = parse(f"\\boxed{{{shown}}}", [LatexExtractionConfig()], parsing_timeout=None)
        if boxed and formula:
            return boxed
    return boxed + parse(_SPACED.sub(r"\1  ", _RUN.sub(_one_number, text)), parsing_timeout=None)


def _without_unit(text: str) -> str:
    """Return a text that a number with a unit ends, up to the number: 34 m/s is 34, and 34 x is not. Any word
    may be a unit, a single letter if it is one of the units of sympy."""
    from sympy.physics import units

    unit = _UNIT.search(text)
    if unit is None or re.search("[a-zA-Z]", _formula(_LABEL.split(before := text[: unit.start()])[-1])):
        return text
    letters = _LETTERS.findall(unit[1])
    known = all(len(one) > 1 or isinstance(getattr(units, one, None), units.Quantity) for one in letters)
    return before if known else text


def _formula(text: str) -> str:
    """Return the formula that a text is, or that ends it behind words; "" if that is a number or nothing."""
    bare = _COMMAND.sub(lambda match: " " * len(match[0]), text)
    behind = max((word.end() for word in _WORD.finditer(bare)), default=0)
    formula = (_LABEL.split(text[behind:])[-1] if behind else text).strip(" \n.:,;*")
    formula = _ARTICLE.sub("", formula) if behind else formula
    balanced = all(
        formula.count(left) == formula.count(right) for left, right in (("{", "}"), ("(", ")"), ("[", "]"))
    )
    return formula if balanced and _SYMBOL.search(formula) else ""


# Outside LaTeX, math-verify reads the longest prefix of a ``_RUN`` that is a number: 2125 in 2,1251, and 1.2
# in 1,2,3.


def _one_number(run: re.Match[str]) -> str:
    """Return the run, with a decimal point for a decimal comma, if it is one number. If it is several
    numbers, return a space, because none of them alone is the answer."""
    text = run[0]
    if "," not in text or _THOUSANDS.fullmatch(text):
        return text
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else " "


def _spread(run: re.Match[str]) -> str:
    """Put spaces between the numbers of a run within LaTeX, unless it is one number with thousands
    separators. In LaTeX, a list with spaces is read like one without."""
    text = run[0]
    return text if "," not in text or _THOUSANDS.fullmatch(text) else text.replace(",", ", ")
