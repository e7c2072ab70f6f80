"""What can be seen before torch is imported, so that a start that would fail costs a second or two: folders,
an existing run, files of model and data, packages."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import ConfigError, DataError, require
from common.files import check_writable
from config.schema import Config
from config.schema_evaluations import evaluation_sets, of_set
from data.kinds import check_kind
from data.sources import check_found
from jobs.run_folder import RunFolder
from reports.trackers import check_trackers
from rollouts.inputs import check_inputs
from trainers.settings import check_loss, check_ranks


def check_early(config: Config, name: str) -> None:
    """Raise ConfigError for a run ``name`` that cannot start, DataError for data that are damaged at their
    beginning. Nothing is written."""
    if not config.dry_run:
        RunFolder(config, name).check()
        for key, folder in (("runs_dir", config.runs_dir), ("cache_dir", config.cache_dir)):
            check_writable(key, Path(folder), Path(folder))
    cache = Path(config.cache_dir)
    hubs = [
        f for kind in ("models", "datasets") for at in (cache, cache / "hub") for f in at.glob(f"{kind}--*")
    ]
    require(
        not hubs,
        "cache_dir",
        cache,
        "is the hub's cache, which HF_HOME names; here cache_dir is for scores and token ids: give another",
    )
    if config.push_to_hub is not None:
        from jobs.hub import check_push  # the hub's client takes a quarter of a second

        check_push(config.push_to_hub)
    check_trackers(config.trackers)
    check_ranks(config, (config.dry_run and config.plan.ranks) or int(os.environ.get("WORLD_SIZE") or 1))
    check_loss(config)
    online = {"sampler", "reward"} if config.online else set()
    uses = {"model", "data", "optimizer", "callbacks", "humanline_rule", "trainer", "correction"} | online
    check_inputs(config, uses, columns_reach=config.reward_gets_columns)
    for set_name, data in evaluation_sets(config.evaluations, config.data).items():
        try:
            loaded_splits = check_found(data, splits=("eval",))
            if "eval" in loaded_splits and data.verifier is None and not config.online:
                check_kind(config, data.eval_path or data.path or "", loaded_splits["eval"], training=False)
        except (ConfigError, DataError) as error:
            raise of_set(f"evaluations.{set_name}", error) from error
