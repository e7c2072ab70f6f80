"""Short online runs, and what they leave: shared by the tests of rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollouts.ledger import RoundFolder
from tests.tiny import make_config
from train import train

SHORT = (
    "rounds.contexts=48",
    "rounds.contexts_per_round=24",
    "rounds.samples=4",
    "model.batch_size=8",
    "data.verifier=null",
    "n_eval_examples=8",
    "wandb.enabled=false",
    "warmup=0",
    "lr=3e-4",
    "log_drift=false",
)


def run_online(folder: Path, name: str, *overrides: str) -> Path:
    """A run in this process; returns its folder."""
    config = make_config(*SHORT, f"runs_dir={folder}", f"cache_dir={folder}/cache", *overrides)
    train(config, name)
    return folder / name


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rounds(run: Path) -> list[RoundFolder]:
    return [RoundFolder(path) for path in sorted((run / "rounds").glob("*"))]


def function(name: str) -> tuple[str, ...]:
    return (
        "reward=function",
        f"reward.function.path=tests.integration.rewarding.{name}",
        "reward.function.conversational=false",
        "reward.function.batch_size=1024",
    )
