"""A run goes on with the data that it was started with, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.errors import ConfigError, StoppedError
from jobs.same_data import check_inputs, code_files, hub_commits, reward_code, reward_files
from tests.integration.online import cut_off
from tests.tiny import ROOT, make_config
from tests.tiny_files import everything
from train import train

LINES = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)[:40]
FAST = ("model.batch_size=8", "n_eval_examples=8", "wandb.enabled=false", "data.verifier=null", "resume=true")
FAST += ("save_every=8", "report=false", "diagnostics=false", "retention.kl=false")


def go(folder: Path, lines: list[str], *more: str) -> dict:
    (folder / "pairs.jsonl").write_text("".join(lines))
    here = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"data.path={folder / 'pairs.jsonl'}")
    return train(make_config("loss=dpo", *here, *FAST, *more), "run")


def left(run: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a run's folder but its lock, which says who asked last."""
    return {name: content for name, content in everything(run).items() if name != "run.lock"}


def cut(folder: Path, lines: list[str], *more: str) -> None:
    """Do two of the run's three steps, each with its checkpoint."""
    with cut_off(2):
        go(folder, lines, *more, "n_examples=24")


def test_a_run_does_not_go_on_with_other_rows(tmp_path: Path) -> None:
    cut(tmp_path, LINES)
    run = tmp_path / "run"
    before = left(run)
    row = json.loads(LINES[7])
    row["completions"][1]["text"] += "1"
    for lines in ([*LINES[:7], json.dumps(row) + "\n", *LINES[8:]], LINES[::-1], LINES[:-1]):
        with pytest.raises(ConfigError, match=r"^data\.path=.*not those that this run was started with"):
            go(tmp_path, lines, "n_examples=24")
        assert left(run) == before, "nothing of the run is changed"
    assert go(tmp_path, LINES, "n_examples=24")["steps"] == 3, "and the old data go on"


