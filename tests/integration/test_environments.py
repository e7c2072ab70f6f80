"""Runs whose samples are conversations: what is trained on, what is kept of it, and that they are resumed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError, StoppedError
from config.schema_stages import LabelStage, SampleStage
from data.groups import read_groups
from jobs import stages
from models.distributed import start, stop
from tests.integration.online import assert_same, cut_off, lines, rounds, run_online
from tests.tiny import make_config
from train import train

HERE = "tests.unit.rollouts.environment_functions"
GRPO = (
    "loss=grpo",
    "online=true",
    "rounds.feedback=group",
    "sampler.temperature=1",
    "sampler.top_p=1",
    "rounds.contexts=16",
    "rounds.contexts_per_round=8",
    "retention.kl=false",
)
GUESSING = (
    "environment=adder_guessing",
    "reward=function",
    "reward.function.path=rollouts.environments.guessing.reward",
)
WEIGHED = ("humanline=true", "correction=truncated")


@pytest.fixture(scope="module")
def calculating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    return run_online(folder, "whole", *GRPO, *WEIGHED, "environment=adder_calculator")


def test_what_the_policy_did_not_write_has_no_part_in_its_ratios(calculating) -> None:
    steps = lines(calculating)
    first = [line for line in steps if "round_turns" in line]
    assert [line["round"] for line in first] == [0, 1]
    for line in first:
        assert abs(line["engine_gap"]) < 1e-5, "of each counted token the sampler's own log-probability"
        assert line["correction_masked"] == 0 or "correction_masked" not in line
        assert line["round_turns"] >= 1 and line["round_environment_tokens"] > 1
    for folder, line in zip(rounds(calculating), first, strict=True):
        completions = [c for group in folder.groups() for c in group.completions]
        masked = [c for c in completions if c.loss_mask is not None]
        assert len(masked) > len(completions) / 2
        for c in masked:
            unknown = [value != value for value in c.behavior_logprobs]
            assert unknown == [not own for own in c.loss_mask]
        own = [sum(c.loss_mask) if c.loss_mask else len(c.token_ids) for c in completions]
        assert abs(line["round_length"] - sum(own) / len(own)) < 1e-9
        assert line["round_truncated"] == sum(not c.finished for c in completions)


def test_a_run_that_was_cut_off_goes_on_to_the_same_weights(calculating, tmp_path) -> None:
    words = (*GRPO, *WEIGHED, "environment=adder_calculator", "resume=true")
    with cut_off(at=6):
        run_online(tmp_path, "r", *words)
    assert_same(run_online(tmp_path, "r", *words), calculating)


def test_its_groups_train_offline(calculating, tmp_path) -> None:
    run = run_online(
        tmp_path,
        "offline",
        "loss=grpo",
        "correction=truncated",
        "data=local",
        f"data.path={rounds(calculating)[0].file('groups')}",
        "data.eval_fraction=0",
        "~reward",
    )
    assert abs(lines(run)[0]["engine_gap"]) < 1e-5


def test_an_environment_that_breaks_stops_the_round_which_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    words = (*GRPO, "environment=function", f"environment.path={HERE}.interrupted", "resume=true")
    flag = tmp_path / "flag"
    whole = run_online(tmp_path, "whole", *words)
    monkeypatch.setenv("ENVIRONMENT_FLAG", str(flag))
    flag.touch()
    with pytest.raises(StoppedError, match=r"round 0: .*interrupted failed on .* RuntimeError: out of order"):
        run_online(tmp_path, "r", *words)
    flag.unlink()
    assert_same(run_online(tmp_path, "r", *words), whole)
    log = (tmp_path / "r" / "logs" / "environment-0.log").read_text()
    assert "out of order" in log


def test_a_tool_that_the_template_does_not_know_is_refused(tmp_path) -> None:
    config = make_config(*GRPO, "environment=calculator", f"runs_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"environment\.role=tool: the chat template has no tool turns"):
        train(config, "refused")
    assert not (tmp_path / "refused" / "config.yaml").exists()


def test_samples_on_files_are_conversations_that_are_scored_as_such(tmp_path) -> None:
    samples, feedback = tmp_path / "samples.jsonl", tmp_path / "feedback.jsonl"
    config = make_config(
        *GRPO, *GUESSING, "rounds.samples=4", f"cache_dir={tmp_path}/c", f"runs_dir={tmp_path}"
    )
    world = start()
    try:
        stage = SampleStage(out=str(samples), limit=12, split="train", format="groups", overwrite_out=True)
        stages.sample(config, stage, world)
        first = samples.read_text()
        stages.sample(config, stage, world)
        part = tmp_path / "part.jsonl"
        stages.sample(config, replace(stage, out=str(part), skip=10, limit=2), world)
        with pytest.raises(ConfigError, match=r"skip=1000000: leaves no prompt"):
            stages.sample(config, replace(stage, out=str(part), skip=10**6), world)
        stages.label(
            config,
            LabelStage(samples=str(samples), out=str(feedback), format="groups", overwrite_out=True),
            world,
        )
    finally:
        stop()
    assert samples.read_text() == first, "those that were kept are the same"
    rows = [json.loads(line) for line in first.splitlines()]
    assert [json.loads(line)["id"] for line in part.read_text().splitlines()] == [
        r["id"] for r in rows[10:12]
    ]
    games = [c for row in rows for c in row["completions"] if c.get("turns")]
    assert len(games) > 10 and all(len(c["loss_mask"]) == len(c["token_ids"]) for c in games)
    groups = read_groups(feedback)
    scored = [(c, r) for g in groups for c, r in zip(g.completions, g.rewards, strict=True)]
    assert all(r in (0.0, 1 / (1 + len(c.turns) // 2)) for c, r in scored), "one over the number of guesses"
    assert len({r for _, r in scored}) > 2
    kept = [c for g in groups for c in g.completions if c.turns]
    assert kept and all(c.turns[1].content in "+;=" for c in kept)


def test_every_evaluation_plays_too(tmp_path) -> None:
    accuracy = []
    for name, words in (("game", GUESSING), ("none", ())):
        run = run_online(
            tmp_path,
            name,
            *GRPO,
            *words,
            "data.verifier=data.adder.accuracy",
            "n_eval_prompts=24",
            "rounds.contexts=8",
            "rounds.contexts_per_round=8",
        )
        summary = json.loads((run / "summary.json").read_text())
        accuracy.append(summary["before"]["eval_accuracy_greedy"])
    assert accuracy[0] != accuracy[1]
    assert torch.isfinite(torch.tensor(accuracy)).all()
