"""The settings: every default stands once, in the yaml files, and every key of theirs is typed."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.cli import compose_config
from config.files import section
from config.load import split_settings
from config.schema import Config, CorrectionConfig
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from config.schema_stages import EvalStage, LabelStage, SampleStage
from config.sections import word_of
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
    "model/base.yaml": ModelConfig,
    "data/_base.yaml": DataConfig,
    "correction/none.yaml": CorrectionConfig,
}


@pytest.mark.parametrize("file", GROUP_FILES)
def test_the_groups_of_settings_have_the_keys_of_their_schema(file):
    written = OmegaConf.to_container(OmegaConf.load(ROOT / "config" / file), resolve=False)
    assert set(written) - COMPOSED == {key.split(".")[0] for key in leaves(GROUP_FILES[file])}


def test_no_default_of_the_yaml_files_stands_in_the_schema_too():
    """A field whose default is in a yaml file is declared without one: only sections and keys of other files
    have their own."""
    twice = []
    for path in sorted((ROOT / "config").glob("schema*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            calls = [d for d in node.decorator_list if "yaml_defaults(" in ast.unparse(d)]
            places = [ast.literal_eval(a) for call in calls for a in getattr(call, "args", ())]
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


def test_settings_of_a_program_stand_beside_those_of_a_run_and_a_missing_one_has_its_typed_name():
    given = {"in": "a.json", "out": "b.jsonl", "format": "groups", "overwrite_out": False, "lr": 1}
    stage, rest = split_settings(OmegaConf.create(given), LabelStage)
    assert (stage.samples, stage.out, stage.format) == ("a.json", "b.jsonl", "groups")
    assert rest == {"lr": 1}
    with pytest.raises(ConfigError, match="in=") as error:
        split_settings(OmegaConf.create(given | {"in": "???"}), LabelStage)
    assert error.value.key == "in"


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


MODELS = sorted(
    path.stem for path in (ROOT / "config/model").glob("*.yaml") if path.stem not in ("base", "hub")
)
HUB = ["model=hub", "model.name_or_path=org/name"]


@pytest.mark.parametrize("sampler", ["embedded", "vllm"])
@pytest.mark.parametrize("model", [*([f"model={name}"] for name in MODELS), HUB], ids=" ".join)
def test_the_defaults_of_every_model_go_online(model, sampler):
    config = compose_config([*model, f"sampler={sampler}", "online=true", "reward=adder"])
    assert 1 <= config.max_tokens <= config.model.max_length - config.model.max_prompt_length


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (HUB, 1024),
        ([*HUB, "model.max_length=3072"], 2048),
        ([*HUB, "model.max_length=8192"], 2048),  # the paper's, however much room there is
        ([*HUB, "model.max_prompt_length=2000"], 48),
        ([*HUB, "sampler.max_tokens=100"], 100),
        (["model=qwen2.5-1.5b-instruct"], 2048),
        (["experiment=dpo-online"], 2048),
        ([], 48),
    ],
)
def test_what_is_left_behind_the_longest_prompt_and_never_more_than_the_papers(overrides, expected):
    config = compose_config(overrides)
    assert config.max_tokens == expected
    config.check_room()


def test_one_answer_a_prompt_is_too_few_for_pairs_alone():
    """Only rounds compare a prompt's answers: sampling alone takes any number."""
    assert compose_config(["rounds.samples=1"]).rounds.samples == 1
    with pytest.raises(ConfigError, match=r"rounds\.samples=1"):
        compose_config(["rounds.samples=1", "online=true"])
    online = ["rounds.samples=1", "rounds.feedback=threshold", "loss=kto", "online=true"]
    assert compose_config(online).rounds.samples == 1
