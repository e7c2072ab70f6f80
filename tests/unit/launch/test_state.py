"""What became of a run, from its log and from what Slurm says. Logs are as job.sh.j2 writes them."""

from __future__ import annotations

import json
from pathlib import Path

from config.load import LOCK
from launch.slurm import RECORD
from launch.state import Statuses, last_words
from tests.unit.common.test_lock import holder  # noqa: F401
from tests.unit.launch.test_slurm import fakes


def log_of(*lines: str) -> str:
    """Lines that begin with '>' are the script's own."""
    start = "[2026-11-21 19:04:49 s-a-s1, job 7_0, start 1] "
    return "".join((start + line[1:] if line.startswith(">") else line) + "\n" for line in lines)


LOST = "RuntimeError: lost|>exit code 1|>failed: trying again|OSError: gone|>exit code 1"
LOGS = {
    "error: lr=-1: low|srun: error: n1: task 0: Exited|>exit code 2": ("failed", "error: lr=-1: low"),
    "Traceback …|torch.OutOfMemoryError: CUDA|cleaning up|>exit code 1": ("failed", "MemoryError: CUDA"),
    "Killed|>exit code 137": ("failed", "Killed"),
    ">failed before training (exit code 127): module load x|>exit code 1": ("failed", "module load x"),
    "saved|>exit code 75": ("interrupted", ""),
    ">Slurm ends this job|RuntimeError: broken pipe|>exit code 1": ("interrupted", ""),
    "step 3": ("interrupted", ""),
    "ValueError: old|>exit code 1|>on n2|step 3": ("interrupted", ""),
    LOST: ("failed", "OSError: gone"),
}
LAST = {
    "[rank1]: ValueError: y|torch.distributed.ChildFailedError: z|=====": "ValueError: y",
    "step 3|slurmstepd-n1: error: *** STEP CANCELLED ***|": "step 3",
    "": "",
}


def test_what_a_log_says(tmp_path: Path) -> None:
    for lines, (kind, detail) in LOGS.items():
        (tmp_path / "s-a-s1.7.out").write_text(log_of(">on n1", *lines.split("|")))
        found = Statuses(tmp_path).of("s-a-s1", tmp_path / "s-a-s1")
        assert found.kind == kind and found.detail.endswith(detail), lines
        assert found.log == tmp_path / "s-a-s1.7.out"
    for lines, word in LAST.items():
        assert last_words(lines.split("|") if lines else []) == word


def test_a_run_whose_process_is_at_work_is_running(tmp_path: Path, holder) -> None:  # noqa: F811
    """Whatever its logs say: it may have been started by hand."""
    (tmp_path / "s-a-s1.7.out").write_text(log_of(">on n1", "boom", ">exit code 1"))
    process = holder(tmp_path / "s-a-s1" / LOCK)
    status = Statuses(tmp_path).of("s-a-s1", tmp_path / "s-a-s1")
    assert status.kind == "running" and f"process {process.pid} on" in status.detail
    process.kill()
    process.wait()
    assert Statuses(tmp_path).of("s-a-s1", tmp_path / "s-a-s1").kind == "failed"


def test_what_slurm_says(tmp_path: Path, monkeypatch) -> None:
    """The queue before the logs, accounting for those that left no word of their end; neither where it is not
    there."""
    names = ["waits", "runs", "starved", "cancelled", "no-node", "done", "unknown", "refused"]
    (tmp_path / "slurm").mkdir()
    (tmp_path / RECORD).write_text(json.dumps({"array": "7", "runs": names}) + "\n")
    (tmp_path / "starved.1.out").write_text(log_of(">on n1", "step 3"))
    (tmp_path / "slurm" / "7_7.out").write_text("slurmstepd: error: could not open the log\n")
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "summary.json").write_text("{}")
    said = "7_2|OUT_OF_MEMORY\n7_3|CANCELLED by 0\n7_4|NODE_FAIL\n7_5|COMPLETED\n7_0|PENDING\n"
    answers = {"squeue": "7_0 PENDING\n7_1 RUNNING\n", "sacct": said}
    fakes(tmp_path, monkeypatch, **{name: f"cat <<'E'\n{text}E" for name, text in answers.items()})
    statuses = Statuses(tmp_path)
    found = {name: statuses.of(name, tmp_path / name) for name in names}
    kinds = ["waiting", "running", "failed", "not started", "failed", "finished", "not started", "failed"]
    assert [found[name].kind for name in names] == kinds
    assert found["starved"].detail == "Slurm: OUT_OF_MEMORY; step 3"
    assert found["refused"].detail == "slurmstepd: error: could not open the log"
    fakes(tmp_path, monkeypatch, **dict.fromkeys(answers, "echo no cluster here >&2; exit 1"))
    assert Statuses(tmp_path).of("runs", tmp_path / "runs").kind == "not started"
