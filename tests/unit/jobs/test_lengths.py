"""A run that is made longer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from config.load import dump
from data.batches import Segment
from jobs.lengths import LENGTHS, examples_of, planned, stretches, write
from tests.tiny import make_config, random_groups


@pytest.fixture
def begun(tmp_path):
    """A run of two epochs that has begun."""
    (tmp_path / "config.yaml").write_text(dump(make_config("n_epochs=2")))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    return tmp_path


def test_a_run_that_is_as_long_as_it_was_is_one_stretch(begun):
    assert planned(begun, make_config("n_epochs=2"), 10) == ()
    assert planned(begun / "nowhere", make_config("n_epochs=9"), 10) == ()


def test_each_time_it_is_made_longer_is_kept(begun):
    config = make_config("n_epochs=3")
    assert planned(begun, config, 10) == (20, 30)
    write(begun, (20, 30))
    (begun / "config.yaml").write_text(dump(config))
    assert planned(begun, config, 10) == (20, 30)
    assert planned(begun, make_config("n_epochs=null", "n_examples=31"), 10) == (20, 30, 31)


@pytest.mark.parametrize("more", [["n_epochs=1"], ["n_epochs=2", "n_examples=19"]])
def test_a_shorter_one_is_refused_with_both_values(begun, more):
    with pytest.raises(ConfigError, match=r"was (2|None) when .* 20 examples.*not shorter"):
        planned(begun, make_config(*more), 10)


@pytest.mark.parametrize("text", ["", "{}", '{"examples": []}', '{"examples": ["a"]}', "[1]"])
def test_a_damaged_record_is_said(begun, text):
    (begun / LENGTHS).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        planned(begun, make_config("n_epochs=2"), 10)


@pytest.mark.parametrize("ends", [(7,), (8, 12), (5, 6, 30), (20, 40)])
def test_the_stretches_train_on_so_many_examples_and_the_first_is_as_it_was(ends):
    groups = random_groups(10)
    whole = Segment(groups, 4, ends[-1], seed=3)
    parts = stretches(whole, ends if len(ends) > 1 else ())
    assert [sum(len(part.batch(i)) for i in range(part.steps)) for part in parts] == [
        end - begin for begin, end in zip((0, *ends), ends, strict=False)
    ]
    alone = replace(whole, n_examples=ends[0])
    keys = [[example.prompt_id for example in alone.batch(i)] for i in range(alone.steps)]
    assert [[example.prompt_id for example in parts[0].batch(i)] for i in range(alone.steps)] == keys
    steps = range(alone.steps + 1)
    assert [parts[0].done(i) for i in steps] == [alone.done(i) for i in steps]
    assert all(part.done(i) == 1.0 for part in parts[1:] for i in range(part.steps))


def test_what_says_how_long_a_run_is():
    assert [examples_of(*case, 10) for case in ((2, None), (None, 7), (2, 7), (1, 70))] == [20, 7, 7, 10]


def test_what_is_written_is_read(tmp_path: Path):
    write(tmp_path, ())
    assert not (tmp_path / LENGTHS).exists()
    write(tmp_path, (1, 2))
    assert json.loads((tmp_path / LENGTHS).read_text())["examples"] == [1, 2]
