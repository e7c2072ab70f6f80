"""Reward functions as users write them, good and bad, for worker processes to import."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np


def lengths(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(c[0]["content"])) for c in completions]


def sees_others(completions, difficulty, tags=None, missing=None, **rest):
    assert all(isinstance(c, str) for c in completions) and missing is None and rest["prompts"]
    return [float(d * len(t)) for d, t in zip(difficulty, tags, strict=True)]


def none_for_long(completions, **columns):
    return [None if len(c[0]["content"]) > 20 else 3.0 for c in completions]


def plain_lengths(completions):
    return [len(c) for c in completions]


async def slow_lengths(completions, **columns):
    return np.array([float(len(c[0]["content"])) for c in completions], dtype=np.float32)


def sees_columns(completions, prompts, reference, answer, solution, **rest):
    assert all(p[-1]["role"] == "user" for p in prompts) and not rest
    return [float(r) for r in reference]


def by_word(completions, **columns):
    """Answers as the first completion of its batch says."""
    word = completions[0][0]["content"]
    n = len(completions)
    if word == "raise":
        raise ValueError("the reward is broken")
    if word == "hang":
        time.sleep(60)
    if word == "die":
        print("about to die", flush=True)
        os._exit(1)
    return {
        "none": [None] * n,
        "nan": [float("nan")] * n,
        "short": [1.0] * (n - 1),
        "string": "1" * n,
    }.get(word, [1.0] * n)


def talks(completions, **columns):
    print("scoring", len(completions))
    text = completions[0][0]["content"]
    return [len(json.loads(text)) for _ in completions]
