"""Every leaf of the settings has a rule that says when it is read, and a leaf that is typed elsewhere is
refused."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from common.errors import UserError
from config.files import FOLDER, section
from config.schema import Config
from config.schema_stages import LabelStage, SampleStage
from config.sections import word_of
from config.unknown_keys import names
from config.unread import ABSENT, _value, check_idle, conditions, why_idle
from tests.tiny import ROOT, compose_config
from trainers import corrections
from trainers.losses import shapes

LOSSES = sorted(path.stem for path in (FOLDER / "loss").glob("*.yaml"))
MORE = (
    """
humanline=true
humanline=true humanline_mode=sample
humanline=true humanline_mode=rule +humanline_rule._target_=a.b
sync_mode=kl sync_freq=2
sync_mode=ema sync_alpha=.5
online=true reward=adder
online=true reward=adder loss=kto rounds.feedback=threshold
dry_run=true resume=true scheduler=cosine model.use_peft=true
keep_best=eval_loss wandb.enabled=false data.verifier=null
loss=grpo correction=truncated
loss=grpo correction=negative_masked
data=mix data.mix=[{name:hh},{name:shp}]
loss=dpo loss.divergence=alpha
data=local data.path=x data.verifier=null retention.kl=false
data=hub data.path=x data.eval_split=test
data.apply_chat_template=false
loss=grpo online=true reward=adder rounds.feedback=group rounds.overlong=8
""".strip().splitlines()
    + [f"loss=grpo loss.shape={shape}" for shape in sorted(shapes.SHAPES)]
)


@cache
def bases() -> list[Config]:
    losses = [f"loss={name}{' data=adder-sft data.subset=x' if name == 'sft' else ''}" for name in LOSSES]
    return [compose_config(line.split()) for line in ("loss=dpo", *losses, *MORE)]


def leaves() -> set[str]:
    every = [*names(Config), *(f"loss.{key}" for loss in LOSSES for key in section(f"loss/{loss}.yaml:loss"))]
    return {key for key in every if not any(other.startswith(f"{key}.") for other in every)}


def test_every_leaf_has_a_rule_and_every_rule_a_setting():
    covered = {key for key in leaves() if any(f"{key}.".startswith(f"{place}.") for place in conditions())}
    assert leaves() - covered == set(), "say in config/reads.yaml when it is read"
    sections = {key.rpartition(".")[0] for key in leaves()} | {"reward", "evaluations"}
    assert {place for place in conditions() if place not in leaves() | sections} == set()
    terms = " and ".join(conditions().values()).replace(" or ", " and ").split(" and ")
    asked = {term.partition("=")[0].removesuffix("!") for term in terms if term}
    assert all(any(_value(config, key) is not ABSENT for config in bases()) for key in asked)


@pytest.mark.parametrize("key", sorted(key for key, condition in conditions().items() if condition))
def test_a_setting_typed_where_nothing_reads_it_is_refused_and_elsewhere_it_passes(key):
    """The rule of each is true of some run and false of another."""
    typed = next((leaf for leaf in sorted(leaves()) if f"{leaf}.".startswith(f"{key}.")), key)
    idle = next(config for config in bases() if why_idle(config, key) and _value(config, key) is not ABSENT)
    for word in (f"{typed}=3", f"++{typed}=[x]"):
        with pytest.raises(UserError, match=rf"^{typed}=.*nothing would read it: it needs .*, and here "):
            check_idle(idle, [word])
        assert check_idle(idle, [word], crossed=True)[0].startswith(f"{typed} has no effect: it needs")
    for nothing in ("false", "null", word_of(Config, typed) or "null"):
        assert check_idle(idle, [f"{typed}={nothing}"]) == []
    read = next(
        config for config in bases() if not why_idle(config, typed) and _value(config, key) is not ABSENT
    )
    assert check_idle(read, [f"{typed}=3"]) == []


LABEL = {"samples": "a", "out": "x.json", "format": "binary"}
PROGRAMS = [
    (
        SampleStage(out="x.jsonl"),
        "loss=kto lr=1 humanline=true reward=adder rounds.feedback=pair rounds={tau:1} optimizer.lr=1 "
        "online=true n_examples=3 sync_freq=2 data.logprob_range=[0,1]",
        "data=x model.max_length=9 sampler=vllm sampler.top_p=1 rounds.samples=2 seed=3 out=x limit=3",
    ),
    (
        LabelStage(**LABEL),
        "loss=grpo sampler.top_p=1 rounds.tau=1 rounds.feedback=group exp_name=x",
        "in=a format=binary rounds.threshold=8 reward=adder reward.function.path=a.b seed=2",
    ),
    (LabelStage(samples="a", out="x.jsonl"), "rounds.threshold=8", "rounds.tau=1 rounds={tau:1}"),
]


@pytest.mark.parametrize(("stage", "idle", "read"), PROGRAMS)
def test_what_only_training_reads_is_refused_by_the_other_programs_too(stage, idle, read):
    config, program = compose_config(["loss=dpo"]), type(stage).__name__.removesuffix("Stage").lower()
    for word in idle.split():
        with pytest.raises(UserError, match=r"nothing would read it: (it needs|\w+\.py reads) "):
            check_idle(config, [word], program=program, stage=stage)
    assert check_idle(config, read.split(), program=program, stage=stage) == []
    carried = check_idle(config, ["model=hub", "data.path=x"], program=program, stage=stage)
    assert len(carried) == 2 * (program == "label")


def test_the_rules_of_shapes_and_corrections_are_those_of_their_code():
    own = {key for shape in shapes.SHAPES for key in shapes.reads(shape)}
    for shape in shapes.SHAPES:
        config = compose_config(["loss=grpo", f"loss.shape={shape}"])
        assert {key for key in own if why_idle(config, f"loss.{key}") is None} == shapes.reads(shape) & own
    for path in (FOLDER / "correction").glob("*.yaml"):
        config = compose_config(["loss=grpo", f"correction={path.stem}"])
        used = set() if path.stem == "none" else set(getattr(corrections, path.stem).__code__.co_names)
        for key in ("low", "high", "delta"):
            assert (why_idle(config, f"correction.{key}") is None) == (key in used), (path.stem, key)


def named_in(path: Path) -> set[object]:
    """The attributes, arguments and texts of a file; of a schema those in its properties alone, as the rest
    of it only checks."""
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    parts = [one for one in functions if one.decorator_list] if path.name.startswith("schema") else [tree]
    every = [node for part in parts for node in ast.walk(part)]
    return {getattr(node, name, None) for node in every for name in ("attr", "arg", "value")}


def test_every_leaf_is_named_by_code_that_does_not_only_check_it():
    """A setting whose name no other room mentions, nor a property of a schema, is read by nobody at all."""
    rooms = (path for path in ROOT.iterdir() if path.name not in ("tests", ".venv", "benchmarks", "tools"))
    said = set().union(*(named_in(path) for room in rooms for path in room.rglob("*.py")))
    assert {key.rpartition(".")[2] for key in leaves()} - said == set()
