"""Planted keys, in every place where one can be typed, and every file and stream that programs leave."""

from __future__ import annotations

import gzip
import os
import subprocess
from pathlib import Path

import pytest

from export import push
from tests import programs
from tests.integration.test_hub import TOKEN, hub  # noqa: F401, a fixture

MODULE = """
import os, random, sys

class Callback:
    def __init__(self, **given):
        self.given = given

    def on_start(self, run_dir, config, step):
        print("config", config, self.given, file=sys.stderr)

    def on_step(self, record):
        raise RuntimeError(f"refused with {self.given}")

def reward(prompts, completions, **columns):
    if os.environ.get("CRASH"):
        raise ValueError("the key is " + os.environ["MY_SECRET"])
    return [random.random() for text in completions]
"""
PLANTED = {  # setting or environment variable -> value; a planted part begins with PLANT
    "callbacks.c.token": "PLANTa1secret",
    "callbacks.c.api_key": "sk-" + "PLANTb2secret1234567890",
    "callbacks.c.my_key": "PLANTc3 two words",
    "callbacks.c.passphrase": "PLANTd4-pass=phrase,x",
    "callbacks.c.password": "98765432101",
    "callbacks.c.credentials": "{user: PLANTe5user, n: [PLANTf6part]}",
    "callbacks.c.clientSecret": "PLANTg7",
    "callbacks.c.url": "https://me:PLANTh8@127.0.0.1/hook?sig=PLANTi9&x=1",
    "callbacks.c.hook": "https://PLANTj10@127.0.0.1/v1",
    "callbacks.c.slack": "https://hooks.slack.com/services/T0/B1/PLANTk11",
    "callbacks.c.headers": "{Authorization: Bearer PLANTl12abc, Cookie: PLANTm13}",
    "callbacks.c.text": "glpat-PLANTn14abcdefghijkl",
    "callbacks.c.more": "[xoxb-PLANTo15-abcdefgh, sk_live_PLANTp16abcdefghij]",
    "wandb.tags": "[h" + "f_PLANTq17abcdefghijkl]",
    "HF_TOKEN": "PLANTu21",
    "WANDB_API_KEY": "PLANTv22" + "0123456789" * 4,
    "GITHUB_PAT": "github_pat_" + "PLANTw23abcdefghij",
    "MY_SECRET": "PLANTr18environment",
    "JUDGE_LOGIN": "PLANTs19-known-by-its-setting",
    "callbacks.c.jwt": "eyJPLANTt20abc.abcdefghijkl.abcdefghijk",
    "callbacks.c.pat": "PLANTx24",
    "callbacks.c.telegram": "https://api.telegram.org/bot123:PLANTy25/sendMessage",
    "callbacks.c.login": "me:PLANTz26",
    "callbacks.c.room": "PLANTaa27 of the team",
    "callbacks.c.accessKeyId": "PLANTbb28",
}
KEYS = ("PLANT", "98765432101", TOKEN)


def words() -> list[str]:
    quoted = lambda v: v if v[0] in "[{" else f"'{v}'"  # noqa: E731
    return [
        f"+{key}={quoted(value)}" if key.startswith("callbacks") else f"{key}={value}"
        for key, value in PLANTED.items()
        if "." in key
    ]


def decoded(path: Path) -> bytes:
    """A file's bytes, also as text of 16 bits and without the frames that wandb puts into it."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".wandb":  # 7 bytes, then pieces of at most 32 KiB with 7 bytes each
        blocks = [content[at + (14 if at == 0 else 7) : at + 32768] for at in range(0, len(content), 32768)]
        content += b"".join(blocks)
    return content


def found(*places: Path | str | bytes) -> list[str]:
    """Where planted keys are: file or text, and the key's surroundings."""
    out = []
    for place in places:
        files = [p for p in place.rglob("*") if p.is_file()] if isinstance(place, Path) else [place]
        for one in files:
            content = decoded(one) if isinstance(one, Path) else one
            content = content.encode() if isinstance(content, str) else content
            where = one if isinstance(one, Path) else "printed"
            places_of = [at for key in KEYS if (at := content.find(key.encode())) >= 0]
            out += [f"{where}: {content[at - 60 : at + 30]!r}" for at in places_of]
    return out


