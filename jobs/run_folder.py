"""The folder of a run: may it be written, is there a run to go on with."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.errors import require
from config.load import changed, dump
from config.schema import Config


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
