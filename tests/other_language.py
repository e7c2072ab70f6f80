"""Another language of the embedded instructions' kind: other words, another grammar, other authors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from data.stories import Language, read_language

OTHER: dict[str, Any] = {
    "tones": {
        "hot": {"ADJ": [["spicy"], ["fiery"]], "ADV": [["warmly"], ["burningly"]]},
        "cold": {"ADJ": [["icy"], ["frosty"]], "ADV": [["coolly"], ["freezingly"]]},
    },
    "slots": {"COOK": ["ann", "bob", "cy"], "DISH": ["soup", "pie", "stew", "cake"]},
    "counts": {"one": 1, "two": 2},
    "words": {"MAKE": [["cooked"], ["served"]]},
    "sentences": {"dish": "COOK MAKE a ADJ DISH", "how": "ADV COOK MAKE it"},
    "closing": "enjoy",
    "reward": {
        "tone": 3,
        "COOK": 2,
        "DISH": 2,
        "count": 1,
        "grammar": 1,
        "variety": 0.5,
        "closing": 0.5,
    },
    "authors": {
        "chef": {
            "obeys": 0.9,
            "favourite": 0.5,
            "dialect": [0.2, 0.8],
            "broken": 0.05,
            "counts": 0.9,
            "closes": 0.9,
            "repeats": 0.05,
            "sentences": {"dish": 2, "how": 1},
        },
        "guest": {
            "obeys": 0.3,
            "favourite": 0.5,
            "dialect": [0.8, 0.2],
            "broken": 0.3,
            "counts": 0.3,
            "closes": 0.3,
            "repeats": 0.3,
            "sentences": {"dish": 1, "how": 1},
        },
    },
    "favourites": 2,
    "mixtures": {"table": {"chef": 0.5, "guest": 0.5}},
}


def write_other(path: Path) -> Path:
    path.write_text(yaml.safe_dump(OTHER, sort_keys=False))
    return path


@cache
def kitchen() -> Language:
    with TemporaryDirectory() as folder:
        return read_language(str(write_other(Path(folder, "kitchen.yaml"))))
