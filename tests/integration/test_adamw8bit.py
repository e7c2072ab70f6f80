"""The real program with 8-bit moments: killed and gone on with, and refused a run of another
optimizer."""

from __future__ import annotations

import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests import programs
from tests.integration.test_runs import SMALL

pytestmark = pytest.mark.usefixtures("with_torchao")
METHOD = ("loss=dpo", "humanline=true", "sync_freq=2", "save_every=4", *SMALL)


def command(folder, name: str, *more: str) -> list[str]:
    places = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"exp_name={name}")
    return ["train.py", *METHOD, "resume=true", "optimizer=AdamW8bit", *places, *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    done = programs.run(*command(folder, "whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchao" not in done.stdout + done.stderr  # what it warns of is not needed
    return folder


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def test_a_killed_run_ends_to_the_bit_where_it_would_have(whole):
    killed, metrics = programs.start(*command(whole, "killed")), whole / "killed" / "metrics.jsonl"
    programs.until(
        lambda: killed.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3)
    )
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -9, killed.said()
    done = programs.run(*command(whole, "killed"))
    assert done.returncode == 0 and "resumed before step" in done.stdout, done.stdout + done.stderr
    one, other = weights(whole / "whole"), weights(whole / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_ends_near_adamws_weights(whole):
    """Nearer than a seventh of the way that both went."""
    done = programs.run(*command(whole, "adamw", "optimizer=AdamW"))
    assert done.returncode == 0, done.stdout + done.stderr
    begin = load_file("assets/adder/model/model.safetensors")
    eight, plain = weights(whole / "whole"), weights(whole / "adamw")
    way = sum(float((plain[name] - begin[name]).square().sum()) for name in begin) ** 0.5
    apart = sum(float((plain[name] - eight[name]).square().sum()) for name in begin) ** 0.5
    assert 0 < apart < 0.15 * way, (apart, way)


def test_what_another_optimizer_wrote_is_refused(whole):
    done = programs.run(*command(whole, "whole", "optimizer=AdamW"))
    assert done.returncode != 0
    assert re.search(
        r"optimizer=AdamW: was AdamW8bit when the run in .* was started", done.stdout + done.stderr
    )
