"""What cannot be used is refused before weights load, by the setting, its value and what would do, and leaves
nothing. What is wrong in files of data, models and runs: tests/unit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, UserError
from config.cli import compose
from tests.tiny import make_config
from train import train

SMALL = ("n_examples=16", "model.batch_size=4", "n_eval_examples=4", "n_eval_prompts=2")
SMALL += ("wandb.enabled=false",)
HERE = "tests.integration.test_observers"
LABELS = [{"prompt": "1+1=", "completion": "2" * (1 + i), "label": i > 0} for i in range(3)]
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
STRANGE = {"prompt": "Who are you?", "chosen": "Nobody", "rejected": "Somebody"}
ACCURACY = "eval_hard_accuracy_sampled"
REFUSED: list[tuple[str, str]] = [
    ("optimizer=torch.nn.Linear", r"optimizer=torch\.nn\.Linear: is no subclass of torch\.optim\.Optimizer"),
    ("optimizer=torch.optim.LBFGS", r"optimizer=torch\.optim\.LBFGS: does not take weight_decay"),
    ("optimizer=Lion", r"optimizer=Lion: must be AdamW, or the import path of a torch optimizer"),
    ("callbacks.a._target_=no.such", r"callbacks\.a\._target_=no\.such: cannot be imported"),
    ("callbacks.a._target_=builtins.object", r"_target_=object: is no observer: .*on_start, on_step"),
    (f"callbacks.a._target_={HERE}.Misspelt", r"nothing calls its on_evaluate; .*on_evaluation"),
    (f"callbacks.a._target_={HERE}.Stops", r"callbacks\.a\.at=\?\?\?: has no default; give it"),
    (f"callbacks.a._target_={HERE}.Stops callbacks.a.att=1", r"a\.att=1: .*it takes at"),
    ("evaluations.hard.path={none}", r"evaluations\.hard\.path=\S+none\.jsonl: .*no such file"),
    ("evaluations.hard.path={labels}", r"gives loss=dpo no example.*loss=kto.*no prompt has a ref"),
    (f"evaluations.hard.path={{pair}} keep_best={ACCURACY}", f"keep_best={ACCURACY}: .* has no such number"),
    ("evaluations.hard.path={strange}", r"for evaluations\.hard, its tokenizer does not know"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_used_is_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    files: dict[str, Any] = {"labels": LABELS, "pair": [PAIR], "strange": [STRANGE] * 9}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in (*files, "none"):
        words = words.replace(f"{{{name}}}", f"{tmp_path}/{name}.jsonl")
    monkeypatch.setattr("jobs.job.load_sharded", lambda *of: pytest.fail("weights were loaded"))
    places = (f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache", "exp_name=refused")
    with pytest.raises(UserError, match=message):
        train(*compose("loss=dpo", *SMALL, *places, *words.split()))
    assert not (tmp_path / "runs" / "refused").exists()


NEW_TOKENS = "loss=csft model.new_tokens='[\"<|good|>\"]'"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("loss=dpo ratio_reference=behavior", "ratio_reference"),
        ("loss=grpo ratio_reference=behavior correction=truncated", "ratio_reference"),
        ("loss=grpo ratio_reference=behavior online=true", "ratio_reference"),
        ("loss=grpo sync_mode=delayed online=true rounds.reset_reference=false", "rounds.reset_reference"),
        ("patience=2", "patience"),
        ("patience=0 eval_every=64 keep_best=eval_loss", "patience"),
        (f"{NEW_TOKENS} model.use_peft=true", "model.new_tokens"),
        ("loss=kto online=true reward=adder model.new_tokens='[a]'", "model.new_tokens"),
        ("loss=csft model.new_tokens='[\"\"]'", "model.new_tokens"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(words: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(*shlex.split(words))
    assert caught.value.key == key
