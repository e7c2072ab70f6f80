"""A run that was killed goes on with the inputs that it was started with, or not at all: each input is
exchanged in turn, and the refusal names it, its file and the setting that accepts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from common.errors import ConfigError, StoppedError
from jobs.same_data import check_inputs, file_inputs
from tests.integration.online import cut_off
from tests.tiny import ROOT, make_config
from tests.tiny_files import everything
from train import train

ADDER = ROOT / "assets" / "adder"
LINES = (ADDER / "pairs.jsonl").read_text().splitlines(keepends=True)[:48]
FAST = ("model.batch_size=8", "wandb.enabled=false", "data.verifier=null", "retention.kl=false", "warmup=0")
FAST += ("save_every=8", "report=false", "diagnostics=false", "resume=true", "humanline=true", "sync_freq=2")
MODEL = ("model=hub", "model.max_length=64", "model.max_prompt_length=16", "model.dtype=float32")
PARTS = "{m:{reward:classifier,weight:1,name_or_path:%s},f:{reward:function,weight:1,path:own_rewards.score}}"
MODES = {
    "offline": ("loss=dpo", "n_examples=24", "loss._target_=own_losses.loss"),
    "online": ("loss=kto", "online=true", "rounds.contexts=16", "rounds.contexts_per_round=16"),
}
CODE = {
    "own_rewards": "from own_helper import W\n\ndef score(completions, **_):\n"
    "    return [W * float(len(one)) for one in completions]\n",
    "own_helper": "def load():\n    from own_parts.deep import W\n    return W\nW = load()\n",
    "own_parts/deep": "W = 1\n",
    "own_losses": "from own_parts import deep\nfrom trainers.losses.dpo import dpo as loss\n",
}


def words(folder: Path, mode: str) -> list[str]:
    held_out = folder / "held_out.jsonl"
    places = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"data.path={folder / 'pairs.jsonl'}")
    rows = (f"data.eval_path={held_out}", "n_eval_examples=8", f"model.name_or_path={folder / 'M'}")
    rows += (f"model.chat_template={folder / 't.jinja'}", f"+evaluations.hard.path={folder / 'hard.jsonl'}")
    rewards = ("reward=weighted", f"reward.weighted.parts={PARTS % (folder / 'R')}") * (mode == "online")
    return [*MODES[mode], *places, *rows, *MODEL, *FAST, *rewards]


def inputs(folder: Path) -> None:
    """Write everything that the runs read."""
    shutil.copytree(ADDER / "model", folder / "M")
    shutil.copytree(ADDER / "model", folder / "R")
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "M", num_labels=1)
    reward.save_pretrained(folder / "R")
    (folder / "own_parts").mkdir()
    for name, text in CODE.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pairs.jsonl").write_text("".join(LINES[:40]))
    for name in ("held_out", "hard"):
        (folder / f"{name}.jsonl").write_text("".join(LINES[40:]))
    shutil.copy(ADDER / "model" / "chat_template.jinja", folder / "t.jinja")


def field(key: str, value: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return change


def text(old: str, new: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        before, found, behind = file.read_text().partition(old)
        assert found
        file.write_text(before + new + behind)

    return change


def bit(file: Path) -> None:
    """Flip one bit of a weight."""
    tensors = load_file(file)
    tensors[min(tensors)].view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


def added(file: Path) -> None:
    file.write_text("{}")


def reversed_rows(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[::-1]))


OF_MODEL = r"^model\.name_or_path=\S+/M: .*"
OF_LOSS = r"^loss\._target_=own_losses\.loss: .*its "
OF_FUNCTION = r"^reward\.weighted\.parts\.f\.path=own_rewards\.score: .*its "
OF_CLASSIFIER = r"^reward\.weighted\.parts\.m\.name_or_path=\S+/R: .*its "
EXCHANGED: list[tuple[str, str, Callable[[Path], None], str]] = [
    ("both", "M/config.json", field("rms_norm_eps", 0.1), f"{OF_MODEL}its config.json changed"),
    ("both", "M/tokenizer_config.json", field("eos_token", "<user>"), f"{OF_MODEL}its tokenizer_config.json"),
    ("both", "M/chat_template.jinja", text("{", "{# #}{"), f"{OF_MODEL}its chat_template.jinja changed"),
    ("both", "M/vocab.txt", added, f"{OF_MODEL}its vocab.txt changed, or came or went"),
    ("both", "M/generation_config.json", Path.unlink, f"{OF_MODEL}its generation_config.json changed"),
    ("both", "M/model.safetensors", bit, f"{OF_MODEL}the initial weights are others"),
    ("both", "pairs.jsonl", reversed_rows, r"^data\.path=.*would go on with other (rows|prompts)"),
    ("both", "held_out.jsonl", reversed_rows, r"^data\.eval_path=.*would compare two different sets"),
    ("both", "hard.jsonl", reversed_rows, r"^evaluations\.hard\.path=\S+/hard\.jsonl: .*two different sets"),
    ("both", "t.jinja", text("{", "{# #}{"), r"^model\.chat_template=\S+/t\.jinja: .*its t\.jinja changed"),
    ("offline", "own_losses.py", text("import deep", "import  deep"), f"{OF_LOSS}own_losses.py"),
    ("offline", "own_parts/deep.py", text("1", "2"), f"{OF_LOSS}own_parts/deep.py"),
    ("online", "own_rewards.py", text("W *", "-W *"), f"{OF_FUNCTION}own_rewards.py"),
    ("online", "own_helper.py", text("return W", "return -W"), f"{OF_FUNCTION}own_helper.py"),
    ("online", "own_parts/deep.py", text("1", "2"), f"{OF_FUNCTION}own_parts/deep.py"),
    ("online", "R/chat_template.jinja", text("{", "{# #}{"), f"{OF_CLASSIFIER}chat_template.jinja"),
    ("online", "R/tokenizer_config.json", field("eos_token", "<user>"), f"{OF_CLASSIFIER}tokenizer_config"),
    ("online", "R/model.safetensors", bit, f"{OF_CLASSIFIER}model.safetensors"),
    ("online", "pairs.jsonl", text('"reference": "108"', '"reference": "9"'), r"^data\.path=.*other prompts"),
]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that call it
    yield
    for name in [one for one in sys.modules if one.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("code")
def test_an_exchanged_input_is_refused_by_its_name_its_file_and_what_accepts_it(
    tmp_path: Path, mode: str
) -> None:
    inputs(tmp_path)
    run, go_on = tmp_path / "run", lambda *more: train(make_config(*words(tmp_path, mode), *more), "run")
    with cut_off(1):
        go_on()
    before = everything(run) | {"run.lock": None}
    for which, name, change, message in EXCHANGED:
        if which not in ("both", mode):
            continue
        file = tmp_path / name
        kept = file.read_bytes() if file.exists() else None
        change(file)
        with pytest.raises(ConfigError, match=message) as refused:
            go_on()
        assert re.search(r"'resume_with_other=\[\S+\]' goes on with what is there now$", str(refused.value))
        assert everything(run) | {"run.lock": None} == before, "nothing is changed"
        file.unlink(missing_ok=True)
        if kept is not None:
            file.write_bytes(kept)
    with pytest.raises(ConfigError, match=r"^resume_with_other=weight: names no input"):
        go_on("resume_with_other=[weights,weight]")
    (tmp_path / "M" / "README.md").write_text("what a model is")
    os.utime(tmp_path / "M" / "tokenizer.json")
    field("rms_norm_eps", 1e-5)(tmp_path / "M" / "config.json")
    with pytest.raises(ConfigError) as refused:
        go_on()
    (accepts,) = re.findall(r"'(resume_with_other=\S+)'", str(refused.value))
    assert accepts == "resume_with_other=[model.name_or_path,architecture]", "neither README nor a time"
    assert go_on(accepts)["steps"] > 1
    (noted, *_) = json.loads((run / "run.json").read_text())["went_on_with_other"]
    assert noted["model.name_or_path"][0] != noted["model.name_or_path"][1]
    assert go_on()["steps"] > 1, "what it goes on with is recorded"


@pytest.mark.usefixtures("code")
def test_a_round_whose_reward_was_repaired_goes_on_as_the_message_says(tmp_path: Path) -> None:
    inputs(tmp_path)
    text("return [", "raise RuntimeError('out of order')\n    return [")(tmp_path / "own_rewards.py")
    online = words(tmp_path, "online")
    with pytest.raises(StoppedError, match=r"out of order(.|\n)*says what accepts changed code"):
        train(make_config(*online), "run")
    text("    raise RuntimeError('out of order')\n", "")(tmp_path / "own_rewards.py")
    with pytest.raises(ConfigError, match=OF_FUNCTION) as refused:
        train(make_config(*online), "run")
    samples = (tmp_path / "run" / "rounds" / "000" / "samples.jsonl").read_bytes()
    added = re.findall(r"'(resume_with_other=\S+)'", str(refused.value))
    assert train(make_config(*online, *added), "run")["steps"] > 0
    assert (tmp_path / "run" / "rounds" / "000" / "samples.jsonl").read_bytes() == samples


def test_a_commit_of_the_hub_says_its_files_and_an_unread_file_has_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the hub is known by the name of its blob; a large local one is read once, by any program."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub, local = tmp_path / "models--org--reward", tmp_path / "local"
    for folder in (hub / "refs", hub / "blobs", hub / "snapshots" / "a1", local):
        folder.mkdir(parents=True)
    (hub / "blobs" / "f00d").write_text("content")
    (hub / "snapshots" / "a1" / "model.safetensors").symlink_to(hub / "blobs" / "f00d")
    (hub / "refs" / "main").write_text("a1")
    (local / "config.json").write_text("{}")
    os.utime(local / "config.json", (0, 0))
    named = ("reward.classifier.name_or_path=org/reward", f"model.name_or_path={local}", "data.verifier=null")
    online = ("loss=dpo", "online=true", "rounds.contexts=1024", "reward=classifier", "model=hub")
    more = ("data=adder", "optimizer=torch.optim.SGD", "+evaluations.e.verifier=data.adder.verify")
    places = (f"cache_dir={tmp_path / 'cache'}", f"+sampler.options.model={local}")
    config = replace(make_config(*online, *named, *more, *places), resume=True)
    before = file_inputs(config)
    assert before["reward.classifier.name_or_path"] == {"model.safetensors": "f00d", "commit": "a1"}
    assert before["sampler.options.model"] == before["model.name_or_path"]
    assert "evaluations.e.verifier" in before and "sampler._target_" in before and "optimizer" in before
    monkeypatch.setattr("common.files._sha256", lambda path, *of: "read" if path.parent == local else "code")
    assert file_inputs(config)["model.name_or_path"] == before["model.name_or_path"]
    os.utime(local / "config.json", (1, 1))
    assert file_inputs(config)["model.name_or_path"] == {"config.json": "read"}
    (checkpoint := tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"inputs": before, "progress": {"step": 1}}))
    (hub / "snapshots" / "a1" / "further.json").write_text("fetched later")
    reward = {key: value for key, value in file_inputs(config).items() if key.startswith("reward.c")}
    check_inputs(tmp_path, config, reward)
    (hub / "refs" / "main").write_text("b2")
    (hub / "snapshots" / "a1").rename(hub / "snapshots" / "b2")
    with pytest.raises(ConfigError, match=r"^reward\.classifier\.name_or_path=org/reward: .*further.json"):
        check_inputs(tmp_path, config, {key: file_inputs(config)[key] for key in reward})
