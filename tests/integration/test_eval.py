"""A run, its checkpoint and its answers evaluated by the commands: the numbers can be made again from the
answers by hand, the table of runs shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from data.adder import accuracy, rewards
from launch.collect import read_run
from tests.integration.online import run_online
from tests.integration.test_stages import command

TRAIN = ("loss=dpo", "n_examples=64", "model.batch_size=32", "save_every=32")
TRAIN += ("data.verifier=data.adder.accuracy", "n_eval_prompts=8", "~reward")
FEW = ("limit=40", "resamples=200")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished run ``a``."""
    path = tmp_path_factory.mktemp("runs")
    run_online(path, "a", *TRAIN)
    return path


def evaluated(*words: str) -> str:
    done = command("eval", *FEW, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(path: Path) -> tuple[dict, list[dict]]:
    """A result and its answers."""
    return json.loads(path.read_text()), [
        json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def result(folder) -> tuple[dict, list[dict]]:
    printed = evaluated(f"run={folder}/a", "accuracy.samples=4", "accuracy.k=[1,2,4]")
    found, rows = read(folder / "a" / "evals" / "accuracy-adder.json")
    assert f"{found['sampled']['pass@2']:.1%}" in printed
    return found, rows


def test_the_numbers_are_those_of_the_answers(folder, result):
    found, rows = result
    assert read_run(folder / "a").values["accuracy-adder/sampled.pass@4"] == found["sampled"]["pass@4"]
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


def test_a_checkpoint_is_another_model_and_the_same_weights_give_the_same_answers(folder, result):
    nothing_kept = f"cache_dir={folder}/other"
    evaluated(f"run={folder}/a/checkpoints/step_00000002", "accuracy.samples=0", nothing_kept)
    evaluated(f"run={folder}/a", "step=1", "accuracy.samples=0")
    last, answers = read(folder / "a" / "evals" / "accuracy-adder-step2.json")
    before, _ = read(folder / "a" / "evals" / "accuracy-adder-step1.json")
    found, rows = result
    weights = [one["fingerprints"]["weights"] for one in (last, found, before)]
    assert weights[0] == weights[1] != weights[2]
    assert answers == [row for row in rows if row["drawn"] == "greedy"]


def test_a_comparison_of_models_and_one_of_their_answers_agree(folder, result):
    against = ("kind=compare", "reward=adder", "against=assets/adder/model")
    evaluated(f"run={folder}/a", *against, f"cache_dir={folder}/cache")
    found, rows = read(folder / "a" / "evals" / "compare-adder-adder.json")
    differences = [fmean(row["rewards"]) - fmean(row["rewards_against"]) for row in rows]
    assert all(row["rewards"] == rewards(row["answers"], [row["reference"]]) for row in rows)
    assert found["mean_difference"] == pytest.approx(fmean(differences))
    assert found["win"] == pytest.approx(fmean(d > 0 for d in differences))
    for side, key in (("a", "answers"), ("b", "answers_against")):
        answers = [
            {"prompt": row["prompt"], "reference": row["reference"], "output": row[key][0]} for row in rows
        ]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    files = (f"answers={folder}/a.jsonl", f"against={folder}/b.jsonl", f"out={folder}/files")
    evaluated("kind=compare", "reward=adder", *files)
    of_files, _ = read(folder / "files" / "compare-adder-b.json")
    for key in ("win_rate", "mean_difference", "p_t", "p_wilcoxon", "p_sign", "mean_difference_ci"):
        assert of_files[key] == found[key]
