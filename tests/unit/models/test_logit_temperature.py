"""``model.logit_temperature``: one division in the one forward, the same for the policy and its reference."""

from __future__ import annotations

import json

import pytest
import torch

from common.errors import ConfigError
from data.batches import collate
from tests.engine import engine_config, make_segment, make_trainer, run
from tests.integration.online import run_online
from tests.tiny import make_config, random_groups, tiny_policy


def tempered(temperature: float):
    policy = tiny_policy()
    policy.temperature = temperature
    return policy


@pytest.mark.parametrize("pack", [False, True])
def test_values_and_gradients_are_those_of_divided_logits(pack):
    rows = [row for group in random_groups(4) for row in group[0].rows]
    policy, plain = tempered(0.6).double(), tiny_policy().double()
    values = policy(collate(rows, torch.device("cpu"), pack))
    values.sum().backward()
    for r, row in enumerate(rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = plain.model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1]
        wanted = (logits / 0.6).log_softmax(-1).gather(1, torch.tensor(row.completion_ids).long()[:, None])
        torch.testing.assert_close(values[r, : len(row.completion_ids)], wanted[:, 0], rtol=1e-10, atol=1e-10)
        wanted.sum().backward()
    for (name, mine), theirs in zip(policy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_one_changes_no_bit():
    sequences = collate([row for group in random_groups(4) for row in group[0].rows], torch.device("cpu"))
    logits = tiny_policy()
    assert torch.equal(tempered(1.0)(sequences), logits(sequences))
    with logits.at_temperature(0.5):
        assert not torch.equal(logits(sequences), tempered(1.0)(sequences))
    assert logits.temperature == 1.0


def test_policy_and_reference_agree_before_the_first_update(tmp_path):
    """The reference is scored at the same temperature: DPO begins at ln 2, and then leaves the run at 1."""
    lines = []
    for temperature in (1.0, 0.7):
        config = engine_config(tmp_path / f"{temperature}", "dpo", "model.batch_size=4", "humanline=true")
        trainer = make_trainer(config, tempered(temperature))
        lines.append(run(config, make_segment(config, pairs=8), trainer)[1])
    assert lines[1][0]["loss"] == pytest.approx(lines[0][0]["loss"], abs=1e-6)
    assert lines[1][0]["grad_norm"] != lines[0][0]["grad_norm"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.logit_temperature=0", "model.logit_temperature=0.0: divides the logits: must be above 0"),
        ("loss=bradley_terry model.logit_temperature=2", "a reward model has none"),
        (
            "loss=grpo online=true correction=masked sampler.temperature=1 sampler.top_p=1 "
            "model.logit_temperature=0.7",
            "sampler.temperature=1 and sampler.top_p=1; set sampler.temperature=0.7 sampler.top_p=1, or",
        ),
    ],
)
def test_what_means_nothing_is_refused(words, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*words.split())
    assert said in str(caught.value)


def test_an_online_run_records_and_trains_at_it(tmp_path):
    """On the command line: what the sampler noted is what the trainer finds before the first update."""
    words = ["online=true", "loss=grpo", "rounds.feedback=group", "correction=truncated", "humanline=true"]
    words += ["model.logit_temperature=0.7", "sampler.temperature=0.7", "sampler.top_p=1"]
    words += ["rounds.contexts=8", "rounds.contexts_per_round=8", "rounds.zero_variance=keep", "seed=2"]
    folder = run_online(tmp_path, "r", *words)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["behavior_kl"] < 1e-6 and first["correction_weight"] == pytest.approx(1, abs=1e-3)
    line = json.loads((folder / "rounds" / "000" / "samples.jsonl").read_text().splitlines()[0])
    assert line["completions"][0]["behavior_temperature"] == 0.7
    offline = ["data=local", f"data.path={folder}/rounds/000/groups.jsonl", "data.eval_fraction=0"]
    with pytest.raises(ConfigError, match=r"row 1: its behavior_logprobs are at temperature 0\.7, and"):
        run_online(tmp_path, "s", "loss=grpo", "correction=truncated", *offline)
