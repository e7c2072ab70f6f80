r"""A calculator environment, which answers ``<<12*7>>`` in the policy's turn with ``84``.

The marks of a call are a regular expression, so that a model whose tokenizer has no such marks can call the
calculator too. With ``environment.role=assistant``, ``environment.stops=["="]`` and
``environment.options.call=([0-9+]+)=$`` the value of a sum is filled in after each ``=``, which is how
calculation annotations are sampled in Cobbe et al. 2021 (arXiv 2110.14168).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MOST_CHARACTERS = 200
"""Length of the longest expression that is computed. There are no powers, so within this limit no expression
takes long."""

_PAIRS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LEADING_ZEROS = re.compile(r"(?<![\d._])0+(?=\d)")
_THOUSANDS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?![\w,])")
_DOLLAR = re.compile(r"(?<![\w.,])\$")
CALL = "<<(.+?)>>"


def calculate(conversation: list[dict[str, str]], *, call: str = CALL, failed: str = "error") -> str | None:
    """Return the value of the last call in the policy's last turn. Without a call return None, which ends the
    conversation. ``call``: a regular expression whose first group is the expression. ``failed``: the answer
    if the expression has no value."""
    text = conversation[-1]["content"]
    if call == CALL:  # each << of a line without a >> behind it would be compared with the rest of the line
        text = "\n".join(line[: line.rfind(">>") + 2] if ">>" in line else "" for line in text.split("\n"))
    calls = list(re.finditer(call, text))
    if not calls:
        return None
    try:
        return shown(value(calls[-1][1]))
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return failed


def value(expression: str) -> Fraction:
    """Return the exact value of an expression of numbers, + - * / and brackets. Raises SyntaxError,
    ValueError, ZeroDivisionError."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    if "#" in expression:
        raise ValueError("the rest would be a comment")
    plain = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), _DOLLAR.sub("", expression))
    plain = _LEADING_ZEROS.sub("", plain.strip())
    return _value(ast.parse(plain, mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _PAIRS:
        return _PAIRS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    raise ValueError("only numbers, + - * / and brackets are computed")


def shown(number: Fraction) -> str:
    """Return a whole number as it is, and any other number with up to six decimals."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.6f}".rstrip("0").rstrip(".")
