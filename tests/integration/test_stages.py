"""Sample here, label there, train elsewhere: the commands, on files."""

from __future__ import annotations

import json

import pytest

from data.groups import read_groups
from tests import programs
from tests.integration.online import SHORT, lines, rounds, run_online
from tests.tiny_armorm import save_armorm

COMMON = [s for s in SHORT if s.startswith(("data.", "rounds.samples"))]


def command(program, *arguments):
    return programs.run(f"{program}.py", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With samples of the policy, labelled as pairs and as whole groups."""
    folder = tmp_path_factory.mktemp("stages")
    done = command("sample", *COMMON, f"out={folder}/samples.jsonl", "limit=24", f"cache_dir={folder}/cache")
    assert done.returncode == 0, done.stderr
    for name, words in (("pairs", ()), ("groups", ("rounds.feedback=group",))):
        files = (f"in={folder}/samples.jsonl", f"out={folder}/{name}.jsonl")
        done = command("label", *COMMON, "reward=adder", *files, *words)
        assert done.returncode == 0, done.stderr
    return folder


def trained_on(file, folder, *words):
    where = ("data=local", f"data.path={file}", "data.eval_fraction=0", "~reward")
    return run_online(folder, "offline", *words, *where)


def test_stages_on_files_make_the_data_of_a_run(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [len(row["completions"]) for row in rows] == [4] * 24
    sampled = {(row["id"], tuple(c["token_ids"])) for row in rows for c in row["completions"]}
    groups = read_groups(folder / "pairs.jsonl")
    assert groups
    assert all((g.prompt.id, c.token_ids) in sampled for g in groups for c in g.completions)
    assert all(group.rewards[0] - group.rewards[1] >= 0.01 for group in groups)
    run = trained_on(folder / "pairs.jsonl", tmp_path, "loss=dpo")
    assert lines(run)[-1]["examples"] == len(groups)
    assert not rounds(run)


def test_samples_bring_the_log_probabilities_that_corrections_need(folder, tmp_path):
    """Drawn from the policy that is then trained: every ratio is 1 until it moves."""
    completions = [c for group in read_groups(folder / "groups.jsonl") for c in group.completions]
    assert all(len(c.behavior_logprobs or ()) == len(c.token_ids or ()) for c in completions)
    words = ("humanline=true", "correction=masked", "correction.low=0.97", "correction.high=1.02")
    steps = lines(trained_on(folder / "groups.jsonl", tmp_path, "loss=grpo", *words))
    assert steps[0]["correction_weight"] == pytest.approx(1, abs=1e-5) and steps[0]["correction_masked"] == 0
    assert steps[-1]["correction_masked"] > 0 == steps[-1]["correction_unknown"]
    assert steps[0]["behavior_kl"] < 1e-9 < steps[-1]["behavior_kl"]


def test_ranks_label_as_one(tmp_path):
    """Each scores a share of the batches. The file is that of one process; one message says what failed."""
    save_armorm(tmp_path / "armorm")
    asked = [{"instruction": f"what is {i // 2}?", "output": "so " * (i + 1)} for i in range(12)]
    (tmp_path / "in.json").write_text(json.dumps(asked))
    model = (f"reward.armorm.name_or_path={tmp_path}/armorm", "reward.armorm.max_length=96")
    model += ("reward.armorm.batch_tokens=64", "reward.armorm.max_prompt_length=32")
    words = (f"in={tmp_path}/in.json", "reward=armorm", *model, f"runs_dir={tmp_path}")
    written = []
    for ranks in (1, 3):
        out = tmp_path / f"{ranks}.json"
        started = programs.ranks(ranks, "label.py", *words, "format=scalar", f"out={out}")
        programs.finished(started)
        assert "".join(one.said() for one in started).count("12 entries from 12 scored samples") == 1
        written.append(out.read_bytes())
    assert written[0] == written[1]
    (tmp_path / "armorm" / "model.safetensors").unlink()
    started = programs.ranks(2, "label.py", *words, f"out={tmp_path}/none.jsonl")
    codes = [one.wait() for one in started]
    assert all(codes) and not (tmp_path / "none.jsonl").exists()
    assert "".join(one.said() for one in started).count("error: reward.armorm.name_or_path=") == 1
