"""Samples and feedback as other people's files: what is written is read back, by this project's own readers
of those formats too."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from config.schema_data import DataConfig
from config.schema_sampler import RoundsConfig
from data.sources import load_groups
from data.types import Completion, Prompt, Turn
from rollouts.files import read_samples, refuse_existing, write_feedback, write_samples
from rollouts.rounds import SampledPrompt

SAMPLES = [
    SampledPrompt(
        Prompt((Turn("user", f"{i} ünd?"),), reference_answer=str(i)),
        tuple(Completion(f"answer {i} {k}", (i, k), k < 3) for k in range(4)),
    )
    for i in range(3)
]
SCORES: list[list[float | None]] = [[1.0, 4.0, None, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 3.0, 2.0]]


def test_samples_come_back(tmp_path):
    wanted = [(one.prompt.turns, [c.text for c in one.completions]) for one in SAMPLES]
    for form in ("groups", "halos", "alpacaeval"):
        path = tmp_path / ("samples.jsonl" if form == "groups" else f"{form}.json")
        write_samples(path, SAMPLES, form, "someone/model", "task_train")
        back = read_samples(path)
        assert [(one.prompt.turns, [c.text for c in one.completions]) for one in back] == wanted
        assert form != "groups" or back == SAMPLES
    rows = json.loads(path.read_text())
    assert len(rows) == 12 and rows[0].keys() == {"instruction", "output", "generator"}


@pytest.mark.parametrize(
    ("form", "entries"), [("groups", 2), ("pairwise", 2), ("binary", 11), ("scalar", 11)]
)
def test_feedback_is_read_as_data(tmp_path, form, entries):
    path = tmp_path / "feedback.jsonl" if form == "groups" else tmp_path / "feedback.json"
    assert write_feedback(path, SAMPLES, SCORES, form, RoundsConfig(threshold=2.0), 0) == entries
    config = DataConfig(name="local", source="data.sources.local", path=str(path), eval_fraction=0.0)
    groups = load_groups(config, "train").groups
    if form in ("groups", "pairwise"):
        best = [[c.text for c in group.completions] for group in groups]
        assert best == [["answer 0 1", "answer 0 0"], ["answer 2 0", "answer 2 1"]]
        assert all(group.prompt.reference_answer is not None for group in groups)
    elif form == "binary":
        labels = "-++----+-++"
        assert [group.rewards[0] for group in groups] == [1.0 if sign == "+" else -1.0 for sign in labels]
    else:
        assert [group.rewards for group in groups] == [(1.0, 4.0, 2.0), (0.0,) * 4, (3.0, 1.0, 3.0, 2.0)]


def test_a_path_that_cannot_be_written_is_refused_before_work(tmp_path):
    """Whether or not a file there may be written over; nothing is made."""
    file = tmp_path / "afile"
    file.write_text("x")
    for path, overwrite, said in (
        (file / "deep" / "fb.jsonl", False, "is no folder"),
        (file, False, "overwrite_out=true"),
        (tmp_path, True, "is a folder: name a file in it"),
        (tmp_path / (252 * "n"), False, r"cannot be written: .*File name too long"),  # with a part's ending
    ):
        with pytest.raises(ConfigError, match=rf"^out={path}: .*{said}"):
            refuse_existing(path, overwrite)
    refuse_existing(file, overwrite=True)
    refuse_existing(tmp_path / "new" / "folders" / "fb.jsonl", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]
