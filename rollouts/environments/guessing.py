"""A guessing game in which the policy guesses the prompt's reference answer, a whole number. It is told
``higher`` or ``lower`` until it is right."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")


def play(
    conversation: list[dict[str, str]],
    reference: str | None,
    *,
    higher: str = "higher",
    lower: str = "lower",
    unreadable: str = "a number",
) -> str | None:
    """Return the reply to the guess in the last turn, or None, which ends the conversation, if the guess is
    right. Raises ValueError for a prompt whose reference answer is not a whole number and so cannot be
    guessed."""
    if reference is None or not _NUMBER.fullmatch(reference.strip()):
        raise ValueError(f"the reference answer is {reference!r}, not a whole number")
    guess = guessed(conversation[-1]["content"])
    if guess is None:
        return unreadable
    secret = int(reference)
    return None if guess == secret else higher if guess < secret else lower


def guessed(text: str) -> int | None:
    """Return the last whole number in ``text`` that has at most 18 digits; None if there is none."""
    numbers = [number for number in _NUMBER.findall(text) if len(number) <= 18]
    return int(numbers[-1]) if numbers else None


def reward(
    completions: list[list[dict[str, str]]], prompts: list[list[dict[str, str]]], reference: list[Any]
) -> list[float | None]:
    """Return one over the number of guesses if the last guess is right, else 0; None without a reference
    answer. This is a reward function (``reward.function.path``), and ``prompts`` are the conversations before
    the last guess."""
    return [
        None if secret is None else _worth(guess[-1]["content"], before, str(secret))
        for guess, before, secret in zip(completions, prompts, reference, strict=True)
    ]


def _worth(guess: str, before: list[dict[str, str]], secret: str) -> float:
    guesses = 1 + sum(turn["role"] == "assistant" for turn in before)
    readable = _NUMBER.fullmatch(secret.strip()) is not None
    return 1 / guesses if readable and guessed(guess) == int(secret) else 0.0
