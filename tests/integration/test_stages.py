"""Sample here, label there, train elsewhere: the commands, on files. And a run, its checkpoint and its
answers evaluated: the numbers can be made again from the answers by hand, the table of runs shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from data.adder import accuracy, rewards
from data.groups import read_groups
from launch.collect import read_run
from tests import programs
from tests.integration.online import SHORT, lines, rounds, run_online
from tests.tiny_armorm import save_armorm

COMMON = [s for s in SHORT if s.startswith(("data.", "rounds.samples"))]


def command(program: str, *arguments: str) -> str:
    """What the command prints, which ends well."""
    done = programs.run(f"{program}.py", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With samples of the policy, labelled as pairs and as whole groups."""
    folder = tmp_path_factory.mktemp("stages")
    command("sample", *COMMON, f"out={folder}/samples.jsonl", "limit=24", f"cache_dir={folder}/cache")
    for name, words in (("pairs", ()), ("groups", ("rounds.feedback=group",))):
        files = (f"in={folder}/samples.jsonl", f"out={folder}/{name}.jsonl")
        command("label", *COMMON, "reward=adder", *files, *words)
    return folder


def trained_on(file, folder, *words):
    where = ("data=local", f"data.path={file}", "data.eval_fraction=0", "~reward")
    return run_online(folder, "offline", *words, *where)


def test_stages_on_files_make_the_data_of_a_run(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [len(row["completions"]) for row in rows] == [4] * 24
    sampled = {(row["id"], tuple(c["token_ids"])) for row in rows for c in row["completions"]}
    assert (groups := read_groups(folder / "pairs.jsonl"))
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
    """Each scores a share of the batches. The file is that of one process."""
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


# -- eval.py ----------------------------------------------------------------------------------------

TRAIN = ("loss=dpo", "n_examples=64", "model.batch_size=32", "save_every=32")
TRAIN += ("data.verifier=data.adder.accuracy", "n_eval_prompts=8", "~reward")
FEW = ("limit=40", "resamples=200")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A finished run ``a``."""
    path = tmp_path_factory.mktemp("runs")
    run_online(path, "a", *TRAIN)
    return path


def read(path: Path) -> tuple[dict, list[dict]]:
    """A result and its answers."""
    answers = path.with_suffix(".jsonl").read_text().splitlines()
    return json.loads(path.read_text()), [json.loads(line) for line in answers]


@pytest.fixture(scope="module")
def result(runs) -> tuple[dict, list[dict]]:
    printed = command("eval", *FEW, f"run={runs}/a", "accuracy.samples=4", "accuracy.k=[1,2,4]")
    found, rows = read(runs / "a" / "evals" / "accuracy-adder.json")
    assert f"{found['sampled']['pass@2']:.1%}" in printed
    return found, rows


def test_the_numbers_are_those_of_the_answers(runs, result):
    found, rows = result
    assert read_run(runs / "a").values["accuracy-adder/sampled.pass@4"] == found["sampled"]["pass@4"]
    assert len(rows) == 40 * 5 and len({row["prompt_id"] for row in rows}) == 40
    assert all(row["verdict"] == accuracy([row["output"]], [row["reference"]])[0] for row in rows)
    greedy = [row["verdict"] for row in rows if row["drawn"] == "greedy"]
    assert found["greedy"]["accuracy"] == pytest.approx(fmean(greedy)) and len(greedy) == 40
    right: dict[str, list[float]] = {}
    for row in rows:
        if row["drawn"] == "sampled":
            right.setdefault(row["prompt_id"], []).append(row["verdict"])
    for k in (1, 2, 4):
        by_hand = fmean(1 - math.comb(int(4 - sum(v)), k) / math.comb(4, k) for v in right.values())
        assert found["sampled"][f"pass@{k}"] == pytest.approx(by_hand)
        low, high = found["sampled"][f"pass@{k}_ci"]
        assert low <= by_hand <= high
    lengths = [row["tokens"] for row in rows if row["drawn"] == "greedy"]
    assert found["greedy"]["length"] == pytest.approx(fmean(lengths))
    assert {len(found["fingerprints"][part]) for part in ("weights", "prompts")} == {64}
    assert found["settings"]["sampler"]["temperature"] == 0.7 and found["settings"]["sampler"]["top_p"] == 1.0


def test_a_checkpoint_is_another_model_and_the_same_weights_give_the_same_answers(runs, result):
    nothing_kept = f"cache_dir={runs}/other"
    command("eval", *FEW, f"run={runs}/a/checkpoints/step_00000002", "accuracy.samples=0", nothing_kept)
    command("eval", *FEW, f"run={runs}/a", "step=1", "accuracy.samples=0")
    last, answers = read(runs / "a" / "evals" / "accuracy-adder-step2.json")
    before, _ = read(runs / "a" / "evals" / "accuracy-adder-step1.json")
    found, rows = result
    weights = [one["fingerprints"]["weights"] for one in (last, found, before)]
    assert weights[0] == weights[1] != weights[2]
    assert answers == [row for row in rows if row["drawn"] == "greedy"]


def test_a_comparison_of_models_and_one_of_their_answers_agree(runs, result):
    against = ("kind=compare", "reward=adder", "against=assets/adder/model")
    command("eval", *FEW, f"run={runs}/a", *against, f"cache_dir={runs}/cache")
    found, rows = read(runs / "a" / "evals" / "compare-adder-adder.json")
    differences = [fmean(row["rewards"]) - fmean(row["rewards_against"]) for row in rows]
    assert all(row["rewards"] == rewards(row["answers"], [row["reference"]]) for row in rows)
    assert found["mean_difference"] == pytest.approx(fmean(differences))
    assert found["win"] == pytest.approx(fmean(d > 0 for d in differences))
    for side, key in (("a", "answers"), ("b", "answers_against")):
        answers = [{k: row[k] for k in ("prompt", "reference")} | {"output": row[key][0]} for row in rows]
        (runs / f"{side}.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    files = (f"answers={runs}/a.jsonl", f"against={runs}/b.jsonl", f"out={runs}/files")
    command("eval", *FEW, "kind=compare", "reward=adder", *files)
    of_files, _ = read(runs / "files" / "compare-adder-b.json")
    for key in ("win_rate", "mean_difference", "p_t", "p_wilcoxon", "p_sign", "mean_difference_ci"):
        assert of_files[key] == found[key]
