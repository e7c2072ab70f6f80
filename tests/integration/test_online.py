"""Rounds from end to end on the embedded task: what is sampled is what is trained, the schedule's clock,
drops, failures."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from safetensors.torch import load_file

from common.errors import StoppedError, UserError
from data.groups import read_groups
from launch.state import ending_of_folder
from tests import programs
from tests.integration.online import SHORT, cut_off, function, lines, rounds, run_online, scored_again
from tests.tiny_armorm import save_armorm


@pytest.fixture
def batches():
    """The global batches that training steps were given, in order."""
    seen = []
    with cut_off(None, seen):
        yield seen


def test_the_tokens_that_were_sampled_are_the_tokens_that_are_trained(tmp_path, batches):
    """And the clock of the schedule is contexts consumed."""
    run = run_online(tmp_path, "r", "online=true", "loss=dpo", "warmup=1.0", "lr=1e-3")
    wanted, order = set(), []
    for folder in rounds(run):
        for sampled, scored in zip(folder.read("samples"), folder.read("scores"), strict=True):
            order.append(sampled["id"])
            best, worst = max(scored["scores"]), min(scored["scores"])
            if best - worst >= 0.01:
                ids = [tuple(c["token_ids"]) for c in sampled["completions"]]
                chosen, rejected = (ids[scored["scores"].index(score)] for score in (best, worst))
                wanted.add((sampled["id"], chosen, rejected))
    examples = [example for batch in batches for example in batch]
    trained = [(e.prompt_id, *(tuple(row.completion_ids.tolist()) for row in e.rows)) for e in examples]
    assert len(order) == 48 == len(set(order))
    assert len(trained) == len(set(trained)) and set(trained) == wanted
    assert sum(folder.record["kept"] for folder in rounds(run)) == len(wanted) > 10
    assert len(lines(run)) == len(batches)
    assert not (run / "rounds" / "000" / "weights").exists()
    for index, done in ((0, 0.5), (1, 1.0)):
        last = [line for line in lines(run) if line["round"] == index][-1]
        assert last["lr"] == pytest.approx(1e-3 * done)
    assert next(line["staleness"] for line in lines(run) if line["round"] == 1) == 0


def test_a_round_replayed_offline_trains_the_same(tmp_path):
    """The files are the seam: the first round's groups as a data set give the first round's losses and
    gradients, to the bit."""
    run = run_online(tmp_path, "r", "online=true", "loss=kto")
    first = [line for line in lines(run) if line["round"] == 0]
    data = ("data=local", f"data.path={run}/rounds/000/groups.jsonl", "data.eval_fraction=0", "~reward")
    replayed = run_online(tmp_path, "replay", "loss=kto", *data)
    assert len(first) > 2
    for key in ("loss", "grad_norm", "kl", "reward_margin"):
        assert [line[key] for line in lines(replayed)] == [line[key] for line in first]


def test_whole_groups_with_equal_scores_take_the_same_steps(tmp_path, batches):
    words = ("online=true", "loss=grpo", "rounds.feedback=group")
    run = run_online(tmp_path, "r", *words, "rounds.contexts_per_round=12")
    assert len(lines(run)) == 48 * 4 / 8
    made = [group for folder in rounds(run) for group in folder.groups()]
    groups = {(group.prompt.id, c.token_ids): group.rewards for group in made for c in group.completions}
    assert any(len(set(values)) == 1 for values in groups.values())
    for example in (e for batch in batches for e in batch):
        values = groups[example.prompt_id, tuple(example.rows[0].completion_ids.tolist())]
        possible = {0.0} if np.std(values) == 0 else {(v - np.mean(values)) / np.std(values) for v in values}
        assert any(math.isclose(example.label, a, abs_tol=1e-9) for a in possible)
    dropped = run_online(tmp_path, "d", *words, "rounds.zero_variance=drop")
    assert len(lines(dropped)) < len(lines(run))


def test_an_empty_round_is_no_step(tmp_path):
    words = ("online=true", "loss=dpo", "rounds.contexts_per_round=16")
    run = run_online(tmp_path, "r", *words, *function("silent_second_time"))
    records = [folder.record for folder in rounds(run)]
    assert [record["kept"] > 0 for record in records] == [True, False, True]
    assert records[1]["steps"] == 0
    assert {line["round"] for line in lines(run)} == {0, 2}
    assert sum(records[1]["dropped"].values()) == 16


def test_filling_up_samples_on_until_enough_are_kept(tmp_path):
    words = ("rounds.contexts=80", "rounds.contexts_per_round=16", "rounds.fill=true")
    run = run_online(tmp_path, "r", "online=true", "loss=dpo", *words)
    records = [folder.record for folder in rounds(run)]
    assert all(record["kept"] == 16 for record in records[:-1])
    assert len(records[0]["parts"]) > 1
    assert [r["contexts"][0] for r in records] == [0, *(r["contexts"][1] for r in records[:-1])]
    assert records[-1]["contexts"][1] == 80
    parts = [folder.read(f"samples{suffix}") for folder in rounds(run) for suffix in folder.record["parts"]]
    ids = [line["id"] for part in parts for line in part]
    assert len(ids) == 80 == len(set(ids))


def apart(path):
    """Return (a file's text without its samples' log-probabilities, these log-probabilities)."""
    field, text = r'"behavior_logprobs": \[[^\]]*\]', path.read_text()
    logprobs = [float(v) for found in re.findall(field, text) for v in found[22:-1].split(", ")]
    return re.sub(field, "", text), logprobs


def test_several_ranks_and_one_sample_score_and_train_alike(tmp_path):
    """Two gloo ranks share sampling and a reward model. The files of the first round are the same to the byte
    but for the samples' log-probabilities: these and the weights are the same to rounding, for a processor
    may sum a smaller batch in another order."""
    save_armorm(tmp_path / "armorm")
    model = "max_length:400,max_prompt_length:200,dtype:float32,batch_tokens:600"
    parts = f"model:{{reward:armorm,weight:1,name_or_path:{tmp_path}/armorm,{model}}}"
    parts += ",short:{reward:function,weight:-0.05,path:tests.unit.rollouts.reward_functions.lengths}"
    words = ("online=true", "humanline=true", "loss=kto", "model.batch_size=16", "reward=weighted")
    words += (f"reward.weighted.parts={{{parts}}}", "rounds.keep_weights=true", "rounds.contexts=24")
    words += ("rounds.contexts_per_round=12",)
    one = run_online(tmp_path, "one", *words)
    places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/c", "exp_name=two")
    programs.finished(programs.ranks(2, "train.py", *SHORT, *words, *places))
    for stage in ("samples", "scores", "groups"):
        (text, logprobs), (other, others) = (
            apart(run / f"rounds/000/{stage}.jsonl") for run in (one, tmp_path / "two")
        )
        assert text == other
        np.testing.assert_allclose(logprobs, others, rtol=1e-5)
    assert len(read_groups(one / "rounds/000/groups.jsonl")) > 4
    np.testing.assert_allclose(
        [a["loss"] for a in lines(one)], [b["loss"] for b in lines(tmp_path / "two")], rtol=1e-4
    )
    first, second = (load_file(run / "model" / "model.safetensors") for run in (one, tmp_path / "two"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-3
    for means in (folder.record["metrics"] for folder in rounds(one)):
        assert means["reward"] == pytest.approx(means["reward_model"] - 0.05 * means["reward_short"])
    assert any("round_reward_short" in line for line in lines(one))
    assert all(len(found) > 100 and found.max() < 1e-4 for found in scored_again(tmp_path / "two"))


def test_a_run_may_be_as_long_as_an_offline_one_of_so_many_examples(tmp_path, batches):
    """``rounds.examples``: as many examples as offline, on the same schedule, whatever share of contexts is
    dropped."""
    words = ("online=true", "loss=dpo", "warmup=1.0", "lr=1e-3", "rounds.contexts=200", "rounds.fill=true")
    run = run_online(tmp_path, "r", *words, "rounds.contexts_per_round=12", "rounds.examples=30")
    assert sum(len(batch) for batch in batches) == 30
    sizes = [folder.record["examples"] for folder in rounds(run)]
    assert len(sizes) == 3 and sum(sizes[:2]) < 30 <= sum(sizes), "the last round is cut, not left out"
    last = lines(run)[-1]
    assert last["examples"] == 30 and last["lr"] == pytest.approx(1e-3)
    for line in lines(run):
        assert line["lr"] == pytest.approx(1e-3 * line["examples"] / 30)


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_rewards_without_spread_teach_nothing_and_everybody_is_told(tmp_path, capsys, loss):
    """Each round warns with the rewards. Groups that are kept take their steps; the run, its summary, its
    card and its status then say that nothing was learnt. Without a pair there is no step, and the reason is
    said."""
    few = ("rounds.contexts=24", "rounds.contexts_per_round=12")
    words = ("online=true", f"loss={loss}", *function("nothing"), *few)
    if loss == "dpo":
        why = r"24 × the scores differ by less than rounds\.tau"
        with pytest.raises(UserError, match=why) as error:
            run_online(tmp_path, "r", *words)
        assert not isinstance(error.value, StoppedError), "which is tried again"
        said = capsys.readouterr().out
    else:
        run = run_online(tmp_path, "r", *words, "rounds.feedback=group")
        said, summary = capsys.readouterr().out, json.loads((run / "summary.json").read_text())
        assert summary["status"] == "nothing learnt" and summary["silent_steps"] == summary["steps"] > 0
        told = f"nothing learnt: {summary['steps']} of {summary['steps']} updates without a signal"
        card = (run / "model" / "README.md").read_text()
        assert all(told in text for text in (said, card, str(ending_of_folder(run))))
        assert [line["round_zero_variance"] for line in lines(run) if "round_reward" in line] == [1.0, 1.0]
    for index in (0, 1):
        assert f"warning: round {index}: all rewards lie in [0, 0], so" in said


def test_updates_that_were_all_skipped_are_nothing_learnt(tmp_path):
    words = ("loss=dpo", "loss.beta=1e30", "n_examples=32", "model.batch_size=8", "~reward")
    summary = json.loads((run_online(tmp_path, "r", *words) / "summary.json").read_text())
    assert summary["status"] == "nothing learnt" and summary["skipped_steps"] == summary["steps"] == 4
