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
from rollouts.vllm import engines as vllm_engines
from rollouts.vllm import handover
from rollouts.vllm.handover import TransferError
from rollouts.vllm.sampler import VllmSampler
from tests.fake_transfer import PROMPTS, RENDERER, FakeTransfer, use_fake_transfer
from tests.programs import writers
from tests.tiny import make_config, tiny_policy

pytestmark = pytest.mark.usefixtures("quick_python")
SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=8)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """An engine says of a token's log-probability what the trainer does."""
    monkeypatch.setattr(vllm_engines, "WORKER", "tests.fake_engine")
    use_fake_transfer(monkeypatch)
    scores = [-torch.from_numpy(RENDERER.prompt_ids(prompt)[1:]).double() for prompt in PROMPTS]
    monkeypatch.setattr(handover, "score", lambda policy, rows: scores)


@pytest.fixture
def sampler(tmp_path) -> Iterator[VllmSampler]:
    attached = make(tmp_path)
    yield attached
    attached.close()


def make(folder: Path, tied: bool = True, way: str = "auto") -> VllmSampler:
    sampler = VllmSampler(
        make_config("sampler=vllm", f"sampler.weight_transfer={way}"), RENDERER, start(), folder / "logs"
    )
    sampler.attach(tiny_policy(tied=tied), PROMPTS)
    return sampler


def kill(sampler: VllmSampler) -> None:
    (pid,) = writers(sampler.nodes.engines._workers[0].log)
    os.kill(pid, signal.SIGKILL)


def drawn(sampler: VllmSampler) -> list[tuple[int, ...]]:
    return [row[0].token_ids[:-1] for row in sampler.sample(PROMPTS, 1, SETTINGS, seed=1)]


def test_weights_go_over_in_memory_and_a_folder_is_made_where_they_are_kept(sampler, tmp_path):
    for version in range(2):
        facts = sampler.publish(tmp_path / "weights", version, False)
        assert facts["weight_transfer"] == "ipc" and facts["probe_largest"] == 0.0
        assert sampler.nodes.engines.version == version
    assert drawn(sampler) and not (tmp_path / "weights").exists()
    assert sampler.publish(tmp_path / "weights", 2, True)["weight_transfer"] == "ipc"
    assert (tmp_path / "weights" / "model.safetensors").exists()
    kill(sampler)
    assert drawn(sampler) and sampler.nodes.engines.version == 2
    sampler.publish(tmp_path / "others", 5, False)
    assert sampler.nodes.engines.version == 5


@pytest.fixture
def unreachable(monkeypatch):
    """Memory that the engine's processes cannot find, as from another container."""
    monkeypatch.setattr(FakeTransfer, "lost", True)


@pytest.mark.usefixtures("unreachable")
def test_a_first_try_that_fails_goes_on_by_disk_and_says_so(sampler, tmp_path, capsys):
    assert sampler.publish(tmp_path / "weights", 0, False)["weight_transfer"] == "disk"
    said = capsys.readouterr().out
    assert "weight transfer by ipc failed" in said and "No such file" in said
    assert "a folder on disk instead" in said
    assert drawn(sampler)
    assert sampler.publish(tmp_path / "more", 1, False)["weight_transfer"] == "disk"
    assert not capsys.readouterr().out


@pytest.mark.parametrize("way", ["ipc", "auto"])
def test_a_way_that_was_asked_for_or_has_worked_is_not_left(tmp_path, way, request):
    """A later failure ends the round."""
    sampler = make(tmp_path, way=way)
    if way == "auto":
        sampler.publish(tmp_path / "weights", 0, False)
    request.getfixturevalue("unreachable")
    with pytest.raises(TransferError, match="weight transfer by ipc failed"):
        sampler.publish(tmp_path / "weights", 1, False)
    assert sampler.handover.backend == "ipc"
    sampler.close()


@pytest.mark.parametrize("keep", [False, True])
def test_a_killed_engine_is_started_again_and_connected_anew(sampler, tmp_path, monkeypatch, keep, capsys):
    """It gives the same samples, once a round; also where it was started with kept weights, and the hand-over
    after that is the first to send."""
    made, closed = [], []

    def connect(*arguments, **named):
        made.append(FakeTransfer(*arguments, **named))
        made[-1].shutdown = partial(closed.append, made[-1])
        return made[-1]

    monkeypatch.setattr(handover, "make_transfer", connect)
    sampler.publish(tmp_path / "weights", 3, keep)
    before = drawn(sampler)
    assert len(made) == 1 and not closed
    kill(sampler)
    assert drawn(sampler) == before and sampler.nodes.engines.version == 3
    assert "SIGKILL" in (said := capsys.readouterr().out) and "started again" in said
    assert drawn(sampler) == before and not capsys.readouterr().out
    kill(sampler)
    with pytest.raises(WorkerError, match="SIGKILL"):
        drawn(sampler)
    connected = len(made)
    assert (
        sampler.publish(tmp_path / "next", 4, keep)["weight_transfer"] == "ipc"
    )  # another round, another try
    assert len(made) == connected + 1 and closed == made[:-1]
    kill(sampler)
    assert drawn(sampler) == before and sampler.nodes.engines.version == 4


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_that_is_dead_is_noticed_before_weights_are_sent(tmp_path, monkeypatch, tied, capsys):
    """A broadcast would wait for it without end. It is replaced, as one is that dies while it samples."""
    sampler = make(tmp_path, tied)
    sampler.publish(tmp_path / "weights", 0, False)
    before, send_all, sent = drawn(sampler), sampler.handover._send_all, []
    kill(sampler)
    monkeypatch.setattr(sampler.handover, "_send_all", lambda asked: sent.append(asked) or send_all(asked))
    assert sampler.publish(tmp_path / "weights", 1, False)["weight_transfer"] == "ipc"
    [sending] = sent
    assert sending.unconnected == {0} and not sending.without, "to the new one alone"
    said = capsys.readouterr().out
    assert "SIGKILL" in said and "it is started again" in said and drawn(sampler) == before
    sampler.close()


@pytest.mark.parametrize("way", ["auto", "disk"])
def test_an_engine_that_dies_asleep_or_while_the_trainer_trains_is_replaced(tmp_path, way, capsys):
    sampler = make(tmp_path, way=way)
    sampler.publish(tmp_path / "0", 0, False)
    before = drawn(sampler)
    kill(sampler)
    sampler.sleep()  # its samples are here
    assert "SIGKILL" in capsys.readouterr().out
    for version in (1, 2):
        sampler.publish(tmp_path / str(version), version, False)
        assert drawn(sampler) == before and sampler.nodes.engines.version == version
        sampler.sleep()
        kill(sampler)
    assert "SIGKILL" in capsys.readouterr().out
    sampler.close()
