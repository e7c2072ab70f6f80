"""The command line: one message, its exit code, and a word about settings that nothing will read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import ConfigError
from tests.programs import HANG
from tests.tiny import ROOT, make_config
from train import train

WRONG = {
    "model.batchsize=8": "did you mean model.batch_size?",
    "loss=nope": "there is no such file in config/loss",
    "model.name_or_path=./nope": "model.name_or_path=./nope",
    "loss=sft data=adder-sft data.subset=policy humanline=true": "loss=sft has no reference",
}


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "train.py", "dry_run=true", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gives_one_message_and_code_2(line):
    done = program(*line.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert WRONG[line] in errors[0]


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "lr=fast": "lr=fast",
        "+loss.betta=1": "loss.betta=1: loss=dpo does not take it",
        "loss.beta=-1": "loss.beta=-1: must be",
        "model.max_prompt_length=64": "model.max_prompt_length=64: must be less than model.max_length=64",
        "+humanlin=true": "did you mean humanline?",
        "loss=grpo loss.importance=tokn": "importance",
        "loss.beta=0": "loss.beta=0: must be above 0",
        "sync_freq=0": "sync_freq=0: must be",
        "resume=true overwrite=true": "give one",
        "model.batch_size=30 model.gradient_accumulation_steps=4": "must divide",
        "log_epsilon_P=1": "log_epsilon_P=1.0: is the lower bound",
        "data.source=data.nope.f": "data.source=data.nope.f: cannot be imported",
    }.items(),
)
def test_every_refusal_says_key_value_and_remedy(line, said):
    with pytest.raises(ConfigError) as caught:
        train(make_config(*line.split(), "dry_run=true"), "run")
    assert said in str(caught.value)


def test_settings_that_nothing_will_read_are_said():
    done = program("sync_freq=4", "sampler.temperature=1.0", "loss.beta=0.2")
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert done.returncode == 0
    assert [note.split()[1] for note in notes] == ["sync_freq", "sampler.temperature"]
