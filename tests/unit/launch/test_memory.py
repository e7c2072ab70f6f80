"""A sweep whose runs need more memory than their card has is not submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from launch.grid import read_sweep
from launch.memory import cell_plans
from launch.slurm import make_job
from launch.state import Composer, inspect
from launch.sweep import refuse_too_large

SWEEP = """
base: {model.batch_size: 4, model.microbatches: 2}
grid:
  humanline: [true, false]
  lr: [1e-4, 2e-4]
seeds: [1, 2]
slurm: {gpus_per_node: 1, card: "%s"}
"""


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "small.yaml").write_text(SWEEP % "1")
    sweep = read_sweep(tmp_path / "small.yaml", {})
    composer = Composer()
    states = [inspect(run, composer) for run in sweep.runs()]
    small = make_job(sweep.slurm)
    plans = cell_plans(states, small)
    assert sorted(len(made.runs) for made in plans) == [4, 4]
    assert all(made.over and "too much" in made.text for made in plans)
    with pytest.raises(ConfigError, match=r"slurm\.card=1: has no room: model\.name_or_path="):
        refuse_too_large(states[:1], small, acting=True)
    refuse_too_large(states[:1], small, acting=False)
    assert "warning" in capsys.readouterr().err
    large = make_job({**sweep.slurm, "card": "H100"})
    refuse_too_large(states[:1], large, acting=True)
    assert cell_plans(states, make_job({**sweep.slurm, "card": None})) == []
