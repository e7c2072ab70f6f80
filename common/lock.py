"""A lock on a file: one process holds it until it ends, in whatever way, and the file says who that is.

It is a POSIX record lock (``fcntl.lockf``). The kernel lets go of it when its process ends, so a dead process
holds nothing, and a process that was forked from the holder does not hold it either. It works over NFS, and
over Lustre where that is mounted with locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_ATTEMPTS = 20
_FLOCK = "hhqqi4x"
"""Linux's struct flock: kind, whence, start, length, process."""


class LockedError(Exception):
    """Another process holds the lock. ``str()`` says which: process, host, since when, Slurm job."""


class FileLock:
    """The lock on one file. The process that holds it must not open the file otherwise: closing that would
    let go of the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why there is no lock although ``acquire`` was called: the file system offers none"""
        self._stream: IO[bytes] | None = None

    def acquire(self) -> None:
        """Hold the lock, without waiting; the folder is made if need be. Raises LockedError, OSError."""
        for _ in range(_ATTEMPTS):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stream = self.path.open("a+b")
            except FileNotFoundError:  # the one before has just removed the folder that it made for nothing
                continue
            if self._take(stream):
                self._stream = stream
                return
            stream.close()
        raise LockedError("a process that starts and ends again and again")

    def _take(self, stream: IO[bytes]) -> bool:
        """Whether ``stream`` is now locked, or cannot be; False: it is no longer the file at ``path``. Raises
        LockedError, OSError."""
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                self.problem = os.strerror(error.errno)
                return True
            with stream:
                raise LockedError(_owner(stream)) if error.errno in _HELD else error from None
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(stream.fileno()), self.path.stat())
        return False

    def sign(self) -> None:
        """Write into the file who holds the lock. A full disk prevents that, and nothing else."""
        assert self._stream is not None, "acquire comes first"
        job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ.get("SLURM_JOB_ID"))
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        facts = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "slurm_job": f"{job}_{task}" if job and task else job,
        }
        with suppress(OSError):
            self._stream.truncate(0)
            self._stream.write((json.dumps(facts) + "\n").encode())
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def release(self, remove: bool = False) -> None:
        """Let go of the lock; ``remove``: of the file too. Nothing where it is not held."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if remove:  # while the lock is held: nobody can hold a lock on what is removed here
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written of the owner is tried again
            stream.close()


def holder(path: Path) -> str | None:
    """Who holds the lock on the file ``path``, in words; None if nobody does, or the system cannot be asked.

    It takes no lock, so it is in nobody's way. It does not see a lock of this process, and ends it: see
    ``FileLock``.
    """
    if sys.platform != "linux":  # the form of the question is the system's own
        return None
    try:
        with path.open("rb") as stream:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, question))
            return None if kind == fcntl.F_UNLCK else _owner(stream)
    except OSError:  # no such file, or a file system without locks
        return None


def _owner(stream: IO[bytes]) -> str:
    """Who holds the lock, in words."""
    try:
        stream.seek(0)
        facts: dict[str, Any] = json.loads(stream.read())
        job = f" (Slurm job {facts['slurm_job']})" if facts["slurm_job"] else ""
        return f"process {facts['pid']} on {facts['host']}, since {facts['since']}{job}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not said yet which it is"
