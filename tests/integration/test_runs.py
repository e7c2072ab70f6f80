"""Runs as a whole, on the embedded task: what they leave. That they go on after anything as if nothing had
been: test_kills.py."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import StoppedError
from config.schema import Config
from export import export_run
from models.pretrained import check_model, load_policy
from reports.tracking import Tracker
from tests import programs
from tests.integration.online import lines
from tests.tiny import ROOT, make_config
from train import train
from trainers import basic
from trainers.paired import PairedPreferenceTrainer
from trainers.sft import control_tokens

BARE = ("model.batch_size=4", "n_eval_examples=8", "wandb.enabled=false", "lr=1e-3", "data.verifier=null")
BARE += ("retention.kl=false",)
SMALL = (*BARE, "n_examples=48", "diagnostics=false")
WANTED = """
step examples tokens tokens_per_second tokens_per_second_per_rank token_balance seconds lr
loss grad_norm reward_chosen reward_rejected reward_margin reward_accuracy
reference_step kl drift clipped_low clipped_high
"""
"""What a line of metrics has."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def settings(folder: Path, cache: Path, *more: str) -> Config:
    return make_config(f"runs_dir={folder}", f"cache_dir={cache}", *SMALL, *more)


def test_what_a_run_leaves_loads_in_transformers_and_chains(tmp_path, cache):
    summary = train(settings(tmp_path, cache, "loss=kto", "humanline=true", "eval_every=24"), "run")
    run = tmp_path / "run"
    model, tokenizer = (cls.from_pretrained(run / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.float32 and tokenizer.chat_template
    base = AutoModelForCausalLM.from_pretrained(ROOT / "assets/adder/model")
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))
    assert all(set(WANTED.split()) <= set(line) for line in lines(run))
    assert [bool("eval_loss" in line) for line in lines(run)] == [i in (0, 6) for i in range(12)]
    assert summary["before"]["eval_reward_margin"] == 0.0 and summary["before"]["eval_reward_accuracy"] == 0.5
    left = ("config.yaml", "data_report.md", "report.html", "model/README.md", "model/generation_config.json")
    assert all((run / name).stat().st_size > 0 for name in left)
    train(settings(tmp_path, cache, "loss=dpo", f"model.name_or_path={run}", "n_examples=4"), "next")


def test_with_syncing_drift_is_measured_on_some_batches_and_the_report_says_on_how_many(tmp_path, cache):
    every = ("loss=dpo", "humanline=true", "n_examples=64", "model.batch_size=8")
    found = {}
    for drawn, count in ((16, 32), ("null", 128)):  # rows of two of eight batches of eight pairs, or of all
        train(settings(tmp_path, cache, *every, f"drift_examples={drawn}"), f"of-{drawn}")
        run = tmp_path / f"of-{drawn}"
        found[drawn] = [line["drift"] for line in lines(run)]
        assert json.loads((run / "data_report.json").read_text())["logprob"]["all"]["count"] == count
    some, whole = found.values()
    assert all(value is not None for value in whole)
    assert some == [value if i in (0, 4) else None for i, value in enumerate(whole)]


def test_gradients_that_are_not_finite_stop_the_run_and_leave_their_batches(tmp_path, cache, monkeypatch):
    real = PairedPreferenceTrainer.compute_loss

    def poisoned(self, micro, scores, prepared):
        result = real(self, micro, scores, prepared)
        if self.progress.step in (4, 5, 6):
            return type(result)(result.total * float("nan"), result.metrics)
        return result

    steps, norm = itertools.count(), basic.clip_grad_norm
    infinite = {2: math.inf}
    monkeypatch.setattr(basic, "clip_grad_norm", lambda *of: norm(*of) * infinite.get(next(steps), 1))
    monkeypatch.setattr(PairedPreferenceTrainer, "compute_loss", poisoned)
    with pytest.raises(StoppedError, match="3 updates in a row"):
        train(settings(tmp_path, cache, "max_skipped_steps=3"), "run")
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records if r.get("skipped")] == [2, 4, 5, 6]
    assert all(r["loss"] == r["loss"] and r["loss"] is not None for r in records if r["step"] in (1, 3))
    left = sorted((tmp_path / "run" / "skipped").iterdir())
    assert len(left) == 4 and len(left[0].read_text().splitlines()) == 4


# -- diagnostics.jsonl -------------------------------------------------------------------------------

RUN = (*BARE, "humanline=true", "log_epsilon_P=-0.1", "log_epsilon_R=0.1", "model.packing=false")


def sides(line: dict) -> list[dict]:
    return [line[side] for side in ("chosen", "rejected", "neutral") if side in line]


