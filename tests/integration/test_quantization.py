"""The real programs with a base in 4 bits: sampled from and trained online, exported from a checkpoint, and
refused to go on otherwise."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests import programs

LORA = ("model.use_peft=true", "model.peft.lora_r=4")
NF4 = (*LORA, "model.quantization=nf4")
SMALL = (
    "n_eval_examples=24",
    "n_eval_prompts=8",
    "wandb.enabled=false",
    "model.batch_size=8",
    "save_every=8",
)
ROUNDS = ("online=true", "reward=adder", "rounds.contexts=32", "rounds.contexts_per_round=16")


def command(folder, name: str, *more: str) -> list[str]:
    places = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"exp_name={name}")
    return ["train.py", "loss=dpo", "humanline=true", "sync_freq=2", *SMALL, *places, *more]


def finished(*words) -> str:
    done = programs.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """A run whose samples the quantised policy itself gave."""
    folder = tmp_path_factory.mktemp("four")
    finished(*command(folder, "online", *NF4, *ROUNDS))
    return folder / "online"


def test_online_the_policy_is_its_own_reference_first(online):
    lines = [json.loads(line) for line in (online / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 2 and lines[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)


def test_an_export_of_a_checkpoint_has_adapters_on_the_rounded_weights(online, tmp_path):
    """The newest checkpoint's is the run's. It is a tenth away from the original weights, in more directions
    than adapters of rank 4 have."""
    finished("export.py", online, "--to", tmp_path / "again")
    run, again = (load_file(f / "model.safetensors") for f in (online / "model", tmp_path / "again"))
    assert run.keys() == again.keys() and all(torch.equal(run[name], again[name]) for name in run)
    begin = load_file("assets/adder/model/model.safetensors")
    assert run.keys() == begin.keys()
    for name, value in begin.items():
        if ".layers." not in name or "norm" in name:
            assert torch.equal(run[name], value), name
            continue
        apart = run[name] - value
        assert 0.07 < float(apart.norm() / value.norm()) < 0.12, name
        assert torch.linalg.matrix_rank(apart, rtol=1e-2) > 100, name


def test_it_is_not_gone_on_with_otherwise(online):
    done = programs.run(*command(online.parent, "online", *LORA, *ROUNDS, "resume=true"))
    assert done.returncode != 0
    assert re.search(r"model\.quantization=off: was nf4 when the run", done.stdout + done.stderr)
