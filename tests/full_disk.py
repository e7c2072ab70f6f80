"""A disk without room, as far as a process can see: files that may not grow beyond a size."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def set_limit(size: int | None) -> None:
    """Let no file of this process grow beyond ``size`` bytes; None: let them grow again."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    set_limit(size)
    try:
        yield
    finally:
        set_limit(None)
