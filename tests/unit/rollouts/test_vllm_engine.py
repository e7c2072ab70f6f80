"""How weights reach engines, and what happens to a round when one of them is killed: with processes that only
pretend to be engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from common.worker_process import WorkerError
from models.distributed import start
from rollouts.samplers import SamplingSettings
from rollouts.vllm import engine as vllm_engine
from rollouts.vllm import sampler as vllm_sampler
from rollouts.vllm.engine import TransferError, VllmEngine, probe_rows
from tests.fake_transfer import FakeTransfer, use_fake_transfer
from tests.programs import writers
from tests.tiny import tiny_policy
from tests.unit.rollouts.test_vllm_sampler import PROMPTS, RENDERER, make

pytestmark = pytest.mark.usefixtures("quick_python")
SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=8)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """An engine says of a token's log-probability what the trainer does."""
    monkeypatch.setattr(vllm_sampler, "WORKER", "tests.fake_engine")
    monkeypatch.setattr(vllm_sampler, "installed", lambda: True)
    use_fake_transfer(monkeypatch)
    monkeypatch.setattr(vllm_engine, "score", lambda policy, rows: [-row.completion_ids for row in probes()])


def probes():
    rows = probe_rows(PROMPTS, RENDERER)
    return [type(row)(row.prompt_ids, torch.from_numpy(row.completion_ids).double()) for row in rows]


@pytest.fixture
def engine(tmp_path) -> Iterator[VllmEngine]:
    made = engine_of(tmp_path)
    yield made
    made.close()


def engine_of(folder: Path, tied: bool = True, **settings) -> VllmEngine:
    sampler, policy = make(folder / "logs", **settings), tiny_policy(tied=tied)
    return VllmEngine(sampler, policy, RENDERER, start(), probe_rows(PROMPTS, RENDERER), "float32")


def kill(engine: VllmEngine) -> None:
    (pid,) = writers(engine.sampler._workers[0].log)
    os.kill(pid, signal.SIGKILL)


def drawn(engine: VllmEngine) -> list[tuple[int, ...]]:
    return [row[0].token_ids[:-1] for row in engine.sample(PROMPTS, 1, SETTINGS, seed=1)]


def test_weights_go_over_in_memory_and_no_folder_is_made(engine, tmp_path):
    for version in range(3):
        facts = engine.publish(tmp_path / "weights", version, False)
        assert facts["weight_transfer"] == "ipc" and facts["probe_largest"] == 0.0
        assert engine.sampler.version == version
    assert drawn(engine)
    assert not (tmp_path / "weights").exists()


def test_weights_that_must_be_kept_are_beside(engine, tmp_path):
    assert engine.publish(tmp_path / "weights", 0, True)["weight_transfer"] == "ipc"
    assert (tmp_path / "weights" / "model.safetensors").exists()
    kill(engine)
    assert drawn(engine) and engine.sampler.version == 0
    engine.publish(tmp_path / "others", 5, False)
    assert engine.sampler.version == 5


@pytest.fixture
def unreachable(monkeypatch):
    """Memory that the engine's processes cannot find, as from another container."""
    monkeypatch.setattr(FakeTransfer, "lost", True)


@pytest.mark.usefixtures("unreachable")
def test_a_first_try_that_fails_goes_on_by_disk_and_says_so(engine, tmp_path, capsys):
    assert engine.publish(tmp_path / "weights", 0, False)["weight_transfer"] == "disk"
    said = capsys.readouterr().out
    assert "weight transfer by ipc failed" in said and "No such file" in said
    assert "a folder on disk instead" in said
    assert drawn(engine)
    assert engine.publish(tmp_path / "more", 1, False)["weight_transfer"] == "disk"
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("unreachable")
def test_a_way_that_was_asked_for_is_not_left(tmp_path):
    engine = engine_of(tmp_path, weight_transfer="ipc")
    with pytest.raises(TransferError, match="weight transfer by ipc failed"):
        engine.publish(tmp_path / "weights", 0, False)
    engine.close()


def test_a_later_failure_ends_the_round_and_changes_no_way(engine, tmp_path, request):
    engine.publish(tmp_path / "weights", 0, False)
    request.getfixturevalue("unreachable")
    with pytest.raises(TransferError):
        engine.publish(tmp_path / "weights", 1, False)
    assert engine.backend == "ipc"


@pytest.mark.parametrize("keep", [False, True])
def test_a_killed_engine_is_started_again_and_gives_the_same_samples(engine, tmp_path, keep, capsys):
    engine.publish(tmp_path / "weights", 3, keep)
    before = drawn(engine)
    kill(engine)
    assert drawn(engine) == before and engine.sampler.version == 3
    assert "SIGKILL" in (said := capsys.readouterr().out) and "started again" in said
    assert drawn(engine) == before and not capsys.readouterr().out
    kill(engine)
    with pytest.raises(WorkerError, match="SIGKILL"):
        drawn(engine)
    engine.publish(tmp_path / "next", 4, keep)  # another round, another try
    kill(engine)
    assert drawn(engine) == before


@pytest.mark.parametrize("keep", [False, True])
def test_engines_that_were_started_again_are_connected_anew(engine, tmp_path, monkeypatch, keep):
    """Also where they were started with kept weights, and the hand-over after that is the first to send."""
    made, closed = [], []

    def connect(*arguments, **named):
        made.append(FakeTransfer(*arguments, **named))
        made[-1].shutdown = partial(closed.append, made[-1])
        return made[-1]

    monkeypatch.setattr(vllm_engine, "make_transfer", connect)
    engine.publish(tmp_path / "weights", 0, keep)
    engine.publish(tmp_path / "weights", 1, keep)
    assert len(made) == 1 and not closed
    kill(engine)
    assert drawn(engine)
    assert engine.publish(tmp_path / "next", 2, keep)["weight_transfer"] == "ipc"
    assert len(made) == 2 and closed == made[:1]
    assert drawn(engine) and engine.sampler.version == 2


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_that_is_dead_is_noticed_before_weights_are_sent(tmp_path, monkeypatch, tied, capsys):
    """A broadcast would wait for it without end. It is replaced, as one is that dies while it samples."""
    engine = engine_of(tmp_path, tied)
    engine.publish(tmp_path / "weights", 0, False)
    before, send_all, sent = drawn(engine), engine._send_all, []
    kill(engine)
    monkeypatch.setattr(engine, "_send_all", lambda asked: sent.append(asked) or send_all(asked))
    assert engine.publish(tmp_path / "weights", 1, False)["weight_transfer"] == "ipc"
    assert sent == [(True, frozenset())], "to the new one alone"
    said = capsys.readouterr().out
    assert "SIGKILL" in said and "it is started again" in said and drawn(engine) == before
    engine.close()


@pytest.mark.parametrize("way", ["auto", "disk"])
def test_an_engine_that_dies_asleep_or_while_the_trainer_trains_is_replaced(tmp_path, way, capsys):
    engine = engine_of(tmp_path, weight_transfer=way)
    engine.publish(tmp_path / "0", 0, False)
    before = drawn(engine)
    kill(engine)
    engine.sleep()  # its samples are here
    assert "SIGKILL" in capsys.readouterr().out
    for version in (1, 2):
        engine.publish(tmp_path / str(version), version, False)
        assert drawn(engine) == before and engine.sampler.version == version
        engine.sleep()
        kill(engine)
    assert "SIGKILL" in capsys.readouterr().out
    engine.close()
