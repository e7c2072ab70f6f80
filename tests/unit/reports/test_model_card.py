"""The model card, and what keeps secrets out of whatever is shown to others."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from common.secrets import scrub
from reports.model_card import write_model_card
from tests.unit.reports.test_report import CONFIG as OF_RUN

REVISION = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
MODEL = {"name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "revision": REVISION, "batch_size": 64}
CONFIG = OF_RUN | {
    **{"online": True, "log_epsilon_R": 1.25},
    "loss": {"name": "kto", "_target_": "trainers.losses.kto.kto", "beta": 0.25, "desirable_weight": 1.1},
    "model": MODEL | {"tokenizer_name_or_path": "a/tokenizer", "use_peft": True, "peft": {"lora_r": 16}},
    "data": {"name": "ultrafeedback", "path": None},
}
SUMMARY = {
    "before": {"eval_reward_accuracy": 0.5},
    "after": {"eval_reward_accuracy": 0.75},
    "command": "python train.py loss=kto | tee log",
}


def test_the_card_says_where_the_model_comes_from_and_no_folder_of_a_machine(tmp_path):
    path = write_model_card(tmp_path, CONFIG, SUMMARY)
    card = ModelCard.load(path)
    assert card.data.base_model == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert {"kto", "online+humanline"} <= set(card.data.tags)
    for expected in (
        *("beta = 0.25, desirable_weight = 1.1", "log_epsilon_R = 1.25", "sync_freq = 4", "ultrafeedback"),
        *("| Seed | 7 |", f"revision {REVISION}", "| 50.0% | 75.0% |", "rank 16", "torch 2.", "Humanline"),
    ):
        assert expected in card.text, expected
    assert "_target_" not in card.text
    assert "loss=kto &#124; tee log" in card.text  # a pipe would end the cell
    config = CONFIG | {"model": {"name_or_path": f"{Path.home()}/runs/sft/model"}}
    card = ModelCard.load(write_model_card(tmp_path, config, {}))
    assert card.data.base_model is None, "no pointer to the hub"
    assert "~/runs/sft/model" in card.text and "Evaluation" not in card.text
    words = f"data.path={Path.cwd()}/pairs.jsonl x=/mnt/a/b url=https://host/a/b/c c=a/b/c"
    page = write_model_card(tmp_path, CONFIG, {"command": f"runs_dir=/scratch/ada/runs {words}"}).read_text()
    assert "runs_dir=…/runs data.path=pairs.jsonl x=…/b url=https://host/a/b/c c=a/b/c</code>" in page


@pytest.mark.parametrize(
    "hostile",
    ["<svg onload=alert(1)>![](http://x)`|`", "a\n---\n# b\n[a](b)<script>alert(1)</script>"],
)
def test_whatever_a_setting_says_is_shown_and_does_nothing(tmp_path, hostile):
    config = copy.deepcopy(CONFIG)
    config["loss"] |= {"name": hostile, "beta": hostile, "<b>": 1}
    config["model"] |= {"name_or_path": hostile, "revision": hostile}
    config["data"]["path"] = hostile
    path = write_model_card(tmp_path, config, SUMMARY | {"command": f"python train.py {hostile}"})
    page = path.read_text(encoding="utf-8")
    for tag in ("<svg", "<script", "<b>", "](", "\n# b"):
        assert tag not in page
    card = ModelCard.load(path)
    assert card.data.base_model is None and card.data.library_name == "transformers"
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {
        row.count("|") for row in rows if not row.startswith(("| |", "|---", "| sampled", "| evaluation"))
    } <= {3, 4}
    assert len([row for row in rows if row.startswith(("| Base model |", "| Command |"))]) == 2


def test_values_of_secret_environment_variables_never_get_in(tmp_path, monkeypatch):
    secrets = ["0123456789abcdef0123", "f" * 40]
    monkeypatch.setenv("OPENAI_API_KEY", secrets[0])
    monkeypatch.setenv("WANDB_API_KEY", secrets[1])
    monkeypatch.setenv("SHORT_KEY", "kto")  # too short to be one: cutting it out would cut words out
    config = CONFIG | {"note": [f"x{secrets[0]}x", {"deep": secrets[1]}], "seed": secrets[1]}
    text = json.dumps(scrub(config)) + write_model_card(tmp_path, config, SUMMARY).read_text()
    assert [secret for secret in secrets if secret in text] == [] and "kto" in text
