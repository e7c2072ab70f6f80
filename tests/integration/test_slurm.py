"""A sweep through a real Slurm: two nodes of one machine, brought up by tools/slurm/up.sh. Skips where its
daemons cannot run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from launch import sweep
from launch.state import Statuses
from tests.programs import HANG, until

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / "tools" / "slurm"
pytestmark = pytest.mark.skipif(
    shutil.which("slurmctld", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None,
    reason="slurmctld is not installed: tools/slurm/install.sh, as root, installs it",
)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    words = ["bash", str(TOOLS / "up.sh"), str(folder), "2", "MaxArraySize=3"]
    up = subprocess.run(words, capture_output=True, text=True, timeout=HANG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            if up.returncode:
                pytest.skip(f"Slurm's daemons do not run here: {up.stderr[-500:]}")
            yield folder
        finally:
            subprocess.run(["bash", str(TOOLS / "down.sh"), str(folder)], timeout=HANG, check=False)


def logs_of(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.rglob("*.out")))


def queue(*words: str) -> str:
    command = ["squeue", "--noheader", *(words or ("--array", "--format=%F_%K %T"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def until_done(logs: Path) -> None:
    until(lambda: not queue(), lambda: queue() + logs_of(logs))


def set_limit(job: str, minutes: int) -> None:
    """The job's time limit: so many minutes from now, rounded up; of less than 45 seconds one more, since its
    last 40 are for saving."""
    whole, seconds = map(int, queue(f"--job={job}", "--format=%M").strip().split(":"))
    limit = whole + minutes + (seconds > 15)
    subprocess.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={limit}"], check=True)


def test_ranks_find_each_other_and_exit_codes_are_understood(tmp_path: Path) -> None:
    """With a stand-in for python that notes what each rank is given, and leaves with the codes that train.py
    has. It is in a container alone, which an option of srun makes; and the runs are one more than an array
    may have."""
    fake, notes, file = tmp_path / "python", tmp_path / "notes", tmp_path / "codes.yaml"
    fake.write_text(f"""#!/bin/bash
[ "$INSIDE" = container ] || {{ echo "no python outside of the container"; exit 127; }}
[ "$1" = -c ] && exec {sys.executable} "$@"
code=$(tr ' ' '\\n' <<< "$*" | sed -n 's/^seed=//p')
echo "$code $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $SLURM_NODEID" >> {notes}
sleep 0.5
[ "$code" = 75 ] && [ "$(grep -c '^75 0 ' {notes})" -gt 1 ] && exit 0
exit $code
""")
    fake.chmod(0o755)
    job = {
        "nodes": 2,
        "gpus_per_node": 0,
        "ranks_per_node": 2,
        "cpus_per_rank": 1,
        "time": "5",
        "signal_lead": 10,
        "retries": 1,
        "python": str(fake),
        "srun": ["--export=ALL,INSIDE=container"],
        "running_at_once": 1,
    }
    parts = {"base": {"runs_dir": str(tmp_path / "runs")}, "seeds": [0, 1, 2, 75], "slurm": job}
    file.write_text(yaml.safe_dump(parts))
    assert sweep.main([str(file), "--submit", "--logs", str(tmp_path / "logs")]) == 0
    record = (tmp_path / "logs" / "codes" / "submitted.jsonl").read_text().splitlines()
    arrays = [json.loads(line) for line in record]
    assert [made["runs"] for made in arrays] == [["codes-s0", "codes-s1", "codes-s2"], ["codes-s75"]]
    assert len({made["array"] for made in arrays}) == 2, "the second waits for the first: running_at_once"
    until_done(tmp_path)
    lines = [line.split() for line in notes.read_text().splitlines()]
    starts = Counter((line[0], line[1]) for line in lines)
    often = {"0": 1, "1": 2, "2": 1, "75": 2}  # once, retried, refused, requeued
    assert starts == {(code, rank): n for code, n in often.items() for rank in "0123"}
    first = [line for line in lines if line[0] == "0"]
    assert {line[1] + line[2] + line[6] for line in first} == {"000", "110", "201", "311"}
    assert {line[3] for line in lines} == {"4"} and {line[4] for line in lines} == {"n1"}
    assert len({line[5] for line in first}) == 1, "ranks of one run have different ports"
    assert all(line[5].isdigit() for line in lines), "a port that was found in the container"
    statuses = Statuses(tmp_path / "logs" / "codes")
    found = [statuses.of(run, tmp_path / "runs" / run) for run in ("codes-s1", "codes-s2", "codes-s9")]
    assert [status.kind for status in found] == ["failed", "failed", "not started"]
    assert "exit code 1" in str(found[0].log and found[0].log.read_text())


@pytest.mark.timeout(4 * HANG)
def test_a_cancelled_run_and_one_that_meets_its_time_limit_finish(tmp_path: Path) -> None:
    """The embedded task: it is cancelled and submitted again; then it meets its time limit (it is held up
    until then, so that it does so on any machine)."""
    runs, logs, name = tmp_path / "runs", tmp_path / "logs", "adder-long-s1"
    base = {"runs_dir": str(runs), "cache_dir": str(tmp_path / "c"), "wandb.enabled": False, "report": False}
    base |= {"n_eval_examples": 8, "n_eval_prompts": 2, "model.batch_size": 8}
    job = {"gpus_per_node": 0, "cpus_per_rank": 1, "time": "20", "signal_lead": 40, "python": sys.executable}
    file = tmp_path / "adder.yaml"
    file.write_text(yaml.safe_dump({"base": base, "cells": {"long": {"n_examples": 320}}, "slurm": job}))

    def submitted() -> list[str]:
        assert sweep.main([str(file), "--submit", "--logs", str(logs)]) == 0
        return [
            json.loads(line)["array"] for line in (logs / "adder/submitted.jsonl").read_text().splitlines()
        ]

    (array,) = submitted()
    subprocess.run(["scancel", f"{array}_0"], check=True)
    until_done(logs)
    _, array = arrays = submitted()
    assert submitted() == arrays, "what is queued is left alone"
    log = lambda: "".join(p.read_text() for p in (logs / "adder").glob(f"{name}.*.out"))  # noqa: E731
    metrics = runs / name / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, lambda: queue() + logs_of(logs))
    subprocess.run(["scancel", "--signal=STOP", f"{array}_0"], check=True)
    set_limit(f"{array}_0", 1)
    until(lambda: "the time limit is near: saving" in log(), lambda: queue() + logs_of(logs))
    subprocess.run(["scancel", "--signal=CONT", f"{array}_0"], check=True)
    set_limit(f"{array}_0", 20)
    until(lambda: (runs / name / "summary.json").exists() or not queue(), lambda: queue() + logs_of(logs))
    assert (runs / name / "summary.json").exists(), logs_of(logs)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(40)), "every step is there once"
    assert "exit code 75" in log() and "start 2] on" in log() and "resumed before step" in log()
    until_done(logs)
    assert submitted() == arrays, "nothing is left to submit"
