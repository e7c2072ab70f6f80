"""Score the samples in a file with a reward and write them as feedback to train on, without training.

    python label.py in=samples.jsonl reward=armorm out=feedback.jsonl
    torchrun --nproc-per-node 4 label.py in=samples.jsonl reward=armorm out=feedback.jsonl
    python label.py in=samples.json reward=verifier format=binary rounds.threshold=8 out=feedback.json

It reads reward, rounds and a few other settings of train.py (config/reads.yaml), and those of
config/label.yaml: python label.py --cfg job
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from common.errors import require
from common.imports import importing
from config.arguments import override_in
from config.cli import cli, guarded, settings
from config.files import files_of
from config.load import split_settings
from config.schema_stages import LabelStage


def label(cfg: DictConfig) -> None:
    """Write one file of feedback."""
    stage, rest = split_settings(cfg, LabelStage)
    config, _ = settings(rest, stage)
    some = f"choose a file of config/reward: {', '.join(files_of('reward'))}"
    require(config.reward is not None and _is_chosen(HydraConfig.get()), "reward", "???", some)
    require(
        stage.format != "pairwise" or config.rounds.feedback in ("pair", "random", "min"),
        "rounds.feedback",
        config.rounds.feedback,
        "format=pairwise takes pair, random or min",
    )
    from rollouts.files import read_samples, refuse_existing
    from rollouts.inputs import check_inputs

    refuse_existing(Path(stage.out), stage.overwrite_out)
    check_inputs(config, {"reward"})
    read_samples(Path(stage.samples), first=100)
    with importing("torch"):
        from jobs import stages
        from models.distributed import started

    with started(deterministic=config.deterministic) as world:
        stages.label(config, stage, world)


def _is_chosen(hydra: Any) -> bool:
    """Return whether the command line or an experiment chose the reward. Otherwise it is that of the data,
    which are not read here."""
    words, choices = filter(None, map(override_in, hydra.overrides.task)), dict(hydra.runtime.choices)
    return any(word.key_or_group == "reward" for word in words) or choices.get("reward") != choices["data"]


@hydra.main(version_base="1.3", config_path="config", config_name="label")
def main(cfg: DictConfig) -> None:
    guarded(lambda: label(cfg))


if __name__ == "__main__":
    cli(main)
