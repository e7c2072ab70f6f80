"""Sample a model's answers to the prompts of a data set into a file, without training.

    python sample.py model=llama3-8b-instruct data=ultrafeedback_armorm sampler=vllm rounds.samples=8 out=samples.jsonl
    python sample.py model=hub model.name_or_path=runs/mine data=alpacaeval data.path=alpaca_eval.json data.eval_fraction=0 \\
        rounds.samples=1 format=alpacaeval out=outputs.json

It reads model, data, sampler, environment and a few other settings of train.py (config/reads.yaml), and those of
config/sample.yaml: python sample.py --cfg job
"""  # noqa: E501

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig

from config.cli import cli, guarded, settings
from config.load import split_settings
from config.schema_stages import SampleStage


def sample(cfg: DictConfig) -> None:
    """Write one file of samples."""
    stage, rest = split_settings(cfg, SampleStage)
    config, _ = settings(rest, stage)
    config.check_room()
    config.check_samples()
    from jobs.early import check_inputs
    from rollouts.files import refuse_existing

    refuse_existing(Path(stage.out), stage.overwrite_out)
    check_inputs(config, {"model", "data", "sampler", "environment"})
    from jobs import stages
    from models.distributed import start, stop

    world = start()
    try:
        stages.sample(config, stage, world)
    finally:
        stop()


@hydra.main(version_base="1.3", config_path="config", config_name="sample")
def main(cfg: DictConfig) -> None:
    guarded(lambda: sample(cfg))


if __name__ == "__main__":
    cli(main)
