"""What keeps an evaluation from its start and can be seen before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.errors import ConfigError, require
from common.imports import check_importable
from config.schema_data import DataConfig
from config.schema_stages import EvalStage
from evals.base import Target
from evals.running import result_path
from rollouts.files import refuse_existing
from rollouts.inputs import check_inputs

PACKAGES = {"alpacaeval": "alpaca_eval", "lm_eval": "lm_eval"}
"""Kind of evaluation -> the package that it needs."""
FILES = ("annotations", "outputs", "reference")
"""Settings of a kind of evaluation that name a file."""
MATHS = ("gsm8k", "math")
MATH_VERIFY = "rollouts.rewards.verifier.accuracy"


def check_early(targets: Sequence[Target], stage: EvalStage) -> None:
    """Raise ConfigError for a result that is there already, and for a package, a model, data or a function
    that are not; DataError for data that are damaged at their beginning."""
    if package := PACKAGES.get(stage.kind):
        needs = f"needs the package {package}: make eval-tools, or pip install -r requirements/eval.txt"
        require(find_spec(package) is not None, "kind", stage.kind, needs)
    options = getattr(stage, stage.kind)
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
