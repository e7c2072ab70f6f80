"""Files, hub tables and their splits: what is read, what is refused, and that training and evaluation share
no prompt."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from config.files import group_file
from config.schema_data import DataConfig, MixPart
from data.batches import FILL, microbatch
from data.examples import make_examples
from data.mix import by_weight, mixed, part_config
from data.rows import Loaded
from data.sources import check_found, hold_out, load_groups, load_splits
from data.token_cache import TokenCache
from data.types import Completion, Group, Prompt, Turn
from data.views import keep_shares, labelled, pairs
from tests.tiny import make_config
from tests.unit.data.people import lines, local
from tests.unit.data.test_token_cache import renderer

RECORDS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]


def config(path: object, **settings: object) -> DataConfig:
    return local(path, **{"eval_fraction": 0.05, **settings})


def ids(loaded: Loaded) -> list[str]:
    return [group.prompt.id for group in loaded.groups]


@pytest.mark.parametrize("kind", [".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz"])
def test_every_kind_of_file_gives_the_same_groups(tmp_path, kind: str) -> None:
    path = tmp_path / f"pairs{kind}"
    text = "\n".join(map(json.dumps, RECORDS)) if ".jsonl" in kind else json.dumps(RECORDS)
    if kind == ".parquet":
        datasets.Dataset.from_list(RECORDS).to_parquet(path)
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    loaded = load_groups(config(path, eval_fraction=0), "train")
    assert loaded.read == 40
    assert [[c.text for c in group.completions] for group in loaded.groups] == [
        [r["chosen"], r["rejected"]] for r in RECORDS
    ]


def test_numbers_of_the_data_reach_the_microbatch(tmp_path) -> None:
    pair = {"chosen": "a", "rejected": "b"}
    rows = ({"prompt": f"p{i}", "gap": gap, **pair} for i, gap in enumerate([2, 0.5, None]))
    path = lines(tmp_path / "pairs.jsonl", rows)
    settings = {"eval_fraction": 0, "numbers": ["margin"], "columns": {"margin": "gap"}, "max_unreadable": 1}
    loaded = load_groups(config(path, **settings), "train")
    assert [group.numbers for group in loaded.groups] == [(2.0,), (0.5,)]
    assert len(loaded.dropped) == 1 and "margin" in loaded.dropped[0].reason
    fill = dataclasses.replace(FILL, rows=FILL.rows * 2)
    for cache in (None, TokenCache(tmp_path / "cache", worth=1), TokenCache(tmp_path / "cache", worth=1)):
        (one,), (other,) = make_examples(loaded.groups, pairs, renderer(), cache).groups
        assert microbatch([one, other, fill], torch.device("cpu")).numbers.tolist() == [[2.0], [0.5], [0.0]]
    assert microbatch([FILL], torch.device("cpu")).numbers is None


def test_bad_rows_are_counted_and_named(tmp_path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [json.dumps(RECORDS[0]), "{broken", "", "[1]", '{"prompt": "x"}', json.dumps(RECORDS[1])]
    path.write_text("\n".join(rows))
    loaded = load_groups(config(path, eval_fraction=0, max_unreadable=0.6), "train")
    assert (len(loaded.groups), loaded.read) == (2, 5)
    assert [(d.file, d.row) for d in loaded.dropped] == [("pairs.jsonl", row) for row in (2, 4, 5)]
    for dropped, reason in zip(loaded.dropped, ("not JSON", "not a JSON object", "no column"), strict=True):
        assert reason in dropped.reason


def test_no_usable_row_at_all_is_an_error_that_shows_the_first(tmp_path) -> None:
    path = lines(tmp_path / "pairs.jsonl", [{"prompt": "x", "chosen": "same", "rejected": "same"}] * 3)
    with pytest.raises(DataError, match=r"none of the 3 rows.*3 × chosen and .* the same.*data.format"):
        load_groups(config(path), "train")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("absent.jsonl", None, ConfigError, r"data.path=.*no such file"),
        ("pairs.xml", b"a,b", ConfigError, "use one of .json, .jsonl"),
        ("pairs.csv", b"a,a\n1,2", DataError, "must name every column, each once"),
        (
            "index.csv",
            b",prompt\n0,a",
            DataError,
            "each once; it is .*; pandas leaves its index out with index=False",
        ),
        ("pairs.csv", b"prompt,chosen", DataError, "holds no row"),
        ("pairs.json", b'{"prompt": 1}', DataError, "must hold one list"),
        ("pairs.json", b'{"a": 1}\n{"a": 2}', DataError, "must be named .jsonl"),
        ("pairs.jsonl.gz", b"not gzip", DataError, "not JSON"),
        (
            "pairs.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9],
            DataError,
            "cannot be read to its end",
        ),
        ("pairs.parquet", b"not parquet", DataError, "cannot be read"),
        ("pairs.jsonl", b"\xff\xfe", DataError, "cannot be read"),
        ("pairs.jsonl", b"\n", DataError, "holds no row"),
        ("pairs.json", b"[]", DataError, "holds no row"),
    ],
)
def test_a_wrong_file_is_refused_with_a_remedy(
    tmp_path, name: str, content: bytes | None, error: type, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        load_groups(config(tmp_path / name), "train")


def test_a_wrong_source_is_refused() -> None:
    for source in ("data.sources.nothing", "nowhere.at.all", "function", "data.detection.FORMATS"):
        with pytest.raises(ConfigError, match=r"data.source="):
            load_groups(config("x.jsonl", source=source), "train")
    with pytest.raises(ConfigError, match=r"data.path=None"):
        load_groups(config(None), "train")


# Splits


def test_held_out_prompts_are_a_share_and_never_trained_on(tmp_path) -> None:
    doubled = RECORDS + [{**row, "chosen": "another"} for row in RECORDS]  # two pairs a prompt stay together
    path = lines(tmp_path / "a.jsonl", doubled)
    settings = config(path, eval_fraction=0.1)
    train, held_out = load_groups(settings, "train"), load_groups(settings, "eval")
    assert len(set(ids(held_out))) == 4
    assert len(held_out.groups) == 8
    assert not set(ids(train)) & set(ids(held_out))
    assert len(train.groups) + len(held_out.groups) == 80
    assert "4 of 40 prompts held out" in held_out.origin
    shuffled = random.Random(0).sample(doubled, len(doubled))
    again = load_groups(config(lines(tmp_path / "b.jsonl", shuffled), eval_fraction=0.1), "eval")
    assert set(ids(again)) == set(ids(held_out))


@pytest.mark.parametrize(
    "settings", [{}, {"eval_fraction": 0.0}, {"eval_path": "a"}, {"system_prompt": "x", "eval_fraction": 0.3}]
)
def test_both_splits_at_once_are_the_two_of_them(tmp_path, settings: dict) -> None:
    """A system prompt does not change who is held out."""
    path = lines(tmp_path / "a.jsonl", RECORDS)
    chosen = config(path, **{k: str(path) if k == "eval_path" else v for k, v in settings.items()})
    both = load_splits(chosen)
    assert both == (load_groups(chosen, "train"), load_groups(chosen, "eval"))
    asked = [[group.prompt.turns[-1] for group in loaded.groups] for loaded in both]
    without = load_splits(replace(chosen, system_prompt=None))
    assert asked == [[group.prompt.turns[-1] for group in loaded.groups] for loaded in without]


def test_a_single_prompt_is_not_held_out() -> None:
    loaded = Loaded([Group(Prompt((Turn("user", "a"),)))], 1)
    assert len(hold_out(loaded, 0.5, "train").groups) == 1
    assert not hold_out(loaded, 0.5, "eval").groups


def test_named_evaluation_data_are_used_and_nothing_is_held_out(tmp_path) -> None:
    one, other = lines(tmp_path / "a.jsonl", RECORDS[:30]), lines(tmp_path / "b.jsonl", RECORDS[30:])
    settings = config(one, eval_path=str(other))
    assert len(load_groups(settings, "train").groups) == 30
    assert len(load_groups(settings, "eval").groups) == 10
    with pytest.raises(ConfigError, match=r"data.eval_path=.*no such file"):
        load_groups(config(tmp_path / "a.jsonl", eval_path=str(tmp_path / "c.jsonl")), "eval")


def test_no_evaluation_data_is_possible_and_said(tmp_path) -> None:
    loaded = load_groups(config(lines(tmp_path / "a.jsonl", RECORDS), eval_fraction=0), "eval")
    assert not loaded.groups
    assert "no evaluation data" in loaded.origin


@pytest.mark.parametrize(
    "row",
    [
        {"type": "binary_feedback", "output": "x", "label": 1},
        {"chosen": "x", "rejected": "y"},
        {"completion": "x", "label": True},
        {"reference": "x"},
    ],
)
def test_a_row_may_name_its_split(row, tmp_path) -> None:
    records = [{**row, "prompt": f"q{i}", "split": ("train", "test")[i % 2]} for i in range(6)]
    path = lines(tmp_path / "f.jsonl", records)
    settings = config(path, eval_split="test")
    train, test = load_groups(settings, "train"), load_groups(settings, "eval")
    assert [g.prompt.turns[0].content for g in train.groups] == ["q0", "q2", "q4"]
    assert [g.prompt.turns[0].content for g in test.groups] == ["q1", "q3", "q5"]
    assert "split" not in train.unused and {d.reason for d in train.dropped} == {
        "says split: 'test', not 'train' (data.split; data.ignore_columns=[split] reads all)"
    }
    check_found(settings)
    assert len(load_groups(config(path, eval_fraction=0), "train").groups) == 3
    everything = config(path, eval_fraction=0, ignore_columns=["split"])
    assert len(load_groups(everything, "train").groups) == 6
    with pytest.raises(DataError, match=r"none of the 6 rows .*says split: 'train', not 'dev'"):
        load_groups(config(path, split="dev", eval_fraction=0), "train")
    for refused in (config(lines(tmp_path / "a.jsonl", RECORDS), eval_split="test"), everything):
        with pytest.raises(ConfigError, match=r"data.eval_split=test: no row"):
            load_groups(replace(refused, eval_split="test"), "eval")


def test_the_system_prompt_goes_before_prompts_that_have_none(tmp_path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]
    path = lines(tmp_path / "a.jsonl", [RECORDS[0], {"prompt": own, "chosen": "x", "rejected": "y"}])
    loaded = load_groups(config(path, eval_fraction=0, system_prompt="Be brief."), "train")
    assert [group.prompt.turns[0] for group in loaded.groups] == [
        Turn("system", "Be brief."),
        Turn("system", "mine"),
    ]
    named = load_groups(config(path, eval_fraction=0, system_prompt="think_answer"), "train")
    assert "<think>" in named.groups[0].prompt.turns[0].content


def made_here(settings: DataConfig, split: str) -> Loaded:
    """A source of somebody's own, as data.source may name it."""
    prompts = [Prompt((Turn("user", f"{split} {i}"),)) for i in range(3)]
    return Loaded([Group(prompt, (Completion("x"),), (1.0,)) for prompt in prompts], 3, origin=split)


