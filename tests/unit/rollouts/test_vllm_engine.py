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
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from common.worker_process import WorkerError
from models.distributed import start
from models.policy import Policy
from rollouts.samplers import SamplingSettings
from rollouts.vllm import engine as vllm_engine
from rollouts.vllm import sampler as vllm_sampler
from rollouts.vllm import transfer
from rollouts.vllm.engine import TransferError, VllmEngine, probe_rows
from tests.programs import writers
from tests.tiny import tiny_llama, tiny_policy
from tests.unit.rollouts.test_vllm_sampler import PROMPTS, RENDERER, make

pytestmark = pytest.mark.usefixtures("quick_python")
SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=8)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """An engine says of a token's log-probability what the trainer does."""
    monkeypatch.setattr(vllm_sampler, "WORKER", "tests.fake_engine")
    monkeypatch.setattr(vllm_sampler, "installed", lambda: True)
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


def engine_of_adapters(folder: Path, base: str = "base", **settings) -> VllmEngine:
    """Of a LoRA policy whose adapters go over alone. An engine on a base called ``without`` refuses them."""
    sampler, probe = make(folder / "logs", **settings), probe_rows(PROMPTS, RENDERER)
    return VllmEngine(sampler, tiny_lora(), RENDERER, start(), probe, "float32", folder / base)


def tiny_lora() -> Policy:
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return Policy(get_peft_model(tiny_llama(), config)).eval()


def kill(engine: VllmEngine) -> None:
    (pid,) = writers(engine.sampler._workers[0].log)
    os.kill(pid, signal.SIGKILL)


def drawn(engine: VllmEngine) -> list[tuple[int, ...]]:
    return [row[0].token_ids[:-1] for row in engine.sample(PROMPTS, 1, SETTINGS, seed=1)]


def test_weights_go_over_in_memory_and_no_folder_is_made(engine, tmp_path):
    for version in range(3):
        facts = engine.publish(tmp_path / "weights", version, False)
        assert facts["weight_transfer"] == "shared_memory" and facts["probe_largest"] == 0.0
        assert engine.sampler.version == version
    assert drawn(engine)
    assert not (tmp_path / "weights").exists()


def test_weights_that_must_be_kept_are_beside(engine, tmp_path):
    assert engine.publish(tmp_path / "weights", 0, True)["weight_transfer"] == "shared_memory"
    assert (tmp_path / "weights" / "model.safetensors").exists()
    engine.reload_weights(tmp_path / "weights", 4)
    assert engine.sampler.version == 4
    engine.publish(tmp_path / "others", 5, False)
    assert engine.sampler.version == 5


@pytest.fixture
def unreachable(monkeypatch):
    """Memory that the engine's processes cannot find, as from another container."""
    shared = transfer.shared

    class Elsewhere:
        def __init__(self, part):
            self.context = shared(part)

        def __enter__(self):
            return self.context.__enter__() | {"path": "/proc/self/fd/9999"}

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    monkeypatch.setattr(transfer, "shared", Elsewhere)


@pytest.mark.usefixtures("unreachable")
def test_a_first_try_that_fails_goes_on_by_disk_and_says_so(engine, tmp_path, capsys):
    assert engine.publish(tmp_path / "weights", 0, False)["weight_transfer"] == "disk"
    said = capsys.readouterr().out
    assert "weight transfer by shared_memory failed" in said and "No such file" in said
    assert "a folder on disk instead" in said
    assert drawn(engine)
    assert engine.publish(tmp_path / "more", 1, False)["weight_transfer"] == "disk"
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("unreachable")
def test_a_way_that_was_asked_for_is_not_left(tmp_path):
    engine = engine_of(tmp_path, weight_transfer="shared_memory")
    with pytest.raises(TransferError, match="weight transfer by shared_memory failed"):
        engine.publish(tmp_path / "weights", 0, False)
    engine.close()


