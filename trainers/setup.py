"""From a typed config to the parts of a run. What can be refused is refused in here, before any weights are loaded."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from config.schema import RESERVED_LOSS_KEYS, Config, ConfigError, changed, dump, require
from data.batches import Segment
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.selection import places
from data.sources import Loaded, import_function, load_splits
from data.token_cache import TokenCache
from data.types import Example, Group
from models.distributed import on_main
from trainers.basic import BasicTrainer
from trainers.losses.base import LossResult, TokenScores

Loss = Callable[..., LossResult]


def make_loss(config: Config) -> Loss:
    """The loss function with its numbers filled in. Raises ConfigError for a number it does not take or lacks."""
    function = import_function("loss._target_", config.loss["_target_"])
    takes = {
        n: p
        for n, p in inspect.signature(function).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    numbers = {key: value for key, value in config.loss.items() if key not in RESERVED_LOSS_KEYS}
    for key, value in numbers.items():
        require(
            key in takes,
            f"loss.{key}",
            value,
            f"loss={config.loss['name']} does not take it; it takes {', '.join(takes) or 'no numbers'}",
        )
        if "float" in str(takes[key].annotation):
            number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            require(number, f"loss.{key}", value, "must be a number")
            require(value is None or value >= 0, f"loss.{key}", value, "must be 0 or more")
            scales = (
                key in ("beta", "tau") and config.trainer.name != "grpo"
            )  # there beta weighs a penalty, and 0 is none
            require(
                not scales or value > 0, f"loss.{key}", value, "must be above 0, or the loss has no gradient"
            )
    for key, parameter in takes.items():
        require(
            key in numbers or parameter.default is not inspect.Parameter.empty,
            f"loss.{key}",
            "???",
            f"loss={config.loss['name']} needs it; set it in config/loss/{config.loss['name']}.yaml",
        )
    loss = partial(function, **numbers)
    _try(loss, config)
    return loss


def _try(loss: Loss, config: Config) -> None:
    """Call the loss once on one token a row, so that what it refuses of its numbers is refused now. A loss with other inputs than
    those known here is not tried."""
    zero, one = torch.zeros(1, 1), torch.ones(1)
    scores = TokenScores(zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    known = {
        "chosen": scores,
        "rejected": scores,
        "scores": scores,
        "desirable": one > 0,
        "kl": zero.sum(),
        "advantages": one,
    }
    takes = inspect.signature(loss).parameters.values()
    needed = [
        p.name
        for p in takes
        if p.kind is not inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if set(needed) <= set(known):
        try:
            loss(*(known[name] for name in needed))
        except ValueError as error:
            raise ConfigError("loss", config.loss["name"], str(error)) from error


def trainer_class(config: Config) -> type[BasicTrainer]:
    cls = import_function("trainer._target_", config.trainer._target_)
    require(
        isinstance(cls, type) and issubclass(cls, BasicTrainer),
        "trainer._target_",
        config.trainer._target_,
        "is not a subclass of trainers.basic.BasicTrainer",
    )
    return cls


def check_ranks(config: Config, ranks: int) -> None:
    """Raise ConfigError unless the batch divides into ranks x accumulation steps."""
    require(
        ranks % config.replicas == 0, "replicas", config.replicas, f"must divide the number of ranks, {ranks}"
    )
    parts = config.model.gradient_accumulation_steps * ranks
    require(
        config.model.batch_size % parts == 0,
        "model.batch_size",
        config.model.batch_size,
        f"must be a multiple of ranks x model.gradient_accumulation_steps = {ranks} x {config.model.gradient_accumulation_steps}",
    )


def run_folder(config: Config, name: str) -> tuple[Path, bool]:
    """(the run's folder, whether there is a run in it to go on with). Called by rank 0 alone.

    Raises ConfigError for a run that is there already, unless overwrite or resume says what to do with it, and for one that cannot be
    gone on with because its settings were others.
    """
    folder = Path(config.runs_dir) / name
    record = folder / "config.yaml"
    exists = folder.exists() and any(folder.iterdir())
    if exists and config.overwrite:
        shutil.rmtree(folder)
        exists = False
    require(
        not exists or config.resume,
        "exp_name",
        name,
        f"{folder} is there already; resume=true goes on with it, overwrite=true deletes it, exp_name=… names another",
    )
    if exists and record.exists():
        key = changed(record.read_text(), config)
        require(
            key is None,
            str(key),
            "changed",
            f"{record} has another value; a run goes on with the settings it was started with",
        )
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(dump(config))
    return folder, exists


@dataclass(frozen=True)
class Plan:
    """What will be trained on and evaluated with, before anything is computed."""

    train: Segment
    held_out: Segment | None
    loaded: Loaded
    evaluation: Loaded
    examples: Examples
    cuts: dict[str, int]
    """What was shortened of the training rows, and how often."""

    @property
    def steps(self) -> int:
        return self.train.steps


def make_plan(config: Config, trainer: type[BasicTrainer], renderer: Renderer) -> Plan:
    """Load, view and tokenise the data. Raises ConfigError when nothing is left to train on.

    With ``data.logprob_range`` the plan trains on as many groups as will be kept; which ones only the initial weights can tell
    (``trainers.likelihood``).
    """
    loaded, evaluation = load_splits(config.data)
    examples = _tokenised(config, loaded.groups, trainer, renderer)
    cuts = dict(renderer.cuts)
    require(
        examples.count > 0,
        "data.path",
        config.data.path,
        f"gives loss={config.loss['name']} no example: {loaded.read} rows read, {examples.dropped or 'none'} dropped",
    )
    expected = examples.groups
    if config.data.logprob_range is not None:
        first, last = places(len(examples.groups), config.data.logprob_range)
        require(
            last > first,
            "data.logprob_range",
            config.data.logprob_range,
            f"keeps none of the {len(examples.groups)} groups; widen it",
        )
        expected = examples.groups[: last - first]
    held_out = make_examples(evaluation.groups[: config.n_eval_examples], trainer.view, renderer)
    return Plan(
        train=training_segment(config, expected),
        held_out=Segment(held_out.groups, config.model.eval_batch_size, held_out.count, seed=0)
        if held_out.count
        else None,
        loaded=loaded,
        evaluation=evaluation,
        examples=examples,
        cuts=cuts,
    )


def training_segment(config: Config, groups: tuple[tuple[Example, ...], ...]) -> Segment:
    """Offline training on these groups: all epochs of it, as far as ``n_examples`` goes."""
    count = sum(len(group) for group in groups)
    units = (config.n_epochs or 10**9) * count
    return Segment(groups, config.model.batch_size, min(units, config.n_examples or units), config.seed)


def _tokenised(
    config: Config, groups: list[Group], trainer: type[BasicTrainer], renderer: Renderer
) -> Examples:
    """The examples of ``groups``. Rank 0 makes them, on all of the machine's cores, and the others read what it wrote; a rank that does
    not see its files, or a dry run, which writes none, makes its own."""
    cache = TokenCache(Path(config.cache_dir), write=not config.dry_run)
    made: list[Examples] = []
    on_main(lambda: made.append(make_examples(groups, trainer.view, renderer, cache)))
    return made[0] if made else make_examples(groups, trainer.view, renderer, cache)


class Offline:
    """The source of offline training: one segment, all of it."""

    def __init__(self, segment: Segment) -> None:
        self.only = segment

    def segment(self, index: int) -> Segment | None:
        return self.only if index == 0 else None
