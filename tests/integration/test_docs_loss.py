"""The loss that docs/losses.md adds as an example is added as it says, passes the tests of every loss, and trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from tests.programs import HANG
from tests.tiny import ROOT

PARTS = ("config", "data", "models", "trainers", "rollouts", "tests", "assets", "train.py", "pyproject.toml")


def test_the_documented_example_is_a_loss_like_any_other(tmp_path):
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / "docs" / "losses.md").read_text(), re.DOTALL)
    written = []
    for block in blocks:
        name = re.search(r"^# (\S+\.(?:py|yaml))$", block, re.MULTILINE)[1]
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(block)
        written.append(name)
    assert written == ["trainers/losses/hinge.py", "config/loss/hinge.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", "hinge", "tests/unit/trainers/losses/test_every_loss.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert tests.returncode == 0, tests.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", tests.stdout)[1]) >= 4
    run = subprocess.run(
        [
            sys.executable,
            "train.py",
            "loss=hinge",
            "humanline=true",
            "n_examples=96",
            "exp_name=run",
            "wandb.enabled=false",
            "data.verifier=null",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 3
