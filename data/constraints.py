"""Short descriptions under constraints that a program can check, for any chat model (``data=constraints``).

A prompt names a topic and asks for two constraints of the kinds of IFEval (Zhou et al., 2023, arXiv
2311.07911), so that IFEval itself is the test on other prompts. A kind is here because a small model meets
it in 20 to 80 % of its tries (assets/constraints/rates.md): a prompt on which all samples score alike
teaches nothing. A prompt's reference answer says what its constraints are, as JSON, so that own prompts can
be scored too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import one_of
from config.schema_data import DataConfig
from data.groups import read_groups
from data.rows import Loaded
from data.types import Group, Prompt, Turn

TOPICS = Path("assets/constraints/topics.yaml")
PROMPTS = {"train": 1024, "validation": 128, "test": 128}
"""split -> number of prompts"""

ASKS = (
    "Write a few sentences about {}.",
    "Describe {}.",
    "Tell me about {}.",
    "Write a short paragraph about {}.",
    "What comes to mind when you think of {}?",
)


@dataclass(frozen=True)
class Constraint:
    """A kind of constraint. ``{}`` in the words that ask for it is its ``value``."""

    words: str
    values: tuple[Any, ...]
    """values that prompts ask for"""
    met: Callable[[str, Any], bool]
    """whether (an answer, a value) goes together"""
    about: str
    """what it constrains: two constraints of a prompt are about different things"""


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+(?:['’][A-Za-z]+)*", text)


def count_of(text: str, word: str) -> int:
    """Return how often a word of any signs stands in a text by itself."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


KINDS = {
    "words_at_most": Constraint(
        "Use at most {} words.", (20, 25, 30), lambda a, n: len(words_of(a)) <= n, "length"
    ),
    "words_at_least": Constraint(
        "Use at least {} words.", (35, 40, 45), lambda a, n: len(words_of(a)) >= n, "length"
    ),
    "include_word": Constraint(
        'Include the word "{}".',
        ("light", "silence", "friend", "window", "stone", "dream", "paper", "smile", "shadow", "voice"),
        lambda a, word: count_of(a, word) > 0,
        "keyword",
    ),
    "avoid_word": Constraint(
        'Do not use the word "{}".',
        ("it", "is", "with", "as"),
        lambda a, word: count_of(a, word) == 0,
        "avoided",
    ),
    "avoid_letter": Constraint(
        'Do not use the letter "{}".',
        ("j", "k", "v", "x"),
        lambda a, letter: letter.lower() not in a.lower(),
        "avoided",
    ),
    "no_comma": Constraint("Do not use any commas.", (None,), lambda a, _: "," not in a, "comma"),
    "first_word": Constraint(
        'Begin your answer with the word "{}".',
        ("Once", "Today", "Imagine", "Sometimes", "Every"),
        lambda a, word: re.match(rf"\W*?{re.escape(word)}(?!\w)", a, re.IGNORECASE) is not None,
        "start",
    ),
    "title": Constraint(
        "Start with a title in double angular brackets, such as <<title>>.",
        (None,),
        lambda a, _: re.match(r"\W*<<[^>\n]+>>", a) is not None,
        "start",
    ),
    "bullets": Constraint(
        "Use bullet points that start with *.",
        (None,),
        lambda a, _: re.search(r"^\s*\* ", a, re.M) is not None,
        "form",
    ),
    "digits": Constraint(
        "Include a number written in digits.", (None,), lambda a, _: re.search(r"\d", a) is not None, "digits"
    ),
}


# Prompts


@cache
def prompts(split: str) -> tuple[Prompt, ...]:
    """Return the prompts of ``train``, ``validation`` or ``test``, in a fixed order. No topic is in two
    splits."""
    topics = yaml.safe_load(TOPICS.read_text(encoding="utf-8"))[split]
    drawn: dict[str, Prompt] = {}
    rng = random.Random(f"constraints/{split}")
    while len(drawn) < PROMPTS[split]:
        one = prompt(rng.choice(topics), rng)
        drawn.setdefault(one.id, one)
    return tuple(drawn.values())


def prompt(topic: str, rng: random.Random) -> Prompt:
    """Return a prompt about ``topic`` with two constraints, drawn by ``rng``."""
    first, second = rng.sample(sorted(KINDS), 2)
    while KINDS[first].about == KINDS[second].about:
        second = rng.choice(sorted(KINDS))
    wanted = {name: rng.choice(KINDS[name].values) for name in (first, second)}
    sentences = [
        rng.choice(ASKS).format(topic),
        *(KINDS[name].words.format(value) for name, value in wanted.items()),
    ]
    return Prompt((Turn("user", " ".join(sentences)),), reference_answer=json.dumps(wanted))


# What answers are worth


def wanted_of(reference: str | None) -> dict[str, Any] | None:
    """Return the constraints that a reference answer names, as kind -> value; None if it names none, one
    that is not known, or a value that its kind cannot have: of another type than in ``KINDS``, or empty."""
    try:
        constraints = json.loads(reference or "")
    except ValueError:
        return None
    if not isinstance(constraints, dict) or not constraints or not constraints.keys() <= KINDS.keys():
        return None
    typed = (type(value) is type(KINDS[kind].values[0]) for kind, value in constraints.items())
    return constraints if all(typed) and "" not in constraints.values() else None


def met(answer: str, wanted: dict[str, Any]) -> dict[str, bool]:
    """Return whether an answer meets each of the constraints ``wanted``. An empty one meets none."""
    return {name: bool(answer.strip()) and KINDS[name].met(answer, value) for name, value in wanted.items()}


def all_met(completions: list[str], references: list[str | None]) -> list[float | None]:
    """Return 1.0 for an answer that meets all constraints, else 0.0; None where the reference names none.
    This is the verifier."""
    return [
        None if (wanted := wanted_of(reference)) is None else float(all(met(answer, wanted).values()))
        for answer, reference in zip(completions, references, strict=True)
    ]


# The source that a yaml names


def constrained(config: DataConfig, split: str) -> Loaded:
    """Return the prompts of a split, with the answers to them of the groups file ``data.path`` (for training)
    or ``data.eval_path``. With null there are prompts alone, which is enough for online training.
    ``data.eval_split`` is validation or test, or null for both.

    Raises ConfigError, DataError.
    """
    path = config.path if split == "train" else config.eval_path
    part = config.eval_split
    one_of("data.eval_split", part or "null", ("validation", "test", "null"))
    splits = ["train"] if split == "train" else [part] if part else ["validation", "test"]
    split_prompts = [one for name in splits for one in prompts(name)]
    if path is None:
        origin = f"prompts under constraints ({split})"
        return Loaded([Group(one) for one in split_prompts], len(split_prompts), origin=origin)
    by_id = {group.prompt.id: group for group in read_groups(Path(path))}
    groups = [by_id.get(one.id, Group(one)) for one in split_prompts]
    if split == "train":
        groups = [group for group in groups if group.completions]
    return Loaded(groups, len(groups), origin=path)
