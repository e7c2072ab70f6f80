"""``kind=lm_eval``, which runs tasks of EleutherAI's lm-eval harness on the target with the harness's own
library, through transformers.

Prompts, few-shot examples, answer extraction, metrics and standard errors come from the harness. Weights,
dtype, tokenizer and chat template come from the target's settings.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch

from common.errors import ConfigError, StoppedError, require
from config.schema import Config
from config.schema_eval import EvalStage
from data.templates import DATE, load_template
from evals.base import Evaluation, Target, fingerprints
from models.distributed import World
from models.policy import causal_lm
from models.pretrained import check_model, load_policy, load_tokenizer

FEWSHOT_SEED = 1234
"""The harness's own default, so that runs with other seeds use the same few-shot examples."""
_NAMED = 3
Metrics = dict[str, Any]


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError if the evaluation cannot be done.

    The reasons are: a task is unknown or its data are not available, a task
    runs code that the model wrote and ``unsafe_code`` is not set, or the target is not a language model."""
    own = stage.lm_eval
    require(
        own.include_path is None or Path(own.include_path).is_dir(),
        "lm_eval.include_path",
        own.include_path,
        "is no folder",
    )
    require(
        target.config.model.head is None,
        "run",
        target.run or target.name,
        "has a head of its own: the harness asks language models",
    )
    check_model(target.config.model)
    unsafe = [name for name, task in _load(stage).items() if getattr(task, "UNSAFE_CODE", False)]
    require(
        own.unsafe_code or not unsafe,
        "lm_eval.unsafe_code",
        False,
        f"{', '.join(unsafe[:_NAMED])} runs what the model wrote on this machine; set it to true where that "
        "may be",
    )


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Return every metric of every task with its standard error, and every answer.

    Raises ConfigError, and StoppedError where a task fails."""
    require(world.size == 1, "kind", "lm_eval", "runs on one process: start eval.py without a launcher")
    import lm_eval

    own, config = stage.lm_eval, target.config
    chat = config.data.apply_chat_template if own.chat_template is None else own.chat_template
    model = _model(config, own.batch_size, world)
    try:
        with _quiet():
            results = lm_eval.simple_evaluate(
                model,
                tasks=list(own.tasks),
                task_manager=_manager(own.tasks, own.include_path),
                num_fewshot=own.num_fewshot,
                limit=stage.limit,
                bootstrap_iters=own.bootstrap,
                apply_chat_template=chat,
                system_instruction=own.system_instruction,
                confirm_run_unsafe_code=own.unsafe_code,
                random_seed=config.seed,
                numpy_random_seed=config.seed,
                torch_random_seed=config.seed,
                fewshot_random_seed=FEWSHOT_SEED,
            )
    except Exception as error:  # a task is a program of its own and may raise anything
        raise StoppedError(
            f"lm_eval.tasks={own.tasks}: the harness failed ({type(error).__name__}: {error})"
        ) from error
    return _evaluation(cast(dict[str, Any], results), target, stage, chat)


def _model(config: Config, batch_size: int, world: World) -> Any:
    """Return the target as the harness's own transformers model."""
    with _quiet():
        from lm_eval.models.huggingface import HFLM

        tokenizer = load_tokenizer(config.model)
        tokenizer.chat_template = load_template(tokenizer)
        dated: Any = partial(tokenizer.apply_chat_template, **DATE)
        tokenizer.apply_chat_template = dated  # type: ignore[method-assign]
        policy = load_policy(
            replace(config.model, packing=False, compile=False), world.device
        )  # packing and compile are for training rows
        model: Any = causal_lm(policy.model)
        model.config._attn_implementation = (
            config.model.attn_implementation
        )  # the policy's attention takes no mask, but the harness pads
        model.to(getattr(torch, config.model.dtype))
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


# -- tasks -----------------------------------------------------------------------------------------


