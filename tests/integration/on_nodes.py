"""An online run as one rank of two launchers on this machine, each of which is a node."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from common.ports import free_port
from config.cli import guarded
from rollouts.vllm.engines import Engines
from rollouts.vllm.handover import HandOver
from rollouts.vllm.nodes import Nodes
from tests import programs
from tests.integration.online import kill_while_it_samples, run_online
from tests.programs import Program, writers
from trainers.basic import BasicTrainer

RANKS = 2


def launched(folder: Path, nodes: int, how: str, *overrides: str) -> list[Program]:
    """The launchers of so many nodes, of two ranks together, each with a TMPDIR of its own; ``how``: what
    happens on the second node (``main``)."""
    port, started = str(free_port()), []
    for node in range(nodes):
        scratch = folder / f"tmp-{node}"
        scratch.mkdir(parents=True, exist_ok=True)
        words = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"]
        words += [f"--nproc-per-node={RANKS // nodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        words += ["-m", "tests.integration.on_nodes", str(folder), how, *overrides]
        env = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        started.append(programs.start(*words, env=env, log=folder / f"node-{node}.log"))
    return started


def finished(folder: Path, nodes: int, how: str, *overrides: str) -> list[int]:
    """The launchers' exit codes."""
    return [program.wait() for program in launched(folder, nodes, how, *overrides)]


def kill(engines: Engines) -> None:
    os.kill(writers(engines._workers[0].log)[0], signal.SIGKILL)  # type: ignore[arg-type]


def main(folder: Path, how: str, *overrides: str) -> None:
    """``how``: "" or when the second node's engine is killed (``sampling``, ``training``,
    ``giving``)."""
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["GROUP_RANK"]) == 1:
            if how == "sampling":
                kill_while_it_samples(patch, 1)
            before = {"training": (BasicTrainer, "step"), "giving": (HandOver, "_loaded")}.get(how)
            if before is not None:
                _kill_before(patch, *before)
        guarded(lambda: run_online(folder, "r", *overrides))


def _kill_before(patch: pytest.MonkeyPatch, of: type, name: str) -> None:
    """Kill the engine before the second call of a method, by the first that has it."""
    found, calls, method = list[Nodes](), [0], getattr(of, name)
    made = Nodes.__init__

    def note(self, *arguments) -> None:
        made(self, *arguments)
        found.append(self)

    def called(self, *arguments):
        calls[0] += 1
        if calls[0] == 2:
            kill(found[-1].engines)
        return method(self, *arguments)

    patch.setattr(Nodes, "__init__", note)
    patch.setattr(of, name, called)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
