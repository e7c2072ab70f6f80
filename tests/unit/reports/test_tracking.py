"""Trackers, judged by the files that they leave behind, each read as its own reader does."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import ConfigError
from config.schema import WandbConfig
from reports.metrics import read_metrics
from reports.tensorboard import TensorBoard
from reports.trackers import check_trackers
from reports.tracking import Tracker
from tests.tiny import make_config

ROOT = Path(__file__).parents[3]
CONFIG = {"seed": 3, "humanline": True, "loss": {"name": "dpo", "beta": 0.1}}


@pytest.fixture(autouse=True)
def _logged_out(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")]


def test_numbers_that_json_lacks_become_null_and_a_failing_wandb_is_warned_about_once(
    tmp_path, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("wandb.init", refuse)
    tracker = Tracker(tmp_path, CONFIG, WandbConfig())
    kept = {"d": None, "e": True, "f": "x"}
    tracker.log({"step": np.int64(0), "a": float("nan"), "b": float("-inf"), "c": np.float32(0.5)} | kept)
    for step in range(1, 3):
        tracker.log({"step": step})
    tracker.table("samples", ["a"], [["b"]], 2)
    tracker.close()
    first, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(first, parse_constant=pytest.fail)
    assert read == {"step": 0, "a": None, "b": None, "c": 0.5} | kept and steps(tmp_path) == [0, 1, 2]
    assert capsys.readouterr().err.count("warning: wandb: failed (OSError: no space left)") == 1


# -- wandb -----------------------------------------------------------------------------------------

TRAIN = """
    import sys
    from pathlib import Path
    from config.schema import WandbConfig
    from reports.tracking import Tracker

    run_dir, first, last, run_id = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] or None
    config = {"seed": 3, "humanline": True, "loss": {"name": "dpo", "beta": 0.1}, "judge_api_key": "hunter2hunter2"}
    tracker = Tracker(run_dir, config, WandbConfig(tags=["mine"]), resumed=first > 0, wandb_id=run_id)
    if not first:
        tracker.table("samples_before", ["prompt", "completion"], [["2+2=", "5"]], step=0)
    for step in range(first, last):
        tracker.log({"step": step, "loss": 1 / (step + 1), "reference_step": None})
        tracker.diagnostics({"step": step, "entropy": 0.5}, {"log_ratio_chosen": ([step, 2, 3], [-1.0, 4.0])})
    tracker.table("samples_after", ["prompt", "completion"], [["2+2=", "4"]], step=last - 1)
    tracker.summary({"after": {"eval_reward_accuracy": 0.75}})
    tracker.close()
    print(tracker.wandb_id)
"""  # noqa: E501


def train(run_dir: Path, first: int, last: int, run_id: str, before: str = "", **env: str) -> tuple[str, str]:
    """(wandb id, everything the process said) of a logged-out run in a process of its own, that cannot answer
    a prompt."""
    words = ["-c", before + textwrap.dedent(TRAIN), str(run_dir), str(first), str(last), run_id]
    settings = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | env, check=False, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1], done.stdout + done.stderr


def records(path: Path) -> Iterator:
    """The records of a .wandb file: a LevelDB log (blocks of 32 KiB, chunks with a header of 7 bytes) after a
    header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    raw, at, whole = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:  # no room for a header: zeros up to the next block
            at += left
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        whole += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a chunk that is whole, or the last one
            yield Record.FromString(whole)
            whole = b""


def keyed(items) -> dict:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_has_every_step_config_tables_and_summary_over_a_resume(tmp_path):
    """A run killed after three steps and resumed."""
    run_dir = tmp_path / "my-run"
    named = {"WANDB_TAGS": "theirs", "WANDB_RUN_GROUP": "sweep", "WANDB_PROJECT": "other"}
    first, said = train(run_dir, 0, 3, "", **named)
    second, said_again = train(run_dir, 3, 5, first)
    written = [list(records(path)) for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(written) == 2
    history = [keyed(r.history.item) for run in written for r in run if r.HasField("history")]
    assert {h["step"]: h["loss"] for h in history} == {step: 1 / (step + 1) for step in range(5)}
    assert all(h["step"] == h["_step"] for h in history), "wandb's axis is the step, over the resume too"
    assert [h["log_ratio_chosen.values"] for h in history] == [[step, 2, 3] for step in range(5)]
    assert all(h["log_ratio_chosen.bins"] == [-2.0, -1.0, 4.0, 8.0] for h in history), "open bins are closed"
    (run,) = [r.run for r in written[0] if r.HasField("run")]
    config = keyed(run.config.update)
    assert config["loss"] == {"name": "dpo", "beta": 0.1} and "hunter2" not in json.dumps(config)
    assert (run.run_group, run.project) == ("sweep", "other")
    assert set(run.tags) == {"mine", "dpo", "offline+humanline"}
    tables = [json.loads(p.read_text()) for p in run_dir.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert [["2+2=", "5"]] in [t["data"] for t in tables]
    assert {tuple(t["columns"]) for t in tables} == {("prompt", "completion")}
    summary = json.dumps([keyed(r.summary.update) for r in written[1] if r.HasField("summary")])
    assert "eval_reward_accuracy" in summary
    assert first == second and (said + said_again).split() == [first, second], "no prompt, nothing else said"
    assert [line["step"] for line in read_metrics(run_dir / "diagnostics.jsonl")] == list(range(5))
    assert {p.name for p in run_dir.glob("wandb/offline-run-*/*.wandb")} == {f"run-{first}.wandb"}
    assert not (ROOT / "wandb").exists()  # all of it in the run's folder


@pytest.mark.parametrize(
    ("key", "why"), [("a" * 40, "connection refused"), ("short", "API key must have 40+ characters")]
)
def test_what_keeps_a_run_from_wandb_is_said_once_and_it_is_tracked_offline(tmp_path, key, why):
    """Also where a program has turned logging down."""
    before = (
        "import reports.tracking as t; t.INIT_SECONDS = 1.0\n"
        "import logging; logging.getLogger().setLevel(logging.ERROR)\n"
    )
    env = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    run_id, said = train(tmp_path, 0, 2, "", before, **env)
    assert steps(tmp_path) == [0, 1]
    assert list(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: wandb: ")]
    assert why in warning and "this run is tracked offline: `wandb sync" in warning and key not in warning


# -- TensorBoard -----------------------------------------------------------------------------------

LINES = [{"step": step, "loss": 0.7 - 0.01 * step, "eval_loss": None, "seconds": 1} for step in range(5)]


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
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
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
