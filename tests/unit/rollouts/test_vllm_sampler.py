"""Engines and the settings of the vLLM sampler, how weights reach engines, and what happens to a round when
one of them is killed: with processes that only pretend to be engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.worker_process import WorkerError
from config.schema_sampler import SamplerConfig
from data.types import Sequence
from models.distributed import start
from rollouts.samplers import SamplingSettings
from rollouts.vllm import engines as vllm_engines
from rollouts.vllm import handover
from rollouts.vllm.handover import TransferError
from rollouts.vllm.options import engine_environment, with_engines
from rollouts.vllm.sampler import VllmSampler, check_logprobs, sample_seed
from tests.fake_transfer import PROMPTS, RENDERER, FakeTransfer, use_fake_transfer
from tests.programs import writers
from tests.tiny import make_config, tiny_policy

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
    with closing(make(tmp_path / "logs")) as sampler:
        sampler.attach(tiny_policy(tied=True), PROMPTS)
        yield sampler


def make(folder: Path, *settings: str) -> VllmSampler:
    model = ("model.max_length=64", "model.max_prompt_length=48", "sampler.max_tokens=8")
    config = make_config("sampler=vllm", "sampler.timeout=30", *model, *settings)
    return VllmSampler(config, RENDERER, start(), folder)


def kill(sampler: VllmSampler) -> None:
    (pid,) = writers(sampler.nodes.engines._workers[0].log)
    os.kill(pid, signal.SIGKILL)


def drawn(sampler: VllmSampler) -> list[tuple[int, ...]]:
    return [row[0].token_ids[:-1] for row in sampler.sample(PROMPTS, 1, SETTINGS, seed=1)]


def test_a_first_try_that_fails_goes_on_by_disk_and_says_so_once(sampler, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FakeTransfer, "lost", True)
    for version in range(2):
        assert sampler.publish(tmp_path / str(version), version, False)["weight_transfer"] == "disk"
        assert drawn(sampler)
    said = capsys.readouterr().out
    assert said.count("weight transfer by ipc failed") == said.count("a folder on disk instead") == 1
    assert "No such file" in said


def test_a_way_that_has_worked_is_not_left(sampler, tmp_path, monkeypatch):
    """A later failure ends the round."""
    sampler.publish(tmp_path / "weights", 0, False)
    monkeypatch.setattr(FakeTransfer, "lost", True)
    with pytest.raises(TransferError, match="weight transfer by ipc failed"):
        sampler.publish(tmp_path / "weights", 1, False)
    assert sampler.handover.backend == "ipc"


def test_a_killed_engine_is_started_again_once_a_round_and_connected_anew(sampler, tmp_path, capsys):
    """It gives the same samples, also where it was started with kept weights."""
    facts = sampler.publish(tmp_path / "weights", 3, True)
    assert facts["weight_transfer"] == "ipc" and facts["probe_largest"] == 0.0
    assert (tmp_path / "weights" / "model.safetensors").exists()
    before = drawn(sampler)
    kill(sampler)
    assert drawn(sampler) == before and sampler.nodes.engines.version == 3
    assert "SIGKILL" in (said := capsys.readouterr().out) and "started again" in said
    kill(sampler)
    with pytest.raises(WorkerError, match="SIGKILL"):
        drawn(sampler)
    assert sampler.publish(tmp_path / "next", 4, False)["weight_transfer"] == "ipc"
    kill(sampler)  # another round, another try
    assert drawn(sampler) == before and sampler.nodes.engines.version == 4


def test_samples_come_in_the_order_of_the_prompts_whoever_drew_them(tmp_path):
    with closing(make(tmp_path, "sampler.data_parallel=2")) as sampler:
        sampler.nodes.engines.load(tmp_path, 0)
        samples = sampler.sample(PROMPTS, 3, SETTINGS, seed=1)
        assert sampler.sample([], 3, SETTINGS, seed=1) == []
        assert len(sampler.sample(PROMPTS[:1], 3, SETTINGS, seed=1)[0]) == 3
        sampler.nodes.engines._ask = lambda *of: [[], []]  # an engine that loses requests
        with pytest.raises(WorkerError, match=r"drew \(samples, of so many\): \[\(0, "):
            sampler.sample(PROMPTS, 3, SETTINGS, seed=1)
    for prompt, row in zip(PROMPTS, samples, strict=True):
        ids = RENDERER.prompt_ids(prompt).tolist()
        wanted = [(*ids, sample_seed(1, prompt.id, i) % 1000) for i in range(3)]
        assert [sample.token_ids[:-1] for sample in row] == wanted
        assert len({sample.token_ids[-1] for sample in row}) == 1, "they share a part of one engine's cache"
    assert len({row[0].token_ids[-1] for row in samples}) == 2
    seeds = {sample_seed(seed, prompt.id, i) for seed in range(5) for prompt in PROMPTS for i in range(8)}
    assert len(seeds) == 5 * len(PROMPTS) * 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_log_probabilities_that_the_engine_cannot_say_are_not_made_up(tmp_path):
    """Those of rows are of the completions' tokens. A correction by them is refused before weights load."""
    with closing(make(tmp_path, "model.logit_temperature=0.7")) as sampler:
        sampler.nodes.engines.load(tmp_path, 0)
        drawn = [
            sampler.sample(PROMPTS[:1], 1, SamplingSettings(t, p, 8), seed=1)[0][0].logprobs
            for t, p in ((0.7, 1.0), (0.7, 0.95), (1.0, 1.0))
        ]
        ids = [np.array(some, np.int32) for some in ([1, 2, 3], [4, 5], [6], [7])]
        rows = [Sequence(*ids[:2]), Sequence(*ids[2:])]
        assert sampler.nodes.engines.logprobs(rows) == [[[-4.0, -5.0], [-7.0]]]
    assert drawn == [(-0.5,), (), ()]
    words = ["loss=grpo", "online=true", "sampler=vllm", "correction=masked", "correction.mismatch=allow"]
    check_logprobs(make_config(*words))
    with pytest.raises(ConfigError, match=r"vLLM says .* set sampler\.temperature=0\.6 sampler\.top_p=1"):
        check_logprobs(make_config(*words, "model.logit_temperature=0.6"))


