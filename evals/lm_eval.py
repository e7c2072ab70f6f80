"""``kind=lm_eval``: tasks of EleutherAI's lm-eval harness, run on the target by the harness's own library
through transformers. Prompts, few-shot examples, metrics and standard errors are the harness's."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

from common.errors import ConfigError, StoppedError, require
from config.schema_stages import EvalStage
from data.templates import DATE, load_template
from evals.base import Evaluation, Target, fingerprints
from models.distributed import World
from models.pretrained import check_model, load_tokenizer
from rollouts.weights import model_folder

PUNKT = Path(".venv/punkt/llama_index/core/_static/nltk_cache")
"""Where ``make eval-tools`` puts the data by which ifeval's checkers count sentences."""


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError for a target that is no language model, and for a task that is unknown, has no data
    here, or runs what the model wrote without ``unsafe_code``."""
    options, head = stage.lm_eval, target.config.model.head
    require(head is None, "run", target.run or target.name, "has a head: the harness asks language models")
    check_model(target.config.model)
    try:
        tasks = _manager(options.include_path, tuple(options.tasks)).load(list(options.tasks))["tasks"]
    except Exception as error:  # a task is a program of its own and may raise anything
        why = f"cannot be loaded ({type(error).__name__}: {error}); data come from the hub, or its cache"
        raise ConfigError("lm_eval.tasks", options.tasks, why) from error
    unsafe = ", ".join(name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False))
    why = f"{unsafe} runs what the model wrote on this machine; set it to true where that may be"
    require(options.unsafe_code or not unsafe, "lm_eval.unsafe_code", False, why)


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Return every metric of every task (``metric``, or ``metric_filter``), and every answer. Raises
    ConfigError, and StoppedError where a task fails."""
    require(world.size == 1, "kind", "lm_eval", "runs on one process: start eval.py without a launcher")
    from lm_eval import simple_evaluate

    options, config, model = stage.lm_eval, target.config, target.config.model
    chat = config.data.apply_chat_template if options.chat_template is None else options.chat_template
    tokenizer: Any = load_tokenizer(model)
    tokenizer.chat_template = load_template(tokenizer)
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **DATE)
    loaded = {"pretrained": str(model_folder(config)), "tokenizer": tokenizer, "dtype": model.dtype}
    loaded |= {key: getattr(model, key) for key in ("trust_remote_code", "attn_implementation")}
    try:
        found: Any = simple_evaluate(
            "hf",
            loaded,
            list(options.tasks),
            options.num_fewshot,
            options.batch_size,
            device=str(world.device),
            limit=stage.limit,
            apply_chat_template=chat,
            task_manager=_manager(options.include_path, tuple(options.tasks)),
            confirm_run_unsafe_code=options.unsafe_code,
            **{f"{name}random_seed": config.seed for name in ("", "numpy_", "torch_")},
        )
    except Exception as error:  # as above
        why = f"lm_eval.tasks={options.tasks}: the harness failed ({type(error).__name__}: {error})"
        raise StoppedError(why) from error
    by_task = found["results"] | found.get("groups", {})
    values: dict[str, Any] = {name: metrics_of(result) for name, result in by_task.items()}
    table = [[task, name, f"{value:.4f}"] for task, of in values.items() for name, value in of.items()]
    rows = [{"task": task} | one for task, every in found["samples"].items() for one in every]
    counts = {"prompts": {name: number["effective"] for name, number in found["n-samples"].items()}}
    settings = {"target": target.name, "step": target.step, "dtype": model.dtype, "seed": config.seed}
    settings |= asdict(options) | {"limit": stage.limit, "chat_template": chat, "lm_eval": version("lm_eval")}
    return Evaluation(values | {"counts": counts}, table, rows, settings, fingerprints(target))


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """Return a task's numbers; its key ``metric,filter`` becomes ``metric_filter``, without filter none."""
    numbers = {key: float(value) for key, value in result.items() if "," in key and isinstance(value, Real)}
    return {key.removesuffix(",none").replace(",", "_"): value for key, value in numbers.items()}


@cache
def _manager(include_path: str | None, tasks: tuple[str, ...]) -> Any:
    """Return the harness's register of tasks, without its own (half a minute) where none is asked for."""
    if PUNKT.is_dir():
        os.environ.setdefault("NLTK_DATA", str(PUNKT.resolve()))
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    mine = TaskManager(include_path=include_path, include_defaults=False)
    has_all = all(name in mine.all_tasks for name in tasks)
    return mine if has_all else TaskManager(include_path=include_path)
