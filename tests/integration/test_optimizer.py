"""A run with an optimizer that is named by its import path: killed and gone on with, refused a run of another
optimizer, and refused before weights load where the path names none."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from tests.integration.online import cut_off
from tests.integration.test_runs import SMALL
from tests.tiny import make_config
from train import train

METHOD = ("loss=dpo", "humanline=true", "sync_freq=2", "save_every=4", *SMALL)


def settings(folder, name: str, optimizer: str):
    places = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"exp_name={name}")
    return make_config(*METHOD, "resume=true", f"optimizer={optimizer}", *places)


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def test_a_killed_run_ends_to_the_bit_where_it_would_have(tmp_path):
    optimizer = "torch.optim.RMSprop"
    train(settings(tmp_path, "whole", optimizer), "whole")
    with cut_off(at=4):
        train(settings(tmp_path, "killed", optimizer), "killed")
    train(settings(tmp_path, "killed", optimizer), "killed")
    begin = load_file("assets/adder/model/model.safetensors")
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], begin[name]) for name in one)
    with pytest.raises(ConfigError, match=f"optimizer=AdamW: was {optimizer} when the run in "):
        train(settings(tmp_path, "whole", "AdamW"), "whole")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("torch.optim.Nothing", r"optimizer=torch\.optim\.Nothing: cannot be imported"),
        ("torch.nn.Linear", r"optimizer=torch\.nn\.Linear: is no subclass of torch\.optim\.Optimizer"),
        ("torch.optim.LBFGS", r"optimizer=torch\.optim\.LBFGS: does not take weight_decay"),
        ("Lion", r"optimizer=Lion: must be AdamW, or the import path of a torch optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_weights_load(tmp_path, monkeypatch, path, said):
    monkeypatch.setattr("jobs.job.load_sharded", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=said):
        train(make_config(f"runs_dir={tmp_path}", *METHOD, f"optimizer={path}"), "refused")
