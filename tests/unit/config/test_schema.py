"""The settings: every default stands once, in the yaml files, and every key of theirs is typed."""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.files import section
from config.load import split_settings
from config.schema import Config
from config.schema_eval import EvalStage
from config.schema_stages import LabelStage, SampleStage
from config.sections import dataclass, word_of, yaml_defaults
from tests.tiny import ROOT

FILES = {"config.yaml": Config, "eval.yaml": EvalStage, "sample.yaml": SampleStage, "label.yaml": LabelStage}
COMPOSED = {"defaults", "hydra"}  # Hydra's own
GROUPS = {"model", "data", "loss", "trainer", "correction"}  # files of their own
REUSED = {"sampler"}  # eval.yaml's section changes a run's own


def leaves(schema, prefix=""):
    for name, hint in get_type_hints(schema).items():
        key = next((f.metadata.get("key", name) for f in fields(schema) if f.name == name), name)
        inner = next((h for h in (hint, *get_args(hint)) if is_dataclass(h)), None)
        yield from leaves(inner, f"{prefix}{key}.") if inner else [prefix + key]


def keys(tree, prefix=""):
    for key, value in tree.items():
        yield from keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]


@pytest.mark.parametrize("file", FILES)
def test_the_yaml_and_the_schema_have_the_same_keys(file):
    written = yaml.safe_load((ROOT / "config" / file).read_text())
    in_yaml = {key for key in keys(written) if key.split(".")[0] not in COMPOSED | (REUSED - {file})}
    in_yaml = {key for key in in_yaml if file == "config.yaml" or key.split(".")[0] not in REUSED}
    own = {key for key in leaves(FILES[file]) if key.split(".")[0] not in GROUPS}
    if file == "config.yaml":  # groups that are optional or have files of their own
        own = {key for key in own if key.split(".")[0] not in ("reward", "sampler")}
    assert in_yaml == own


GROUP_FILES = {
    "model": ("model/base.yaml", "config.schema_model.ModelConfig"),
    "data": ("data/_base.yaml", "config.schema_data.DataConfig"),
    "correction": ("correction/none.yaml", "config.schema.CorrectionConfig"),
}


@pytest.mark.parametrize("group", GROUP_FILES)
def test_the_groups_of_settings_have_the_keys_of_their_schema(group):
    from common.imports import import_function

    file, schema = GROUP_FILES[group]
    written = OmegaConf.to_container(OmegaConf.load(ROOT / "config" / file), resolve=False)
    own = {key.split(".")[0] for key in leaves(import_function("schema", schema))}
    assert set(written) - COMPOSED == own


def test_no_default_of_the_yaml_files_stands_in_the_schema_too():
    """A field whose default is in a yaml file is declared without one: only sections and keys of other files
    have their own."""
    import ast

    twice = []
    for path in sorted((ROOT / "config").glob("schema*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            calls = [
                d
                for d in node.decorator_list
                if getattr(getattr(d, "func", None), "id", "") == "yaml_defaults"
            ]
            places = [ast.literal_eval(a) for call in calls for a in call.args]
            for item in node.body:
                if not isinstance(item, ast.AnnAssign) or item.value is None:
                    continue
                held = [section(p)[item.target.id] for p in places if item.target.id in section(p)]
                if any(not isinstance(value, dict) and value != "???" for value in held):
                    twice.append(f"{path.stem}.{node.name}.{item.target.id}")
    assert twice == []


def test_a_default_that_has_a_word_is_written_as_its_word():
    written = [
        (f"{module.__name__}.{section.__name__}.{item.name}", item.default)
        for path in sorted((ROOT / "config").glob("schema*.py"))
        for module in [importlib.import_module(f"config.{path.stem}")]
        for section in vars(module).values()
        if isinstance(section, type) and is_dataclass(section) and section.__module__ == module.__name__
        for item in fields(section)
        if word_of(section, item.name)
    ]
    assert len(written) > 30
    assert [name for name, value in written if value is None] == ["config.schema_trainer.LossKeys.advantage"]


def test_defaults_are_copied_and_the_first_place_wins():
    @dataclass
    @yaml_defaults("config.yaml:wandb", "config.yaml")
    class Some:
        tags: list[str]
        project: str | None
        lr: float
        own: int = 3

    assert Some() == Some(tags=[], project=None, lr=5e-6, own=3)
    assert Some().tags is not Some().tags


def test_own_settings_stand_beside_those_of_a_run():
    cfg = OmegaConf.create(
        {"in": "a.json", "out": "b.jsonl", "format": "groups", "overwrite_out": False, "lr": 1}
    )
    stage, rest = split_settings(cfg, LabelStage)
    assert (stage.samples, stage.out, stage.format) == ("a.json", "b.jsonl", "groups")
    assert rest == {"lr": 1}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"format": "csv"}, "format"),
        ({"out": "???"}, "out"),
        ({"limit": 0}, "limit"),
        ({"split": "dev"}, "split"),
        ({"out": "x.json"}, "out"),
        ({"format": "halos"}, "out"),
    ],
)
def test_what_a_stage_cannot_honour_is_refused_by_its_name(given, key):
    whole = {"run": None, "out": "x.jsonl", "format": "groups", "split": "train"}
    whole |= {"skip": 0, "limit": None, "overwrite_out": False}
    with pytest.raises(ConfigError) as error:
        split_settings(OmegaConf.create(whole | given), SampleStage)
    assert error.value.key == key


def test_the_samples_that_are_missing_are_asked_for_by_the_name_on_the_command_line():
    cfg = OmegaConf.create({"in": "???", "out": "b.jsonl", "format": "groups", "overwrite_out": False})
    with pytest.raises(ConfigError, match="in=") as error:
        split_settings(cfg, LabelStage)
    assert error.value.key == "in"
