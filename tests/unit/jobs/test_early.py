"""What is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

from common.files import sealed
from config.schema_data import DataConfig
from data.sources import LOCAL, check_found
from rollouts.inputs import PACKAGES
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
    (tmp_path / "old" / "run.json").write_text(sealed({"kind": "humanline run"}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    rows = f"data=local data.path={tmp_path}/rows.jsonl"
    own = "model=hub model.name_or_path=assets/adder/model"
    chat = f"{own} model.max_length=64 model.max_prompt_length=32"
    said = {
        "exp_name=old": "exp_name=old: ",
        f"runs_dir={tmp_path}/file/runs": f"runs_dir={tmp_path}/file/runs: {tmp_path}/file is no folder",
        "data=local data.path=nope.jsonl": "data.path=nope.jsonl: no such file (the working directory is",
        f"data=local data.path={tmp_path}/empty": "has no file that can be read",
        "data.eval_path=nope.jsonl": "data.eval_path=nope.jsonl: no such file",
        "cache_dir=": "cache_dir=: must name a folder",
        "evaluations.hard.path=nope.jsonl": "evaluations.hard.path=nope.jsonl: no such file",
        f"{rows} model=hub model.name_or_path=./nope": "model.name_or_path=./nope: no such folder",
        f"{rows} model=hub model.name_or_path=https://hf.co/org/m/tree/main": "model.name_or_path=org/m",
        "data=hub data.path=https://huggingface.co/datasets/org/set": "type the name: data.path=org/set",
        "data.verifier=data.adder.nope": "data.verifier=data.adder.nope: cannot be imported",
        "online=true reward=function reward.function.path=data.nope.f": "cannot be imported",
        "callbacks.mine=nope.F": "callbacks.mine=nope.F: needs a _target_, as in callbacks.mine._target_=",
        "online=true reward=classifier reward.classifier.name_or_path=./nope": "./nope: no such folder",
        "online=true reward=http reward.http.url=x": "reward.http.url=x: is not a setting",
        "push_to_hub=x": "push_to_hub=x: names no owner",
        "cache_dir=/proc/x": "cache_dir=/proc/x: /proc is not writable",
        f"{rows} {chat} model.tokenizer_name_or_path=./nope": "model.tokenizer_name_or_path=./nope: no such",
        f"{rows} {own} model.max_length=9999": "positions: give as many at most",
        f"{rows} {chat} model.use_peft=true model.peft.target_modules=[qq]": "the model has no qq; it has",
        f"{rows} model=hub model.name_or_path=x.gguf": "is one file; python -m tools.gguf x.gguf FOLDER",
        "data=mix data.mix=[{name:hh},{name:local,path:nope.jsonl}]": "data.path=nope.jsonl: no such file",
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
        "list.jsonl": ("[\n {\n", "is a JSON list, which a name in .json says"),
        "object.jsonl": ('{\n "prompt": "a"\n}', "jq -c . OLD > NEW"),
        "python.jsonl": ("{'prompt': 'a'}\n", "json.dumps turns into JSON"),
        "latin.csv": ("prompt,chosen,rejected\no\xf9?,l\xe0,\xe7a\n", "iconv -f LATIN1"),
        "same.jsonl": (json.dumps(row | {"chosen": "c"}), "none of the 1 rows can be used"),
        "margin.jsonl": ("\n".join([json.dumps(row | {"margin": 1})] * 99), "data.numbers=[margin]"),
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


def test_rows_of_a_kind_that_teaches_nothing_are_refused_before_torch_is_imported(tmp_path):
    """With the loss that learns from them, and the column that may say more."""
    kinds = {
        "dpo-single": ({"completion": "b"}, "no example; rows are single answers without", "loss=sft"),
        "dpo-label": ({"completion": "b", "label": 0}, "no example; rows are single", "loss=kto"),
        "kto-label": (
            {"completion": "b", "label": True},
            "loss=kto desirable answers alone",
            "loss=sft",
        ),
        "kto-thumbs": ({"completion": "b", "thumbs_up": 1}, "desirable", "{label: thumbs_up}"),
        "sft-prompts": ({}, "no example; rows are prompts without answers", "online=true"),
        "dpo-jk": ({"response_j": "b", "response_k": "c"}, "nothing reads", "chosen: response_j, rejected"),
    }
    lines = []
    for name, (row, *_) in kinds.items():
        rows = [json.dumps({"prompt": f"a{i}"} | row) for i in range(99)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        lines.append(f"loss={name[:3]} data=local data.path={tmp_path}/{name}.jsonl runs_dir={tmp_path}")
    for (name, (_, *said)), text in zip(kinds.items(), refusals(lines), strict=True):
        assert [part for part in said if part not in text] == [], (name, text)


def test_the_settings_of_a_loss_are_checked_by_its_source(tmp_path):
    said = {
        "loss=dpo loss.beta=[0.1,0.2]": "loss.beta=[0.1, 0.2]: must be a number",
        "loss=dpo loss.divergence=jensen": "use one of reverse_kl, forward_kl, js, alpha",
        "loss=dpo loss._target_=my.loss": "loss._target_=my.loss: cannot be imported",
        "loss=grpo loss.shape=foo": "loss.shape=foo: use one of ppo, dual",
        "loss=grpo loss.max_tokens=2.5 loss.normalization=constant": "must be a whole number",
        "loss=ppo loss.gamma=2": "must lie in [0, 1]",
        "loss=kto replicas=3": "replicas=3: must divide the number of ranks, 1",
    }
    found = refusals([f"runs_dir={tmp_path} {line}" for line in said])
    assert [
        (line, text) for (line, want), text in zip(said.items(), found, strict=True) if want not in text
    ] == []


def test_a_package_that_is_not_installed_is_refused_before_torch_is_imported(tmp_path):
    lines = {
        "peft": "model.use_peft=true",
        "flash_attn": "model.attn_implementation=flash_attention_2",
        "vllm": "online=true sampler=vllm",
        "math_verify": "online=true reward=verifier",
    }
    assert set(lines) == {package for _, _, package, _ in PACKAGES}
    found = refusals([f"loss=dpo runs_dir={tmp_path} {line}" for line in lines.values()], ",".join(lines))
    for package, text in zip(lines, found, strict=True):
        assert f"needs {package}, which is not installed: pip install " in text
