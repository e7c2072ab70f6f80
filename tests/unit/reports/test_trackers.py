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
    """Steps that are taken again stand once; a run that only ends again takes nothing out of sight."""
    for lines in (LINES, LINES[3:], []):
        tracker = TensorBoard(tmp_path, CONFIG)
        for line in lines:
            tracker.log(line, line["step"])
        if lines is LINES:
            tracker.table("samples", ["prompt", "answer"], [["1+1", "a | b\nc"]], 4)
            tracker.histogram("log_ratio", [1, 5, 2], [-1.0, 1.0], 4)
        tracker.summary({"loss": 0.5})
        tracker.finish()
        found = read(tmp_path / "tensorboard")
        assert set(found.Tags()["scalars"]) == {"loss", "seconds"}
        events = found.Scalars("loss")
        assert [(event.step, event.value) for event in events] == [
            (line["step"], pytest.approx(line["loss"])) for line in LINES
        ]
        if lines is LINES:
            (histogram,) = found.Histograms("log_ratio")
            values = histogram.histogram_value
            assert values.num == 8 and list(values.bucket)[:3] == [1, 5, 2]
            text = found.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
            assert text.splitlines()[-1] == "| 1+1 | a \\| b<br>c |"
            settings = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
            assert '"seed": 3' in settings


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
