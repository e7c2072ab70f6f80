"""Who the others wait for is named: a rank that is behind, or a stopped process."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.ports import free_port
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


class Ranks:
    """Two gloo ranks that step together, and what stands for their launcher: a process that holds their
    store."""

    def __init__(self, folder: Path) -> None:
        self.until, self.logs = folder / "stop", [folder / f"{rank}.log" for rank in (0, 1)]
        port = str(free_port())
        self.holder = programs.start("-c", HOLDER, port)
        launched = {f"TORCHELASTIC_{name}": value for name, value in LAUNCHED.items()}
        self.processes = [
            programs.start(
                *("-m", "tests.distributed.stepping", str(SECONDS), self.until),
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
    """Rank 1 and rank 0, each in turn; all go on afterwards and end."""
    assert "no rank has moved" not in "".join(log.read_text() for log in ranks.logs)
    for stopped, other in ((1, 0), (0, 1)):
        process = ranks.processes[stopped]
        process.send_signal(signal.SIGSTOP)
        who = f"waited for: rank {stopped} (process {process.pid} on {socket.gethostname()})"
        said = ranks.wait_for(other, who)
        line = next(line for line in said.splitlines() if "no rank has moved" in line and who in line)
        assert "gives no sign of life" in line and "under way" in line and f"rank {other}" not in line
        process.send_signal(signal.SIGCONT)
        time.sleep(2 * SECONDS)
    ranks.until.touch()
    assert [process.wait() for process in ranks.processes] == [0, 0]
