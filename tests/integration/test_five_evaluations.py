"""A run evaluates five times unless asked otherwise: at its ends and at the quarters between, offline and
online, killed or not, and to the same weights as without."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.online import cut_off
from tests.tiny import make_config
from train import train

SMALL = (
    "lr=1e-3",
    "model.batch_size=8",
    "n_eval_examples=8",
    "n_eval_prompts=8",
    "wandb.enabled=false",
    "diagnostics=false",
    "retention.kl=false",
    "report=false",
)
OFFLINE = ("loss=dpo", "n_examples=100", *SMALL)  # 13 steps, the last of them short
ONLINE = (
    "loss=grpo",
    "online=true",
    "rounds.contexts=12",
    "rounds.contexts_per_round=3",
    "rounds.samples=4",
    "rounds.feedback=group",
    *SMALL,
)


def go(folder: Path, name: str, *words: str):
    return train(make_config(*words, f"runs_dir={folder}", f"cache_dir={folder}/cache"), name)


def evaluated(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "eval_loss" in line]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_the_quarters_of_an_offline_run_that_is_killed(tmp_path):
    with cut_off(at=9):
        go(tmp_path, "five", *OFFLINE, "eval_every=null")
    go(tmp_path, "five", *OFFLINE, "eval_every=null", "resume=true")
    go(tmp_path, "two", *OFFLINE, "eval_every=0")
    # 100 examples of 8 a step: the first steps with 25, 50 and 75 behind them are 4 (32), 7 (56) and 10 (80).
    assert evaluated(tmp_path / "five") == [0, 4, 7, 10]
    assert evaluated(tmp_path / "two") == [0]
    assert weights(tmp_path / "five") == weights(tmp_path / "two")
    kept = sorted(path.name for path in (tmp_path / "five" / "checkpoints").iterdir())
    assert "step_00000010" in kept, "a checkpoint is written with each"


def test_the_quarters_of_rounds(tmp_path):
    summary = go(tmp_path, "rounds", *ONLINE, "eval_every=null")
    steps = evaluated(tmp_path / "rounds")
    # Four rounds of a quarter each: an evaluation where each begins.
    lines = [json.loads(line) for line in (tmp_path / "rounds" / "metrics.jsonl").read_text().splitlines()]
    first = {}
    for line in lines:
        first.setdefault(line["round"], line["step"])
    assert steps == sorted(first.values()) and len(steps) == 4
    assert summary["after"]["eval_loss"] is not None
