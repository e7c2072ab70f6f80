"""Checkpoints that find no room, that are damaged, and that somebody else made."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as records

from models.checkpoint import CheckpointError, Checkpoints
from models.distributed import start
from models.sharding import local
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.full_disk import full_disk
from tests.tiny import tiny_policy
from trainers.basic import BasicTrainer

STATE = {"place": 3}
VALUE = "optimizer.param_groups.0.lr"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> BasicTrainer:
    config = engine_config(tmp_path_factory.mktemp("cache"), "kto", "model.batch_size=8")
    return run(config, make_segment(config, 8), make_trainer(config))[0]


@pytest.fixture(scope="module")
def sound(trainer, tmp_path_factory) -> Path:
    kept = Checkpoints(tmp_path_factory.mktemp("sound"), start(), 3)
    kept.save(1, trainer.policy, trainer.optimizer, STATE, {"x": torch.arange(3.0)})
    return kept.path(1)


@pytest.fixture
def foreign(sound, tmp_path) -> Checkpoints:
    """A checkpoint to be changed."""
    kept = Checkpoints(tmp_path / "foreign", start(), 3)
    shutil.copytree(sound, kept.path(1))
    return kept


def same(trainer: BasicTrainer, other: BasicTrainer) -> bool:
    """Whether weights and optimizer are equal to the bit."""
    one, two = (t.optimizer.state_dict() for t in (trainer, other))
    pairs = [(one["state"][k][n], two["state"][k][n]) for k in one["state"] for n in one["state"][k]]
    found = weights(other)
    pairs += [(wanted, found[name]) for name, wanted in weights(trainer).items()]
    return one["param_groups"] == two["param_groups"] and all(torch.equal(*map(local, two)) for two in pairs)


def fresh(trainer: BasicTrainer) -> BasicTrainer:
    return make_trainer(trainer.config, tiny_policy(seed=9))


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "behind"), [(100, False), (200_000, True), (365_000, False), (365_000, True)]
)
def test_a_checkpoint_that_finds_no_room_leaves_those_before_it_and_nothing_else(
    trainer, tmp_path, room, behind
):
    kept = Checkpoints(tmp_path, start(), 1, behind=behind)
    mine = {"x": torch.zeros(100_000)}  # the shards fit where 365,000 bytes do, this does not

    def save(step: int, mine: dict[str, torch.Tensor]) -> None:
        kept.save(step, trainer.policy, trainer.optimizer, STATE, mine)
        kept.finish()

    save(1, {})
    said = r"step_00000002 could not be written.* \(disk /"
    with full_disk(room), pytest.raises(CheckpointError, match=said):
        save(2, mine)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert kept.problem(kept.path(1)) == "" and kept.newest_sound() == kept.path(1)
    other = fresh(trainer)
    kept.load(kept.path(1), other.policy, other.optimizer)
    assert same(trainer, other)
    save(2, mine)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


# -- behind the training -----------------------------------------------------------------------------


def test_what_is_written_behind_is_what_was_there_when_it_was_saved(trainer, tmp_path):
    kept, first, mine = (
        Checkpoints(tmp_path, start(), 3, behind=True),
        fresh(trainer),
        {"x": torch.arange(3.0)},
    )
    before = Checkpoints(tmp_path / "before", start(), 3)
    before.save(1, trainer.policy, trainer.optimizer, STATE, {})
    before.load(before.path(1), first.policy, first.optimizer)
    assert same(trainer, first)
    kept.save(1, first.policy, first.optimizer, STATE, mine)
    with torch.no_grad():  # training goes on, in place
        for parameter in first.policy.parameters():
            parameter.mul_(2)
        for state in first.optimizer.state.values():
            state["exp_avg"].add_(1)
    mine["x"].zero_()
    kept.finish()
    kept.finish()
    other = fresh(trainer)
    state, own = Checkpoints(tmp_path, start(), 3).load(kept.path(1), other.policy, other.optimizer)
    assert same(trainer, other) and state["place"] == 3 and torch.equal(own["x"], torch.arange(3.0))
    kept.save(2, first.policy, first.optimizer, STATE, {})
    kept.save(3, first.policy, first.optimizer, STATE, {})
    assert [path.name for path in kept.all()][:2] == ["step_00000001", "step_00000002"], "one at a time"
    kept.finish()
    kept.load(kept.path(3), other.policy, other.optimizer)
    assert same(first, other), "the copy of an earlier save is not what a later one writes"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whatever_file_is_damaged_one_rank_says_so(foreign, ranks):
    path = foreign.path(1)
    views = [Checkpoints(foreign.folder, replace(start(), rank=r, size=ranks), 3) for r in range(ranks)]
    for file in sorted(json.loads((path / "manifest.json").read_text())):
        whole = (path / file).read_bytes()
        (path / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert f"{file} is not as it was written" in [view.problem(path) for view in views]
        (path / file).write_bytes(whole)
    assert {view.problem(path) for view in views} == {""}


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "link", "null", '{"state.json": [1, 2]}'])
def test_a_manifest_that_lists_too_little_or_something_else_than_its_files_is_damage(foreign, name):
    path = foreign.path(1)
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to("/dev/zero")
    listed, little = json.loads((path / "manifest.json").read_text()) | {name: [0, 0]}, name[0] in "n{"
    (path / "manifest.json").write_text(name if little else json.dumps(listed))
    assert ("manifest.json does not list" if little else name) in foreign.problem(path)
    assert foreign.newest_sound() is None
    (path / "manifest.json").write_text("[" * 100_000)
    (path / "state.json").unlink()
    (path / "state.json").symlink_to("/dev/zero")
    assert "nested" in foreign.problem(path) and foreign.best() is None


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "now"), [("tokens", "tokens"), ("length", "tokens"), ("tokens", "length")])
def test_rows_that_were_dealt_otherwise_may_lie_on_any_rank(trainer, tmp_path, said, now):
    """The second of three ranks goes on: with its own scores, or with everybody's where rows were dealt in
    another way (padded where they are packed now)."""
    state = STATE | {"dealing": said}
    kept = Checkpoints(tmp_path, start(), 3)
    kept.save(1, trainer.policy, trainer.optimizer, state, {"y": torch.ones(2), "shared": torch.zeros(1)})
    own = {"x": torch.arange(3.0), "shared": torch.ones(1), "rng": torch.get_rng_state()}
    save_file(own, kept.path(1) / "rank_0001.safetensors")
    save_file({"shared": torch.zeros(1), "rng": own["rng"]}, kept.path(1) / "rank_0002.safetensors")
    second = Checkpoints(tmp_path, replace(start(), rank=1, size=3), 3)
    other = fresh(trainer)
    _, mine = second.load(kept.path(1), other.policy, other.optimizer, now)
    assert mine.keys() == {"x", "shared"} | ({"y"} if said != now else set())
    assert torch.equal(mine["x"], torch.arange(3.0)) and mine["shared"] == 1, "a rank's own scores come first"


class Reduced:
    """Makes ``function(*arguments)`` of itself when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced

    def __call__(self) -> None:
        """What is made may be the function of another."""


