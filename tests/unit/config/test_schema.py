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


GROUP_FILES = {
    "model/base.yaml": ModelConfig,
    "data/_base.yaml": DataConfig,
    "correction/none.yaml": CorrectionConfig,
}


def test_the_yaml_and_the_schema_have_the_same_keys():
    for file, schema in FILES.items():
        written = yaml.safe_load((ROOT / "config" / file).read_text())
        in_yaml = {key for key in keys(written) if key.split(".")[0] not in COMPOSED | (REUSED - {file})}
        in_yaml = {key for key in in_yaml if file == "config.yaml" or key.split(".")[0] not in REUSED}
        own = {key for key in leaves(schema) if key.split(".")[0] not in GROUPS}
        if file == "config.yaml":  # groups that are optional or have files of their own
            own = {key for key in own if key.split(".")[0] not in ("reward", "sampler")}
        assert in_yaml == own, file
    for file, schema in GROUP_FILES.items():
        written = OmegaConf.to_container(OmegaConf.load(ROOT / "config" / file), resolve=False)
        assert set(written) - COMPOSED == {key.split(".")[0] for key in leaves(schema)}, file


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


WHOLE = {"run": None, "out": "x.jsonl", "format": "groups", "split": "train"}
WHOLE |= {"skip": 0, "limit": None, "overwrite_out": False}


def test_settings_of_a_program_stand_beside_those_of_a_run_and_wrong_ones_have_their_typed_names():
    given = {"in": "a.json", "out": "b.jsonl", "format": "groups", "overwrite_out": False, "lr": 1}
    stage, rest = split_settings(OmegaConf.create(given), LabelStage)
    assert (stage.samples, stage.out, stage.format) == ("a.json", "b.jsonl", "groups")
    assert rest == {"lr": 1}
    for schema, settings, key in [
        (LabelStage, given | {"in": "???"}, "in"),
        (SampleStage, WHOLE | {"format": "csv"}, "format"),
        (SampleStage, WHOLE | {"out": "???"}, "out"),
        (SampleStage, WHOLE | {"limit": 0}, "limit"),
        (SampleStage, WHOLE | {"split": "dev"}, "split"),
        (SampleStage, WHOLE | {"out": "x.json"}, "out"),
        (SampleStage, WHOLE | {"format": "halos"}, "out"),
    ]:
        with pytest.raises(ConfigError, match=f"^{key}=") as error:
            split_settings(OmegaConf.create(settings), schema)
        assert error.value.key == key


MODELS = [p.stem for p in (ROOT / "config/model").glob("*.yaml") if p.stem not in ("base", "hub")]
HUB = "model=hub model.name_or_path=org/name"
ROOM = {
    HUB: 1024,
    f"{HUB} model.max_length=3072": 2048,
    f"{HUB} model.max_length=8192": 2048,  # the paper's, however much room there is
    f"{HUB} model.max_prompt_length=2000": 48,
    f"{HUB} sampler.max_tokens=100": 100,
    "model=qwen2.5-1.5b-instruct": 2048,
    "experiment=dpo-online": 2048,
    "": 48,
}


@pytest.mark.parametrize("sampler", ["embedded", "vllm"])
@pytest.mark.parametrize("model", [*(f"model={name}" for name in sorted(MODELS)), HUB])
def test_the_defaults_of_every_model_go_online(model, sampler):
    config = compose_config([*model.split(), f"sampler={sampler}", "online=true", "reward=adder"])
    assert 1 <= config.max_tokens <= config.model.max_length - config.model.max_prompt_length


@pytest.mark.parametrize("words", ROOM)
def test_what_is_left_behind_the_longest_prompt_and_never_more_than_the_papers(words):
    config = compose_config(words.split())
    assert config.max_tokens == ROOM[words]
    config.check_room()


def test_one_answer_a_prompt_is_too_few_for_pairs_alone():
    """Only rounds compare a prompt's answers: sampling alone takes any number."""
    for more in ([], ["online=true", "rounds.feedback=threshold", "loss=kto"]):
        assert compose_config(["rounds.samples=1", *more]).rounds.samples == 1
    with pytest.raises(ConfigError, match=r"rounds\.samples=1"):
        compose_config(["rounds.samples=1", "online=true"])
