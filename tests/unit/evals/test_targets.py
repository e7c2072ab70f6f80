"""From the command line to targets: what a run says, what the command line changes, and what is refused with
key, value and remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from common.errors import ConfigError, DataError
from config.load import dump, load
from config.schema_stages import EvalStage
from eval import evaluate
from evals.targets import over_run, targets_of
from sample import sample
from tests.tiny import ROOT

MODEL = ROOT / "assets" / "adder" / "model"


def composed(program: str, *words: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return compose(program, overrides=list(words))


def evaluated(*words: str) -> None:
    """``python eval.py <words>`` in this process."""
    evaluate(composed("eval", *words), [word.lstrip("+~").partition("=")[0] for word in words])


def make_run(folder: Path, *words: str, finished: bool = True) -> Path:
    """A run's folder as training leaves it, of the embedded model as it is."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(load(composed("config", *words))))
    (folder / "checkpoints" / "step_00000008").mkdir(parents=True)
    if finished:
        shutil.copytree(MODEL, folder / "model")
    return folder


def test_a_wrong_command_line_says_key_value_and_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused = {
        "out=null": "out=None: is needed",
        "out=x data.verifier=null": "accuracy.verifier=None: data=adder names nothing that checks answers",
        "out=x lr=1": "lr=1: is not read by an evaluation",
        "out=x against=runs/y": "against=['runs/y']: is for kind=compare",
        "run=assets/adder/model": "give model=hub model.name_or_path=",
        "model=hub model.name_or_path=./nowhere sampler.max_tokens=16 out=x": "model.name_or_path=./nowhere",
    }
    for line, said in refused.items():
        words = [word.replace("out=x", f"out={tmp_path}/out") for word in line.split()]
        with pytest.raises((ConfigError, DataError)) as caught:
            evaluated(*words)
        assert said in str(caught.value), line
        assert not (tmp_path / "out").exists()


def test_what_is_no_run_to_evaluate_is_refused(tmp_path):
    run, whole = make_run(tmp_path / "a", finished=False), make_run(tmp_path / "b")
    reward = make_run(tmp_path / "c", "loss=bradley_terry")
    theirs = make_run(tmp_path / "theirs", "model.trust_remote_code=true")
    (part := run / "checkpoints" / "step_00000016.part").mkdir()
    (whole / "evals").mkdir()
    (whole / "evals" / "accuracy-adder.json").write_text("{}")
    for words, said in (
        ((f"run={run}",), r"is not finished.*step=… of 8$"),
        ((f"run={part}",), r"step_00000016\.part: is no whole checkpoint.*there are 8$"),
        ((f"run={whole}", "model=hub"), "run= says which model"),
        ((f"run={whole}", "accuracy.samples=0", "limit=4"), "overwrite_out=true"),
        ((f"run={reward}",), "is a reward model"),
        ((f"run={theirs}",), r"model\.trust_remote_code=True: .*theirs/config\.yaml lets the model"),
    ):
        with pytest.raises(ConfigError, match=said):
            evaluated(*words)
    assert (whole / "evals" / "accuracy-adder.json").read_text() == "{}"
    with pytest.raises(ConfigError, match=f"run={reward}: is a reward model"):
        sample(composed("sample", f"run={reward}", f"out={tmp_path}/out.jsonl"), ["run", "out"])
    evaluated(f"run={theirs}", "model.trust_remote_code=true", "limit=1", "accuracy.samples=0")


SAVED = {
    "model": {"name_or_path": "theirs", "max_length": 64},
    "data": {"name": "adder", "path": "a"},
    "sampler": {"name": "embedded", "temperature": 1.0, "top_p": 0.95, "max_tokens": 48},
    **{"seed": 7, "reward": None, "lr": 1.0},
}
COMPOSED = {
    "model": {"name_or_path": "default", "max_length": 32},
    "data": {"name": "math", "path": "b"},
    "sampler": {"name": "vllm", "temperature": 0.7, "top_p": 1.0, "max_tokens": 2048},
    **{"seed": 1, "reward": {"name": "r"}, "lr": 2.0},
}


def test_a_runs_settings_are_its_own_but_for_what_the_command_line_changes():
    kept = over_run(SAVED, COMPOSED, ["run", "kind"])
    drawn = {"temperature": 0.7, "top_p": 1.0}  # how answers are drawn is the evaluation's
    assert kept == SAVED | {"reward": {"name": "r"}, "sampler": SAVED["sampler"] | drawn}
    changed = over_run(SAVED, COMPOSED, ["data", "model.max_length", "seed"])
    assert changed["data"] == COMPOSED["data"] and changed["seed"] == 1
    assert changed["model"] == {"name_or_path": "theirs", "max_length": 32}
    assert over_run(SAVED, COMPOSED, ["sampler"])["sampler"] == COMPOSED["sampler"] | {"max_tokens": 48}
    longer = over_run(SAVED, COMPOSED, ["sampler", "sampler.max_tokens"])
    assert longer["sampler"] == COMPOSED["sampler"]
    assert SAVED["sampler"]["temperature"] == 1.0  # what was given is not written to


def targets(stage, *words):
    settings = OmegaConf.to_container(composed("eval", *words), resolve=True)
    return targets_of(stage, settings, [word.partition("=")[0] for word in words], {})


def test_an_online_run_s_model_answers_otherwise_than_it_was_trained(tmp_path):
    """Greedily where eight samples a prompt were drawn, from fewer tokens where the loss divided by
    log-probabilities of all, shorter than a penalty of length; and both sides of a comparison as long."""
    run = make_run(
        tmp_path / "a",
        *("loss=grpo", "online=true", "reward=adder", "rounds.samples=8", "rounds.overlong=4"),
        *("sampler.temperature=1", "sampler.top_p=1", "model.logit_temperature=1", "correction=truncated"),
    )
    for key, value in (("temperature", 0), ("top_p", 0.9), ("max_tokens", 3)):
        (target,) = targets(EvalStage(run=[str(run)]), f"sampler.{key}={value}")
        assert getattr(target.config.sampler, key) == value
    longer = ["model=hub", f"model.name_or_path={MODEL}", "model.max_length=3072"]
    sides = [str(make_run(tmp_path / f"side {n}", *longer[:n])) for n in (2, 3)]
    (target,) = targets(EvalStage(kind="compare", run=sides[:1], against=sides[1:]))
    assert target.config.max_tokens == target.other.config.max_tokens == 1024
