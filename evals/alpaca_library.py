"""Import the alpaca_eval library without its side effects on the process, and compute its two win rates."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from evals.alpaca_files import Row

GAMED_COLUMNS = (
    "model",
    "preference",
    "index",
    "std_delta_len",
    "instruction_difficulty",
    "not_gamed_baseline",
)
_CHAT = "<|im_start|>"
_ENDPOINT_KEYS = ("client_kwargs", "price_per_token", "requires_chatml", "num_procs", "client_config_path")
"""Keys of an annotator's completions_kwargs that say how to reach the endpoint; the settings under alpacaeval
replace them."""


@cache
def library() -> ModuleType:
    """Return the library with the modules that are used.

    Its import would read a nearby .env file and set the root logger's level; both are prevented here."""
    level, before = logging.getLogger().level, os.environ.get("PYTHON_DOTENV_DISABLED")
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import alpaca_eval
            import alpaca_eval.annotators
            import alpaca_eval.metrics.glm_winrate
    finally:
        logging.getLogger().setLevel(level)
        if before is None:
            del os.environ["PYTHON_DOTENV_DISABLED"]
        else:
            os.environ["PYTHON_DOTENV_DISABLED"] = before
    made: ModuleType = alpaca_eval
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the library's progress bars, warnings and logging inside the context."""
    utils = library().utils
    bar = utils.tqdm
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        utils.tqdm = SimpleNamespace(tqdm=lambda work, *_, **__: work)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        utils.tqdm = bar


def annotator_settings(name: str) -> dict[str, Any]:
    """Return the library's settings of an annotator, with the path of its prompt made absolute.

    Raises ConfigError for an annotator that does not exist or that a chat endpoint cannot serve. Does not
    import the library."""
    key, spec = "alpacaeval.annotator", importlib.util.find_spec("alpaca_eval")
    assert spec is not None and spec.origin is not None, "evals.early comes first"
    folder = Path(spec.origin).parent / "evaluators_configs"
    names = sorted(path.parent.name for path in folder.glob("*/configs.yaml"))
    require(
        name in names,
        key,
        name,
        "the alpaca_eval library has no such annotator; weighted_alpaca_eval_gpt4_turbo is AlpacaEval 2's, "
        f"and there are {', '.join(names)}",
    )
    settings: dict[str, Any] = next(
        iter(yaml.safe_load((folder / name / "configs.yaml").read_text("utf-8")).values())
    )
    prompt = folder / settings["prompt_template"]
    settings["prompt_template"] = str(prompt)
    text = prompt.read_text("utf-8").lstrip()
    chats = settings.get("fn_completions") == "openai_completions" and text.startswith(_CHAT)
    require(
        chats and settings.get("batch_size", 1) == 1,
        key,
        name,
        "does not ask an OpenAI-compatible chat endpoint about one pair at a "
        "time; use weighted_alpaca_eval_gpt4_turbo, or alpaca_eval_gpt4 for an endpoint without "
        "log-probabilities",
    )
    settings["completions_kwargs"] = {
        k: v for k, v in settings["completions_kwargs"].items() if k not in _ENDPOINT_KEYS
    }
    return settings


def win_rate(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the library's plain win rates in percent and its counts, under the leaderboard's names.

    They are win_rate, standard_error, n_wins, n_wins_base, n_draws, n_total and discrete_win_rate.
    ``preference`` is 2 where output_2 wins and 1.5 (or 0) for a tie; rows without one are left out."""
    import pandas as pd

    frame = pd.DataFrame({"preference": [row.get("preference") for row in rows]}, dtype=float)
    with quiet():
        win_rates: dict[str, Any] = library().metrics.get_winrate(frame)
    return win_rates


def length_controlled(
    rows: Sequence[Row], gamed: Path, positions: Sequence[int] | None
) -> tuple[dict[str, float], list[float]] | str:
    """Compute the length-controlled win rate with the library's regression (Dubois et al. 2024).

    Returns (length_controlled_winrate and lc_standard_error in percent, each row's length-controlled
    preference in [0, 1]), or the reason why there is no such rate. ``gamed``: df_gamed.csv, whose rows
    identify an instruction by its number in the set. ``positions``: these numbers for ``rows``; None if
    ``rows`` has all instructions in order. Raises ConfigError if ``gamed`` is not such a file.
    """
    import pandas as pd

    known = _instructions_of(gamed)
    if len(rows) != known:
        return f"is for all {known} instructions of the set, and there are {len(rows)} judgements"
    frame = pd.DataFrame(list(rows))
    frame["preference"] = frame["preference"].astype(float)
    frame.index = pd.Index(range(len(rows)) if positions is None else list(positions))
    frame = frame.drop(columns="index", errors="ignore").sort_index()
    try:
        metrics = _regression(frame, gamed)
    except (
        Exception
    ) as error:  # the regression may raise anything for rows it cannot fit; the plain rate is still right
        return f"the library's regression failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"  # noqa: E501
    by_position = frame["glm_preference"].to_dict()
    order = range(len(rows)) if positions is None else positions
    rates = {name: float(metrics[name]) for name in ("length_controlled_winrate", "lc_standard_error")}
    return rates, [float(by_position[i]) for i in order]


def _regression(frame: Any, gamed: Path) -> dict[str, float]:
    """Run the library's regression with the file ``gamed`` instead of the one it takes from the hub.

    Adds the column ``glm_preference`` to the frame."""
    import sklearn

    glm = library().metrics.glm_winrate
    fetch = glm.hf_hub_download
    glm.hf_hub_download = lambda **_: str(gamed)
    try:
        with quiet(), sklearn.config_context():  # the library changes scikit-learn's settings for good
            metrics: dict[str, float] = glm.get_length_controlled_winrate(frame, save_weights_dir=None)
    finally:
        glm.hf_hub_download = fetch
    return metrics


def _instructions_of(gamed: Path) -> int:
    """Return the number of instructions in df_gamed.csv. Raises ConfigError if the file is another one."""
    import pandas as pd

    try:
        table = pd.read_csv(gamed)
    except (ValueError, OSError) as error:
        raise ConfigError(
            "alpacaeval.difficulty", gamed, f"is no CSV file ({error}); it is the hub's df_gamed.csv"
        ) from error
    missing = [name for name in GAMED_COLUMNS if name not in table.columns]
    require(
        not missing,
        "alpacaeval.difficulty",
        gamed,
        f"has no column {', '.join(missing)}; it is the hub's df_gamed.csv",
    )
    return int(table["index"].nunique())
