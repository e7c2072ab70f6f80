"""A file lock that one process holds until the process ends, in whatever way; the file says which process it
is.

The lock is a POSIX record lock (``fcntl.lockf``). The kernel releases it when the process ends, so a dead
process holds no lock. A process forked from the holder does not hold it either. The lock works over NFS, and
over Lustre if that is mounted with locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from common.files import open_own

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_FLOCK = "hhqqi4x"
"""Layout of Linux's struct flock: type, whence, start, length, process id."""


class LockedError(Exception):
    """Another process holds the lock. ``str()`` describes it: process id, host, start time."""


class FileLock:
    """The lock on one file. The process that holds the lock must not open the file in any other way, because
    closing it again would release the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """Why ``acquire`` got no lock: the error of a file system that offers no locks"""
        self._stream: IO[bytes] | None = None

    def acquire(self) -> None:
        """Take the lock without waiting, and create the folder if necessary. Raises LockedError, and OSError,
        for example for a file that is a link (``open_own``)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stream = os.fdopen(open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                with stream:
                    raise LockedError(_owner(stream)) if error.errno in _HELD else error from None
            self.problem = os.strerror(error.errno)
        if not self.path.exists() or not os.path.samestat(os.fstat(stream.fileno()), self.path.stat()):
            stream.close()
            raise LockedError("a process that has just ended and removed it: start again")
        self._stream = stream

    def sign(self) -> None:
        """Write into the file which process holds the lock. If the disk is full, the file stays without this
        text, but the lock still holds."""
        assert self._stream is not None, "acquire comes first"
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        with suppress(OSError):
            self._stream.truncate(0)
            self._stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def release(self, remove: bool = False) -> None:
        """Release the lock, and with ``remove`` also delete the file. Does nothing if the lock is not
        held."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if remove:  # removed while the lock is held, so that no other process can have locked this file
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # closing the file retries a failed write of the owner's description
            stream.close()


def holder(path: Path) -> str | None:
    """Return a description of the process that holds the lock on the file ``path``; None if no process does
    or the system cannot be asked.

    The function takes no lock, so it does not block other processes. Do not call it in a process that holds
    the lock itself: it does not see that lock and releases it (see ``FileLock``).
    """
    if sys.platform != "linux":  # the layout of struct flock is specific to Linux
        return None
    try:
        with path.open("rb") as stream:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, question))
            return None if kind == fcntl.F_UNLCK else _owner(stream)
    except OSError:  # no such file, or a file system without locks
        return None


def _owner(stream: IO[bytes]) -> str:
    """Return a description of the process that holds the lock, read from the file."""
    stream.seek(0)
    return stream.read().decode(errors="replace").strip() or "a process that has not said yet which it is"
