"""What the environment of a machine decides, and what it must not."""

from __future__ import annotations

import pytest

from common.errors import UserError
from config.machine import MARK, refuse_left_over, speaks

LEFT = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29577"}
REFUSED = [
    *(LEFT, {"WORLD_SIZE": "2"}, {"RANK": "1"}),
    LEFT | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # of an interactive shell
    LEFT | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},  # of another program
]
FINE = [
    *({}, {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, {"WORLD_SIZE": "", "RANK": ""}),
    {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    LEFT | {MARK: "none", "RANK": "3", "LOCAL_RANK": "3"},
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
