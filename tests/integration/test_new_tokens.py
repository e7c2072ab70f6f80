"""Tokens that a tokenizer lacks: from the command line to the exported model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from export import export_run
from models.pretrained import check_model, load_policy
from tests.integration.online import lines
from tests.tiny import ROOT, make_config
from train import train
from trainers.sft import control_tokens

GOOD, BAD = "<|good|>", "<|bad|>"
NEW = (
    f'model.new_tokens=["{GOOD}","{BAD}"]',
    f'model.control_tokens={{chosen: "{GOOD}", rejected: "{BAD}"}}',
)
SHORT = ("loss=csft", "n_examples=16", "model.batch_size=4", "save_every=8", "n_eval_examples=4")
SHORT += ("data.verifier=null", "wandb.enabled=false", "report=false", "diagnostics=false")
MODEL = ROOT / "assets" / "adder" / "model"


def test_only_the_new_rows_are_new():
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).get_input_embeddings().weight
    config, tokens = make_config("loss=csft", *NEW), AutoTokenizer.from_pretrained(MODEL)
    after = load_policy(config.model, torch.device("cpu")).model.get_input_embeddings().weight
    assert len(after) == len(before) + 2 == check_model(config.model).vocab_size
    torch.testing.assert_close(after[: len(before)], before, rtol=0, atol=0)
    torch.testing.assert_close(after[len(before) :], before[: len(tokens)].mean(0).expand(2, -1))
    assert [ids.tolist() for ids in control_tokens(config)] == [[len(tokens)], [len(tokens) + 1]]


def test_a_run_trains_and_exports_them(tmp_path, capfd):
    places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache")
    train(make_config(*SHORT, *NEW, *places), "run")
    assert "<|good|>, <|bad|>: tokens of their own, with new rows" in capfd.readouterr().out
    assert len([line for line in lines(tmp_path / "run") if "loss" in line]) == 4
    export_run(tmp_path / "run", 2, tmp_path / "earlier")
    for folder in (tmp_path / "run" / "model", tmp_path / "earlier"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.get_output_embeddings().weight.shape[0] == len(tokenizer) == model.config.vocab_size
        assert len(tokenizer(GOOD, add_special_tokens=False)["input_ids"]) == 1
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight[-2:]
        for folder in (tmp_path / "run" / "model", tmp_path / "earlier")
    )
    assert not torch.equal(one, other), "they are read, and so trained"
    again = make_config("loss=csft", "model=hub", f"model.name_or_path={tmp_path}/run/model", *NEW)
    assert check_model(again.model).vocab_size == len(tokenizer), "nothing is added twice"
