"""One kind of evaluation on one or several targets: checked before torch is imported, then run, its results
written and printed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, StoppedError, require
from common.files import write_whole
from common.imports import check_importable
from common.secrets import scrub
from common.worker_process import WorkerError
from config.schema_data import DataConfig
from config.schema_stages import EvalStage
from evals.base import Evaluation, Target
from reports.metrics import plain
from rollouts.files import refuse_existing
from rollouts.inputs import check_inputs
from rollouts.rewards.base import RewardError

if TYPE_CHECKING:
    from models.distributed import World

PACKAGES = {"alpacaeval": "alpaca_eval", "lm_eval": "lm_eval"}
"""Kind of evaluation -> the package that it needs."""
FILES = ("annotations", "outputs", "reference")
"""Settings of a kind of evaluation that name a file."""
MATHS = ("gsm8k", "math")
MATH_VERIFY = "rollouts.rewards.verifier.accuracy"


def evaluate(targets: list[Target], stage: EvalStage, world: World) -> list[Evaluation]:
    """Evaluate every target, then combine them into one result if the kind can pool.

    Raises ConfigError and DataError before anything is loaded, and StoppedError where sampling or scoring
    cannot continue."""
    kind = importlib.import_module(f"evals.{stage.kind}")
    pooled = pooled_path(targets, stage) if len(targets) > 1 and hasattr(kind, "pool") else None
    if pooled is not None:
        refuse_existing(pooled, stage.overwrite_out)
    for target in targets:
        kind.check(target, stage)
    evaluations: list[Evaluation] = []
    for target in targets:
        try:
            evaluation = kind.evaluate(target, stage, world)
        except (WorkerError, RewardError) as error:
            raise StoppedError(f"{target.name}: {error}") from error
        if world.is_main:
            report(target, stage, evaluation)
        evaluations.append(evaluation)
    if world.is_main and len(evaluations) > 1 and hasattr(kind, "pool"):
        report_pooled(kind.pool(evaluations, stage), targets, stage)
    return evaluations


def result_name(target: Target, stage: EvalStage) -> str:
    """Return the result's file name without the suffix."""
    if stage.name is not None:
        return stage.name
    data_names = [target.config.data.name] if stage.kind in ("accuracy", "compare") else []
    against = [target.other.name] if target.other is not None else []
    step = [f"step{target.step}"] if target.step is not None else []
    return "-".join([stage.kind, *data_names, *against, *step])


def result_path(target: Target, stage: EvalStage) -> Path:
    return target.out / f"{result_name(target, stage)}.json"


def pooled_path(targets: list[Target], stage: EvalStage) -> Path | None:
    """Return the file of the pooled result; None where ``out`` was not given and the result is only
    printed."""
    return None if stage.out is None else Path(stage.out) / f"{result_name(targets[0], stage)}-pooled.json"


def report(target: Target, stage: EvalStage, evaluation: Evaluation) -> None:
    """Write the result and its answers, and print the table."""
    path = result_path(target, stage)
    write_result(path, evaluation)
    answers = f", its answers to {path.with_suffix('.jsonl').name}" if evaluation.rows else ""
    print(f"\n{target.name}\n{text_table(evaluation.table)}\nwritten to {path}{answers}", flush=True)


def report_pooled(evaluation: Evaluation, targets: list[Target], stage: EvalStage) -> None:
    """Print the pooled result of several runs, and write it where ``out`` was given."""
    print(
        f"\n{len(targets)} runs together: "
        f"{', '.join(target.name for target in targets)}\n{text_table(evaluation.table)}"
    )
    if (path := pooled_path(targets, stage)) is not None:
        write_result(path, evaluation)
        print(f"written to {path}", flush=True)


def write_result(path: Path, evaluation: Evaluation) -> None:
    """Write the answers first and then the numbers, so that a result always has its answers beside it.

    Each file is written completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = path.with_suffix(".jsonl")
    if evaluation.rows:
        write_whole(
            answers, "".join(json.dumps(plain(row), ensure_ascii=False) + "\n" for row in evaluation.rows)
        )
    else:
        answers.unlink(missing_ok=True)
    about: dict[str, Any] = {"settings": evaluation.settings, "fingerprints": evaluation.fingerprints}
    write_whole(
        path, json.dumps(plain(evaluation.values | scrub(about)), indent=2, ensure_ascii=False) + "\n"
    )


def text_table(table: list[list[str]]) -> str:
    """Return the table as text; the first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table)
    return "\n".join("  ".join(row).rstrip() for row in aligned)


# -- before torch is imported ----------------------------------------------------------------------


def check_early(targets: Sequence[Target], stage: EvalStage) -> None:
    """Raise ConfigError for a result that is there already, and for a package, a model, data or a function
    that are not; DataError for data that are damaged at their beginning."""
    if package := PACKAGES.get(stage.kind):
        needs = f"needs the package {package}: make eval-tools, or pip install -r requirements/eval.txt"
        require(find_spec(package) is not None, "kind", stage.kind, needs)
    options = getattr(stage, stage.kind, None)  # a kind may have no settings
    for key in FILES:
        value = getattr(options, key, None)
        there = value is None or Path(value).is_file()
        require(there, f"{stage.kind}.{key}", value, f"no such file (the working directory is {Path.cwd()})")
    for target in targets:
        path = result_path(target, stage)
        for file in (path, path.with_suffix(".jsonl")):  # the result, its answers
            refuse_existing(file, stage.overwrite_out)
        inputs = {"data", "sampler"} if stage.kind in ("accuracy", "compare") else set()
        for side in (target, target.other):
            if side is not None and side.answers is None:
                silent = side.config.model.head == "reward"
                require(not silent, "run", side.run or side.name, "is a reward model: it answers nothing")
                check_inputs(side.config, {"model"} | inputs)
        if stage.kind == "accuracy":
            check_importable("accuracy.verifier", verifier_path(target.config.data, stage))
        chosen = stage.kind != "compare" or target.config.reward is not None
        what = "choose what compares: a file of config/reward, as in reward=armorm"
        require(chosen, "reward", None, what)


def verifier_path(data: DataConfig, stage: EvalStage) -> str:
    """Return the import path of the verifier of the answers. Raises ConfigError where there is none."""
    path = stage.accuracy.verifier or data.verifier or (MATH_VERIFY if data.format in MATHS else None)
    if path is None:
        raise ConfigError(
            "accuracy.verifier",
            None,
            f"data={data.name} names nothing that checks answers: give data.verifier, as in "
            f"accuracy.verifier={MATH_VERIFY}, or compare by a reward (kind=compare)",
        )
    return path
