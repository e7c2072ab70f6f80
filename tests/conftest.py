"""One thread a process: the tests run as many processes as there are cores (pytest-xdist), and so do the programs that they start."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def cpu_seconds() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def log_cpu(name: str, seconds: float) -> None:
    with open(os.environ["HUMANLINE_TEST_CPU_LOG"], "a") as log:
        log.write(f"{seconds:.3f}\t{name}\n")


if "HUMANLINE_TEST_CPU_LOG" in os.environ:

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """CPU seconds of each test with its fixtures, a line a test; docs/contributing.md says how to read them."""
        before = cpu_seconds()
        result = yield
        log_cpu(item.nodeid, cpu_seconds() - before)
        return result

    def pytest_collection_finish(session: pytest.Session) -> None:
        log_cpu("(start and collection)", cpu_seconds())