def test_a_source_may_be_anybodys_function() -> None:
    settings = config(None, source="tests.unit.data.test_sources.made_here", eval_fraction=0)
    assert load_groups(settings, "eval").groups[0].prompt.turns[0].content == "eval 0"


# The hub (no network here: the library is given a folder, or answers as the hub would)


@pytest.fixture
def hub_folder(tmp_path) -> Path:
    for split, part in (("train", RECORDS[:30]), ("test", RECORDS[30:])):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / "set" / f"{split}.parquet")
    (tmp_path / "set" / "README.md").touch()
    return tmp_path / "set"


def test_a_folder_that_is_no_clone_is_read_as_any_folder(hub_folder) -> None:
    (hub_folder / "README.md").unlink()
    settings = config(hub_folder, source="data.sources.hub_table", subset="main", eval_split="test")
    assert [len(load_groups(settings, split).groups) for split in ("train", "eval")] == [30, 10]
    (hub_folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^data.path=.*empty: has no file that can be read"):
        load_groups(replace(settings, path=str(hub_folder / "empty")), "train")


def test_a_hub_set_is_read_by_split(hub_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    settings = config(hub_folder, source="data.sources.hub_table", eval_split="test")
    assert len(load_groups(settings, "train").groups) == 30
    assert len(load_groups(settings, "eval").groups) == 10
    with pytest.raises(ConfigError, match=r"data.split=validation: .*no such split"):
        load_groups(config(hub_folder, source="data.sources.hub_table", split="validation"), "train")


def test_of_a_hub_set_too_the_rows_that_name_another_split_are_not_trained_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{**row, "split": ("train", "test")[i % 2]} for i, row in enumerate(RECORDS)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train.parquet")
    (tmp_path / "set" / "README.md").touch()
    settings = config(tmp_path / "set", source="data.sources.hub_table", eval_fraction=0)
    loaded = load_groups(settings, "train")
    assert len(loaded.groups) == len(loaded.dropped) == len(RECORDS) / 2 and "split" not in loaded.unused
    assert len(load_groups(replace(settings, split="train[:10]"), "train").groups) == 5
    assert len(load_groups(replace(settings, ignore_columns=["split"]), "train").groups) == len(RECORDS)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found alpaca_eval.py"),
            "is made by a script.*data=local",
        ),
        (
            datasets.exceptions.DatasetNotFoundError("Dataset 'org/name' doesn't exist"),
            "data.path=org/name: cannot be loaded",
        ),
        (ValueError("BuilderConfig 'x' not found. Available: ['main']"), "data.subset=x"),
        (ConnectionError("offline"), "data.path=org/name: cannot be loaded .offline"),
    ],
)
def test_what_the_hub_refuses_is_said_with_a_remedy(monkeypatch, error: Exception, message: str) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match=message):
        load_groups(config("org/name", source="data.sources.hub_table", subset="x"), "train")


