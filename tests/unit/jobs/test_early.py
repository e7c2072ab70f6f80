"""What is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import sealed
from rollouts.inputs import PACKAGES
from tests.programs import HANG
from tests.tiny import ROOT

START = """
import json, sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # to import it fails
from common.errors import UserError
from train import compose, train
for line, *missing in json.load(sys.stdin):
    before = {name: sys.modules.pop(name) for name in missing if name in sys.modules}
    sys.modules.update(dict.fromkeys(missing))
    try:
        print(json.dumps(str(train(*compose(*line.split())))))
    except UserError as error:
        print(json.dumps(str(error)))
    for name in missing:
        del sys.modules[name]
    sys.modules.update(before)
"""
ROWS, OWN = "data=local data.path={here}/rows.jsonl", "model=hub model.name_or_path=assets/adder/model"
CHAT = f"{OWN} model.max_length=64 model.max_prompt_length=32"
ABSENT = {
    "exp_name=old": "exp_name=old: ",
    "runs_dir={here}/file/runs": "runs_dir={here}/file/runs: {here}/file is no folder",
    "data=local data.path=nope.jsonl": "data.path=nope.jsonl: no such file (the working directory is",
    "data=local data.path={here}/empty": "has no file that can be read",
    "cache_dir=": "cache_dir=: must name a folder",
    f"{ROWS} model=hub model.name_or_path=./nope": "model.name_or_path=./nope: no such folder",
    f"{ROWS} model=hub model.name_or_path=https://hf.co/org/m/tree/main": "model.name_or_path=org/m",
    "data=hub data.path=https://huggingface.co/datasets/org/set": "type the name: data.path=org/set",
    "data.verifier=data.adder.nope": "data.verifier=data.adder.nope: cannot be imported",
    "online=true reward=classifier reward.classifier.name_or_path=./nope": "./nope: no such folder",
    "online=true reward=http reward.http.url=x": "reward.http.url=x: is not a setting",
    "cache_dir=/proc/x": "cache_dir=/proc/x: /proc is not writable",
    f"{ROWS} {OWN} model.max_length=9999": "positions: give as many at most",
    f"{ROWS} {CHAT} model.use_peft=true model.peft.target_modules=[qq]": "the model has no qq; it has",
    f"{ROWS} model=hub model.name_or_path=x.gguf": "is one file; python -m tools.gguf x.gguf FOLDER",
    "data=mix data.mix=[{{name:local,path:nope.jsonl}},{{name:hh}}]": "data.path=nope.jsonl: no such file",
}
LOSSES = {
    "loss=dpo loss._target_=my.loss": "loss._target_=my.loss: cannot be imported",
    "loss=grpo loss.advantage=mean": "loss.advantage=mean: use one of auto, group, group_mean, rloo, batch",
    "loss=kto replicas=3": "replicas=3: must divide the number of ranks, 1",
}
MISSING = {
    "peft": "model.use_peft=true",
    "flash_attn": "model.attn_implementation=flash_attention_2",
    "vllm": "online=true sampler=vllm",
    "math_verify": "online=true reward=verifier",
}
ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}
FILES = {
    "lfs.jsonl": ("version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
    "page.jsonl": ("<!DOCTYPE html><html>", "is a web page"),
    "python.jsonl": ("{'prompt': 'a'}\n", "json.dumps turns into JSON"),
    "margin.jsonl": ("\n".join([json.dumps(ROW | {"margin": 1})] * 99), "data.numbers=[margin]"),
}
KINDS = {
    "dpo-single": ({"completion": "b"}, "no example; rows are single answers without", "loss=sft"),
    "kto-thumbs": ({"completion": "b", "thumbs_up": 1}, "desirable", "{label: thumbs_up}"),
    "dpo-jk": ({"response_j": "b", "response_k": "c"}, "nothing reads", "chosen: response_j, rejected"),
}
"""Rows of a kind that teaches nothing, the loss that learns from them, and the column that may say more."""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder of data and of what is no data."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "old" / "model").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "file").touch()
    (folder / "old" / "run.json").write_text(sealed({"kind": "humanline run"}))
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    for name, (text, _) in FILES.items():
        (folder / name).write_text(text, encoding="latin-1")
    for name, (row, *_) in KINDS.items():
        rows = [json.dumps({"prompt": f"a{i}"} | row) for i in range(99)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def refused(here) -> dict[str, str]:
    """What a start says of each line, by the line; all of them in one process."""
    lines = {line: [] for line in (*ABSENT, *LOSSES)} | {line: [name] for name, line in MISSING.items()}
    lines |= {f"data=local data.path={{here}}/{name}": [] for name in FILES}
    lines |= {f"loss={name[:3]} data=local data.path={{here}}/{name}.jsonl": [] for name in KINDS}
    places, given = f"runs_dir={here} cache_dir={here}", []
    for line, missing in lines.items():
        loss = "" if line.startswith("loss=") else "loss=dpo "
        given.append((f"{loss}{places} {line}".format(here=here), *missing))
    before = {path.name for path in here.iterdir()}
    words = [sys.executable, "-c", START]
    done = subprocess.run(
        words, input=json.dumps(given), cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in here.iterdir()} == before
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


def test_what_is_not_there_or_makes_no_sense_is_refused_before_torch_is_imported(here, refused):
    known = {line: said.format(here=here) for line, said in (ABSENT | LOSSES).items()}
    assert [(line, refused[line]) for line, said in known.items() if said not in refused[line]] == []


def test_rows_that_cannot_be_read_are_refused_before_torch_is_imported(here, refused):
    found = {name: refused[f"data=local data.path={{here}}/{name}"] for name in FILES}
    assert [(name, found[name]) for name, (_, said) in FILES.items() if said not in found[name]] == []


def test_rows_of_a_kind_that_teaches_nothing_are_refused_before_torch_is_imported(refused):
    for name, (_, *parts) in KINDS.items():
        text = refused[f"loss={name[:3]} data=local data.path={{here}}/{name}.jsonl"]
        assert [part for part in parts if part not in text] == [], text


def test_a_package_that_is_not_installed_is_refused_before_torch_is_imported(refused):
    assert set(MISSING) == {package for _, _, package, _ in PACKAGES}
    for package, line in MISSING.items():
        assert f"needs {package}, which is not installed: pip install " in refused[line]
