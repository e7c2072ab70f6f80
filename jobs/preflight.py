"""What is checked, and read, before a run's model is built, the cheapest first: what needs no torch, so that
most starts that would fail cost a second or two, and what needs torch but not transformers. ``jobs.prepare``
comes next, with the tokenizer. Nothing is written or started here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, DataError
from common.files import check_writable
from common.progress import phase
from config.schema import Config
from config.schema_data import DataConfig, evaluation_sets, of_set
from data.quality import check_kind
from data.rows import Loaded
from data.sources import EARLY, load_groups, load_splits
from jobs.run_folder import RunFolder
from reports.trackers import check_trackers
from rollouts.inputs import check_inputs

if TYPE_CHECKING:
    from trainers.assembly import Loss


@dataclass(frozen=True)
class LoadedData:
    """Everything that a run reads of its data, as groups."""

    train: Loaded
    evaluation: Loaded
    sets: Mapping[str, tuple[DataConfig, Loaded]]
    """Name of a further evaluation set (``evaluations``) -> its settings and its held-out groups."""


def check_without_torch(config: Config, name: str) -> LoadedData:
    """Return the data of a run ``name``. Raises ConfigError for a run that cannot start: folders, an existing
    run, packages, files of the model, data that the loss cannot use; DataError for damaged data."""
    for check in WITHOUT_TORCH:
        check(config, name)
    with phase("read the data", "data.path"):
        return _loaded(config)


def _folders(config: Config, name: str) -> None:
    if not config.dry_run:
        RunFolder(config, name).check()
        for key, at in (("runs_dir", Path(config.runs_dir)), ("cache_dir", Path(config.cache_dir))):
            check_writable(key, at, at)


def _settings(config: Config, name: str) -> None:
    check_trackers(config.trackers)
    config.check_ranks((config.dry_run and config.plan.ranks) or int(os.environ.get("WORLD_SIZE") or 1))
    uses = {"model", "data", "optimizer", "loss", "humanline_rule", "trainer", "correction", "callbacks"}
    check_inputs(config, uses | ({"sampler", "reward"} if config.online else set()))


WITHOUT_TORCH: tuple[Callable[[Config, str], None], ...] = (_folders, _settings)
"""What is checked of a run by its settings and name before its data are read, in this order."""


def _loaded(config: Config) -> LoadedData:
    """Return the data, of which the evaluation sets are read first: they are small."""

    def first(loaded: Loaded) -> Loaded:
        return replace(loaded, groups=loaded.groups[:EARLY])

    sets = {}
    for name, data in evaluation_sets(config.evaluations, config.data).items():
        with errors_of_set(name):
            loaded = load_groups(data, "eval")
            sets[name] = data, loaded
            if data.verifier is None and not config.online:
                check_kind(config, data.eval_path or data.path or "", first(loaded), training=False)
    train, evaluation = load_splits(config.data)
    if train.refusal is not None and not config.reward_gets_columns:
        raise train.refusal
    if not config.online:
        check_kind(config, config.data.path or "", first(train))
    return LoadedData(train, evaluation, sets)


@contextmanager
def errors_of_set(name: str) -> Iterator[None]:
    """Make the errors of an evaluation set name it."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise of_set(f"evaluations.{name}", error) from error


def check_with_torch(config: Config, observers: Sequence[Any]) -> Loss:
    """Return the loss with its numbers. Raises ConfigError for a loss, an optimizer, a clip rule, a callback
    or one of the ``observers`` that cannot be what it is to be."""
    from trainers.assembly import make_loss

    for check in WITH_TORCH:
        check(config, observers)
    return make_loss(config)


def _parts(config: Config, observers: Sequence[Any]) -> None:
    from trainers.humanline import Humanline
    from trainers.optimizer import optimizer_class

    optimizer_class(config.optimizer)
    Humanline.from_config(config)


def _observers(config: Config, observers: Sequence[Any]) -> None:
    from jobs.observers import check_callback, check_observer

    for name, tree in config.callbacks.items():
        check_callback(name, tree)
    for i, observer in enumerate(observers):
        check_observer(f"observers[{i}]", observer)


WITH_TORCH: tuple[Callable[[Config, Sequence[Any]], None], ...] = (_parts, _observers)
"""What is checked besides the loss once torch is loaded."""
