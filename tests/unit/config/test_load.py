"""A run's record, read back."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.files import section
from config.load import changed, dump, load_saved, run_name, settings_of
from config.schema import Config
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from config.typed import without_words, word_of
from config.unknown import names
from launch.composing import Composer, compose_config
from launch.grid import Run
from trainers.losses.shapes import READS

CONFIG = without_words(section("config.yaml"), Config)
MODEL = without_words(section("model/base.yaml"), ModelConfig)
DATA = without_words(section("data/_base.yaml"), DataConfig)
CORRECTION = section("correction/none.yaml")
EXPERIMENTS = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "config" / "experiment").glob("*.yaml")
    if not path.stem.startswith("_")
)


def test_a_run_from_before_vllm_had_a_room_has_not_changed():
    config = compose_config(["loss=dpo", "online=true", "sampler=vllm", "reward=constraints"])
    today = section("sampler/vllm.yaml")["_target_"]
    text = dump(config)
    earlier = text.replace(today, "rollouts.vllm_sampling.VllmSampling")
    assert text.count(today) == 1 and changed(settings_of(earlier), config) == []


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


def test_a_record_from_before_a_key_of_any_section_is_gone_on_with() -> None:
    config = compose_config(["loss=ppo", "online=true", "reward=adder"])
    before = OmegaConf.create(dump(config))
    before.trainer.feedback, before.trainer.loss_keys = ["pair"], ["gamma", "lam"]
    for key in (
        "sampler.stop",
        "model.new_tokens",
        "rounds.overlong",
        "rounds.overlong_penalty",
        "loss.rewards",
    ):
        section, _, name = key.partition(".")
        del before[section][name]
    assert changed(settings_of(OmegaConf.to_yaml(before)), config) == []


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "ppo_group"])
def test_a_record_from_before_shapes_and_advantages_is_gone_on_with(loss: str) -> None:
    config = compose_config([f"loss={loss}"])
    before = OmegaConf.create(dump(config))
    since = set(READS["dual"] | READS["sapo"] | READS["cppo"] | READS["m2po"]) - READS["ppo"]
    for key in ({"shape", "advantage"} | since) & set(before.loss):
        del before.loss[key]
    before.trainer.loss_keys = []
    text = OmegaConf.to_yaml(before)
    assert "shape" not in text and changed(settings_of(text), config) == []
    assert load_saved(text).loss == config.loss
    own = OmegaConf.to_yaml(OmegaConf.merge(before, {"loss": {"_target_": "mine.grpo"}}))
    assert settings_of(own)["loss"] == OmegaConf.to_container(OmegaConf.create(own).loss)


def test_a_record_from_before_microbatches_had_their_name_is_gone_on_with() -> None:
    config = compose_config(["model.microbatches=4", "model.batch_size=32"])
    before = OmegaConf.create(dump(config))
    before.model.gradient_accumulation_steps = before.model.pop("microbatches")
    assert changed(settings_of(OmegaConf.to_yaml(before)), config) == []
    before.model.gradient_accumulation_steps = 2
    (change,) = changed(settings_of(OmegaConf.to_yaml(before)), config)
    assert (change.key, change.before, change.now) == ("model.microbatches", 2, 4)


def test_a_record_from_before_a_key_is_gone_on_with() -> None:
    """Every key that is at its default, one at a time."""
    config = compose_config(["loss=dpo", "online=true"])
    whole = OmegaConf.to_container(OmegaConf.create(dump(config)))
    tried = 0
    for place, default in (
        ("", CONFIG),
        ("rounds", CONFIG["rounds"]),
        ("retention", CONFIG["retention"]),
        ("plan", CONFIG["plan"]),
        ("model", MODEL),
        ("data", DATA),
        ("trainer", {"single_answers": False}),
        ("correction", CORRECTION),
    ):
        for key in default:
            before = copy.deepcopy(whole)
            section = before[place] if place else before
            if key in section and section[key] == default[key]:
                del section[key]
                assert changed(settings_of(OmegaConf.to_yaml(before)), config) == [], f"{place} {key}"
                tried += 1
    assert tried > 90
    for place in ("rounds", "retention", "plan"):
        before = {key: value for key, value in whole.items() if key != place}
        for found in changed(settings_of(OmegaConf.to_yaml(before)), config):
            assert found.key in ("rounds.contexts", "rounds.contexts_per_round")  # the model's


def test_a_word_and_null_are_the_same_settings() -> None:
    """Also in a file of YAML 1.1, to which a bare ``off`` is false. A run that was recorded with either goes
    on with the other."""
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
        assert changed(settings_of(text), config) == []


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


@pytest.mark.parametrize(
    "text",
    ["", "3", "[1]", "a: [", "a: 1\na: 2", "a: {b: 1, b: 2}", "a: !!python/object:os.system x", "\0\0"],
)
def test_what_is_no_record_says_nothing(text: str) -> None:
    assert settings_of(text) == {}


NESTED = [
    "wandb.enabled=false",
    "plan.ranks=8",
    "++callbacks.x._target_=a.b",
    "+trackers.csv.x=1",
    "~wandb.tags",
]


def test_an_automatic_name_does_not_change_with_operational_settings() -> None:
    config = compose_config(["loss=dpo"])
    name = run_name(config, ["loss=dpo", "lr=1e-5"])
    assert name == "dpo-adder-adder-offline-s1-" + hashlib.sha256(b"loss=dpo\nlr=1e-5").hexdigest()[:6]
    for words in (NESTED, ["wandb={enabled: false}", "resume=true"], *([word] for word in NESTED)):
        assert run_name(config, ["loss=dpo", *words, "lr=1e-5"]) == name, words
    for word in ("model.max_length=32", "evaluations.wandb.path=x", "planner=1"):
        assert run_name(config, ["loss=dpo", word, "lr=1e-5"]) != name, word


NOT_FINITE = {
    "rounds.threshold=nan": "rounds.threshold=nan: is not a number",
    "correction.delta=nan": "correction.delta=nan: is not a number",
    "rounds.threshold=-inf": "rounds.threshold=-inf: must be finite",
    "rounds.tau=inf": "rounds.tau=inf: must be finite",
    "data.score_threshold=.inf": "data.score_threshold=inf: must be finite",
    "correction.delta=inf": "correction.delta=inf: must be finite",
    "sampler.temperature=inf": "sampler.temperature=inf: must be finite",
    "watchdog_seconds=inf": "watchdog_seconds=inf: must be finite",
    "+callbacks.a={x: nan}": r"callbacks.a.x=nan: is not a number",
    "+callbacks.a.y=[1.0, nan]": r"callbacks.a.y[1]=nan: is not a number",
}


@pytest.mark.parametrize(("word", "said"), NOT_FINITE.items())
def test_a_number_that_is_none_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        compose_config([word])


def test_a_reward_and_a_sweep_refuse_a_number_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.verifier\.accuracy=inf: must be finite"):
        compose_config(["online=true", "reward=verifier", "reward.verifier.accuracy=inf"])
    run = Run("s", "s", 1, {"rounds.threshold": math.nan}, None)
    with pytest.raises(ConfigError, match=r"^rounds\.threshold=nan: is not a number"):
        Composer().config(run)


def test_an_infinite_bound_is_a_bound_that_nothing_reaches() -> None:
    words = ["log_epsilon_P=-.inf", "log_epsilon_R=.inf", "model.max_grad_norm=inf", "sync_kl=inf"]
    config = compose_config([*words, "correction.high=inf"])
    assert config.log_epsilon_P == -math.inf and config.model.max_grad_norm == math.inf
