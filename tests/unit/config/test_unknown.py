"""What is answered to a setting that is none."""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.defaults import section
from config.elsewhere import SAME, SOURCES, known_elsewhere
from config.load import load
from config.schema import Config
from config.unknown import NEAR, NOTHING, names, names_of, nearest, remedy
from launch.composing import _composed, compose_config

DPO = list(names_of(OmegaConf.to_container(_composed([]), resolve=False)))
ROWS = [(whose, row) for whose, rows in SOURCES for row in rows]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learning_rate", "1e-5", "is TRL's name, nothing here would read it; here: lr=1e-5"),
        ("model.learning_rate", "1e-5", "here: lr=1e-5"),
        ("model.lr", "1e-5", f"{NOTHING}; here it is lr=1e-5"),
        ("beta", "0.1", f"{NOTHING}; here it is loss.beta=0.1"),
        ("batch_size", "8", "here it is model.batch_size=8 or sampler.batch_size=8"),
        ("epsilon", "0.2", "loss.epsilon is a setting of loss=cdpo, dr_grpo, grpo"),
        ("max_steps", "100", "here: n_examples=320 (steps times batch size)"),
        ("output_dir", "x", "here: runs_dir=runs exp_name=mine"),
        ("report_to", "none", "trackers"),
        ("num_generations", "8", "here: rounds.samples=8 (for loss=grpo online=true"),
        ("loss_type", "ipo", "here: loss=ipo"),
        ("loss_type", '"dr_grpo"', "here: loss=dr_grpo"),
        ("loss_type", "other", 'loss=ipo for "ipo", or'),
        ("model.load_from", "x", "HALOs' name"),
        ("logging_steps", "1", "nothing here would read it; none: every step has its line in metrics.jsonl"),
        ("model.batchsize", "8", "did you mean model.batch_size?"),
        ("humanlin", "true", "did you mean humanline?"),
        ("reward.judge.model", "x", f"{NOTHING} unless reward=judge is chosen"),
        ("reward.classifier.nam_or_path", "x", "reward=bradley_terry or reward=classifier is chosen"),
        ("loss.bet", "1", "did you mean loss.beta?"),
        ("use_vllm", "true", "here: sampler=vllm"),
        ("vllm_mode", "colocate", "here: sampler=vllm"),
        ("load_best_model_at_end", "true", "here: keep_best=eval_reward_margin"),
        ("datasets", "[shp,hh]", "is HALOs' name, nothing here would read it; here: data=shp"),
        ("wandb.mode", "offline", f"{NOTHING}; the settings of wandb are dir, enabled, entity, group"),
        ("peft", "true", f"{NOTHING}; the settings of model.peft are lora_alpha, lora_r"),
        ("model.peft.r", "4", f"{NOTHING}; the settings of model.peft are lora_alpha, lora_r"),
    ],
)
def test_the_remedy_is_what_to_type(key: str, value: str, said: str) -> None:
    found = remedy(key, value, DPO)
    assert said in found
    assert "`" not in found


@pytest.mark.parametrize("key", ["foo.bar.baz", "zz", "maximum_steps_to_take", "x.y"])
def test_nothing_is_guessed_from_afar(key: str) -> None:
    assert remedy(key, "1", DPO) == NOTHING


def test_a_setting_with_one_letter_less_is_found() -> None:
    for key in names(Config):
        last = key.rpartition(".")[2]
        if len(last) > 3:
            missing = key[:-2] + key[-1]
            assert nearest(missing, [key]) == key, missing
    assert 0.75 <= NEAR < 1


def test_a_secret_is_not_repeated() -> None:
    assert "hidden" not in remedy("api_key", "hidden", ["reward.judge.api_key"])


@pytest.mark.parametrize(
    ("whose", "row"), ROWS, ids=lambda item: item if isinstance(item, str) else item.there[0]
)
def test_every_row_has_an_answer_that_composes(whose: str, row: object) -> None:
    """Every name, as a mistake: the answer names its settings here, or says why there is none."""
    found = known_elsewhere(row.names[0], row.there[0].partition("=")[2])
    assert found is not None or row.note in SAME
    assert row.here or row.note
    for here in row.here:
        loss = [] if "loss=" in here else ["loss=grpo"] if "loss." in here else []
        compose_config([*loss, *shlex.split(here)])


def test_no_row_is_about_a_setting_of_here_under_another_name() -> None:
    """A name that TRL has and that stands at the top here as well would never be asked for."""
    for name in (name for row in dict(SOURCES)["TRL"] for name in row.names):
        assert name not in section("config.yaml"), name


def test_what_is_added_to_the_settings_is_answered_alike() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate=3: is TRL's name.*here: lr=3"):
        load(_composed(["+learning_rate=3"]))
    said = r"data.train_file=x: is not a setting.*the settings of data are apply_chat"
    with pytest.raises(ConfigError, match=said):
        load(_composed(["+data.train_file=x"]))
