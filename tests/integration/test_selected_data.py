"""data.logprob_range from the command line to the trained model: which groups, and that neither ranks nor a
restart change that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import programs
from tests.integration.online import cut_off
from tests.tiny import ROOT, make_config
from train import train

PAIRS = 64
RUN = (
    "data=adder",
    "model.batch_size=8",
    "model.eval_batch_size=16",
    "n_eval_examples=8",
    "wandb.enabled=false",
    "lr=1e-4",
    "data.verifier=null",
    "diagnostics=false",
    "report=false",
    "save_every=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("selected")
    lines = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(lines[:PAIRS]))
    train(settings(folder, "data.logprob_range=[0.25,0.75]"), "whole")
    return folder


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        f"runs_dir={folder}",
        f"cache_dir={folder / 'cache'}",
        f"data.path={folder / 'pairs.jsonl'}",
        *RUN,
        *more,
    ]


def settings(folder: Path, *more: str):
    return make_config(*overrides(folder, *more))


def selection(run: Path) -> dict:
    return json.loads((run / "selection.json").read_text())["selection"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def steps(run: Path) -> int:
    return json.loads((run / "summary.json").read_text())["steps"]


def test_a_range_trains_on_its_share_and_says_so(folder):
    report = json.loads((folder / "whole" / "data_report.json").read_text())
    assert steps(folder / "whole") == PAIRS // 2 // 8 and report["examples"] == PAIRS // 2
    assert (report["selection"]["below"], report["selection"]["kept"], report["selection"]["above"]) == (
        16,
        32,
        16,
    )
    assert report["selection"]["all"]["lower_quartile"] <= report["selection"]["lowest"] + 1e-9
    assert report["logprob"]["all"]["count"] == PAIRS
    assert "32 of 64 groups" in (folder / "whole" / "data_report.md").read_text()


@pytest.mark.parametrize("loss", ["sft"])
def test_every_loss_keeps_the_same_pairs(folder, loss):
    """Losses of both completions agree; SFT, which reads the chosen one alone, orders by that."""
    train(
        settings(
            folder, f"loss={loss}", "model.batch_size=8", "data.logprob_range=[0.25,0.75]", "log_drift=false"
        ),
        loss,
    )
    assert (selection(folder / loss)["kept"] == selection(folder / "whole")["kept"]) == (loss != "sft")
    assert json.loads((folder / loss / "data_report.json").read_text())["logprob"]["all"]["count"] in (
        PAIRS,
        PAIRS // 2,
    )


def test_a_killed_run_goes_on_with_its_groups_even_without_the_cache(folder):
    with cut_off(at=3):
        train(settings(folder, "data.logprob_range=[0.25,0.75]", f"cache_dir={folder / 'other'}"), "parts")
    shutil.rmtree(folder / "other")
    train(
        settings(folder, "data.logprob_range=[0.25,0.75]", f"cache_dir={folder / 'other'}", "resume=true"),
        "parts",
    )
    assert selection(folder / "parts")["kept"] == selection(folder / "whole")["kept"]
    whole, parts = weights(folder / "whole"), weights(folder / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_two_ranks_keep_the_same_groups(folder):
    more = ("data.logprob_range=[0.25,0.75]", f"cache_dir={folder / 'ranks'}", "exp_name=two")
    done = programs.run(*programs.torchrun(2, "train.py", *overrides(folder, *more)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert selection(folder / "two")["kept"] == selection(folder / "whole")["kept"]
    one, two = weights(folder / "whole"), weights(folder / "two")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
