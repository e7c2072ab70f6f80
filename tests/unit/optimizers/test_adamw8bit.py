"""8-bit moments: their numbers, what is skipped, what is gone on with, what is refused. torchao is not in the
environment of the tests: what needs it is checked in a process that has it (eight_bits.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from common.worker_process import WorkerProcess
from config.idle import why_idle
from optimizers.build import check_optimizer, eight_bits
from tests.tiny import make_config
from train import train

MODES = {  # others go on with AdamW and Muon in tests/integration/test_sync_modes.py
    "humanline": ["humanline=true", "sync_freq=3"],
    "ema": ["sync_mode=ema", "sync_alpha=0.3"],
}


@pytest.fixture(scope="module")
def worker(quick_python: None, with_torchao: None) -> Iterator[WorkerProcess]:
    made = WorkerProcess("tests.unit.optimizers.eight_bits", log=None, env={"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    [
        "the_moments_are_the_formulas",
        "rows_that_256_divides_are_as_torchaos_own_class_has_them",
        "pieces_change_nothing",
        "two_moments_take_two_bytes_and_their_scales",
        "a_skipped_step_leaves_everything",
        "it_trains_as_adamw_does",
        "adapters_have_8_bits_too",
        "checkpoints_of_other_optimizers_are_refused",
        "a_step_waits_for_nothing",
    ],
)
def test_checked_where_torchao_is(worker: WorkerProcess, name: str) -> None:
    worker.call("checked", name, timeout=300)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_where_it_would_have(worker: WorkerProcess, mode: str) -> None:
    worker.call("checked", "a_resumed_run_ends_where_it_would_have", MODES[mode], timeout=300)


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "optimizers.adamw8bit", raising=False)


def test_without_torchao_it_is_refused_before_weights_are_loaded(without_torchao, tmp_path, capfd):
    says = r"optimizer=AdamW8bit: .*torchao.* pip install -r requirements/small-gpus\.txt, or use another"
    config = make_config("optimizer=AdamW8bit", f"runs_dir={tmp_path}", "model.name_or_path=/nowhere")
    with pytest.raises(ConfigError, match=says):
        train(config, "run")
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ConfigError, match=says):
        eight_bits()


def test_no_other_optimizer_asks_for_it(without_torchao):
    for name in ("AdamW", "Muon"):
        check_optimizer(make_config(f"optimizer={name}"))


def test_muons_settings_are_not_its_own():
    assert why_idle(make_config("optimizer=AdamW8bit"), "muon.lr") == "optimizer=Muon"
