"""Each clip shape and each advantage from the command line, on the embedded task, plain and humanline."""

from __future__ import annotations

import json
import math

import pytest

from tests.tiny import make_config
from train import train
from trainers.losses.shapes import READS, SHAPES

SMALL = (
    "loss=grpo",
    "data=adder",
    "data.verifier=null",
    "report=false",
    "diagnostics=false",
    "retention.kl=false",
    "n_examples=32",
    "n_eval_examples=4",
    "model.batch_size=8",
    "model.microbatches=2",
    "wandb.enabled=false",
    "lr=1e-3",
    "warmup=0",
)
SHARES = {
    "dual": {"ratio_clipped", "dual_clipped"},
    "dppo": {"tokens_masked"},
    "reinforce": set(),
    "sapo": set(),
}
"""What a shape logs beside the others' metrics; the rest: the share of clipped ratios."""


OF_SCORES = ("group", "group_mean", "rloo", "batch")
"""The advantages that a completion's score decides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes")


@pytest.mark.parametrize(
    ("shape", "advantage", "humanline"),
    zip(SHAPES, OF_SCORES * 2, ("false", "true", "true", "false") * 2, strict=False),
)
def test_a_run(folder, shape, advantage, humanline):
    words = (f"loss.shape={shape}", f"loss.advantage={advantage}", f"humanline={humanline}", *SMALL)
    small = {"epsilon": 0.01, "divergence_bound": 0.01}  # so that something is clipped or masked
    epsilon = [f"loss.{name}={value}" for name, value in small.items() if name in READS[shape]]
    run = f"{shape}-{humanline}"
    train(make_config(f"runs_dir={folder}", f"cache_dir={folder}/cache", *words, *epsilon), run)
    steps = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    assert len(steps) == 4 and all(math.isfinite(step["loss"]) for step in steps)
    assert {
        name for name in steps[0] if name.endswith(("ratio_clipped", "dual_clipped", "masked"))
    } == SHARES.get(shape, {"ratio_clipped"})
    assert steps[-1]["kl"] != 0 and steps[0]["grad_norm"] > 0
    if "epsilon" in READS[shape]:
        assert steps[0]["ratio_clipped"] == 0.0 < steps[-1]["ratio_clipped"]
    if "divergence_bound" in READS[shape]:
        assert steps[0]["tokens_masked"] == 0.0 < steps[-1]["tokens_masked"]