LONG = "x" * 300


@pytest.mark.parametrize("source", ["data.sources.local", "data.sources.hub_table"])
def test_a_path_that_no_file_system_has_is_refused(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in (LONG, f"{LONG}.jsonl", str(tmp_path / LONG)):
        with pytest.raises(ConfigError, match=r"^data\.path="):
            load_groups(dataclasses.replace(config(tmp_path / "a"), source=source, path=path), "train")


@pytest.mark.parametrize("form", ["./myfmt.convert", "../a/myfmt.convert", ".myfmt.convert"])
def test_a_format_among_folders_is_refused(form: str, tmp_path) -> None:
    path = lines(tmp_path / "pairs.jsonl", [{"prompt": "x", "chosen": "a", "rejected": "b"}])
    with pytest.raises(ConfigError, match=r"^data\.format=.*write module\.function"):
        load_groups(dataclasses.replace(config(path), format=form), "train")


# Several sets in one by weight, and shares of desirable and undesirable examples


def answers(i, name="q"):
    return Group(Prompt((Turn("user", f"{name} {i}"),)), (Completion("good"), Completion("bad")), (1.0, -1.0))


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 5.0)), min_size=1, max_size=4))
def test_the_mix_is_the_largest_with_those_shares(sets):
    groups = [[answers(i, f"set {s}") for i in range(n)] for s, (n, _) in enumerate(sets)]
    weights = [weight for _, weight in sets]
    chosen = by_weight(groups, weights)
    counts = [len(part) for part in chosen]
    assert any(count == len(part) for count, part in zip(counts, groups, strict=True)), "none is used up"
    assert [len({g.prompt.id for g in part}) for part in chosen] == counts
    scale = min(len(part) / weight for part, weight in zip(groups, weights, strict=True))
    assert all(abs(count - scale * weight) < 1 + 1e-6 for count, weight in zip(counts, weights, strict=True))
    backwards = by_weight([part[::-1] for part in groups], weights)
    assert backwards == chosen


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, n in (("one", 40), ("two", 30)):
        prompts = [f"{name if i else 'shared'} {i}" for i in range(n)]
        rows = [{"prompt": prompt, "chosen": "good", "rejected": "bad"} for prompt in prompts]
        paths[name] = lines(tmp_path / f"{name}.jsonl", rows)
    return paths


