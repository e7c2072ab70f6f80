"""Answers that were drawn are kept as they come: what a killed process had, the next one goes on from; and
only from the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from data import adder
from data.chat import make_renderer
from data.types import Prompt
from models.distributed import start
from models.pretrained import load_tokenizer
from rollouts import answers
from rollouts.answers import AnswerCache, Request
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import Sample, SamplingSettings
from tests.tiny import ROOT, make_config

PROMPTS = [adder.addition(a, 98) for a in range(1, 9)]
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
