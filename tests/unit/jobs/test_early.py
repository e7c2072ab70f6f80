"""What is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

from config.schema_data import DataConfig
from data.sources import LOCAL, check_found
from jobs.early import PACKAGES
from tests.programs import HANG
from tests.tiny import ROOT

START = """
import json, sys
for name in ("torch", "transformers", *sys.argv[1].split(",")):
    sys.modules[name] = None  # to import it fails
from common.errors import UserError
from train import compose, train
for line in json.load(sys.stdin):
    try:
        print(json.dumps(str(train(*compose(*line.split())))))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def refusals(lines: list[str], missing: str = "nothing") -> list[str]:
    words = [sys.executable, "-c", START, missing]
    done = subprocess.run(
        words, input=json.dumps(lines), cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_not_there_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "old" / "model").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "old" / "run.json").write_text('{"kind": "humanline run"}')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    rows = f"data=local data.path={tmp_path}/rows.jsonl"
    said = {
        "exp_name=old": "exp_name=old: ",
        f"runs_dir={tmp_path}/file/runs": f"runs_dir={tmp_path}/file/runs: {tmp_path}/file is no folder",
        f"cache_dir={tmp_path}/file": f"cache_dir={tmp_path}/file: ",
        "data=local": "data.path=None: give the file",
        "data=local data.path=nope.jsonl": "data.path=nope.jsonl: no such file (the working directory is",
        f"data=local data.path={tmp_path}/empty": "has no file that can be read",
        f"{rows} data.eval_path=nope.csv": "data.eval_path=nope.csv: no such file",
        "data.eval_path=nope.jsonl": "data.eval_path=nope.jsonl: no such file",
        "evaluations.hard.path=nope.jsonl": "evaluations.hard.path=nope.jsonl: no such file",
        f"{rows} model=hub model.name_or_path=./nope": "model.name_or_path=./nope: no such folder",
        f"{rows} model=hub model.name_or_path=runs/x/model": "runs/x/model: no such folder",
        f"{rows} model=hub model.name_or_path=https://hf.co/org/m/tree/main": "model.name_or_path=org/m",
        "data=hub data.path=https://huggingface.co/datasets/org/set": "type the name: data.path=org/set",
        "data.verifier=nope.f": "data.verifier=nope.f: cannot be imported",
        "data.verifier=data.adder.nope": "data.verifier=data.adder.nope: cannot be imported",
        "online=true reward=function reward.function.path=data.nope.f": "cannot be imported",
        "callbacks.mine._target_=nope.F": "callbacks.mine._target_=nope.F: cannot be imported",
        "push_to_hub=x": "push_to_hub=x: names no owner",
    }
    found = refusals([f"loss=dpo runs_dir={tmp_path} cache_dir={tmp_path} {line}" for line in said])
    wrong = [(line, text) for (line, want), text in zip(said.items(), found, strict=True) if want not in text]
    assert wrong == []
    assert {path.name for path in tmp_path.iterdir()} == {"old", "empty", "file", "rows.jsonl"}


def test_rows_that_cannot_be_read_are_refused_before_torch_is_imported(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    files = {
        "lfs.jsonl": ("version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        "page.jsonl": ("<!DOCTYPE html><html>", "is a web page"),
        "list.jsonl": ("[\n {\n", "is a JSON list over several lines"),
        "object.jsonl": ('{\n "prompt": "a"\n}', "jq -c . OLD > NEW"),
        "python.jsonl": ("{'prompt': 'a'}\n", "json.dumps turns into JSON"),
        "latin.csv": ("prompt,chosen,rejected\no\xf9?,l\xe0,\xe7a\n", "iconv -f LATIN1"),
        "same.jsonl": (json.dumps(row | {"chosen": "c"}), "none of the 1 rows can be used"),
        "margin.jsonl": ("\n".join([json.dumps(row | {"margin": 1})] * 99), "data.numbers=[margin]"),
        "other.csv": (
            "Prompt,Preferred,Non preferred\na,b,c\n",
            "chosen: Preferred, rejected: Non preferred",
        ),
        "empty.jsonl": ("", "holds no row"),
    }
    for name, (text, _) in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    of = f"loss=dpo runs_dir={tmp_path} cache_dir={tmp_path} data=local data.path={tmp_path}/"
    found = dict(zip(files, refusals([of + name for name in files]), strict=True))
    assert [(name, found[name]) for name, (_, said) in files.items() if said not in found[name]] == []
    rare = [json.dumps(row | ({"margin": 1} if i < 64 else {"id": i})) for i in range(2000)]
    (tmp_path / "rare.jsonl").write_text("\n".join(rare))  # a column that most rows do not have
    check_found(DataConfig(name="t", source=LOCAL, path=f"{tmp_path}/rare.jsonl"))  # type: ignore[call-arg]


def test_a_package_that_is_not_installed_is_refused_before_torch_is_imported(tmp_path):
    lines = {
        "peft": "model.use_peft=true",
        "torchao": "optimizer=AdamW8bit",
        "vllm": "online=true sampler=vllm",
        "math_verify": "online=true reward=verifier",
    }
    assert set(lines) == {package for _, _, package, _ in PACKAGES}
    found = refusals([f"loss=dpo runs_dir={tmp_path} {line}" for line in lines.values()], ",".join(lines))
    for package, text in zip(lines, found, strict=True):
        assert f"needs {package}, which is not installed: pip install -r requirements" in text
