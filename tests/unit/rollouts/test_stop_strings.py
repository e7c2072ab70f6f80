"""Answers end behind the token that completes a stop string, whatever tokens spell it, and are trained on as
drawn."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from common.errors import ConfigError
from data import adder
from data.chat import Renderer
from data.groups import from_dict, to_dict
from data.types import Group
from rollouts import stop_strings
from rollouts.ledger import sampled_line, sampled_of
from rollouts.rounds import SampledPrompt
from rollouts.samplers import Sample, SamplingSettings
from rollouts.stop_strings import StopStrings
from tests.tiny import ROOT, make_config
from tests.tiny_tokenizers import tiny_tokenizer

TEXT = "so  the\n\nend; naïve 你好 \n\nQuestion: 1\n\n\nAnswer:  2;; stop<|im_end|> now"
STRINGS = ["\n\n", "\nQ", "ï", "好", "; ", " stop", "end;", "<|im_end|>", "absent", "s", "  2;"]


def renderer_of(name: str) -> Renderer:
    own = ROOT / "assets" / name / "model"
    tokenizer = AutoTokenizer.from_pretrained(own) if own.is_dir() else tiny_tokenizer(name)
    return Renderer(tokenizer, max_length=256, max_prompt_length=64, template=tokenizer.chat_template)


def first_with(renderer: Renderer, ids: list[int], strings: list[str]) -> int | None:
    """The rule, token by token."""
    decoded = (renderer.tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(1, len(ids) + 1))
    return next((n for n, text in enumerate(decoded, 1) if any(s in text for s in strings)), None)


@pytest.mark.parametrize(("name", "first"), [("adder", 1), ("adder", 128), ("llama3", 1), ("llama3", 3)])
def test_an_answer_is_cut_behind_the_first_token_that_completes_a_string(monkeypatch, name, first):
    monkeypatch.setattr(stop_strings, "FIRST", first)
    renderer = renderer_of(name)
    ids = renderer.encoder.inside([TEXT if name == "llama3" else "7+8=15;3+5=8;85"])[0]
    prompt, settings, keys = adder.prompts("eval")[0], SamplingSettings(1.0, 1.0, len(ids)), list[str]()

    def draw(rows, settings, seed, stops):  # a policy that writes the text
        keys.extend(row.key for row in rows)
        known = [len(row.ids) - len(renderer.prompt_ids(prompt)) for row in rows]
        parts = [range(len(ids))[at : at + row.max_tokens] for at, row in zip(known, rows, strict=True)]
        return [Sample(tuple(ids[i] for i in part), False, tuple(-1.0 * i for i in part)) for part in parts]

    strings = STRINGS if name == "llama3" else [";", "=8;", "15;3", "85", "absent", "+5"]
    for wanted in [[s] for s in strings] + [strings]:
        size = first_with(renderer, ids, wanted)
        [[sample]] = StopStrings(wanted, renderer).sample(draw, [prompt], 1, settings, 0, False)
        assert len({*keys}) == len(keys), "each part has random numbers of its own"
        keys.clear()
        assert sample.token_ids == tuple(ids[:size]) and len(sample.logprobs) == len(sample.token_ids)
        assert sample.finished == bool(sample.stopped) == (size is not None)
        completion = sample.completion(renderer)
        assert not sample.stopped or sample.stopped not in completion.text
        again = sampled_of(sampled_line(SampledPrompt(prompt, (completion,)))).completions[0]
        (read,) = from_dict(to_dict(Group(prompt, (again,), (1.0,)))).completions
        assert read == again == completion
        assert renderer.sequence(prompt, again).completion_ids.tolist() == list(sample.token_ids)


def test_strings_that_cannot_end_an_answer_are_refused_and_special_tokens_end_the_engine_itself():
    renderer = renderer_of("adder")
    for said in ("stop=[a,a]", 'stop=[""]', 'stop=["\ufffd"]'):
        with pytest.raises(ConfigError, match=r"sampler\.stop"):
            StopStrings(make_config("online=true", "reward=adder", f"sampler.{said}").sampler.stop, renderer)
    special, token_id = next(iter(renderer.tokenizer.get_added_vocab().items()))
    alone = StopStrings([special], renderer)
    assert alone.longest and token_id in alone.ends and not StopStrings([special, "a"], renderer).longest
