"""A worker that does what the tests of worker processes need."""

import os
import subprocess
import sys
import time

from common.worker_process import serve


def fail(message: str) -> None:
    raise KeyError(message)


def say(message: str) -> None:
    print(message, flush=True)


def hang() -> None:
    time.sleep(600)


def spawn() -> int:
    """A child of the worker's own, as engines with tensor parallelism have, holding the worker's end of the
    pipe open, as a forked child would; returns its process id."""
    return subprocess.Popen(["sleep", "600"], pass_fds=(int(sys.argv[1]),)).pid


def fork_and_return() -> int:
    """Returns in the child as well."""
    return os.fork()


def scribble() -> None:
    """What code does that writes into every descriptor."""
    os.write(int(sys.argv[1]), b"\0\0\0\5hello")


if __name__ == "__main__":
    own = (fail, say, hang, spawn, fork_and_return, scribble)
    others = {"echo": lambda value: value, "environment": os.environ.get, "unsendable": lambda: (lambda: 1)}
    serve({handler.__name__: handler for handler in own} | others)
    print("left")
