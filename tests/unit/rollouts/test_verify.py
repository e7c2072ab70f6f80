"""Accuracy: what is sampled, and how verdicts are averaged. Answers that were drawn are kept as they come:
what a killed process had, the next one goes on from; and only from the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from data import adder
from data.chat import Renderer, make_renderer
from data.types import Prompt
from models.distributed import Ranks, start
from models.pretrained import load_tokenizer
from rollouts import answers
from rollouts.answers import AnswerCache, Request
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import Sample, SamplingSettings
from rollouts.verify import MOST_FAILURES, Accuracy, verdicts_of
from tests.tiny import ROOT, make_config


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


# -- answers that are kept ----------------------------------------------------------------------------

REQUESTS = [
    Request("greedy", 1, SamplingSettings(0.0, 1.0, 24)),
    Request("sampled", 3, SamplingSettings(0.7, 0.9, 24)),
]


@pytest.fixture
def asked(monkeypatch) -> list[Prompt]:
    """The prompts that a model was asked, in their order."""
    seen: list[Prompt] = []
    sample = EmbeddedSampler.sample

    def noted(self, prompts, *others):
        seen.extend(prompts)
        return sample(self, prompts, *others)

    monkeypatch.setattr(EmbeddedSampler, "sample", noted)
    return seen


def drawn(cache, prompts=PROMPTS, requests=REQUESTS, *overrides):
    config = make_config("sampler.max_tokens=24", "sampler.batch_size=6", f"cache_dir={cache}", *overrides)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    return answers.generate_answers(
        config, renderer, prompts, list(requests), start(), cache / "logs", "mine"
    )


def test_what_a_killed_process_had_is_not_drawn_again(tmp_path, asked, monkeypatch):
    whole = drawn(tmp_path / "whole")
    assert len(asked) == 2 * len(PROMPTS)
    asked.clear()
    add = AnswerCache.add

    def killed(self, new):
        if len(asked) > len(PROMPTS):
            raise KeyboardInterrupt
        add(self, new)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerCache, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            drawn(tmp_path / "cut")
    assert len(asked) == len(PROMPTS) + 2, "the greedy answers, and a part of the samples that was not kept"
    asked.clear()
    assert drawn(tmp_path / "cut") == whole
    assert len(asked) == len({prompt.id for prompt in asked}) == len(PROMPTS)
    monkeypatch.setattr(answers, "make_sampler", None)
    assert drawn(tmp_path / "whole") == whole, "all of it there, no weights are loaded"
    assert drawn(tmp_path / "whole", PROMPTS[3:7]) == [of_request[3:7] for of_request in whole]


def test_other_references_are_other_prompts(tmp_path, asked):
    """A sampler gets the whole prompt; another reference may be in the same data."""
    one, other = PROMPTS[:2], [replace(prompt, reference_answer="7") for prompt in PROMPTS[:2]]
    drawn(tmp_path, one, REQUESTS[:1])
    drawn(tmp_path, [*other, *one], REQUESTS[:1])
    drawn(tmp_path, [*one, *other, replace(PROMPTS[0], reference_answer=None)], REQUESTS[:1])
    assert {prompt.reference_answer for prompt in asked[2:4]} == {"7"}
    assert [prompt.reference_answer for prompt in asked[4:]] == [None]


def test_other_settings_are_other_answers(tmp_path, asked):
    for count, word in enumerate(["seed=1", "seed=2", "model.max_length=48", "model.dtype=bfloat16"], 1):
        drawn(tmp_path, PROMPTS[:1], REQUESTS[1:], word)
        assert len(asked) == count


def test_the_same_weights_in_another_architecture_are_asked_anew(tmp_path, asked):
    """Where the files say nothing else of the model, its answers are those that are there."""
    shutil.copytree(ROOT / "assets/adder/model", folder := tmp_path / "model")
    ask = (tmp_path, PROMPTS[:2], REQUESTS[1:])
    plain, config = drawn(*ask), json.loads((folder / "config.json").read_text())
    rope = {"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}
    for fields, count in ({"transformers_version": "1", "use_cache": True}, 2), (rope, 4):
        (folder / "config.json").write_text(json.dumps(config | fields))
        assert (drawn(*ask, f"model.name_or_path={folder}") == plain) == (count == 2)
        assert len(asked) == count


def test_a_line_with_a_flipped_bit_or_that_a_killed_process_left_unfinished_costs_that_line_alone(tmp_path):
    """Wherever in its line the bit is."""
    kept = AnswerCache(tmp_path, {})
    answers = {name: [Sample((3, 5, i), True, (-0.5, -1.25, -2.0))] for i, name in enumerate("xyz")}
    kept.add(answers)
    whole = kept.path.read_bytes()
    line = range(whole.index(b"\n") + 1, whole.index(b"\n", whole.index(b"\n") + 1))
    for at in line:
        kept.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = kept.read()
        assert {"x": answers["x"], "z": answers["z"]} == {k: v for k, v in found.items() if k in "xz"}
        assert found.get("y", answers["y"]) == answers["y"]
        assert [s.logprobs for s in found.get("y", answers["y"])] == [(-0.5, -1.25, -2.0)]
    kept.path.write_bytes(whole + b'5\nnull\n{}\n{"prompt": "w", "samp')
    kept.add({"w": answers["y"]})
    assert AnswerCache(tmp_path, {}).read() == answers | {"w": answers["y"]}
    assert AnswerCache(tmp_path, {"a": 2}).read() == {}
