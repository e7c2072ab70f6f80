"""The sums' pairs with one thing changed, to ask what turns humanline's sign there: data for ``data.source``.

``data.subset`` names the change; held-out prompts and pairs stay as they are.

| ``data.subset`` | the training pairs |
|---|---|
| ``noise`` | a fifth of them the wrong way round, as on stories |
| ``short`` | answers are the sum alone: 2 or 3 tokens in place of about 17 |
| ``one`` | written anew: the right answer in columns, the wrong one in columns with its own wrong sum |
| ``three`` | as ``one``, each in one of three forms (columns, tens and units apart, the sum alone) |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from common.errors import require
from config.schema_data import DataConfig
from data.adder import CLEAN, adder_pairs, demonstration, operands
from data.rows import Loaded
from data.types import Completion, Group

REVERSED = 0.2
"""Share of pairs that ``noise`` turns round; on stories the judge has 21 % the wrong way round."""


def noise(group: Group, rng: random.Random) -> Group:
    """Return the pair, turned round in ``REVERSED`` of the draws."""
    return replace(group, rewards=group.rewards[::-1]) if rng.random() < REVERSED else group


def short(group: Group, rng: random.Random) -> Group:
    """Return the pair of sums without their steps."""
    return _pair(group, *sums(group))


def one(group: Group, rng: random.Random) -> Group:
    """Return a pair in columns, right steps first, whose sums differ."""
    _, wrong = sums(group)
    text = demonstration(*operands(group.prompt), CLEAN, rng)
    return _pair(group, text, _ending(text, wrong))


def three(group: Group, rng: random.Random) -> Group:
    """Return the same pair with each answer in one of three forms."""
    forms = replace(CLEAN, decompose=1 / 3, direct=1 / 3)
    _, wrong = sums(group)
    texts = [demonstration(*operands(group.prompt), forms, rng) for _ in range(2)]
    return _pair(group, texts[0], _ending(texts[1], wrong))


CHANGES: dict[str, Callable[[Group, random.Random], Group]] = {
    change.__name__: change for change in (noise, short, one, three)
}


def sums(group: Group) -> tuple[str, str]:
    """Return (the right sum, the rejected answer's sum); ten more than the right one if that is right too."""
    right = str(sum(operands(group.prompt)))
    worst = min(range(len(group.rewards)), key=group.rewards.__getitem__)
    wrong = (group.completions[worst].text or "").rpartition(";")[2]
    return right, wrong if wrong.isdigit() and wrong != right else str(int(right) + 10)


def _ending(text: str, total: str) -> str:
    steps, semicolon, _ = text.rpartition(";")
    return f"{steps}{semicolon}{total}"


def _pair(group: Group, right: str, wrong: str) -> Group:
    return Group(group.prompt, (Completion(text=right), Completion(text=wrong)), (10.0, 0.0))


def pairs(config: DataConfig, split: str) -> Loaded:
    """Return the embedded pairs of sums, those of ``train`` changed as ``data.subset`` says. Raises
    ConfigError, DataError."""
    known = config.subset in CHANGES
    require(known, "data.subset", config.subset, f"name what is changed: {', '.join(CHANGES)}")
    loaded = adder_pairs(config, split)
    if split != "train":
        return loaded
    change = CHANGES[config.subset or ""]
    changed = [change(g, random.Random(f"{config.subset}/{g.prompt.id}")) for g in loaded.groups]
    return replace(loaded, groups=changed, origin=f"{loaded.origin}, changed: {config.subset}")