def test_weights_that_are_not_in_the_models_files_are_refused_outside_rounds(tmp_path):
    """vLLM would sample from those that are."""
    for word, peft in (("model.from_config=true", "false"), ("model.quantization=nf4", "true")):
        sampler = make(tmp_path, word, f"model.use_peft={peft}")
        with pytest.raises(ConfigError, match=rf"(?i)^{word}: .*assets/adder/model: use sampler=embedded"):
            sampler.load()


def test_there_is_nothing_to_sample_from_but_the_version_that_was_loaded(tmp_path):
    """Not before a load, while asleep (unless it has GPUs of its own), with an older version, or after a
    failure, which leaves no engine: the next load starts new ones."""
    with closing(make(tmp_path / "own", "sampler.devices=[1]")) as sampler:
        sampler.nodes.engines.load(tmp_path, 0)
        sampler.sleep()
        first = drawn(sampler)
    with closing(make(tmp_path)) as sampler:
        load = sampler.nodes.engines.load
        for before, said in (
            (lambda: None, "call load first"),
            (sampler.sleep, "call load first"),
            (lambda: load(tmp_path / "ignored", 9), r"version \['2'\], not '9'"),
        ):
            before()
            with pytest.raises(WorkerError, match=said):
                drawn(sampler)
            load(tmp_path, 2)
            assert drawn(sampler) == first
        with pytest.raises(WorkerError, match=r"(?s)Traceback.*FileNotFoundError"):
            load(tmp_path / "broken", 9)
        with pytest.raises(WorkerError, match="call load first"):
            drawn(sampler)


def test_engines_share_no_gpu_and_count_within_those_that_the_run_sees():
    own = {"devices": [2, 3, 5, 4]}
    for given, visible, found in (
        ({}, "", ["0,1", "2,3"]),
        (own, "", ["2,3", "5,4"]),
        (own, "7,6,5,4,3,GPU-a", ["5,4", "GPU-a,3"]),
    ):
        config = SamplerConfig(name="vllm", separate=True, tensor_parallel=2, data_parallel=2, **given)
        every = [engine_environment(config, k, {"CUDA_VISIBLE_DEVICES": visible}) for k in range(2)]
        assert [one["CUDA_VISIBLE_DEVICES"] for one in every] == found
        assert every[0]["TRITON_F32_DEFAULT"] == "ieee"  # the probe knows no TF32
    with pytest.raises(ConfigError, match=r"sampler\.devices"):
        engine_environment(config, 0, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_every_gpu_samples_unless_somebody_says_how_many():
    for given, gpus, ranks, engines in (
        ({}, 0, 4, 1),
        ({"tensor_parallel": 2}, 8, 8, 4),
        ({"devices": [4, 5, 6, 7], "tensor_parallel": 2}, 8, 4, 2),
    ):
        config = SamplerConfig(name="vllm", separate=True, **given)
        assert with_engines(config, gpus, ranks).copies == engines
    config = SamplerConfig(name="vllm", separate=True, data_parallel=3, tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"^sampler\.data_parallel=.*has 8.*: use auto, which is 2"):
        with_engines(config, 8, 5)


def test_every_engines_workers_have_ranks_of_their_own_behind_the_trainers(tmp_path, monkeypatch):
    own = make(tmp_path, "sampler.data_parallel=3", "sampler.tensor_parallel=2").nodes.engines
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(own, "_ask", lambda call, infos, timeout: asked.extend(i for (i,) in infos))
    own._workers = [None] * 3
    own.init_weight_transfer_engine({"rank_offset": 5})
    assert [info["rank_offset"] for info in asked] == [5, 7, 9]