def start(folder: Path, *more: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "planted_module.py").write_text(MODULE)
    own = {key: value for key, value in PLANTED.items() if "." not in key} | {"WANDB_MODE": "offline"}
    own |= {"PYTHONPATH": f"{folder}{os.pathsep}{programs.ROOT}"}
    places = (f"runs_dir={folder}/runs", f"cache_dir={folder}/cache")
    long = () if "online=true" in more else ("n_examples=16",)
    small = (*long, "n_eval_examples=4", "n_eval_prompts=4", "model.batch_size=4", "retention.kl=false")
    callback = "+callbacks.c._target_=planted_module.Callback"
    settings = ("loss=kto", *small, *places, callback, *words(), *more)
    return programs.run("train.py", *settings, env=own | (env or {}))


def test_no_key_leaves_a_run_its_push_its_resume_or_a_crash(tmp_path, hub):  # noqa: F811
    trackers = "trackers=[tensorboard]"
    run = start(tmp_path, "exp_name=a", trackers)
    assert run.returncode == 0, run.stderr
    assert "refused with" in run.stderr
    assert list((tmp_path / "runs/a/wandb").rglob("*.wandb")) and (tmp_path / "runs/a/tensorboard").is_dir()
    left = (tmp_path / "runs", tmp_path / "cache")
    assert found(*left, run.stdout, run.stderr) == []
    push(tmp_path / "runs/a", None, "org/name", private=True)
    assert found(*hub.files["org/name"].values(), *hub.messages) == [] != hub.messages
    other = start(tmp_path, "exp_name=a", "resume=true", "callbacks.c.token=PLANTanother", trackers)
    assert other.returncode == 0, other.stderr
    assert found(*left, other.stdout, other.stderr) == []


def test_no_key_leaves_a_round_or_its_crash(tmp_path):
    online = ("online=true", "rounds.contexts=8", "rounds.contexts_per_round=4", "exp_name=r")
    online += ("reward=function", "reward.function.path=planted_module.reward")
    for crash in ("", "1"):
        run = start(tmp_path, *online, "overwrite=true", env={"CRASH": crash})
        assert (run.returncode == 0) is (crash == ""), run.stderr
        assert found(tmp_path / "runs", run.stdout, run.stderr) == []
    words = ("reward.judge.model=m", "reward.judge.retries=0", "reward.judge.timeout=1")
    words += (
        "reward.judge.base_url=http://me:PLANTpw@127.0.0.1:9/v1",
        "reward.judge.api_key_env=JUDGE_LOGIN",
    )
    judge = start(tmp_path, "online=true", "reward=judge", "exp_name=j", *words)
    assert judge.returncode != 0
    assert found(tmp_path / "runs", judge.stdout, judge.stderr) == []


WRONG = ("cache_dir=/dev/null/x", "loss.beta=PLANTwrong token=PLANTx", "callbacks.c=3", "-m seed=1,2")
WRONG += ("hydra.output_subdir=hyd hydra.run.dir=runs", "hydra.mode=MULTIRUN hydra.sweep.dir=runs")


@pytest.mark.parametrize("wrong", [*WRONG, "--multir seed=1,2"])
def test_no_key_is_in_a_message_or_a_traceback(tmp_path, wrong):
    run = start(tmp_path, *wrong.split(), "loss=dpo", env={"PYTHONFAULTHANDLER": "1"})
    assert run.returncode != 0
    said = (run.stdout + run.stderr).replace("PLANTwrong", "")
    assert found(tmp_path / "runs", said) == []
