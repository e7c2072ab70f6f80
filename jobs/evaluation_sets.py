"""The further held-out sets that every evaluation of a run measures (``evaluations``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import require
from common.imports import import_function
from config.schema import Config
from config.schema_data import DataConfig, evaluation_sets
from data.batches import Segment
from data.chat import Renderer
from data.examples import make_examples, token_ids
from data.quality import advice, check_vocabulary, shortened
from data.rows import Loaded, reasons
from data.types import Group
from data.views import prompt_ids, prompts_of
from jobs.plan import check_read, held_out_segment
from jobs.preflight import errors_of_set
from rollouts.rounds import usable_prompts
from trainers.basic import BasicTrainer


@dataclass(frozen=True)
class EvaluationSet:
    """A loaded evaluation set. The loss is measured on its rows, and its prompts are answered and checked; a
    set may have only one of the two."""

    name: str
    data: DataConfig
    held_out: Segment | None
    checkable: Sequence[Group]
    """Groups whose prompts are answered: they have a reference answer, and ``data`` has a verifier."""
    about: str
    """One sentence on what was read."""


def load_evaluation_sets(
    config: Config,
    trainer: type[BasicTrainer],
    renderer: Renderer,
    trained_on: Sequence[Group],
    loaded: Mapping[str, Loaded],
) -> list[EvaluationSet]:
    """Return the sets that ``config.evaluations`` names, in its order.

    ``trained_on``: the training groups; a set should share no prompt with them. ``loaded``: name -> what was
    read. Raises ConfigError or DataError that names the set if its rows are tokens of another model, or if
    neither the loss nor a verifier can use any of them.
    """
    seen = prompt_ids(trained_on)
    sets = []
    for name, data in evaluation_sets(config.evaluations, config.data).items():
        with errors_of_set(name):
            sets.append(_tokenised(config, name, data, loaded[name], trainer, renderer, seen))
    _check_ranked(config, sets)
    return sets


def _tokenised(
    config: Config,
    name: str,
    data: DataConfig,
    loaded: Loaded,
    trainer: type[BasicTrainer],
    renderer: Renderer,
    seen: np.ndarray,
) -> EvaluationSet:
    key = f"evaluations.{name}"
    origin = loaded.origin.partition(";")[0]
    require(loaded.groups != [], key, origin, "has no held-out row; give path or split")
    check_read(config, loaded.groups, renderer)
    examples = make_examples(loaded.groups[: config.n_eval_examples], trainer.view_of(config), renderer)
    check_vocabulary(renderer.tokenizer, token_ids(examples.groups), origin)
    checkable: list[Group] = []
    if data.verifier is not None and config.model.head != "reward":
        import_function(f"{key}.verifier", data.verifier)
        usable, _ = usable_prompts(prompts_of(loaded.groups), renderer)
        ids = {prompt.id for prompt in usable if prompt.reference_answer is not None}
        checkable = [group for group in loaded.groups if group.prompt.id in ids]
    dropped = reasons(examples.dropped)
    require(
        examples.count > 0 or checkable != [],
        key,
        origin,
        f"gives loss={config.loss['name']} no example: {dropped or 'no group'}{advice(loaded.groups)}; and "
        f"no prompt has a reference answer to check answers by (verifier={data.verifier})",
    )
    shared = len(np.intersect1d(prompt_ids(loaded.groups), seen))
    facts = [
        f"{examples.count} {trainer.counts}" if examples.count else "no row that the loss can use",
        *([f"{len(prompts_of(checkable))} prompts whose answers are checked"] if checkable else []),
        *([f"{len(loaded.dropped)} of {loaded.read} rows dropped"] if loaded.dropped else []),
        *([f"groups dropped: {dropped}"] if dropped else []),
        *([f"{shared} of its prompts are trained on"] if shared else []),
    ]
    return EvaluationSet(
        name,
        data,
        held_out_segment(config, examples),
        checkable,
        about=f"{key}: {', '.join(facts)} ({shortened(origin)})",
    )


def _check_ranked(config: Config, sets: list[EvaluationSet]) -> None:
    """Raise ConfigError where ``keep_best`` names a metric that its evaluation set cannot give."""
    for one in sets:
        absent = ["loss", "reward_margin", "reward_accuracy"] if one.held_out is None else []
        absent += [] if one.checkable else ["accuracy_sampled", "accuracy_greedy"]
        require(
            config.keep_best not in [f"eval_{one.name}_{measure}" for measure in absent],
            "keep_best",
            config.keep_best,
            f"evaluations.{one.name} has no such number: {one.about}",
        )