def test_sets_are_mixed_and_what_one_evaluates_on_none_trains_on(files):
    weights = {"one": 1.0, "two": 3.0}
    parts = [MixPart(name="local", weight=weights[file], path=str(files[file])) for file in weights]
    config = DataConfig(name="mix", source="data.mix.mixed", eval_fraction=0, mix=parts)
    train, evaluation = load_splits(config)
    of = Counter(g.prompt.turns[0].content.split()[0] for g in train.groups)
    assert of["two"] >= 26 and of["one"] == pytest.approx(of["two"] / 3, abs=1.5) and train.read == 70
    held_out = {g.prompt.id for g in evaluation.groups}
    assert held_out and held_out.isdisjoint(g.prompt.id for g in train.groups)
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
    groups = [answers(i) for i in range(n)]
    left = list(keep_shares(groups, desirable, undesirable))
    labels = [want.label for group in left for want in labelled(group)]
    assert (labels.count(1.0), labels.count(-1.0)) == (round(desirable * n), round(undesirable * n))
    wants = ((want, group) for group in left for want in labelled(group))
    words = {(want.label, group.completions[want.completions[0]].text) for want, group in wants}
    assert words <= {(1.0, "good"), (-1.0, "bad")}
    again = keep_shares(groups[::-1], desirable, undesirable)
    assert {g.prompt.id for g in again} == {g.prompt.id for g in left}


def test_the_two_labels_are_drawn_apart():
    """Half of each: about a quarter of the prompts keep both, a quarter none."""
    left = list(keep_shares([answers(i) for i in range(400)], 0.5, 0.5))
    both = sum(len(group.rewards) == 2 for group in left)
    assert 60 < both < 140 and len(left) == 400 - both


def test_shares_are_of_the_training_data_alone(tmp_path):
    rows = ({"prompt": f"q {i}", "chosen": "a", "rejected": "b"} for i in range(40))
    path = lines(tmp_path / "pairs.jsonl", rows)
    train, evaluation = load_splits(local(path, eval_fraction=0.25, frac_unique_undesirable=0.0))
    assert [g.rewards for g in train.groups] == [(1.0,)] * 30
    assert [len(g.rewards) for g in evaluation.groups] == [2] * 10
