"""Worker processes without an engine: what goes wrong in one reaches its owner, quickly and with a cause, and
none outlives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.worker_process import ROOT, WorkerError, WorkerProcess, run_workers_on
from tests.programs import alive, until

ECHO = "tests.unit.common.echo_worker"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(ECHO, log=tmp_path / "echo.log", env={"COLOUR": "blue"})
    yield worker
    worker.close(grace=0.0)


def test_replies_come_in_order_and_an_exception_brings_its_traceback(worker):
    """And the worker lives on."""
    for call, error in ((("fail", "no such"), r"in fail.*KeyError: 'no such'"), (("unsendable",), "pickle")):
        with pytest.raises(WorkerError, match=rf"(?s)Traceback.*{error}"):
            worker.call(*call, timeout=900)
    for n in range(5):
        worker.send("echo", n)
    assert [worker.receive(10) for _ in range(5)] == list(range(5))


def test_a_worker_runs_on_the_cores_of_its_nodes_ranks_and_not_on_its_owners_alone(tmp_path):
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        pytest.skip("this machine has one core")
    try:
        os.sched_setaffinity(0, {min(every)})  # as Slurm does for each rank
        run_workers_on(every)
        worker = WorkerProcess(ECHO, log=tmp_path / "echo.log", env={})
        assert worker.call("echo", 1, timeout=900) == 1 and os.sched_getaffinity(worker.pid) == every
        worker.close()
    finally:
        os.sched_setaffinity(0, every)
        run_workers_on(set())


def test_a_killed_worker_is_an_error_at_once_and_its_last_words_are_in_it(worker):
    """The pipe has no end of file where a child holds it open: the worker's death must be seen by itself, and
    the child be killed."""
    worker.call("say", "about to go", timeout=900)
    child = worker.call("spawn", timeout=900)
    worker.send("hang")
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)died.*SIGKILL.*about to go"):
        worker.receive(timeout=900)
    assert time.monotonic() - began < 5
    with pytest.raises(WorkerError, match="died"):
        worker.send("echo", 1)
    until(lambda: not alive(child), seconds=10)


def test_a_child_that_returns_from_its_fork_replies_to_nothing(worker):
    """Nor does it take a request from the pipe; and it is gone."""
    children = [worker.call("fork_and_return", timeout=900) for _ in range(3)]
    assert [worker.call("echo", n, timeout=900) for n in range(5)] == list(range(5))
    until(lambda: not any(alive(pid) for pid in children), seconds=10)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("scribble",), "wrote what is no reply and was killed"),
        (("hang",), r"did not answer within 0\.7 s and was killed"),
    ],
)
def test_what_is_no_reply_and_silence_end_the_worker_and_nothing_is_left(worker, call, error):
    child = worker.call("spawn", timeout=900)
    worker.send(*call)
    with pytest.raises(WorkerError, match=error):
        worker.receive(timeout=0.7 if call == ("hang",) else 900)
    until(lambda: not alive(worker.pid) and not alive(child), seconds=10)


def test_output_without_a_log_is_kept_and_goes_on_in_the_log_that_is_named_later(tmp_path):
    worker = WorkerProcess(ECHO, log=None, env={})
    worker.call("say", "one", timeout=900)
    assert worker.last_words() == "one"
    log = tmp_path / "new" / "echo.log"
    log.parent.mkdir()
    log.write_text("another's\n")
    worker.log_to(log, timeout=900)
    worker.call("say", "two", timeout=900)
    assert (worker.last_words(), log.read_text()) == ("one\ntwo", "another's\none\ntwo\n")
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"(?s)SIGKILL.*the end of .*echo.log:\none\ntwo$"):
        worker.call("echo", 1, timeout=900)


def test_no_worker_outlives_its_owner(tmp_path):
    """Not even in the middle of a request, when the owner is killed and can do nothing about it."""
    program = f"""
import time
from pathlib import Path
from common.worker_process import WorkerProcess
worker = WorkerProcess({ECHO!r}, log=Path({str(tmp_path / "log")!r}), env={{}})
child = worker.call("spawn", timeout=900)
worker.send("hang")
print(worker.pid, child, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        owner.kill()
    until(lambda: not any(alive(pid) for pid in pids), seconds=10)
