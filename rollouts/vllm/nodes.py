"""The engines of all nodes as one set.

Rank 0 requests. On each node the leader, its first rank, asks the node's own engines, all leaders at once,
and every rank learns where that failed. So all ranks go on alike: with what came, once more, or to the end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from common.errors import UserError, require
from common.worker_process import WorkerError
from config.schema import Config
from data.types import Sequence
from models.distributed import Done, Ranks, World, on_every_rank, on_main
from rollouts.vllm.engines import Engines
from rollouts.vllm.messages import Generated, GenerateRequest
from rollouts.vllm.options import with_engines

T = TypeVar("T")
R = TypeVar("R")
Failures = dict[int, "NodeError"]
Asked = Callable[[Mapping[int, T]], dict[int, Done[R]]]
"""What rank 0 calls with a value for each node that is to do something; returns what came of it there."""


class NodeError(WorkerError):
    """One or several nodes that could not do what was requested. ``died``: because their engines failed,
    which are closed then."""

    died = False


class Nodes:
    """The engines of every node, equally many on each.

    Every rank has an instance, and makes it and ``renew``s it alike. Rank 0 alone calls the others, within
    ``ranks.on_main``."""

    def __init__(self, config: Config, world: World, ranks: Ranks, log_dir: Path) -> None:
        """``log_dir``: for the engines' output. Raises ConfigError where a node does not see it."""
        self.config, self.world, self.ranks, self.log_dir = config, world, ranks, log_dir
        hosts = on_every_rank(socket.gethostname)
        self.hosts = [hosts[rank] for rank in world.leaders]
        if len(self.hosts) > 1:
            self._check_folder()
        # what ``some`` and ``all`` take: the methods of Engines
        self.start: Asked[str, bool] = self.request(lambda text: self.engines.start(text))
        self.needs_head: Asked[None, bool] = self.request(lambda _: self.engines.needs_head())
        self.sleep: Asked[None, None] = self.request(lambda _: self.engines.sleep())
        self.logprobs: Asked[list[Sequence], Any] = self.request(lambda rows: self.engines.logprobs(rows))
        self.generate: Asked[list[list[GenerateRequest]], list[list[Generated]]] = self.request(
            lambda shares: self.engines.generate(shares)
        )
        self.renew(trains=config.online and world.size > 1)  # a single process may have no trainer

    def _check_folder(self) -> None:
        """Raise ConfigError unless every node sees what rank 0 writes beside its logs: weights that are kept
        are read there."""
        token = self.log_dir / f".{on_main(lambda: uuid4().hex)}"

        def write() -> None:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            token.touch()

        on_main(write)
        seen = on_every_rank(token.exists)
        on_main(partial(token.unlink, missing_ok=True))
        blind = [host for rank, host in zip(self.world.leaders, self.hosts, strict=True) if not seen[rank]]
        require(
            not blind,
            "runs_dir",
            self.config.runs_dir,
            f"is on {self.hosts[0]}, and not on {', '.join(blind)}, which are nodes of this run too: name a "
            "folder that all of them share",
        )

    def renew(self, trains: bool) -> None:
        """Make the engines anew, not started yet. ``trains``: whether ranks train beside them. Raises
        ConfigError for engines that a node has no room for, and for nodes with different numbers of them."""
        ranks = len(self.world.ranks_of_node) if trains else None
        sampler = self.config.sampler

        every = on_every_rank(lambda: with_engines(sampler, torch.cuda.device_count(), ranks))
        sampler_here = every[self.world.leaders[self.world.node]]
        copies = [every[rank].copies for rank in self.world.leaders]
        counts = ", ".join(f"{count} on {host}" for host, count in zip(self.hosts, copies, strict=True))
        require(
            len(set(copies)) == 1,
            "sampler.data_parallel",
            sampler.data_parallel,
            f"would be {counts}, and every node has as many engines: use {min(copies)}",
        )
        beside = self.hosts.count(self.hosts[self.world.node])
        self.engines = Engines(
            self.config, sampler_here, self.log_dir, self.world.node * sampler_here.copies, beside
        )

    @property
    def every(self) -> range:
        """The numbers of all nodes."""
        return range(len(self.world.leaders))

    @property
    def engines_of_all(self) -> int:
        """Number of engines of all nodes together."""
        return len(self.engines.sizes) * len(self.every)

    # -- requests ----------------------------------------------------------------------------------

    def request(self, work: Callable[[T], R]) -> Asked[T, R]:
        """Return a function with which rank 0 lets the leaders of some nodes ``work`` at once, each with the
        value for its node. Every rank calls this alike, as ``Ranks.on_leaders``."""

        def of_node(value: T) -> R:
            results: list[R] = []
            if (failure := self.failure_of(lambda: results.append(work(value)))) is not None:
                raise failure
            return results[0]

        return self.ranks.on_leaders(of_node, self.world)

    def failure_of(self, work: Callable[[], object]) -> NodeError | None:
        """Return why ``work`` failed on this rank, as any rank can be sent it; None if it did not."""
        try:
            work()
        except Exception as error:
            several, leads = len(self.hosts) > 1, self.world.is_leader
            place = f"node {self.world.node} ({self.hosts[self.world.node]}): " if several else ""
            place += "" if leads else f"rank {self.world.rank}: "
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            failure = NodeError(f"{place}{kind}{error}")
            failure.died = leads and not self.engines.running
            return failure
        return None

    def some(self, asked: Asked[T, R], values: Mapping[int, T]) -> tuple[dict[int, R], Failures]:
        """Return (what the leaders returned, why the others failed), by node. Raises Requeue where one is
        requested to stop."""
        results: dict[int, Any] = {}
        failures: Failures = {}
        for node, (result, error) in asked(values).items():
            if isinstance(error, NodeError):
                failures[node] = error
            elif error is not None:
                raise error
            else:
                results[node] = result
        return results, failures

    def all(self, asked: Asked[T, R], value: T, nodes: Iterable[int]) -> dict[int, R]:
        """Return what the leaders of ``nodes`` returned, by node. Raises NodeError if one failed."""
        results, failures = self.some(asked, dict.fromkeys(nodes, value))
        raise_any(failures)
        return results


def raise_any(failures: Mapping[int, NodeError]) -> None:
    """Raise NodeError with all failures, if there are any."""
    if failures:
        together = NodeError("\n".join(map(str, failures.values())))
        together.died = all(one.died for one in failures.values())
        raise together
