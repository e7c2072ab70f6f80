"""A command line as people type it."""

from __future__ import annotations

import argparse
import contextlib

import pytest
from hydra._internal.utils import get_args_parser
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from config.arguments import apart, as_settings
from config.cli import refuse_foreign


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr 1e-5", ["lr=1e-5"]),
        ("--lr=1e-5 loss=kto", ["lr=1e-5", "loss=kto"]),
        ("--learning-rate 1e-5", ["learning_rate=1e-5"]),
        ("--log_epsilon_P -1.5 --humanline", ["log_epsilon_P=-1.5", "humanline=true"]),
        ("--resume loss=dpo", ["resume=true", "loss=dpo"]),
        ("--trackers a b --seed 3", ["trackers=[a,b]", "seed=3"]),
        ("--model.batch_size 8 -m seed=1,2", ["-m", "model.batch_size=8", "seed=1,2"]),
        ("--cfg job --config-dir x lr=1", ["--cfg", "job", "--config-dir", "x", "lr=1"]),
        ("loss=dpo -m seed=1,2 --cfg job lr=1", ["-m", "--cfg", "job", "loss=dpo", "seed=1,2", "lr=1"]),
        ("lr=1 --info defaults seed=1 -i", ["--info", "defaults", "-i", "lr=1", "seed=1"]),
        ("lr=1 --config-n=y -m --config-dir", ["--config-n=y", "-m", "lr=1", "--config-dir"]),
        ("--help --multi --config-d=y -cd x", ["--help", "--multi", "--config-d=y", "-cd", "x"]),
        ("--", ["--"]),
    ],
)
def test_options_are_settings(typed: str, meant: list[str]) -> None:
    assert as_settings(typed.split(" ")) == meant


@given(st.lists(st.from_regex(r"(\+|\+\+|~)?[a-z_.]+=[^ ]*|-m|-cd|[a-z/.]+", fullmatch=True)))
def test_what_has_hydras_form_stays(words: list[str]) -> None:
    options, others = apart(words)
    assert as_settings(words) == [*options, *others] and sorted(options + others) == sorted(words)
    parser = get_args_parser()
    parser.exit_on_error = False  # type: ignore[attr-defined]
    with contextlib.suppress(argparse.ArgumentError):
        assert parser.parse_args(as_settings(words)) == get_args_parser().parse_intermixed_args(words)
    assert as_settings(as_settings(["--lr", "3", *words])) == as_settings(["--lr", "3", *words])


@pytest.mark.parametrize(
    ("word", "type_instead"),
    {
        "data={here}/pairs.jsonl": "type data=local data.path={here}/pairs.jsonl",
        "data=pairs.csv": "type data=local data.path=pairs.csv",
        "data={here}": "type data=local data.path={here}",
        "data=./not/there": "type data=local data.path=./not/there",
        "data=org/name": "type data=hub data.path=org/name",
        "model={here}": "type model=hub model.name_or_path={here}",
        "model=org/name-1.5B": "type model=hub model.name_or_path=org/name-1.5B",
        "data='a b,ü.csv'": "type data=local 'data.path='\"'\"'a b,ü.csv'\"'\"''",
        "reward=org/name": "type reward=classifier reward.classifier.name_or_path=org/name",
    }.items(),
)
def test_a_path_where_a_file_of_config_is_asked_for(tmp_path, word: str, type_instead: str) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        refuse_foreign([word.format(here=tmp_path)])
    assert str(caught.value).endswith(type_instead.format(here=tmp_path))


def test_a_folder_within_config_is_no_path(tmp_path) -> None:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "set.yaml").write_text("name: mine\n")
    refuse_foreign(["--config-dir", str(tmp_path), "data=mine/set"])


def test_a_choice_with_a_name_that_no_file_system_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no such file in config/data"):
        refuse_foreign([f"data={'x' * 300}"])
    with pytest.raises(ConfigError, match=r"data=/x.*type data=local data\.path=/x"):
        refuse_foreign([f"data='/{'x' * 300}'"])
