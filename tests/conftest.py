"""What all tests share: one thread a process, since there is a process for each core (pytest-xdist), and
charts that cost nothing."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import programs
from tests.quick_start import blank_charts, compose_quickly, prepare_once

gc.disable()  # until everything is imported: a quarter of the time that it takes would be spent on looking
sys.dont_write_bytecode = False  # or each worker rewrites the assertions of every test: a third of its start
atexit.register(gc.unfreeze)  # or libraries would complain of what they find at the very end
UNIT = Path(__file__).parent / "unit"
settings.register_profile("humanline", deadline=None)  # a loaded machine is slow, not wrong
settings.load_profile("humanline")


def pytest_configure(config: pytest.Config) -> None:
    """The process that shares the tests out imports no torch."""
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        compose_quickly()
        prepare_once()


def pytest_unconfigure(config: pytest.Config) -> None:
    programs.end_all()
    gc.freeze()  # pytest collects garbage five times at its very end, over all that is left


@pytest.fixture(scope="module", autouse=True)
def charts_of_whole_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run's report takes as long to draw as the run to train. Where reports are not what is tested they
    have blank charts."""
    with pytest.MonkeyPatch.context() as patch:
        if UNIT not in request.path.parents:
            blank_charts(patch.setattr)
        yield


@pytest.hookimpl(optionalhook=True)  # make test-quick has no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than there are cores (``-n auto``): a test that waits for a program, or for a time to
    pass, leaves its core to another."""
    return len(os.sched_getaffinity(0)) + 1


LONG = ("test_vllm", "test_docs_commands", "test_slurm", "test_kills", "test_equality", "test_stopping")
"""Files that take longest, which begin first: what ends last shall be short."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, long files come first, then whole runs, then the rest."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.stem
        return LONG.index(name) if name in LONG else len(LONG), UNIT in item.path.parents

    if hasattr(config, "workerinput"):
        items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: no collection of garbage need look at it again, and one is due less
    often than for a program with less memory."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    if "HUMANLINE_TEST_CPU_LOG" in os.environ:
        log_cpu("(start and collection)", programs.cpu_seconds())


def log_cpu(name: str, seconds: float) -> None:
    with open(os.environ["HUMANLINE_TEST_CPU_LOG"], "a") as log:
        log.write(f"{seconds:.3f}\t{name}\n")


if "HUMANLINE_TEST_CPU_LOG" in os.environ:

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """CPU seconds of each test with its fixtures, a line a test, in the file that the variable names."""
        before = programs.cpu_seconds()
        result = yield
        log_cpu(item.nodeid, programs.cpu_seconds() - before)
        return result
