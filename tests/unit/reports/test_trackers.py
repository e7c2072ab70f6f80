"""TensorBoard's event files, read by its own reader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import ConfigError
from reports.tensorboard import TensorBoard
from reports.trackers import check_trackers
from tests.tiny import make_config

CONFIG = {"loss": {"name": "dpo"}, "humanline": {"enabled": True}, "seed": 3}
LINES = [{"step": step, "loss": 0.7 - 0.01 * step, "eval_loss": None, "seconds": 1} for step in range(5)]


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_what_was_told(tmp_path):
    tracker = TensorBoard(tmp_path, CONFIG)
    for line in LINES:
        tracker.log(line, line["step"])
    tracker.table("samples", ["prompt", "answer"], [["1+1", "a | b\nc"]], 4)
    tracker.histogram("log_ratio", [1, 5, 2], [-1.0, 1.0], 4)
    tracker.summary({"loss": 0.5})
    tracker.finish()
    found = read(tmp_path / "tensorboard")
    assert set(found.Tags()["scalars"]) == {"loss", "seconds"}
    assert [event.step for event in found.Scalars("loss")] == [0, 1, 2, 3, 4]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([line["loss"] for line in LINES])
    (histogram,) = found.Histograms("log_ratio")
    assert histogram.histogram_value.num == 8 and list(histogram.histogram_value.bucket)[:3] == [1, 5, 2]
    text = found.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[-1] == "| 1+1 | a \\| b<br>c |"
    assert '"seed": 3' in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_steps_that_are_taken_again_stand_once_in_tensorboard(tmp_path):
    for lines in (LINES, LINES[3:]):
        tracker = TensorBoard(tmp_path, CONFIG)
        for line in lines:
            tracker.log(line, line["step"])
        tracker.finish()
    assert [event.step for event in read(tmp_path / "tensorboard").Scalars("loss")] == [0, 1, 2, 3, 4]


def test_a_run_that_only_ends_again_takes_nothing_out_of_tensorboards_sight(tmp_path):
    for lines in (LINES, []):
        tracker = TensorBoard(tmp_path, CONFIG)
        for line in lines:
            tracker.log(line, line["step"])
        tracker.summary({"loss": 0.5})
        tracker.finish()
    found = read(tmp_path / "tensorboard")
    assert [event.step for event in found.Scalars("loss")] == [0, 1, 2, 3, 4]
    assert len(found.Tensors("summary/text_summary")) == 2


def test_a_tracker_without_its_package_is_refused_with_the_remedy(monkeypatch):
    name, module = "tensorboard", "reports.tensorboard"
    config = make_config(f"trackers=[{name}]")
    check_trackers(config.trackers)
    for known in list(sys.modules):
        if known.startswith((f"{name}.", f"torch.utils.{name}")) or known in (name, module):
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"its package is not installed.*requirements/trackers.txt"):
        check_trackers(config.trackers)
