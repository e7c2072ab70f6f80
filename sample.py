"""Sampling alone: answers of a model to the prompts of a data set, in a file.

    python sample.py model=llama3-8b-instruct data=ultrafeedback_armorm sampler=vllm rounds.samples=8 out=samples.jsonl
    python sample.py model=hub model.name_or_path=runs/mine data=alpacaeval data.path=alpaca_eval.json data.eval_fraction=0 \\
        rounds.samples=1 format=alpacaeval out=outputs.json

All settings of train.py; its own are those of config.schema_stages.SampleStage: out, format, split, limit, overwrite_out.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig, open_dict

from config.cli import cli, guarded, settings
from config.schema_stages import SampleStage, plus, stage_settings


def sample(cfg: DictConfig) -> None:
    """One file of samples."""
    with open_dict(cfg):
        stage = stage_settings(lambda key: cfg.pop(key, None), SampleStage)
    config, _ = settings(cfg)
    config.check_room()
    from jobs import stages
    from models.distributed import start, stop

    world = start()
    try:
        stages.sample(config, stage, world)
    finally:
        stop()


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(cfg: DictConfig) -> None:
    guarded(lambda: sample(cfg))


if __name__ == "__main__":
    sys.argv = plus(sys.argv, SampleStage)
    cli(main)
