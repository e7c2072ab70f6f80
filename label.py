"""Labelling alone: the samples in a file, scored by a reward, as feedback to train on.

    python label.py in=samples.jsonl reward=armorm out=feedback.jsonl
    python label.py in=samples.json reward=verifier format=binary rounds.threshold=8 out=feedback.json

All settings of train.py; its own are those of config.schema_stages.LabelStage: in, out, format, overwrite_out.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig, open_dict

from config.cli import cli, guarded, settings
from config.schema_stages import LabelStage, plus, stage_settings


def label(cfg: DictConfig) -> None:
    """One file of feedback."""
    with open_dict(cfg):
        stage = stage_settings(lambda key: cfg.pop(key, None), LabelStage)
    config, _ = settings(cfg)
    import torch

    from jobs import stages

    stages.label(config, stage, "cuda" if torch.cuda.is_available() else "cpu")


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(cfg: DictConfig) -> None:
    guarded(lambda: label(cfg))


if __name__ == "__main__":
    sys.argv = plus(sys.argv, LabelStage)
    cli(main)