def check(run: Path) -> None:
    """The intervals cover the run once, and their sums are those of the steps' metrics."""
    first, *intervals = lines(run, "diagnostics")
    steps = lines(run)
    assert first["step"] == -1
    assert 0 < first["entropy"] < 10 and all(0 < line["entropy"] < 10 for line in intervals)
    starts = [0, *(line["step"] + 1 for line in intervals)]
    assert [line["first_step"] for line in intervals] == starts[:-1] and starts[-1] == len(steps)
    for line in intervals:
        assert all(sum(side["histogram"]) == side["tokens"] for side in sides(line))
    tokens = sum(side["tokens"] for line in intervals for side in sides(line))
    clipped = sum(side["below"] + side["above"] for line in intervals for side in sides(line))
    for line in intervals:  # of a run as short as this, each has one step
        assert line["step"] == line["first_step"]
        step, n = steps[line["step"]], sum(side["tokens"] for side in sides(line))
        for key, name in (("below", "clipped_low"), ("above", "clipped_high")):
            assert sum(side[key] for side in sides(line)) == pytest.approx(step[name] * n, abs=1e-3)
        for key, name in (("log_ratio", "kl"), ("drift", "drift")):
            mean = sum(side[key] * side["tokens"] for side in sides(line)) / n
            assert mean == pytest.approx(step[name], rel=1e-4, abs=1e-6)
    assert tokens > 1000 and clipped > 20
    assert intervals[0]["chosen"]["spread"] == 0.0  # policy and reference are the same weights


STEP_OF: dict[str, Callable[..., int]] = {
    "log": lambda *of: of[0]["step"],
    "diagnostics": lambda *of: of[0]["step"],
    "table": lambda *of: of[3],
}
"""Method of the tracker -> the step that it is called with."""


@pytest.mark.parametrize("loss", ["kto", "grpo"])
def test_the_file_agrees_with_the_metrics_and_trackers_are_told_in_the_order_of_steps(
    tmp_path, cache, monkeypatch, loss
):
    """wandb drops what comes with an earlier step than the last."""
    told: list[tuple[int, str]] = []
    for name, step_of in STEP_OF.items():
        real = getattr(Tracker, name)

        def tell(self, *of, name=name, step_of=step_of, real=real):
            told.append((step_of(*of), name))
            return real(self, *of)

        monkeypatch.setattr(Tracker, name, tell)
    run, sizes = tmp_path / loss, (f"loss={loss}", "n_examples=96", "model.batch_size=8", "eval_every=48")
    answered = ("data.verifier=data.adder.accuracy", "n_eval_prompts=2") * (loss == "kto")
    train(make_config(*RUN, f"runs_dir={tmp_path}", f"cache_dir={cache}", *sizes, *answered), loss)
    check(run)
    found = lines(run, "diagnostics")[1:]
    assert all(0 < line["rejected"]["rows"] == line["chosen"]["rows"] for line in found)
    assert "Spread of the log-ratios" in (run / "report.html").read_text()
    assert (steps := [step for step, _ in told]) == sorted(steps)
    for name, wanted in (("log", range(12)), ("table", (0, 6, 12)), ("diagnostics", range(-1, 12))):
        if name != "table" or loss == "kto":  # whose prompts are answered
            assert [step for step, called in told if called == name] == list(wanted)


def test_two_ranks_change_neither_it_nor_the_groups_of_a_range(tmp_path):
    pairs = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(pairs[:64]))
    half = ("data=adder", f"data.path={tmp_path}/pairs.jsonl", "data.logprob_range=[0.25,0.75]")
    words = (*RUN, f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache", "lr=1e-4", *half)
    programs.finished(programs.ranks(2, "train.py", *words, "exp_name=two", f"cache_dir={tmp_path}/other"))
    train(make_config(*words), "short")
    kept = [json.loads((tmp_path / name / "selection.json").read_text()) for name in ("short", "two")]
    assert kept[0]["selection"]["kept"] == kept[1]["selection"]["kept"]
    one, other = (lines(tmp_path / name, "diagnostics") for name in ("short", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in other] == list(range(-1, 8))
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-4)
        for mine, theirs in zip(sides(a), sides(b), strict=True):
            assert all(mine[key] == theirs[key] for key in ("rows", "tokens", "length"))
            assert mine["spread"] == pytest.approx(theirs["spread"], rel=1e-2, abs=1e-5)
            assert mine["drift"] == pytest.approx(theirs["drift"], abs=1e-4)


# -- tokens that a tokenizer lacks -----------------------------------------------------------------

GOOD, BAD = "<|good|>", "<|bad|>"
NEW = (
    f'model.new_tokens=["{GOOD}","{BAD}"]',
    f'model.control_tokens={{chosen: "{GOOD}", rejected: "{BAD}"}}',
)
MODEL = ROOT / "assets" / "adder" / "model"


def test_only_the_rows_of_new_tokens_are_new():
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).get_input_embeddings().weight
    config, tokens = make_config("loss=csft", *NEW), AutoTokenizer.from_pretrained(MODEL)
    after = load_policy(config.model, torch.device("cpu")).model.get_input_embeddings().weight
    assert len(after) == len(before) + 2 == check_model(config.model).vocab_size
    torch.testing.assert_close(after[: len(before)], before, rtol=0, atol=0)
    torch.testing.assert_close(after[len(before) :], before[: len(tokens)].mean(0).expand(2, -1))
    assert [ids.tolist() for ids in control_tokens(config)] == [[len(tokens)], [len(tokens) + 1]]


def test_new_tokens_are_trained_and_exported(tmp_path, cache, capfd):
    train(settings(tmp_path, cache, "loss=csft", "n_examples=16", "save_every=8", *NEW), "run")
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
