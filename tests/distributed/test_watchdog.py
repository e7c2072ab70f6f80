"""Who the others wait for is named: a rank that is behind, or a stopped process."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

from common.ports import free_port
from models import watchdog
from models.distributed import any_rank, start, stop
from models.watchdog import slow_ranks
from tests import programs

SECONDS = 2.0


def test_the_rank_that_is_not_where_the_others_are_is_named_or_that_all_are_there():
    said = slow_ranks(["step 7, under way", "step 7, under way", "step 6, ready", "step 7, under way"], 300)
    assert said.startswith("no rank has moved for 300 s; most are at: step 7, under way; ")
    assert said.endswith("waited for: rank 2: step 6, ready")
    assert "all are at: step 7, under way" in slow_ranks(["step 7, under way"] * 4, 300)


HOLDER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
time.sleep(100000)
"""
"""Holds the ranks' store, as their launcher does."""
STEPPING = "import sys; from tests.distributed.test_watchdog import stepping; stepping(sys.argv[1])"


def stepping(until: str) -> None:
    """A rank that marks and waits for the others, step after step, until a file says stop. A rank without a
    sign of life for SECONDS is named, long before one that is behind."""
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


def heard(process: programs.Program, text: str) -> str:
    """What it has said, once ``text`` is in it."""
    programs.until(lambda: text in process.said() or process.poll() is not None, process.said)
    assert text in process.said(), process.said()
    return process.said()


def test_a_stopped_rank_is_named_and_when_it_goes_on_all_is_well(tmp_path):
    port = str(free_port())
    launched = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port}
    launched |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    holder = programs.start("-c", HOLDER, port)
    ranks = programs.ranks(2, "-c", STEPPING, tmp_path / "stop", env=launched)
    try:
        for process in ranks:
            heard(process, "started")
        time.sleep(2 * SECONDS)  # they have seen each other
        assert not any("no rank has moved" in process.said() for process in ranks)
        ranks[0].send_signal(signal.SIGSTOP)
        who = f"waited for: rank 0 (process {ranks[0].pid} on {socket.gethostname()})"
        said = heard(ranks[1], who)
        line = next(line for line in said.splitlines() if "no rank has moved" in line and who in line)
        assert "gives no sign of life" in line and "under way" in line and "rank 1" not in line
        ranks[0].send_signal(signal.SIGCONT)
        (tmp_path / "stop").touch()
        assert [process.wait() for process in ranks] == [0, 0]
    finally:
        for process in (*ranks, holder):
            process.send_signal(signal.SIGCONT)
            process.kill()