def call_by_attributes(made: Path) -> Reduced:
    """A call of os.mkdir by a table that asks for ``getattr`` alone."""
    known = Reduced(getattr, Reduced(getattr, records.Metadata, "__init__"), "__globals__")
    module = Reduced(Reduced(getattr, known, "get"), "os")
    return Reduced(Reduced(getattr, module, "mkdir"), str(made))


def table_with(sound: Path, change) -> bytes:
    table = dcp.FileSystemReader(sound).read_metadata()
    change(table)
    return pickle.dumps(table)


def place(table: records.Metadata):
    return next(p for index, p in table.storage_data.items() if index.fqn == VALUE)


CLASS_IS_CHANGED = (
    b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"  # the class itself
    b"N}\x8c\x07versionK\x01s\x86b."  # BUILD: set an attribute of it
)
TABLES = {
    "a call": lambda sound, made: pickle.dumps(Reduced(os.mkdir, str(made))),
    "attributes": lambda sound, made: pickle.dumps(call_by_attributes(made)),
    "a class that is changed": lambda sound, made: CLASS_IS_CHANGED,
    "a file elsewhere": lambda sound, made: table_with(
        sound, lambda t: setattr(place(t), "relative_path", "../../x")
    ),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_is_no_plain_table_is_refused_and_nothing_of_it_is_run(
    trainer, sound, foreign, tmp_path, what
):
    made, path = tmp_path / "made", foreign.path(1)
    (path / ".metadata").write_bytes(TABLES[what](sound, made))
    other, before = fresh(trainer), vars(records.Metadata).copy()
    for load, into in (
        (foreign.load, (other.policy, other.optimizer)),
        (foreign.load_weights, (other.policy,)),
    ):
        with pytest.raises(CheckpointError, match=r"\.metadata is no table of contents"):
            load(path, *into)
    assert not made.exists() and vars(records.Metadata).copy() == before


@pytest.mark.parametrize("name", [VALUE, "model.model.model.norm.weight"], ids=["a setting", "a weight"])
def test_a_value_that_would_run_is_refused(trainer, sound, foreign, tmp_path, name):
    """The table is in order, but says that a value lies where something else does."""
    made, stream = tmp_path / "made", io.BytesIO()
    torch.save(Reduced(os.mkdir, str(made)), stream)
    shard = foreign.path(1) / "__0_0.distcp"
    offset = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + stream.getvalue())

    def point(table: records.Metadata) -> None:
        for index, at in list(table.storage_data.items()):
            if index.fqn == name:
                at.offset, at.length = offset, len(stream.getvalue())
                table.storage_data[records.MetadataIndex(name)] = at
        table.state_dict_metadata[name] = records.BytesStorageMetadata()

    (foreign.path(1) / ".metadata").write_bytes(table_with(sound, point))
    other = fresh(trainer)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        foreign.load(foreign.path(1), other.policy, other.optimizer)
    assert not made.exists()


def test_another_models_checkpoint_is_refused_in_one_line(trainer, sound):
    other = make_trainer(trainer.config, tiny_policy(layers=3))
    with pytest.raises(CheckpointError, match=r"cannot be loaded: rank 0: .*Missing key") as said:
        Checkpoints(sound.parent, start(), 3).load_weights(sound, other.policy)
    assert "\n" not in str(said.value)
