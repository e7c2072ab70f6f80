"""Sample a model's answers to the prompts of a data set into a file, without training.

    python sample.py run=runs/mine split=eval rounds.samples=1 out=answers.jsonl
    python sample.py model=llama3-8b-instruct data=ultrafeedback_armorm sampler=vllm rounds.samples=8 out=samples.jsonl
    python sample.py model=hub model.name_or_path=runs/mine data=alpacaeval data.path=alpaca_eval.json data.eval_fraction=0 \\
        rounds.samples=1 format=alpacaeval out=outputs.json

It reads model, data, sampler and a few other settings of train.py (config/reads.yaml), and those of
config/sample.yaml: python sample.py --cfg job
"""  # noqa: E501

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from common.errors import require
from common.imports import importing
from config.cli import cli, guarded, settings
from config.load import split_settings
from config.schema import Config
from config.schema_stages import SampleStage


def sample(cfg: DictConfig, overridden: list[str]) -> None:
    """Write one file of samples. ``overridden``: the dotted keys that the command line sets."""
    if cfg.run is not None:  # before what its answers are to be written to
        from evals.targets import run_of

        run_of(Path(str(cfg.run)), None)
    stage, rest = split_settings(cfg, SampleStage)
    config = settings(rest, stage)[0] if stage.run is None else of_run(stage.run, rest, overridden)
    key, value = ("run", stage.run) if stage.run else ("model.head", config.model.head)
    require(config.model.head != "reward", key, value, "is a reward model: it answers nothing")
    config.check_room()
    config.check_samples()
    require(
        stage.format != "alpacaeval" or config.rounds.samples == 1,
        "rounds.samples",
        config.rounds.samples,
        "format=alpacaeval takes one answer a prompt: rounds.samples=1",
    )
    from rollouts.files import refuse_existing
    from rollouts.inputs import check_inputs

    refuse_existing(Path(stage.out), stage.overwrite_out)
    check_inputs(config, {"model", "data", "sampler"})
    with importing("torch"):
        from jobs import stages
        from models.distributed import started

    with started(deterministic=config.deterministic) as world:
        stages.sample(config, stage, world)


def of_run(run: str, rest: DictConfig, overridden: list[str]) -> Config:
    """Return the settings of a finished run with the changes of the command line. Raises ConfigError."""
    from evals.targets import refuse_unread, run_of, settings_of_run

    stage_keys = [item.name for item in fields(SampleStage)]
    composed: Any = OmegaConf.to_container(rest, resolve=True)
    refuse_unread([key for key in overridden if key.split(".")[0] != "rounds"], stage_keys, True, composed)
    return settings_of_run(run_of(Path(run), None)[0], composed, overridden)


@hydra.main(version_base="1.3", config_path="config", config_name="sample")
def main(cfg: DictConfig) -> None:
    overridden = [word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task]
    guarded(lambda: sample(cfg, overridden))


if __name__ == "__main__":
    cli(main)
