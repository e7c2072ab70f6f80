"""A run's record, read back."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf
from yaml import YAMLError

from config.cli import compose_config
from config.composing import composed
from config.files import files_of, parsed
from config.load import changed, dump, flat, for_a_cpu, load_saved, run_name, settings_of
from config.schema import Config
from config.sections import word_of
from config.unknown_keys import names

EXPERIMENTS = files_of("experiment")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"experiment={EXPERIMENTS[0]}", "log_epsilon_P=-.inf", "cache_dir='2024-01-01'"],
        [f"experiment={EXPERIMENTS[-1]}", "wandb.tags=['1e-5','on','a: b','#1','- x','.inf','\n']"],
        ["data=mix", "data.mix=[{name: adder, weight: 2}]", "seed=7"],
        ["loss=csft", "model.control_tokens.chosen='- x'", "lr=1"],
    ],
)
def test_a_record_says_what_the_settings_were(overrides: list[str]) -> None:
    config = compose_config(overrides)
    text = dump(config)
    assert settings_of(text) == OmegaConf.to_container(OmegaConf.create(text))
    assert changed(settings_of(text), config) == []
    other = compose_config([*overrides, "warmup=0.25"])
    (found,) = changed(settings_of(text), other)
    assert (found.key, found.before, found.now) == ("warmup", config.warmup, 0.25)


def test_a_word_and_null_are_the_same_settings() -> None:
    """Also in a file of YAML 1.1, to which a bare ``off`` is false."""
    config = compose_config(["loss=grpo", "sampler=vllm", "reward=function", "reward.function.path=m.f"])
    words = {key: word for key in names(Config) if (word := word_of(Config, key))}
    recorded = OmegaConf.create(dump(config))
    unset = {key: word for key, word in words.items() if OmegaConf.select(recorded, key, default=0) is None}
    assert len(unset) > 20 and set(unset.values()) == {"auto", "all", "off"}
    assert config.loss["advantage"] is config.reward["function"]["conversational"] is None
    for key, word in (unset | {"loss.advantage": "auto"}).items():
        OmegaConf.update(recorded, key, word)
    for text in (OmegaConf.to_yaml(recorded), OmegaConf.to_yaml(recorded).replace("'off'", "off")):
        assert load_saved(text) == config


def test_a_record_written_by_hand_is_read_as_hydra_reads_its_files() -> None:
    text = """
a: [1e-5, 5E6, .5e3, 1., 1_000, 0x10, 010, 12:30:00]
b: [.inf, -.INF, +.inf]
c: [2024-01-01, '1e-5', 1e, e5, "${d}"]
d: [yes, off, ~, null, True]
e: {f: {1: 2}, g: [{h: -1.5e+3}]}
"""
    assert settings_of(text) == OmegaConf.to_container(OmegaConf.create(text))
    assert math.isnan(settings_of("a: .nan")["a"])


NESTED = ["wandb.enabled=false", "plan.ranks=8", "++callbacks.x._target_=a.b", "~wandb.tags"]


def test_aliases_are_read_unless_they_stand_for_a_tree_without_end() -> None:
    merged = parsed("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: *a")
    assert merged == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": {"b": 1, "c": 2}}
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    for text in ("\n".join(["l0: &l0 [1]", *levels]), "a: &a [*a]", "a: &a {b: *a}", "[" * 9999):
        with pytest.raises(YAMLError):
            parsed(text)


def test_an_automatic_name_does_not_change_with_operational_settings() -> None:
    config = compose_config(["loss=dpo"])
    name = run_name(config, ["loss=dpo", "lr=1e-5"])
    assert name == "dpo-adder-adder-offline-s1-" + hashlib.sha256(b"loss=dpo\nlr=1e-5").hexdigest()[:6]
    for words in (NESTED, ["wandb={enabled: false}", "resume=true"], *([word] for word in NESTED)):
        assert run_name(config, ["loss=dpo", *words, "lr=1e-5"]) == name, words
    for word in ("model.max_length=32", "evaluations.wandb.path=x", "planner=1"):
        assert run_name(config, ["loss=dpo", word, "lr=1e-5"]) != name, word


@pytest.mark.parametrize("gpu", [True, False])
def test_a_cpu_gets_the_small_numbers_of_a_models_file_and_says_so(monkeypatch, gpu: bool) -> None:
    """With a GPU they are those that a run has without that file; what is typed wins."""
    monkeypatch.setattr("config.load.has_gpu", lambda: gpu)
    words = ["model=smollm2-135m-instruct", "data=local", "data.path=a.jsonl"]
    small = dict(re.findall(r"(\S+)=(\S+?);? ", " ".join(for_a_cpu(composed(words)))))
    assert bool(small) is not gpu and small.get("log_drift", "false") == "false"
    found, default = (flat(asdict(compose_config(list(w)))) for w in (words, ()))
    for key in ("n_eval_examples", "log_drift", "diagnostics", "retention.kl", "retention.tokens"):
        assert str(found[key]).lower() == small.get(key, str(default[key]).lower()), key
    typed = [*words, "log_drift=true", "n_eval_examples=9"]
    assert compose_config(typed).n_eval_examples == 9 and compose_config(typed).log_drift
    assert not any("n_eval" in note or "drift" in note for note in for_a_cpu(composed(typed)))
