"""Accuracy: what is sampled, how verdicts are averaged, and when there is nothing to check."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.errors import ConfigError
from config.schema_data import DataConfig
from data import adder
from data.chat import Renderer
from data.types import Group, Prompt, Turn
from models.distributed import Ranks, start
from rollouts.samplers import Answered, Sample, SamplingSettings
from rollouts.verify import MOST_FAILURES, Accuracy, make_accuracy, verdicts_of
from tests.tiny import ROOT, make_config, tiny_policy

MODEL = ROOT / "assets" / "adder" / "model"


@dataclass
class Scripted:
    """A sampler that answers every prompt with its reference, or with 0 where the prompt is in ``wrong``; it
    remembers its calls."""

    renderer: Renderer
    wrong: set[str] = field(default_factory=set)
    calls: list[tuple[list[Prompt], int, SamplingSettings, int]] = field(default_factory=list)

    @property
    def ranks(self) -> Ranks:
        return Ranks()

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int, answered: Answered
    ) -> list[list[Sample]]:
        self.calls.append((prompts, n, settings, seed))
        texts = ["0" if prompt.id in self.wrong else str(prompt.reference_answer) for prompt in prompts]
        ids = [self.renderer.tokenizer(text)["input_ids"] for text in texts]
        return [[Sample((*row, self.renderer.end_id), True)] * n for row in ids]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return Renderer(tokenizer, max_length=64, max_prompt_length=16, template=tokenizer.chat_template)


PROMPTS = [adder.addition(a, 98) for a in range(1, 11)]


def accuracy(sampler, verifier=adder.accuracy, prompts=PROMPTS, world=None, **more):
    return Accuracy(sampler, prompts, verifier, sampler.renderer, world or start(), 24, **more)


def test_no_verdict_is_not_a_wrong_answer(renderer):
    def judge(texts: list[str], references: list[str | None]) -> list[float | None]:
        return [None if i < 4 else 1.0 if i < 7 else 0.0 for i in range(len(texts))]

    assert accuracy(Scripted(renderer), judge)()["accuracy_sampled"] == 0.5
    nobody = accuracy(Scripted(renderer), lambda texts, _: [None] * len(texts))
    assert nobody() == {"accuracy_sampled": None, "accuracy_greedy": None, "length_sampled": 3.9}


class Failing:
    """A user's verifier that raises wherever one of its ``bad`` answers is among those it is given."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.calls = {str(PROMPTS[i].reference_answer) for i in bad}, 0

    def __call__(self, texts: list[str], references: list[str | None]) -> list[float | None]:
        self.calls += 1
        if self.bad & set(references):
            raise KeyError("units")
        return [1.0 if text == reference else 0.0 for text, reference in zip(texts, references, strict=True)]


def test_a_verifier_that_raises_costs_the_verdicts_on_which_it_does(renderer, capsys):
    """A training is not ended by it, and it is not asked without end. The file and line are those of the
    user's code."""
    sampler = Scripted(renderer, wrong={PROMPTS[0].id, PROMPTS[1].id})
    found = accuracy(sampler, Failing(1, 8))()
    assert found["accuracy_sampled"] == found["accuracy_greedy"] == 7 / 8
    said = capsys.readouterr().out
    assert "failed on 2 of 10 sampled answers, which have no verdict: 2 x KeyError: 'units'" in said
    assert re.search(r"test_verify\.py:\d+\)", said)
    broken = Failing(*range(10))
    assert accuracy(sampler, broken)()["accuracy_sampled"] is None
    assert broken.calls == 2 * 19 and "failed on 10 of 10 greedy answers" in capsys.readouterr().out
    always, references = Failing(0), [str(PROMPTS[0].reference_answer)] * 1000
    verdicts, reasons = verdicts_of(always, ["0"] * 1000, list(references))
    assert verdicts == [None] * 1000 and reasons.total() == 1000 and always.calls < 3 * MOST_FAILURES


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda n: [1.0] * (n - 1), "it returned 0 verdicts for 1 answers"),
        (lambda n: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda n: [float("nan")] * n, "the reward is nan"),
        (lambda n: ["yes"] * n, "'yes' was given, not a number"),
    ],
)
def test_what_is_no_list_of_verdicts_is_no_verdict(returned, reason):
    verdicts, reasons = verdicts_of(lambda texts, _: returned(len(texts)), ["a", "b", "c"], [None] * 3)
    assert verdicts == [None] * 3 and reasons.total() == 3 and reason in next(iter(reasons))
    assert "verify.py" not in next(iter(reasons)), "the user's own code, or no line"


def test_numbers_of_numpy_and_torch_are_verdicts():
    given = [np.bool_(True), np.float32(0.5), torch.tensor(1.0), True, 0, None]
    assert verdicts_of(lambda texts, _: given, ["x"] * 6, [None] * 6) == (given, {})


def test_the_ranks_share_the_verdicts_between_them(renderer):
    shares = []

    def verifier(texts, references):
        shares.append(references)
        return adder.accuracy(texts, references)

    for rank in (0, 1):
        accuracy(Scripted(renderer), verifier, world=replace(start(), rank=rank, size=2))()
    assert sorted(shares[0] + shares[2]) == sorted(str(prompt.reference_answer) for prompt in PROMPTS)


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
    assert [call[1:3] for call in first.calls] == [(2, SamplingSettings(0.7, 1.0, 24)), (1, greedy)]
    assert measured(again, "a") == pytest.approx(found) and not again.calls
    wrong = measured(again, "a", prompts=PROMPTS[:3])
    assert wrong == {"accuracy_sampled": 0.0, "accuracy_greedy": 0.0, "length_sampled": 2.0}
    assert not again.calls
    assert measured(again, "a", initial=False)["accuracy_sampled"] == 1.0, "trained weights are always asked"
    assert measured(again, "b")["accuracy_sampled"] == 1.0 and len(again.calls) == 4
    measured(again, "a", samples=3)
    assert len(again.calls) == 5, "the greedy answers were there"


def test_nothing_is_checked_without_verifier_or_reference(renderer):
    config, world = make_config("loss=dpo", "data=adder"), start()
    unknown, known = [Group(Prompt((Turn("user", "01+02="),)))], [Group(PROMPTS[0])]
    bare = replace(config, data=DataConfig(name="local", source="data.sources.local"))
    for settings, groups in ((config, unknown), (config, []), (bare, known)):
        assert make_accuracy(settings, tiny_policy(), renderer, groups, world) is None
    config = make_config("loss=dpo", "data=adder", "data.verifier=data.adder.acuracy")
    with pytest.raises(ConfigError, match=re.escape("data.verifier=data.adder.acuracy")):
        make_accuracy(config, tiny_policy(), renderer, known, world)