def _load(stage: EvalStage) -> dict[str, Any]:
    """Return the tasks by name, with their data.

    Raises ConfigError for a task that is unknown or whose data are not available."""
    own = stage.lm_eval
    manager = _manager(own.tasks, own.include_path)
    for name in own.tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, n=1)
        require(
            bool(manager.match_tasks([name])) or Path(name).is_file(),
            "lm_eval.tasks",
            name,
            "the harness has no such task, "
            "group or tag; "
            + (f"did you mean {near[0]}?" if near else "its list: python -m lm_eval ls tasks"),
        )
    try:
        with _quiet():
            loaded: dict[str, Any] = manager.load(list(own.tasks))["tasks"]
    except Exception as error:  # a task is a program of its own and may raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            "lm_eval.tasks",
            own.tasks,
            f"cannot be loaded ({type(error).__name__}: {first}); a task of the hub needs its "
            "data in the hub's cache, or a network",
        ) from error
    return loaded


def _manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return the harness's register of tasks.

    Reading the harness's own tasks takes seconds, so they are left out if the user's folder has all
    ``tasks``."""
    if include_path is not None:
        mine = _register(include_path, False)
        if all(name in mine.all_tasks for name in tasks):
            return mine
    return _register(include_path, True)


@cache
def _register(include_path: str | None, defaults: bool) -> Any:
    with _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=include_path, include_defaults=defaults)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Python's warnings and the harness's log messages below errors, which concern its defaults."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# -- results ---------------------------------------------------------------------------------------


def _evaluation(results: dict[str, Any], target: Target, stage: EvalStage, chat: bool) -> Evaluation:
    own, samples = stage.lm_eval, results["samples"]
    sizes = {name: number["effective"] for name, number in results["n-samples"].items()}
    values: dict[str, Any] = {
        name: metrics_of(result)
        for name, result in {**results["results"], **(results.get("groups") or {})}.items()
    }
    values["counts"] = {"prompts": sizes}
    texts = hashlib.sha256(
        repr(
            [
                (name, one["doc_id"], one["doc_hash"], one["prompt_hash"], one["target_hash"])
                for name, every in sorted(samples.items())
                for one in every
            ]
        ).encode()
    ).hexdigest()
    settings = {
        "target": target.name,
        "step": target.step,
        "model": None if target.step is not None else target.config.model.name_or_path,
        "dtype": target.config.model.dtype,
        "seed": target.config.seed,
        "limit": stage.limit,
        **asdict(own),
        "chat_template": chat,
        "versions_of_tasks": results["versions"],
        "shots": results["n-shot"],
        "lm_eval": version("lm_eval"),
    }
    return Evaluation(
        values,
        table_of(results["results"], sizes),
        [line for name, every in samples.items() for line in rows_of(name, every)],
        settings,
        fingerprints(target, texts=texts),
    )


def metrics_of(result: dict[str, Any]) -> Metrics:
    """Return the numbers of one task or group by metric.

    The harness's key ``metric,filter`` becomes ``metric_filter``, or ``metric`` for the filter ``none``."""
    return {_name(key): value for key, value in result.items() if "," in key and isinstance(value, Real)}


def _name(key: str) -> str:
    metric, _, by = key.partition(",")
    return metric if by == "none" else f"{metric}_{by}"


def table_of(results: dict[str, Any], sizes: dict[str, int]) -> list[list[str]]:
    """Return a table with one line per metric: task, metric, value, standard error, number of prompts."""
    table = [["task", "metric", "value", "std. error", "prompts"]]
    for task, result in results.items():
        for key in [key for key in result if "," in key and "_stderr," not in key]:
            error = result.get(key.replace(",", "_stderr,", 1))
            table.append([task, _name(key), _shown(result[key]), _shown(error), str(sizes.get(task, ""))])
    return table


def _shown(value: Any) -> str:
    return f"{float(value):.4f}" if isinstance(value, Real) else "–"


def rows_of(task: str, samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one record per question and filter, with the prompts, the responses and the metrics' values."""
    for one in samples:
        choices = [
            argument[1] for argument in one["arguments"] if len(argument) > 1 and isinstance(argument[1], str)
        ]
        yield {
            "task": task,
            "doc_id": one["doc_id"],
            "filter": one["filter"],
            "prompts": [argument[0] for argument in one["arguments"]],
            **({"choices": choices} if choices else {}),
            "target": str(one["target"]),
            "responses": one["resps"],
            "filtered": one["filtered_resps"],
            "metrics": {name: one[name] for name in one["metrics"] if isinstance(one.get(name), Real)},
        }
