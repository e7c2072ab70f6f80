"""The training program: compose the settings, check them, build the parts, train.

    python train.py loss=dpo humanline=true
    torchrun --nproc-per-node 8 train.py model=llama3-8b-instruct data=ultrafeedback_armorm loss=kto humanline=true

From a notebook or your own program (docs/notebook.md):

    from train import compose, train
    summary = train(*compose("loss=dpo", "humanline=true"))

Exit codes are those of config.cli.
"""  # noqa: E501

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from common.errors import UserError
from common.imports import importing
from common.progress import phase
from config.cli import cli, compose, guarded, settings
from config.machine import decided, speaks
from config.schema import Config
from jobs.signals import Signals
from reports.outcome import NOTHING_LEARNT, text_of

__all__ = ["compose", "train"]


def train(config: Config, name: str, observers: Sequence[Any] = ()) -> dict[str, Any]:
    """Do one run, from settings to an exported model, and return its summary.

    The calling program may continue afterwards. ``observers``: objects with some of the methods
    ``jobs.observers.METHODS``; they follow the run in addition to the ones that ``callbacks`` names. Raises
    UserError for every problem that the user can fix.
    """
    signals = Signals()
    try:
        return run(config, name, signals, observers)
    finally:
        signals.restore()
        gc.collect()  # the model refers to itself, and would be held beside that of the program's next run


def run(config: Config, name: str, signals: Signals, observers: Sequence[Any] = ()) -> dict[str, Any]:
    """Do the same as ``train`` with the given signal handlers."""
    from jobs.preflight import check_with_torch, check_without_torch

    data = check_without_torch(config, name)
    with importing("torch"):
        loss = check_with_torch(config, observers)
    with importing("transformers"):
        from jobs.job import Job
        from jobs.prepare import describe, prepare
        from jobs.run_folder import RunFolder
        from models.distributed import StopRequest, on_main, started

    for notice in decided(os.environ) if speaks(os.environ) else ():
        print(f"from the environment: {notice}", flush=True)
    lends = config.sampler.separate and config.sampler.shares_devices
    with started(replicas=config.replicas, deterministic=config.deterministic, lends=lends) as world:
        signals.request = StopRequest() if world.size > 1 else None
        folder = RunFolder(config, name)
        try:
            if not config.dry_run:
                on_main(folder.claim)
            with phase("read the tokenizer, tokenise the data", "data.path"):
                prepared = prepare(config, data, loss, folder, world)
            del data  # offline training needs no texts once they are token ids
            if world.is_main:
                print("\n".join(prepared.messages), flush=True)
            job = Job(prepared, folder, world, observers)
            try:
                job.start()
                return describe(prepared, world) if config.dry_run else job.run(signals)
            finally:
                job.close()
        finally:
            folder.release()


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(cfg: DictConfig) -> None:
    def work() -> None:
        config, name = settings(cfg)
        summary = run(
            config, name, Signals(interrupts=True)
        )  # never restored: they hold until the program ends
        if summary.get("status") == NOTHING_LEARNT:
            raise UserError(f"{text_of(summary)}; its results are written all the same")

    guarded(work)


if __name__ == "__main__":
    cli(main)
