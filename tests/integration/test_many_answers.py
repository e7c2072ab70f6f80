"""A groups file that was made elsewhere, 57 answers a prompt, trains offline by every kind of loss."""

from __future__ import annotations

import json
import random

import pytest

from tests.tiny import make_config
from train import train

ANSWERS, PROMPTS = 57, 4
SMALL = (
    "data=local",
    "data.eval_fraction=0.25",
    "data.verifier=null",
    "n_eval_examples=2",
    "wandb.enabled=false",
    "log_drift=false",
    "model.batch_size=8",
    "model.microbatches=2",
    "n_epochs=1",
    "warmup=0",
)
TRAINED = PROMPTS - 1
PER_PROMPT = {"grpo": ANSWERS, "kto": 2, "dpo": 1}


@pytest.fixture(scope="module")
def groups_file(tmp_path_factory):
    """Texts of many lengths with graded scores, and of one prompt only answers of equal score but one."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("many") / "groups.jsonl"
    lines = []
    for p in range(PROMPTS):
        completions = [f"{rng.randrange(10 ** rng.randrange(1, 9))}" for _ in range(ANSWERS)]
        rewards = [float(p == 0 and i == 30) if p == 0 else rng.gauss(0, 2) for i in range(ANSWERS)]
        lines.append({"prompt": f"{p}+{p + 1}=", "completions": completions, "rewards": rewards})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("loss", PER_PROMPT)
def test_all_answers_of_a_prompt_are_read(loss, groups_file, tmp_path):
    train(
        make_config(
            f"loss={loss}",
            f"data.path={groups_file}",
            f"runs_dir={tmp_path}",
            f"cache_dir={tmp_path}/cache",
            *SMALL,
        ),
        loss,
    )
    lines = [json.loads(line) for line in (tmp_path / loss / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["examples"] == TRAINED * PER_PROMPT[loss]
    assert all(step["grad_norm"] > 0 for step in steps)
