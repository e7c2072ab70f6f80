"""Accuracy: what is sampled, how verdicts are averaged, and when there is nothing to check."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from data import adder
from data.chat import Renderer, make_renderer
from data.types import Prompt
from models.distributed import Ranks, start
from models.pretrained import load_tokenizer
from rollouts.samplers import Sample, SamplingSettings
from rollouts.verify import MOST_FAILURES, Accuracy, verdicts_of
from tests.tiny import make_config


@dataclass
class Scripted:
    """A sampler that answers every prompt with its reference, or with 0 where the prompt is in ``wrong``; it
    remembers its calls."""

    renderer: Renderer
    wrong: set[str] = field(default_factory=set)
    calls: list[tuple[int, SamplingSettings]] = field(default_factory=list)
    ranks = Ranks()

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        self.calls.append((n, settings))
        texts = ["0" if prompt.id in self.wrong else str(prompt.reference_answer) for prompt in prompts]
        ids = [self.renderer.tokenizer(text)["input_ids"] for text in texts]
        return [[Sample((*row, self.renderer.end_id), True)] * n for row in ids]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    config = make_config()
    return make_renderer(load_tokenizer(config.model), config.model, config.data)


PROMPTS = [adder.addition(a, 98) for a in range(1, 11)]


def accuracy(sampler, verifier=adder.accuracy, prompts=PROMPTS, world=None, **more):
    return Accuracy(sampler, prompts, verifier, sampler.renderer, world or start(), 24, **more)


def test_no_verdict_is_not_a_wrong_answer(renderer):
    judge = lambda texts, _: [*[None] * 4, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]  # noqa: E731
    assert accuracy(Scripted(renderer), judge)()["accuracy_sampled"] == 0.5
    nobody = accuracy(Scripted(renderer), lambda texts, _: [None] * len(texts))
    assert nobody() == {"accuracy_sampled": None, "accuracy_greedy": None, "length_sampled": 3.9}


def test_a_verifier_that_raises_costs_the_verdicts_on_which_it_does(renderer, capsys):
    """A training is not ended by it, and it is not asked without end. The ranks share the verdicts between
    them."""
    sampler = Scripted(renderer, wrong={PROMPTS[0].id, PROMPTS[1].id})
    bad, calls = {str(PROMPTS[i].reference_answer) for i in (1, 8)}, list[list[str]]()

    def verifier(texts: list[str], references: list[str]) -> list[float]:
        calls.append(references)
        if bad & set(references):
            raise KeyError("units")
        return list(map(float, map(str.__eq__, texts, references)))

    found = accuracy(sampler, verifier)()
    assert found["accuracy_sampled"] == found["accuracy_greedy"] == 7 / 8
    said = capsys.readouterr().out
    assert "failed on 2 of 10 sampled answers, which have no verdict: 2 x KeyError: 'units'" in said
    bad = {str(prompt.reference_answer) for prompt in PROMPTS}
    assert accuracy(sampler, verifier)()["accuracy_sampled"] is None
    calls.clear()
    verdicts, reasons = verdicts_of(verifier, ["0"] * 1000, [str(PROMPTS[0].reference_answer)] * 1000)
    assert verdicts == [None] * 1000 and reasons.total() == 1000 and len(calls) < 3 * MOST_FAILURES
    calls.clear()
    bad.clear()
    for rank in (0, 1):
        accuracy(sampler, verifier, world=replace(start(), rank=rank, size=2))()
    assert sorted(calls[0] + calls[2]) == sorted(str(prompt.reference_answer) for prompt in PROMPTS)


def test_what_is_no_list_of_verdicts_is_no_verdict():
    for returned, reason in (
        ([1.0, 1.0], "it returned 2 verdicts for 1 answers"),
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([float("nan")], "the reward is nan"),
    ):
        verdicts, reasons = verdicts_of(lambda texts, _, one=returned: one, ["a"], [None])
        assert verdicts == [None] and reasons.total() == 1 and reason in next(iter(reasons))
    given = [np.bool_(True), np.float32(0.5), torch.tensor(1.0), True, 0, None]
    assert verdicts_of(lambda texts, _: given, ["x"] * 6, [None] * 6) == (given, {})


def test_another_verifier_judges_the_same_answers(renderer):
    """They are drawn once, and kept as many as was said, in the prompts' order."""
    sampler = Scripted(renderer, wrong={PROMPTS[0].id, PROMPTS[3].id})
    first = accuracy(sampler, samples=2, kept=4)
    short = first.with_verifier(lambda texts, _: [float(len(text) < 3) for text in texts])
    assert (first()["accuracy_sampled"], short()["accuracy_sampled"]) == (0.8, 0.2)
    assert len(sampler.calls) == 2, "sampled and greedy"
    assert [row[:3] for row in short.samples[2:4]] == [("sampled", "02+98=", "100")] * 2
    assert [row[4] for row in short.samples] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_the_initial_weights_answer_once_for_all_runs_that_start_from_them(renderer, tmp_path):
    """Evaluation samples as the policy would, and once greedily."""

    def measured(sampler, weights, initial=True, **more):
        measure = accuracy(sampler, **({"samples": 2} | more))
        measure.use_cache(tmp_path, {"weights": weights})
        return measure(initial)

    first, again = Scripted(renderer, wrong={prompt.id for prompt in PROMPTS[:3]}), Scripted(renderer)
    found = {"accuracy_sampled": 0.7, "accuracy_greedy": 0.7, "length_sampled": 3.4}
    assert measured(first, "a") == pytest.approx(found)
    greedy = SamplingSettings(0.0, 1.0, 24)
    assert first.calls == [(2, SamplingSettings(0.7, 1.0, 24)), (1, greedy)]
    assert measured(again, "a") == pytest.approx(found) and not again.calls
    wrong = measured(again, "a", prompts=PROMPTS[:3])
    assert wrong == {"accuracy_sampled": 0.0, "accuracy_greedy": 0.0, "length_sampled": 2.0}
    assert not again.calls
    assert measured(again, "a", initial=False)["accuracy_sampled"] == 1.0, "trained weights are always asked"
    assert measured(again, "b")["accuracy_sampled"] == 1.0 and len(again.calls) == 4
    measured(again, "a", samples=3)
    assert len(again.calls) == 5, "the greedy answers were there"