def test_a_run_of_rounds_does_not_go_on_with_other_prompts(tmp_path: Path) -> None:
    rounds = ("online=true", "reward=adder", "rounds.contexts=8", "rounds.contexts_per_round=8")
    go(tmp_path, LINES, *rounds)
    before = left(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^data\.path=.*go on with other prompts"):
        go(tmp_path, LINES[::-1], *rounds)
    assert left(tmp_path / "run") == before


def exchanged(folder: Path, bit: int = 1) -> None:
    """Flip a bit of a weight in a model's folder."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(iter(sorted(tensors)))
    tensors[name].view(torch.int32).view(-1)[0] ^= bit
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("lora", ["false", "true"])
def test_a_run_does_not_go_on_from_other_initial_weights(tmp_path: Path, lora: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "adder" / "model", model)
    words = ("model=hub", f"model.name_or_path={model}", "model.max_length=64", "model.max_prompt_length=16")
    words = (*words, "data=adder", "model.dtype=float32", f"model.use_peft={lora}")
    cut(tmp_path, LINES, *words)
    exchanged(model)
    with pytest.raises(ConfigError, match=r"^model\.name_or_path=.*initial weights are not those"):
        go(tmp_path, LINES, *words, "n_examples=24")
    with pytest.raises(ConfigError, match=r"^resume_with_other=weight: names no input"):
        go(tmp_path, LINES, *words, "n_examples=24", "resume_with_other=[weights,weight]")
    assert go(tmp_path, LINES, *words, "n_examples=24", "resume_with_other=[weights]")["steps"] == 3
    (other,) = json.loads((tmp_path / "run" / "run.json").read_text())["went_on_with_other"]
    assert len(set(other["weights"])) == 2
    assert go(tmp_path, LINES, *words, "n_examples=24")["steps"] == 3, "what it goes on with is recorded"


def test_a_run_does_not_go_on_with_other_values_of_tokens_or_held_out_rows(tmp_path: Path) -> None:
    """Token ids, masks and labels stay as they are."""

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")

    def lines(shift: float) -> list[str]:
        found = []
        for line in LINES:
            row = json.loads(line)
            for one in row["completions"]:
                one["token_ids"] = tokenizer(one["text"], add_special_tokens=False).input_ids
                one["behavior_logprobs"] = [-1.0 - shift] * len(one["token_ids"])
            found.append(json.dumps(row) + "\n")
        return found

    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(LINES[-8:]))
    words = (f"data.eval_path={held_out}", "n_eval_examples=null")
    cut(tmp_path, lines(0), *words)
    with pytest.raises(ConfigError, match="behavior_logprobs are compared bit by bit"):
        go(tmp_path, lines(2), *words, "n_examples=24")
    held_out.write_text("".join(LINES[-9:-1]))
    with pytest.raises(ConfigError, match=r"^data\.eval_path=.*would compare two different sets"):
        go(tmp_path, lines(0), *words, "n_examples=24")
    assert go(tmp_path, lines(0), *words, "n_examples=24", "resume_with_other=[evaluation]")["steps"] == 3


def test_names_on_the_hub_are_resolved_to_their_commit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for kind, commit in (("models--org--reward", "a" * 40), ("datasets--org--rows", "b" * 40)):
        (tmp_path / kind / "refs").mkdir(parents=True)
        (tmp_path / kind / "refs" / "main").write_text(commit)
    words = ("loss=dpo", "online=true", "rounds.contexts=1024", "reward=classifier", "model=hub", "data=hub")
    named = (
        "reward.classifier.name_or_path=org/reward",
        "model.name_or_path=org/not-there",
        "data.path=org/rows",
    )
    config = make_config(*words, *named)
    found = {"reward.classifier.name_or_path": "a" * 40, "data.path": "b" * 40}
    assert hub_commits(config) == found
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    state = {"data": "d", "inputs": dict.fromkeys(found, "c" * 40)}
    (tmp_path / "checkpoints" / "step_00000001" / "state.json").write_text(json.dumps(state))
    config = replace(config, resume=True)
    with pytest.raises(ConfigError, match=r"^reward\.classifier\.name_or_path=org/reward: is not what"):
        check_inputs(tmp_path, config, found)
    check_inputs(tmp_path, config, {"data.path": "b" * 40})  # its rows are compared


def test_other_files_of_a_reward_model_are_refused(tmp_path: Path) -> None:
    """Also a bit in the middle of a file of the same length and name."""
    shutil.copytree(ROOT / "assets" / "adder" / "model", tmp_path / "reward")
    words = ("loss=dpo", "online=true", "rounds.contexts=1024", "reward=classifier")
    config = make_config(*words, f"reward.classifier.name_or_path={tmp_path / 'reward'}")
    before = reward_files(config)
    exchanged(tmp_path / "reward", 1 << 20)
    assert before.keys() == {"reward.classifier.name_or_path"} and reward_files(config) != before


def test_the_code_of_every_verifier_is_an_input() -> None:
    verifiers = ("data.verifier", "+evaluations.hard.verifier")
    words = ("loss=dpo", *(f"{key}=data.adder.verify" for key in verifiers))
    found = code_files(make_config(*words))
    assert {key.lstrip("+") for key in verifiers} <= found.keys()


def test_another_body_of_a_function_is_refused_by_the_setting_that_names_it(
    tmp_path: Path, monkeypatch
) -> None:
    module = tmp_path / "own_rewards.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that call it
    words = ("online=true", "reward=function", "reward.function.path=own_rewards.score")
    words = (*words, "rounds.contexts=16", "rounds.contexts_per_round=8")

    def body(text: str) -> None:
        module.write_text(f"def score(completions, **_):\n    return [{text} for one in completions]\n")

    body("float(len(one))")
    go(tmp_path, LINES, *words, "save_every=8")
    body("-float(len(one))")
    with pytest.raises(ConfigError, match=r"^reward\.function\.path=own_rewards\.score: is not what"):
        go(tmp_path, LINES, *words, "save_every=8")
    go(tmp_path, LINES, *words, "save_every=8", "resume_with_other=[reward.function.path]")


def test_a_round_whose_reward_was_mended_goes_on_as_the_message_says(tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "failing_rewards.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that call it
    words = ("online=true", "reward=function", "reward.function.path=failing_rewards.score")
    words = (*words, "rounds.contexts=8", "rounds.contexts_per_round=8")
    module.write_text("def score(completions):\n    raise RuntimeError('out of order')\n")
    with pytest.raises(StoppedError, match=r"out of order(.|\n)*'(resume_with_other=\S+)'") as stopped:
        go(tmp_path, LINES, *words)
    module.write_text("def score(completions):\n    return [float(len(one)) for one in completions]\n")
    with pytest.raises(ConfigError, match=r"^reward\.function\.path="):
        go(tmp_path, LINES, *words)
    samples = (tmp_path / "run" / "rounds" / "000" / "samples.jsonl").read_bytes()
    added = re.findall(r"'(resume_with_other=\S+)'", str(stopped.value))
    assert go(tmp_path, LINES, *words, *added)["steps"] > 0
    assert (tmp_path / "run" / "rounds" / "000" / "samples.jsonl").read_bytes() == samples


def test_the_users_code_alone_counts_as_the_rewards() -> None:
    online = ("online=true", "loss=dpo")
    function = ("reward=function", "reward.function.path=data.adder.rewards")
    assert reward_code(make_config(*online, *function)) == ["reward.function.path"]
    assert reward_code(make_config(*online, "reward=adder")) == []
    assert reward_code(make_config(*online, "reward=verifier")) == ["data.verifier"]
    assert reward_code(make_config(*online, "reward=armorm")) == []
