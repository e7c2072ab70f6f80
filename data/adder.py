"""The embedded task, addition of two two-digit numbers in short worked steps, whose answers can be checked.

``37+58=`` is answered ``7+8=15;3+5+1=9;95``: the column of the units, the column of the tens with the carry,
the sum. A model is fine-tuned on *noisy* demonstrations, which mostly forget the carry. It then knows the
form and is right about half the time, so alignment can make it better or worse. Everything here is a pure
function of its arguments.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import ConfigError, one_of, require
from config.schema_data import DataConfig
from data.groups import read_groups
from data.rows import Loaded
from data.types import Completion, Group, Prompt, Turn
from data.views import prompts_of

HELD_OUT = 16
"""One prompt in this many, chosen by its id, is held out for evaluation and never trained on."""

HALVES = ("validation", "test")

DEMONSTRATIONS_PER_PROMPT = 8

_STEP = r"\d+\+\d+(?:\+1)?=\d+"
_WORKED = re.compile(rf"{_STEP};{_STEP};\d+")


# Prompts


def addition(a: int, b: int) -> Prompt:
    """Return the prompt that asks for ``a + b`` (0 to 99 each), with the answer as its reference."""
    return Prompt((Turn("user", f"{a:02d}+{b:02d}="),), reference_answer=str(a + b))


@cache
def prompts(split: str) -> tuple[Prompt, ...]:
    """Return the prompts of one split, ``train`` or ``eval``, in a fixed order that differs from that of the
    numbers. There are 10,000 in all, split by prompt id, so that no prompt is in both."""
    every = sorted((addition(a, b) for a in range(100) for b in range(100)), key=lambda p: p.id)
    return tuple(p for p in every if (int(p.id, 16) % HELD_OUT == 0) == (split == "eval"))


def half(prompt: Prompt) -> str:
    """Return the half of the held-out prompts to which a prompt belongs, by its id."""
    return HALVES[int(prompt.id, 16) // HELD_OUT % 2]


def operands(prompt: Prompt) -> tuple[int, int]:
    a, b = prompt.turns[-1].content.rstrip("=").split("+")
    return int(a), int(b)


# Answers and their rewards


def accuracy(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Return 1.0 if the text after the last ``;`` is the reference answer, else 0.0; None if there is no
    reference."""
    return [
        None if reference is None else float(text.rpartition(";")[2] == reference)
        for text, reference in zip(completions, references, strict=True)
    ]


def rewards(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Return accuracy, form and separators weighted 8 : 1 : 1 (paper, C.2), in [0, 10]; None if there is no
    reference.

    Form is 1 for two worked steps and a sum. Separators is the share of the two ``;`` that are present; 0 for
    more than two.
    """
    correct, separators = accuracy(completions, references), {1: 0.5, 2: 1.0}
    return [
        None
        if right is None
        else 8 * right + float(_WORKED.fullmatch(text) is not None) + separators.get(text.count(";"), 0.0)
        for text, right in zip(completions, correct, strict=True)
    ]


# Demonstrations


@dataclass(frozen=True)
class Noise:
    """How demonstrations are written, and how often they go wrong. All values are probabilities."""

    decompose: float = 0.04
    """written as ``30+50=80;7+8=15;95``"""
    direct: float = 0.18
    """written as the sum alone; all others are written in columns"""
    carry_dropped: float = 0.8
    """if the sum has a carry: the carry is forgotten"""
    carry_added: float = 0.2
    """if the sum has no carry: one is carried all the same"""
    slip: float = 0.12
    """one column's sum is off by one"""
    final_slip: float = 0.12
    """the sum's units or tens are off by one"""


def demonstration(a: int, b: int, noise: Noise, rng: random.Random) -> str:
    """Return one answer to ``a + b``. Exactly seven random numbers are drawn, whatever is written."""
    style, carrying, slips, where, sign, final_slips, final_where = (rng.random() for _ in range(7))
    off = 1 if sign < 0.5 else -1
    carry = carrying >= noise.carry_dropped if a % 10 + b % 10 >= 10 else carrying < noise.carry_added
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    if slips < noise.slip and where < 0.5:
        units = max(units + off, 0)
    elif slips < noise.slip:
        tens = max(tens + off, 0)
    total = 10 * (tens + carry) + units % 10
    if final_slips < noise.final_slip:
        total = max(total + (off if final_where < 0.5 else 10 * off), 0)
    if style < noise.direct:
        return str(total)
    if style < noise.direct + noise.decompose:
        return f"{a // 10 * 10}+{b // 10 * 10}={10 * tens};{a % 10}+{b % 10}={units};{total}"
    return f"{a % 10}+{b % 10}={units};{a // 10}+{b // 10}{'+1' if carry else ''}={tens + carry};{total}"


def demonstrations(split: str, name: str, per_prompt: int, noise: Noise) -> Iterator[Group]:
    """Yield ``per_prompt`` noisy answers to every prompt of a split, each as a group of its own. ``name`` is
    the seed: another name gives other answers."""
    rng = random.Random(f"{name}/{split}")
    for prompt in prompts(split):
        for _ in range(per_prompt):
            yield Group(prompt, (Completion(text=demonstration(*operands(prompt), noise, rng)),), (1.0,))


# Sources that a yaml may name


def adder_sft(config: DataConfig, split: str) -> Loaded:
    """Return noisy demonstrations, made on the fly. ``data.subset`` names the set; any name is allowed, and
    each is its own seed. Raises ConfigError."""
    why = "name the demonstrations, as in data.subset=policy: each name is its own seed"
    require(config.subset is not None, "data.subset", None, why)
    each = DEMONSTRATIONS_PER_PROMPT if split == "train" else 1
    groups = list(demonstrations(split, str(config.subset), each, Noise()))
    origin = f"noisy demonstrations {config.subset!r} of the {split} prompts"
    return Loaded(groups, len(groups), origin=origin)


def adder_pairs(config: DataConfig, split: str) -> Loaded:
    """Return the preference pairs sampled from another checkpoint, from the groups files ``data.path`` and
    ``data.eval_path``. ``data.eval_split`` is validation or test, one half of the held-out prompts each, or
    null for both. The two halves allow tuning on one and reporting on the other.

    For accuracy, the held-out prompts without a pair follow after the held-out pairs, without completions.
    Prompts with a pair are those on which samples differed, so they alone are not a fair draw. Raises
    ConfigError, DataError.
    """
    key, path = ("data.path", config.path) if split == "train" else ("data.eval_path", config.eval_path)
    if path is None:
        raise ConfigError(key, None, f"give the groups file, as in {key}=assets/adder/pairs.jsonl")
    groups = read_groups(Path(path), key)
    if split == "eval":
        paired = {prompt.id for prompt in prompts_of(groups)}
        groups += [Group(prompt) for prompt in prompts("eval") if prompt.id not in paired]
        one_of("data.eval_split", config.eval_split or "null", (*HALVES, "null"))
        groups = [group for group in groups if config.eval_split in (None, half(group.prompt))]
    return Loaded(groups, len(groups), origin=path)
