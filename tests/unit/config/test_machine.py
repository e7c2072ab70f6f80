"""What the environment of a machine decides, and what it must not."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from common.errors import UserError
from config.machine import MARK, WANDB, refuse_left_over, speaks, with_environment
from tests.tiny import make_config

LEFT = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29577"}


REFUSED = [
    *(LEFT, {"WORLD_SIZE": "2"}, {"RANK": "1"}, {"LOCAL_RANK": "3"}),
    LEFT | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # of an interactive shell
    LEFT | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},  # of another program
]
FINE = [
    *({}, {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, {"WORLD_SIZE": "", "RANK": ""}),
    {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    LEFT | {MARK: "none", "RANK": "3", "LOCAL_RANK": "3"},
    LEFT | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    LEFT | {"PMI_RANK": "0", "PMI_SIZE": "4"},
]


def test_a_launchers_variables_without_a_launcher_are_refused():
    for env in REFUSED:
        with pytest.raises(UserError) as caught:
            refuse_left_over(env)
        said = str(caught.value)
        assert all(f"-u {name} " in said for name in LEFT if name in env)
        assert all(f"{name}={value}" in said for name, value in env.items() if name == "WORLD_SIZE")
        assert speaks(env)
    for env in FINE:
        refuse_left_over(env)
        assert speaks(env) == (env.get("RANK") != "3")


def test_wandbs_variables_count_where_a_setting_was_not_given_and_are_said():
    env = {name: f"of-{key}" for key, name in WANDB.items()} | {"WANDB_TAGS": "a,b", "WANDB_MODE": "offline"}
    config, said = with_environment(make_config("wandb.enabled=true"), env)
    own = {key: f"of-{key}" for key in WANDB} | {"enabled": True, "tags": ["a", "b"]}
    assert asdict(config.wandb) == own
    assert all(any(name in sentence for sentence in said) for name in env)
    assert with_environment(config, dict.fromkeys(WANDB.values(), "other"))[0] == config
    named, said = with_environment(make_config("wandb.enabled=true", "exp_name=mine"), env)
    assert named.wandb.name is None and not any("WANDB_NAME" in sentence for sentence in said)
    one, said = with_environment(config, {"WANDB_RUN_ID": "abc", "WANDB_RESUME": "allow"})
    assert one == config and ["WANDB_RUN_ID=abc is not read" in said[0], len(said)] == [True, 2]
    for value, enabled in {"true": False, "1": False, "false": True, "": True}.items():
        said_off, said = with_environment(config, {"WANDB_DISABLED": value})
        assert said_off.wandb.enabled == enabled == (not said)
    off = make_config("wandb.enabled=false")
    assert with_environment(off, env) == (off, [])
