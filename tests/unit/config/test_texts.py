"""Settings that are texts: what is typed is what they are, also where it looks like a number."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from config.cli import compose
from config.texts import as_written, is_text
from launch.grid import parse_overrides

NUMBERS = [
    "2024_10_15",
    "1e3",
    "1_000",
    "1.50",
    "+5",
    "-0",
    "TRUE",
    "true",
    "False",
    "1_0.5",
    "7",
    "2.5",
    "a-1",
]


@pytest.mark.parametrize("typed", NUMBERS)
def test_a_text_is_what_was_typed(typed: str) -> None:
    named = typed.replace("-0", "x-0")  # a name does not begin with a dash
    config, name = compose(f"exp_name={named}", "data=local", f"data.path={typed}", f"--cache-dir={typed}")
    assert (config.exp_name, name) == (named,) * 2
    assert (config.data.path, config.cache_dir) == (typed,) * 2


def test_texts_in_lists_mappings_rewards_and_evaluation_sets_are_what_was_typed() -> None:
    config, _ = compose(
        "idle_settings=note",
        "wandb.tags=[1e3, b,2024_10, 7]",
        "++data.columns={}",
        "++data.columns.prompt=1_0",
        "evaluations.held.path=2024_10",
        "reward=judge",
        "reward.judge.model=1e3",
        "reward.judge.api_key_env=null",
    )
    assert config.wandb.tags == ["1e3", "b", "2024_10", "7"]
    assert config.data.columns == {"prompt": "1_0"}
    assert config.evaluations["held"]["path"] == "2024_10"
    assert config.reward is not None and config.reward["judge"]["model"] == "1e3"


OTHER = ["lr=1e-5", "seed=1_0", "loss.beta=1e-1", "exp_name=null", "resume=TRUE", "exp_name='1e3'", "-m"]
MORE = ["exp_name=a,1e3", "~exp_name", "wandb.tags=['a,b',1e3]", "runs_dir=7", "wandb.tags=[a,b]", "loss=dpo"]


@pytest.mark.parametrize("word", [*OTHER, *MORE, "trackers=[]"])
def test_other_words_stay(word: str) -> None:
    assert as_written([word]) == [word]


def test_the_texts_of_every_program_are_known() -> None:
    for key in ("exp_name", "run", "against", "out", "in", "split", "limits.split", "accuracy.verifier"):
        assert is_text(key) is (key != "limits.split")
    for key in ("lr", "seed", "loss.beta", "loss", "resume", "trackers", "callbacks.mine.name", "reward.x.y"):
        assert not is_text(key)


def test_a_sweeps_text_is_what_was_typed() -> None:
    read = parse_overrides(["data.path=2024_10", "lr=1_0", "hub=1_0", "runs_dir= 1e3"])
    assert read == {"data.path": "2024_10", "lr": 10, "hub": 10, "runs_dir": "1e3"}


def test_a_number_where_a_text_is_meant_to_be_a_folder_is_still_checked() -> None:
    with pytest.raises(ConfigError, match=r"exp_name=\.\.: becomes the name of a folder"):
        compose("exp_name=..")
