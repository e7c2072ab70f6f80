"""The embedded sampler: what a sample depends on, what it does not, and that it is drawn from the policy's
own distribution."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, TopPLogitsWarper

from data import adder
from data.batches import collate
from data.chat import Renderer, make_renderer
from data.types import Prompt, Sequence, Turn
from models.distributed import start, stop
from models.policy import Policy, causal_lm, decoder_blocks
from models.pretrained import load_policy, load_tokenizer
from models.sharding import shard
from rollouts import stop_strings
from rollouts.decoding import InverseCdfProcessor, TopP
from rollouts.embedded import EmbeddedSampler, uniforms
from rollouts.samplers import SamplingSettings
from rollouts.stop_strings import StopStrings
from tests.distributed.joining import join
from tests.programs import in_ranks
from tests.tiny import make_config

GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=24)
SAMPLED = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=24)
STOPPED = list(adder.prompts("eval")[:1])


def shipped() -> tuple[Policy, Renderer]:
    sizes = ("model.dtype=float32", "model.max_length=96", "model.max_prompt_length=64")
    config = make_config(*sizes)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    return load_policy(config.model, torch.device("cpu")), renderer


def make(policy: Policy, renderer: Renderer, **more: Any) -> EmbeddedSampler:
    return EmbeddedSampler(policy, renderer, start(), batch_size=4, **more)


@pytest.fixture(scope="module")
def sampler() -> EmbeddedSampler:
    return make(*shipped())


def uneven_prompts(n: int) -> list[Prompt]:
    """Prompts of 9, 31 and 53 tokens: additions with 0, 1 or 2 answered ones before them."""
    texts = {"user": ("37+58=", "11+22="), "assistant": ("7+8=15;3+5=8;85", "1+2=3;1+2=3;33")}
    before = tuple(Turn(role, texts[role][i]) for i in range(2) for role in texts)
    asked = adder.prompts("eval")[:n]
    return [Prompt(before[: 2 * (i % 3)] + prompt.turns) for i, prompt in enumerate(asked)]


# What a sample depends on


@pytest.mark.parametrize("length", [24, 3])
def test_greedy_is_the_highest_logit_of_plain_forwards(sampler, length):
    """Without cache, padding, mask or generate. A sample is finished where it ends with its only stop token,
    and not where the length ended it."""
    model, renderer, prompts = causal_lm(sampler.policy.model), sampler.renderer, uneven_prompts(3)
    found = sampler.sample(prompts, 1, SamplingSettings(0.0, 1.0, length), 0)
    for prompt, (sample,) in zip(prompts, found, strict=True):
        ids = renderer.prompt_ids(prompt).tolist()
        expected: list[int] = []
        while len(expected) < length and renderer.end_id not in expected:
            with torch.no_grad():
                expected.append(int(model(torch.tensor([ids + expected])).logits[0, -1].argmax()))
        assert list(sample.token_ids) == expected and sample.finished == (expected[-1] == renderer.end_id)
        row = renderer.sequence(prompt, sample.completion(renderer))
        assert row.completion_ids.tolist() == expected, "it is trained on as it is"


def test_a_sample_is_its_own_whatever_is_sampled_beside_it(sampler):
    prompts = uneven_prompts(6)
    every = sampler.sample(prompts, 3, SAMPLED, 7)
    assert sampler.sample(prompts[::-1], 3, SAMPLED, 7) == every[::-1]
    assert sampler.sample(prompts[3:5], 1, SAMPLED, 7) == [[samples[0]] for samples in every[3:5]]
    assert len({sample for samples in every for sample in samples}) > 12, "each sample has its own numbers"
    assert sampler.sample(prompts, 3, SAMPLED, 8) != every and sampler.sample([], 3, SAMPLED, 7) == []


def test_neither_global_generators_nor_published_settings_are_read(sampler, monkeypatch):
    model = causal_lm(sampler.policy.model)
    torch.manual_seed(1)
    first = sampler.sample(uneven_prompts(6), 2, SAMPLED, 0)
    torch.manual_seed(2)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    own = {"top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 3.0, "max_length": 12}
    own |= {"suppress_tokens": [6, 7, 8], "num_return_sequences": 2, "do_sample": True, "min_new_tokens": 20}
    monkeypatch.setattr(model, "generation_config", published := GenerationConfig(**own))
    assert sampler.sample(uneven_prompts(6), 2, SAMPLED, 0) == first
    assert model.generation_config is published
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_a_sharded_policy_samples_from_its_newest_weights(sampler):
    """FSDP2 leaves its root whole after a forward without backward: without a reshard the embeddings would be
    those of the last round."""
    both, prompts = (shipped()[0], shipped()[0]), uneven_prompts(4)
    shard(both[0], decoder_blocks(both[0].model), start(), torch.float32)
    # Taken before sampling, as an optimizer has: what named_parameters gives depends on whether the root is
    # whole.
    embeddings = [
        next(p for name, p in policy.named_parameters() if "embed_tokens" in name) for policy in both
    ]
    samplers = [make(policy, sampler.renderer) for policy in both]
    before, plain = (one.sample(prompts, 1, SAMPLED, 0) for one in samplers)
    with torch.no_grad():
        for weight in embeddings:
            weight.mul_(-1)
    after, other = (one.sample(prompts, 1, SAMPLED, 0) for one in samplers)
    assert before == plain != after == other


# What a sample is


@pytest.mark.parametrize(
    ("settings", "temperature"), [(GREEDY, 1.0), (SamplingSettings(0.6, 0.8, 12), 1.0), (SAMPLED, 0.6)]
)
def test_each_token_comes_with_what_the_policy_thinks_of_it(sampler, settings, temperature):
    """At the trainer's temperature and over all tokens, whatever it was drawn with."""
    prompts, policy, renderer = uneven_prompts(3), sampler.policy, sampler.renderer
    with policy.at_temperature(temperature):
        answers = sampler.sample(prompts, 2, settings, 5)
        rows = [
            Sequence(renderer.prompt_ids(prompt), np.array(sample.token_ids, np.int32))
            for prompt, samples in zip(prompts, answers, strict=True)
            for sample in samples
        ]
        with torch.no_grad():
            wanted = policy(collate(rows, torch.device("cpu")))
    plain = sampler.sample(prompts, 2, settings, 5)
    assert [[s.token_ids for s in of] for of in plain] == [[s.token_ids for s in of] for of in answers]
    for row, sample, values in zip(rows, (s for of in answers for s in of), wanted, strict=True):
        assert sample.logprobs == pytest.approx(values[: len(row.completion_ids)].tolist(), abs=2e-5)
        assert all(float(str(np.float32(value))) == value for value in sample.logprobs)
        assert sample.completion(renderer, temperature).behavior_temperature == temperature


