"""The lock on a file, between real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from common import lock as module
from common.lock import FileLock, LockedError
from tests.tiny_files import ROOT

HOLD = """
import os, sys, time
from pathlib import Path
from common.lock import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire()
lock.sign()
if sys.argv[2:] == ["fork"] and os.fork() == 0:
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder():
    """Start a process that holds the lock on a file; returns it once it does. What is left of it is
    killed."""
    started = []

    def start(path: Path, *how: str) -> subprocess.Popen[str]:
        command, opened = [sys.executable, "-c", HOLD, str(path), *how], {"start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **opened)
        started.append(process)
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_process_is_refused_with_the_holders_name_and_asking_takes_no_lock(tmp_path, holder):
    path = tmp_path / "new" / "lock"
    assert module.holder(path) is None
    process = holder(path)
    written = path.read_bytes()
    with pytest.raises(LockedError) as refused:
        FileLock(path).acquire()
    for words in (str(refused.value), module.holder(path) or "", module.holder(path) or ""):
        assert f"process {process.pid} on {socket.gethostname()}, since 20" in words
    assert path.read_bytes() == written


@pytest.mark.parametrize("how", [(), ("fork",)], ids=["alone", "with a child that lives on"])
def test_a_dead_process_holds_nothing(tmp_path, holder, how):
    process = holder(tmp_path / "lock", *how)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / "lock").exists() and module.holder(tmp_path / "lock") is None
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    lock.sign()
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    lock.release()


def test_a_lock_on_a_removed_file_is_none_and_a_file_system_without_locks_is_not_fatal(tmp_path, monkeypatch):
    """Whoever opened the file before it was removed must not think that it holds the lock: another may have a
    new one."""
    lock, path = FileLock(tmp_path / "lock"), tmp_path / "lock"
    monkeypatch.setattr(fcntl, "lockf", lambda *_: path.unlink())  # just ended, while this one waited
    with pytest.raises(LockedError, match="start again"):
        lock.acquire()

    def none(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)  # every file system of this machine has locks
    lock.acquire()
    assert lock.problem == os.strerror(errno.ENOLCK)
    lock.release()
