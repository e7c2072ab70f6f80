"""A suite does what a run lacks, once, and its average is a column of the results."""

from __future__ import annotations

import json
import subprocess

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError
from launch import suite as suites
from launch.collect import read_run
from launch.grid import Run, read_sweep
from launch.results import metrics_of
from launch.slurm import Job, script
from launch.suite import main, measure, read_suite

OWN = {
    "evaluations": {"own-a": ["kind=accuracy", "limit=3"], "own-b": ["kind=accuracy", "split=train"]},
    "average": {"own-a/greedy": 100, "own-b/rate": 1},
}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "mine-s1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "summary.json").write_text("{}")
    return folder


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(OWN)))
    return read_suite(str(file))


@pytest.fixture
def asked(monkeypatch):
    """The commands of evaluations, which write what eval.py would, and the names of those that fail."""
    made, numbers, failing = [], {"own-a": {"greedy": 0.5}, "own-b": {"rate": 20.0}}, set()

    def call(words, cwd):
        made.append(words[1:])
        given = dict(word.split("=", 1) for word in words[2:])
        if given["name"] in failing:
            return 1
        result = suites.Path(given["run"]) / "evals" / f"{given['name']}.json"
        result.parent.mkdir(exist_ok=True)
        result.write_text(json.dumps(numbers[given["name"]]))
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return made, failing


def test_what_is_missing_is_done_once_and_averaged(run, own, asked, capsys):
    made, failing = asked
    failing.add("own-b")
    assert not measure(own, run) and not (run / "evals" / "own.json").exists()
    assert "failed: python eval.py" in capsys.readouterr().err
    failing.clear()
    assert measure(own, run)
    assert [words[2] for words in made] == ["name=own-a", "name=own-b", "name=own-b"]
    found = read_run(run)
    assert found.values["own/average"] == (100 * 0.5 + 20) / 2 and "own/average" in metrics_of([found])
    assert measure(own, run) and len(made) == 3


def test_the_suite_of_halos_asks_for_its_tasks(run, capsys):
    assert main(["halos", str(run), "--print"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "arc_easy,arc_challenge,winogrande,bbh_cot_fewshot,gsm8k_cot" in first
    assert "kind=alpacaeval" in second
    (run / "summary.json").unlink()
    assert main(["halos", str(run)]) == 2 and "is no finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"average": {"other/greedy": 1}}, "NAME one of own-a, own-b"),
        ({"average": {"own-a/greedy": "x"}}, "must be a number"),
        ({"evaluations": {"own-a": "kind=accuracy"}}, "is a list of words"),
        ({"more": 1}, "and no more"),
        ({"evaluations": ["kind=accuracy"]}, "and no more"),
    ],
)
def test_a_suite_that_cannot_be_read_is_refused(tmp_path, wrong, said):
    file = tmp_path / "own.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(OWN | wrong)))
    with pytest.raises(ConfigError, match=said):
        read_suite(str(file))


def test_a_sweep_ends_its_runs_with_it(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("suite: halos\nbase: {loss: dpo, runs_dir: 'my runs'}\n")
    (made,) = read_sweep(file).runs()
    text = script(Job(gpus_per_node=0), "s", [made], tmp_path)
    assert 'launch.suite halos "$folder"' in text and f"folder='my runs/{made.name}'" in text
    assert "launch.suite" not in script(Job(), "s", [Run("s", "c", 1, {}, None)], tmp_path)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    with pytest.raises(ConfigError, match="there is halos"):
        read_suite("halo")