# The draw


def draw(logits: list[float], numbers: np.ndarray) -> np.ndarray:
    """The token drawn from ``logits`` at each of the random numbers."""
    scores = torch.tensor(logits).expand(len(numbers), -1)
    drawn = InverseCdfProcessor(torch.from_numpy(numbers)[:, None], width=4)(
        torch.zeros(len(numbers), 4, dtype=torch.int64), scores
    )
    assert (drawn.isfinite().sum(-1) == 1).all()
    return drawn.argmax(-1).numpy()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = np.array([0.3, -1.0, 2.0, -np.inf, 0.0, -8.0])
    numbers = (np.arange(100_000, dtype=np.float32) + 0.5) / 100_000
    shares = np.bincount(draw(logits.tolist(), numbers), minlength=6) / len(numbers)
    weights = np.exp(logits)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=2e-5)
    scores = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for top_p in (0.1, 0.6, 0.95):
        warped = TopP(top_p)(torch.empty(0), scores)
        assert torch.equal(warped, TopPLogitsWarper(top_p)(torch.empty(0), scores))


def test_random_numbers_are_uniform_and_of_their_sample():
    numbers = np.stack([uniforms(3, f"{p:016x}", i, 8) for p in range(200) for i in range(4)])
    assert len({row.tobytes() for row in numbers}) == 800 and 0 <= numbers.min() <= numbers.max() < 1
    shares = np.bincount((numbers * 8).astype(int).ravel(), minlength=8) / numbers.size
    assert np.abs(shares - 1 / 8).max() < 0.02
    assert np.array_equal(uniforms(3, "a", 0, 4), uniforms(3, "a", 0, 8)[:4])


# Several ranks


def sample_together(rank: int, ranks: int, store: str, out: str) -> None:
    """Sample one prompt, of which rank 1 has none, in parts."""
    world, (policy, renderer) = join(rank, ranks, store), shipped()
    shard(policy, decoder_blocks(policy.model), world, torch.float32)
    stop_strings.FIRST = 2
    sampler = EmbeddedSampler(policy, renderer, world, batch_size=1, stops=StopStrings([";"], renderer))
    (drawn,) = sampler.ranks.on_main(partial(sampler.sample, STOPPED, 3, SAMPLED, 0))
    Path(f"{out}.{rank}").write_text(json.dumps([s.token_ids for s in drawn]))
    stop()


def test_ranks_with_uneven_shares_finish_with_the_samples_of_one_process(sampler, tmp_path, monkeypatch):
    in_ranks(sample_together, (2, str(tmp_path / "store"), str(tmp_path / "out")), 2)
    monkeypatch.setattr(stop_strings, "FIRST", 2)
    stopped = make(sampler.policy, sampler.renderer, stops=StopStrings([";"], sampler.renderer))
    (alone,) = stopped.sample(STOPPED, 3, SAMPLED, 0)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"out.{rank}").read_text()) == [list(s.token_ids) for s in alone]
    assert any(s.stopped for s in alone) and len({len(s.token_ids) for s in alone}) > 1
