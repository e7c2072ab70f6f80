"""Several sets in one by weight, and shares of desirable and undesirable examples."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from config.files import group_file
from config.schema_data import DataConfig, MixPart
from data.mix import by_weight, mixed, part_config
from data.sources import load_splits
from data.types import Completion, Group, Prompt, Turn
from data.views import keep_shares, labelled
from tests.tiny import make_config


def pair(i, name="q"):
    return Group(Prompt((Turn("user", f"{name} {i}"),)), (Completion("good"), Completion("bad")), (1.0, -1.0))


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 5.0)), min_size=1, max_size=4))
def test_the_mix_is_the_largest_with_those_shares(sets):
    groups = [[pair(i, f"set {s}") for i in range(n)] for s, (n, _) in enumerate(sets)]
    weights = [weight for _, weight in sets]
    chosen = by_weight(groups, weights)
    counts = [len(part) for part in chosen]
    assert any(count == len(part) for count, part in zip(counts, groups, strict=True)), "none is used up"
    assert all(
        count <= len(part) and len({g.prompt.id for g in chosen[s]}) == count
        for s, (count, part) in enumerate(zip(counts, groups, strict=True))
    )
    scale = min(len(part) / weight for part, weight in zip(groups, weights, strict=True))
    assert all(abs(count - scale * weight) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True))
    backwards = by_weight([part[::-1] for part in groups], weights)
    assert [[g.prompt.id for g in part] for part in backwards] == [
        [g.prompt.id for g in part] for part in chosen
    ]


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, n in (("one", 40), ("two", 30)):
        paths[name] = tmp_path / f"{name}.jsonl"
        rows = [
            {"prompt": f"{name if i else 'shared'} {i}", "chosen": "good", "rejected": "bad"}
            for i in range(n)
        ]
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_sets_are_mixed_and_what_one_evaluates_on_none_trains_on(files):
    parts = [
        MixPart(name="local", weight=weight, path=str(files[file]))
        for file, weight in (("one", 1.0), ("two", 3.0))
    ]
    config = DataConfig(name="mix", source="data.mix.mixed", eval_fraction=0, mix=parts)
    train, evaluation = load_splits(config)
    of = {
        name: sum(g.prompt.turns[0].content.startswith(name) for g in train.groups)
        for name in ("one", "two", "shared")
    }
    assert of["two"] >= 26 and of["one"] == pytest.approx(of["two"] / 3, abs=1.5) and train.read == 70
    assert evaluation.groups and not {g.prompt.id for g in train.groups} & {
        g.prompt.id for g in evaluation.groups
    }
    assert "of 2" in train.origin or "of 3" in train.origin


def test_the_command_line_gives_typed_parts():
    config = make_config("data=mix", "data.mix=[{name: hh, weight: 0.7}, {name: shp, weight: 0.3}]")
    assert config.data.mix == [MixPart(name="hh", weight=0.7), MixPart(name="shp", weight=0.3)]
    assert part_config(config.data.mix[0]).path == "Anthropic/hh-rlhf"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data=mix"], "data.mix"),
        (["data=mix", "data.mix=[{name: hh, wieght: 1}]"], "data.mix"),
        (["data=mix", "data.mix=[{name: hh, weight: 0}]"], "data.mix[0].weight"),
        (["loss=kto", "data.frac_unique_desirable=1.5"], "data.frac_unique_desirable"),
        (["loss=dpo", "data.frac_unique_undesirable=0.5"], "data.frac_unique_undesirable"),
    ],
)
def test_wrong_settings_are_refused(overrides, key):
    with pytest.raises(ConfigError) as error:
        make_config(*overrides)
    assert error.value.key.startswith(key)


def test_a_set_that_is_none_is_refused():
    for name in ("hhh", "hub", "mix"):
        with pytest.raises(ConfigError) as error:
            mixed(DataConfig(name="mix", source="data.mix.mixed", mix=[MixPart(name=name)]), "train")
        assert error.value.key == "data.mix.name"


def test_a_data_file_is_what_the_command_line_would_compose():
    for name in ("hh", "hh_helpful", "shp", "ultrafeedback_armorm"):
        assert DataConfig(**group_file("data", "data", name)) == make_config(f"data={name}").data


@given(st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_shares_of_each_label_are_kept(n, desirable, undesirable):
    groups = [pair(i) for i in range(n)]
    left = list(keep_shares(groups, desirable, undesirable))
    labels = [want.label for group in left for want in labelled(group)]
    assert (labels.count(1.0), labels.count(-1.0)) == (round(desirable * n), round(undesirable * n))
    words = {
        (want.label, group.completions[want.completions[0]].text)
        for group in left
        for want in labelled(group)
    }
    assert words <= {(1.0, "good"), (-1.0, "bad")}
    assert {g.prompt.id for g in keep_shares(groups[::-1], desirable, undesirable)} == {
        g.prompt.id for g in left
    }


def test_the_two_labels_are_drawn_apart():
    """Half of each: about a quarter of the prompts keep both, a quarter none."""
    left = list(keep_shares([pair(i) for i in range(400)], 0.5, 0.5))
    both = sum(len(group.rewards) == 2 for group in left)
    assert 60 < both < 140 and len(left) == 400 - both


def test_shares_are_of_the_training_data_alone(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"q {i}", "chosen": "a", "rejected": "b"}) + "\n" for i in range(40))
    )
    config = DataConfig(
        name="x",
        source="data.sources.local",
        path=str(path),
        eval_fraction=0.25,
        frac_unique_desirable=1.0,
        frac_unique_undesirable=0.0,
    )
    train, evaluation = load_splits(config)
    assert [g.rewards for g in train.groups] == [(1.0,)] * 30 and [
        len(g.rewards) for g in evaluation.groups
    ] == [2] * 10
