"""Who the others wait for is named: a rank that is behind, or a stopped process."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.ports import free_port
from models import watchdog
from models.distributed import any_rank, start, stop
from models.watchdog import slow_ranks
from tests import programs

SECONDS = 2.0


def test_the_rank_that_is_not_where_the_others_are_is_named():
    said = slow_ranks(["step 7, under way", "step 7, under way", "step 6, ready", "step 7, under way"], 300)
    assert (
        said
        == "no rank has moved for 300 s; most are at: step 7, under way; waited for: rank 2: step 6, ready"
    )


def test_a_hang_of_all_is_said_to_be_one():
    assert "all are at: step 7, under way" in slow_ranks(["step 7, under way"] * 4, 300)


HOLDER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
time.sleep(100000)
"""
LAUNCHED = {"RUN_ID": "test", "USE_AGENT_STORE": "True", "RESTART_COUNT": "0"}


def stepping(until: str) -> None:
    """A rank that marks and waits for the others, step after step, until a file says stop. A rank without a sign of
    life for SECONDS is named, long before one that is behind."""  # noqa: E501
    world, step = start(), 0
    watchdog.INTERVAL = SECONDS / 4
    of_ranks = watchdog.Watchdog(world, 300.0)
    print("started", flush=True)
    while not any_rank(Path(until).exists()):
        step += 1
        of_ranks.mark(f"step {step}, under way")
        time.sleep(0.01)
    of_ranks.close()
    stop()


class Ranks:
    """Two gloo ranks that step together, and what stands for their launcher: a process that holds their
    store."""

    def __init__(self, folder: Path) -> None:
        self.until, self.logs = folder / "stop", [folder / f"{rank}.log" for rank in (0, 1)]
        port = str(free_port())
        self.holder = programs.start("-c", HOLDER, port)
        code = "import sys; from tests.distributed.test_watchdog import stepping; stepping(sys.argv[1])"
        launched = {f"TORCHELASTIC_{name}": value for name, value in LAUNCHED.items()}
        self.processes = [
            programs.start(
                *("-c", code, self.until),
                env=launched
                | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                log=log,
            )
            for rank, log in enumerate(self.logs)
        ]

    def wait_for(self, rank: int, text: str) -> str:
        """What ``rank`` has said, once ``text`` is in it."""
        process = self.processes[rank]
        programs.until(lambda: text in process.said() or process.poll() is not None, process.said)
        assert text in process.said(), process.said()
        return process.said()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        for rank in (0, 1):
            made.wait_for(rank, "started")
        time.sleep(2 * SECONDS)  # they have seen each other
        yield made
    finally:
        for process in (*made.processes, made.holder):
            process.send_signal(signal.SIGCONT)
            process.kill()


def test_a_stopped_rank_is_named_and_when_it_goes_on_all_is_well(ranks):
    assert "no rank has moved" not in "".join(log.read_text() for log in ranks.logs)
    process = ranks.processes[0]
    process.send_signal(signal.SIGSTOP)
    who = f"waited for: rank 0 (process {process.pid} on {socket.gethostname()})"
    said = ranks.wait_for(1, who)
    line = next(line for line in said.splitlines() if "no rank has moved" in line and who in line)
    assert "gives no sign of life" in line and "under way" in line and "rank 1" not in line
    process.send_signal(signal.SIGCONT)
    ranks.until.touch()
    assert [process.wait() for process in ranks.processes] == [0, 0]
