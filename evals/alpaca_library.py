"""AlpacaEval's files of answers and judgements, and the alpaca_eval library's judge and win rates."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from common.errors import DataError, StoppedError, require
from common.files import lines_of, write_whole
from common.secrets import scrub_text
from config.schema_stages import AlpacaEvalConfig

Row = dict[str, Any]
REPOSITORY = "tatsu-lab/alpaca_eval"
BASELINE, GAMED = "alpaca_eval_gpt4_baseline.json", "df_gamed.csv"
"""The hub's files: the baseline's answers to the 805 instructions, and the instructions' difficulties."""


def read_rows(key: str, path: Path, texts: Sequence[str], of_one: Sequence[str]) -> list[Row]:
    """Return the objects of a JSON list (or of JSON lines), each with a string under every key in ``texts``,
    and all with the same value under each in ``of_one``. ``key`` is the setting that names the file. Raises
    ConfigError, DataError."""
    require(path.is_file(), key, path, "there is no such file")
    try:
        content = path.read_text(encoding="utf-8")
        lines = [line for line in lines_of(content) if line.strip()]
        rows = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else json.loads(content)
    except ValueError as error:
        raise DataError(f"{key}={path}: is no JSON ({error})") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{key}={path}: must be a list of objects with {', '.join(texts)}, and has none")
    bad = []
    for i, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        if missing := [name for name in texts if not isinstance(row.get(name), str)]:
            bad.append(f"row {i}: has no text under {', '.join(missing)}")
    if bad:
        why = "; ".join(bad[:3])
        raise DataError(f"{key}={path}: {len(bad)} of {len(rows)} rows cannot be used; {why}")
    for name in of_one:
        every = sorted({str(row.get(name)) for row in rows})
        if len(every) > 1:
            why = f"one model against one baseline is rated; {name} is {', '.join(every[:3])}"
            raise DataError(f"{key}={path}: {why}{' …' * (len(every) > 3)}")
    return rows


def read_outputs(key: str, path: Path) -> list[Row]:
    """Return answers in AlpacaEval's format: one per instruction, all from the same generator. Raises
    ConfigError, DataError."""
    rows = read_rows(key, path, ("instruction", "output", "generator"), ("generator",))
    if twice := len(rows) - len({row["instruction"] for row in rows}):
        raise DataError(f"{key}={path}: one answer an instruction, {twice} are there again")
    return rows


def read_annotations(path: Path) -> list[Row]:
    """Return judgements of one model against one baseline, as alpaca_eval writes them, with those that
    failed. Raises ConfigError, DataError."""
    key, texts = "alpacaeval.annotations", ("instruction", "output_1", "output_2")
    rows = read_rows(key, path, texts, ("generator_1", "generator_2"))
    preferences = [row.get("preference", "") for row in rows]
    wrong = [f"row {i}: {p!r}" for i, p in enumerate(preferences) if type(p) not in (int, float, type(None))]
    if wrong:
        why = f"have no preference that is a number or null; {'; '.join(wrong[:3])}"
        raise DataError(f"{key}={path}: {len(wrong)} of {len(rows)} rows {why}")
    return rows


def hub_file(name: str) -> Path | str:
    """Return a file of the library's data set from the hub or its cache, or why there is none."""
    try:
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset"))
    except (OSError, HfHubHTTPError, ValueError) as error:
        return f"{name} of {REPOSITORY} is neither in the hub's cache nor on the hub ({type(error).__name__})"


@contextmanager
def library() -> Iterator[Any]:
    """Give the library, without its warnings and log lines. The process's logging stays as it was."""
    level, disabled = logging.getLogger().level, logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            import alpaca_eval

            yield alpaca_eval
    finally:
        logging.getLogger().setLevel(level)
        logging.disable(disabled)


def annotator_settings(name: str) -> dict[str, Any]:
    """Return the library's settings of an annotator. Raises ConfigError for one that does not exist, or that
    asks no OpenAI-compatible endpoint. Does not import the library."""
    spec = importlib.util.find_spec("alpaca_eval")
    folder = Path(str(spec and spec.origin)).parent / "evaluators_configs"
    path, none = folder / name / "configs.yaml", f"the alpaca_eval library has no such annotator in {folder}"
    require(path.is_file(), "alpacaeval.annotator", name, none)
    settings: dict[str, Any] = next(iter(yaml.safe_load(path.read_text("utf-8")).values()))
    chats = settings.get("fn_completions") == "openai_completions"
    require(chats, "alpacaeval.annotator", name, "does not ask an OpenAI-compatible endpoint")
    return settings | {"prompt_template": str(folder / settings["prompt_template"])}


def ask_judge(outputs: list[Row], reference: list[Row], options: AlpacaEvalConfig, place: Path) -> list[Row]:
    """Return the library's judgements of ``outputs`` in the order of ``reference``; a failed one has
    preference None. The library writes them to the folder ``place`` with its cache of judgements, which are
    not asked for again. Raises StoppedError."""
    settings = annotator_settings(options.annotator)
    settings["completions_kwargs"] |= {"model_name": options.model, "requires_chatml": True}
    annotator = (place / "annotator.yaml").absolute()  # a relative path would be of the library's folder
    write_whole(annotator, yaml.safe_dump({f"{options.annotator}-{options.model}": settings}))
    with library() as alpaca_eval:
        try:
            _, rows = alpaca_eval.evaluate(
                model_outputs=outputs,
                reference_outputs=reference,
                annotators_config=str(annotator),
                caching_path=str(place / "judged.json"),
                fn_metric="get_winrate",
                sort_by="win_rate",
                precomputed_leaderboard=None,
                output_path=str(place),
                is_return_instead_of_print=True,
            )
        except Exception as error:  # the endpoint's client and the library raise many kinds
            message = scrub_text(" ".join(str(error).split()))
            raise StoppedError(f"the judge {options.model}: {type(error).__name__}: {message}") from None
    return [{key: None if value != value else value for key, value in row.items()} for row in rows]


def win_rates(rows: Sequence[Row]) -> tuple[dict[str, Any], str | None]:
    """Return the library's rates in percent and counts, and why there is no length-controlled rate. If there
    is one, ``rows``, which are all of the set in its order, get their controlled preferences."""
    import pandas as pd

    frame = pd.DataFrame(list(rows)).drop(columns="index", errors="ignore")
    frame["preference"] = frame["preference"].astype(float)
    with library() as alpaca_eval:
        rates: dict[str, Any] = alpaca_eval.metrics.get_winrate(frame)
        gamed = hub_file(GAMED)
        if isinstance(gamed, str):
            return rates, gamed
        total = pd.read_csv(gamed)["index"].nunique()
        if len(rows) != total:
            return rates, f"is for all {total} instructions of the set, and there are {len(rows)} judgements"
        try:
            rates |= alpaca_eval.metrics.get_length_controlled_winrate(frame, save_weights_dir=None)
        except Exception as error:  # it may raise anything for rows it cannot fit; the plain rate is right
            return rates, f"the library's regression failed ({type(error).__name__}: {error})"
    for row, value in zip(rows, frame["glm_preference"], strict=True):
        row["glm_preference"] = float(value)
    return rates, None
