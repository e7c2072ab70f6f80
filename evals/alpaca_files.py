"""Read AlpacaEval's files of answers and judgements, and find the two files that the alpaca_eval library
takes from the hub.

An unreachable hub does not cause a long wait.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from common.errors import ConfigError, DataError, require
from common.files import lines_of

Row = dict[str, Any]
REPOSITORY = "tatsu-lab/alpaca_eval"
BASELINE, GAMED = "alpaca_eval_gpt4_baseline.json", "df_gamed.csv"
"""BASELINE has the baseline's answers to the 805 instructions, GAMED the instructions' difficulties with the
judgements of two models that game length."""
REACHED_WITHIN_S = 3.0
"""Seconds to wait for the hub to respond before doing without it; its own client would try for half a
minute."""
_NAMED = 3
"""Largest number of bad rows that an error names."""


def read_rows(key: str, path: Path, texts: Sequence[str]) -> list[Row]:
    """Return the objects of a JSON list (or of JSON lines), each with a string under every key in ``texts``.

    Raises ConfigError for a missing file, and DataError for a file that cannot be read or has other rows.
    ``key``: the setting that names the file, for error messages.
    """
    require(path.is_file(), key, path, "there is no such file")
    try:
        content = path.read_text(encoding="utf-8")
        rows = (
            [json.loads(line) for line in lines_of(content) if line.strip()]
            if path.suffix == ".jsonl"
            else json.loads(content)
        )
    except ValueError as error:
        raise DataError(f"{key}={path}: is no JSON ({error})") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{key}={path}: must be a list of objects with {', '.join(texts)}, and has none")
    bad = [f"row {i}: {problem}" for i, row in enumerate(rows) if (problem := _problem(row, texts))]
    if bad:
        raise DataError(
            f"{key}={path}: {len(bad)} of {len(rows)} rows cannot be used; {'; '.join(bad[:_NAMED])}"
        )
    return rows


def _problem(row: Any, texts: Sequence[str]) -> str | None:
    if not isinstance(row, dict):
        return "is no object"
    missing = [name for name in texts if not isinstance(row.get(name), str)]
    return f"has no text under {', '.join(missing)}" if missing else None


def read_outputs(key: str, path: Path) -> list[Row]:
    """Return answers in AlpacaEval's format: one per instruction, all from the same generator.

    Raises ConfigError, DataError."""
    rows = read_rows(key, path, ("instruction", "output", "generator"))
    generators = sorted({row["generator"] for row in rows})
    if len(generators) > 1:
        raise DataError(
            f"{key}={path}: answers of one model are judged, these are of {len(generators)}: "
            f"{', '.join(generators[:_NAMED])}"
        )
    seen: dict[str, int] = {}
    twice = [
        f"rows {seen[row['instruction']]} and {i}"
        for i, row in enumerate(rows)
        if seen.setdefault(row["instruction"], i) != i
    ]
    if twice:
        raise DataError(
            f"{key}={path}: one answer an instruction, {len(twice)} are there again: "
            f"{'; '.join(twice[:_NAMED])}"
        )
    return rows


def read_annotations(path: Path) -> list[Row]:
    """Return judgements of one model against one baseline, as alpaca_eval writes them.

    A ``preference`` that is not a number within [1, 2] (0 is an old way to write a tie) marks a failed
    judgement. Such rows are kept, and the library leaves them out of its counts. Raises ConfigError,
    DataError.
    """
    key = "alpacaeval.annotations"
    rows = read_rows(key, path, ("instruction", "output_1", "output_2"))
    for name in ("generator_1", "generator_2"):
        generators = sorted({str(row.get(name)) for row in rows})
        if len(generators) > 1:
            raise DataError(
                f"{key}={path}: one model against one baseline is rated; {name} is "
                f"{', '.join(generators[:_NAMED])}"
                f"{' …' if len(generators) > _NAMED else ''}"
            )
    wrong = [
        f"row {i}: {row.get('preference')!r}"
        for i, row in enumerate(rows)
        if "preference" not in row
        or not (
            row["preference"] is None
            or (isinstance(row["preference"], int | float) and not isinstance(row["preference"], bool))
        )
    ]
    if wrong:
        raise DataError(
            f"{key}={path}: {len(wrong)} of {len(rows)} rows have no preference that is a number or null; "
            f"{'; '.join(wrong[:_NAMED])}"
        )
    if not any(map(judged, rows)):
        raise DataError(f"{key}={path}: none of its {len(rows)} judgements counts: there is nothing to rate")
    return rows


def judged(row: Row) -> bool:
    """Return whether the library counts the row's preference."""
    value = row.get("preference")
    return value is not None and (value == 0 or 1 <= value <= 2)


def aligned(outputs: Sequence[Row], reference: Sequence[Row], key: str, value: Any) -> None:
    """Raise ConfigError unless every answer's instruction is in the reference, character for character.

    The library would drop any other answer."""
    known = {row["instruction"] for row in reference}
    strange = [row["instruction"] for row in outputs if row["instruction"] not in known]
    require(
        not strange,
        key,
        value,
        f"{len(strange)} of {len(outputs)} instructions are none of alpacaeval.reference's, as "
        f"{strange[:1]}: "
        "answer its instructions as they are",
    )


def hub_file(name: str) -> Path | str:
    """Return the path of a file of the library's data set in the hub's cache, or why it is not available.

    A missing file is downloaded to the cache. An unreachable hub is given up after REACHED_WITHIN_S."""
    cached = try_to_load_from_cache(REPOSITORY, name, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "0").upper() in (
        "1",
        "TRUE",
        "YES",
        "ON",
    ):
        return f"{name} of {REPOSITORY} is not in the hub's cache, and the hub is not asked (HF_HUB_OFFLINE)"
    try:
        request = urllib.request.Request(
            f"{constants.ENDPOINT}/datasets/{REPOSITORY}/resolve/main/{name}", method="HEAD"
        )
        urllib.request.urlopen(request, timeout=REACHED_WITHIN_S).close()
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset", etag_timeout=REACHED_WITHIN_S))
    except (OSError, HfHubHTTPError) as error:  # URLError and HTTPError are OSErrors
        reason = getattr(error, "reason", None) or error
        return f"{name} of {REPOSITORY} is not in the hub's cache, and {constants.ENDPOINT} does not give it ({reason})"  # noqa: E501


def reference_path(given: str | None) -> Path:
    """Return the file of the baseline's answers. Raises ConfigError where it is not available."""
    path_or_problem = Path(given) if given is not None else hub_file(BASELINE)
    if isinstance(path_or_problem, str):
        raise ConfigError(
            "alpacaeval.reference",
            None,
            f"{path_or_problem}; fetch it where there is a network and give its path",
        )
    return path_or_problem


def difficulty_path(given: str | None) -> Path | str:
    """Return the file that the length-controlled win rate needs, or why it is not available.

    Raises ConfigError if the given file does not exist."""
    if given is not None:
        require(
            Path(given).is_file(),
            "alpacaeval.difficulty",
            given,
            f"there is no such file; it is df_gamed.csv of the hub's data set {REPOSITORY}",
        )
        return Path(given)
    return hub_file(GAMED)
