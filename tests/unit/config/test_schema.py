"""The settings: every key of the yaml files is typed; what may be said of a named evaluation set."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.cli import compose, compose_config
from config.files import section, walk
from config.load import split_settings
from config.schema import Config, CorrectionConfig
from config.schema_data import MEASURED, DataConfig, evaluation_sets, named_measure
from config.schema_model import ModelConfig
from config.schema_stages import EvalStage, LabelStage, SampleStage
from tests.tiny import ROOT, make_config

FILES = {"config.yaml": Config, "eval.yaml": EvalStage, "sample.yaml": SampleStage, "label.yaml": LabelStage}
ELSEWHERE = {"model", "data", "loss", "trainer", "correction", "sampler", "reward", "defaults", "hydra"}
"""Groups, which have files of their own, and what is Hydra's"""


def leaves(schema, prefix=""):
    for name, hint in get_type_hints(schema).items():
        key = next((f.metadata.get("key", name) for f in fields(schema) if f.name == name), name)
        inner = next((h for h in (hint, *get_args(hint)) if is_dataclass(h)), None)
        yield from leaves(inner, f"{prefix}{key}.") if inner else [prefix + key]


GROUP_FILES = {
    "model/base.yaml": ModelConfig,
    "data/_base.yaml": DataConfig,
    "correction/none.yaml": CorrectionConfig,
}


def test_the_yaml_and_the_schema_have_the_same_keys():
    for file, schema in FILES.items():
        written = {key for key, value in walk(section(file)) if not (isinstance(value, dict) and value)}
        in_yaml, own = (
            {key for key in keys if key.split(".")[0] not in ELSEWHERE} for keys in (written, leaves(schema))
        )
        assert in_yaml == own, file
    for file, schema in GROUP_FILES.items():
        assert section(file).keys() - {"defaults"} == {key.split(".")[0] for key in leaves(schema)}, file


WHOLE = {"run": None, "out": "x.jsonl", "format": "groups", "split": "train"}
WHOLE |= {"skip": 0, "limit": None, "overwrite_out": False}


def test_settings_of_a_program_stand_beside_those_of_a_run_and_wrong_ones_have_their_typed_names():
    stated = {"in": "a.json", "out": "b.jsonl", "format": "groups", "overwrite_out": False, "lr": 1}
    stage, rest = split_settings(OmegaConf.create(stated), LabelStage)
    assert (stage.samples, stage.out, stage.format) == ("a.json", "b.jsonl", "groups")
    assert rest == {"lr": 1}
    for schema, values, key in [
        (LabelStage, stated | {"in": "???"}, "in"),
        (SampleStage, WHOLE | {"limit": 0}, "limit"),
        (SampleStage, WHOLE | {"format": "halos"}, "out"),
    ]:
        with pytest.raises(ConfigError, match=f"^{key}=") as error:
            split_settings(OmegaConf.create(values), schema)
        assert error.value.key == key


MODELS = [p.stem for p in (ROOT / "config/model").glob("*.yaml") if p.stem not in ("base", "hub")]
HUB = "model=hub model.name_or_path=org/name"
ROOM = {
    HUB: 1024,
    f"{HUB} model.max_length=3072": 2048,
    f"{HUB} model.max_length=8192": 2048,  # the paper's, however much room there is
    f"{HUB} model.max_prompt_length=2000": 48,
    f"{HUB} sampler.max_tokens=100": 100,
    "": 48,
}


def test_what_is_left_behind_the_longest_prompt_and_never_more_than_the_papers():
    """And the defaults of every model go online."""
    for words, room in ROOM.items():
        config = compose_config(words.split())
        assert config.max_tokens == room, words
        config.check_room()
    for model in [*(f"model={name}" for name in MODELS), HUB]:
        for sampler in ("embedded", "vllm"):
            config = compose_config([*model.split(), f"sampler={sampler}", "online=true", "reward=adder"])
            assert 1 <= config.max_tokens <= config.model.max_length - config.model.max_prompt_length


def test_one_answer_a_prompt_is_too_few_for_pairs_alone():
    """Only rounds compare a prompt's answers: sampling alone takes any number."""
    for more in ([], ["online=true", "rounds.feedback=threshold", "loss=kto"]):
        assert compose_config(["rounds.samples=1", *more]).rounds.samples == 1
    with pytest.raises(ConfigError, match=r"rounds\.samples=1"):
        compose_config(["rounds.samples=1", "online=true"])


def test_a_set_differs_from_the_runs_own_data():
    words = ["evaluations.hard.path=hard.jsonl", "--evaluations.other.verifier", "data.adder.sums"]
    config, _ = compose(*words, "evaluations.theirs={path: org/name, split: test}")
    found = evaluation_sets(config.evaluations, config.data)
    assert list(found) == ["hard", "other", "theirs"]
    hard = found["hard"]
    assert (hard.source, hard.path, hard.eval_path) == ("data.sources.local", "hard.jsonl", "hard.jsonl")
    assert hard.verifier == "data.adder.accuracy", "as the run's own data"
    assert found["other"] == replace(make_config().data, verifier="data.adder.sums")
    theirs = found["theirs"]
    assert (theirs.path, theirs.eval_path, theirs.eval_split) == ("org/name", None, "test")


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,12}", fullmatch=True)


@settings(max_examples=50)
@given(NAMES, st.sampled_from(MEASURED))
def test_a_name_and_a_measure_are_told_from_their_key(name: str, measure: str):
    try:
        evaluation_sets({name: {"path": "x"}}, make_config().data)
    except ConfigError:
        return
    assert named_measure(f"eval_{name}_{measure}") == (name, measure)
