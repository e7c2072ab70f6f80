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
    "data=hub data.path=https://huggingface.co/datasets/org/set": "type the name: data.path=org/set",
    "data.verifier=data.adder.nope": "data.verifier=data.adder.nope: cannot be imported",
    "online=true reward=http reward.http.url=x": "reward.http.url=x: is not a setting",
    f"{ROWS} {OWN} model.max_length=9999": "positions: give as many at most",
    f"{ROWS} {CHAT} model.use_peft=true model.peft.target_modules=[qq]": "the model has no qq; it has",
    f"{ROWS} model=hub model.name_or_path=x.gguf": "is one file; python -m tools.gguf x.gguf FOLDER",
    "data=mix data.mix=[{{name:local,path:nope.jsonl}},{{name:hh}}]": "data.path=nope.jsonl: no such file",
    "loss=dpo loss._target_=my.loss": "loss._target_=my.loss: cannot be imported",
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


def test_what_is_not_there_or_makes_no_sense_is_refused_before_torch_is_imported(here):
    """All of it in one process, which writes nothing."""
    assert set(MISSING) == {package for _, _, package, _ in PACKAGES}
    known = {line: (said,) for line, said in ABSENT.items()}
    known |= {f"data=local data.path={{here}}/{name}": (said,) for name, (_, said) in FILES.items()}
    for name, (_, *parts) in KINDS.items():
        known[f"loss={name[:3]} data=local data.path={{here}}/{name}.jsonl"] = parts
    for package, line in MISSING.items():
        known[line] = (f"needs {package}, which is not installed: pip install ",)
    places, given = f"runs_dir={here} cache_dir={here}", []
    for line in known:
        loss = "" if line.startswith("loss=") else "loss=dpo "
        missing = [package for package, words in MISSING.items() if words == line]
        given.append((f"{loss}{places} {line}".format(here=here), *missing))
    before = {path.name for path in here.iterdir()}
    words = [sys.executable, "-c", START]
    done = subprocess.run(
        words, input=json.dumps(given), cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in here.iterdir()} == before
    for (line, parts), text in zip(known.items(), map(json.loads, done.stdout.splitlines()), strict=True):
        assert [part for part in parts if part.replace("{here}", str(here)) not in text] == [], (line, text)