def test_a_later_failure_ends_the_round_and_changes_no_way(engine, tmp_path, request):
    engine.publish(tmp_path / "weights", 0, False)
    request.getfixturevalue("unreachable")
    with pytest.raises(TransferError):
        engine.publish(tmp_path / "weights", 1, False)
    assert engine.backend == "shared_memory"


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
        made.append(transfer.make_transfer(*arguments, **named))
        made[-1].shutdown = partial(closed.append, made[-1])
        return made[-1]

    monkeypatch.setattr(vllm_engine, "make_transfer", connect)
    engine.publish(tmp_path / "weights", 0, keep)
    engine.publish(tmp_path / "weights", 1, keep)
    assert len(made) == 1 and not closed
    kill(engine)
    assert drawn(engine)
    assert engine.publish(tmp_path / "next", 2, keep)["weight_transfer"] == "shared_memory"
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
    assert engine.publish(tmp_path / "weights", 1, False)["weight_transfer"] == "shared_memory"
    assert sent == [(True, frozenset())], "to the new one alone"
    said = capsys.readouterr().out
    assert "SIGKILL" in said and "it is started again" in said and drawn(engine) == before
    engine.close()


@pytest.mark.parametrize("way", ["memory", "disk", "adapters"])
def test_an_engine_that_dies_asleep_or_while_the_trainer_trains_is_replaced(tmp_path, way, capsys):
    if way == "adapters":
        engine = engine_of_adapters(tmp_path)
    else:
        engine = engine_of(tmp_path, weight_transfer="disk" if way == "disk" else "auto")
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


def test_adapters_go_over_alone_once_a_round(tmp_path, capsys):
    engine = engine_of_adapters(tmp_path)
    before = {name: p.detach().clone() for name, p in engine.policy.named_parameters()}
    for version in (0, 1):
        folder = tmp_path / f"weights-{version}"
        facts = engine.publish(folder, version, False)
        assert (facts["adapters"], facts["weight_transfer"]) == ("alone", "disk")
        tensors = load_file(folder / "adapter_model.safetensors")
        assert len(tensors) == 2 * 7 * 2 and all(".lora_" in name for name in tensors)
        assert not any(tensor.any() for name, tensor in tensors.items() if ".lora_B" in name)
        assert {path.name for path in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "probe.json",
        }
    assert drawn(engine) and not capsys.readouterr().out
    assert all(torch.equal(p, before[name]) for name, p in engine.policy.named_parameters())
    kill(engine)
    assert drawn(engine) and engine.sampler.version == 1
    engine.close()


def test_where_the_engine_refuses_adapters_the_merged_model_goes_over_and_it_says_so(tmp_path, capsys):
    engine = engine_of_adapters(tmp_path, "without")
    facts = engine.publish(tmp_path / "weights", 0, True)
    assert (facts["adapters"], facts["weight_transfer"]) == ("merged", "shared_memory")
    said = capsys.readouterr().out
    assert "does not support LoRA yet" in said and "adapters merged instead (sampler.adapters)" in said
    assert not (tmp_path / "weights/adapter_model.safetensors").exists()
    merged = load_file(tmp_path / "weights/model.safetensors")
    assert not any("lora" in name for name in merged)
    assert drawn(engine)
    assert engine.publish(tmp_path / "more", 1, False)["adapters"] == "merged"
    assert not capsys.readouterr().out
    engine.close()


def test_adapters_that_were_asked_for_alone_are_never_merged(tmp_path):
    engine = engine_of_adapters(tmp_path, "without", adapters="alone")
    with pytest.raises(TransferError, match=r"does not support LoRA yet(.|\n)*sampler\.adapters=merged"):
        engine.publish(tmp_path / "weights", 0, False)
    engine.close()


def test_kept_weights_of_either_kind_are_taken_by_engines_of_either_kind(tmp_path):
    """A run that goes on may hand over otherwise than it did before."""
    alone, merged = engine_of_adapters(tmp_path / "a"), engine_of_adapters(tmp_path / "b")
    merged.base, merged.backend = None, "shared_memory"
    merged.sampler.transfers_by("shared_memory")
    alone.publish(tmp_path / "alone", 0, True)
    merged.publish(tmp_path / "merged", 0, True)
    for engine, other in ((alone, "merged"), (merged, "alone")):
        engine.reload_weights(tmp_path / other, 1)
        assert drawn(engine) and engine.sampler.version == 1
        kill(engine)
        assert drawn(engine)
        facts = engine.publish(tmp_path / "next", 2, False)
        assert facts["adapters"] == ("alone" if engine is alone else "merged")
        assert drawn(engine) and engine.sampler.version == 2
        engine.close()
