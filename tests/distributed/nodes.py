"""What a rank does in the tests of vLLM on several nodes: two ranks a node, with processes that only pretend
to be engines, and weights that are sharded over all ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from models.distributed import World, on_every_rank, stop
from models.policy import decoder_blocks
from models.sharding import shard
from rollouts.samplers import SamplingSettings
from rollouts.vllm import engines as vllm_engines
from rollouts.vllm import handover
from rollouts.vllm.sampler import VllmSampler
from tests.distributed.joining import join
from tests.fake_transfer import PROMPTS, RENDERER, FakeTransfer
from tests.programs import writers
from tests.tiny import make_config, tiny_policy

RANKS_OF_NODE = 2
SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=8)
FAILURES = {
    "unequal": "ConfigError: sampler.data_parallel=auto: would be 1 on ",
    "apart": "ConfigError: runs_dir=",
    "lost": "TransferError: weight transfer by ipc failed: node 1 (",
}
"""How the second node differs -> how the message of all ranks begins."""


def join_node(rank: int, ranks: int, store: str) -> World:
    os.environ["GROUP_RANK"] = str(rank // RANKS_OF_NODE)
    return join(rank, ranks, store)


def attached(world: World, folder: Path, logs: Path, patch: pytest.MonkeyPatch) -> VllmSampler:
    """A sampler with the weights of a tiny policy; an engine says of a token's log-probability what the
    trainer does."""
    patch.setattr(vllm_engines, "WORKER", "tests.fake_engine")
    patch.setattr(handover, "make_transfer", FakeTransfer)
    patch.setattr(handover, "chosen", lambda config, device: "ipc")
    scores = [-torch.from_numpy(RENDERER.prompt_ids(prompt)[1:]).double() for prompt in PROMPTS]
    patch.setattr(handover, "score", lambda policy, rows: scores)
    policy = tiny_policy()
    shard(policy, decoder_blocks(policy.model), world, torch.float32, True)
    config = make_config("sampler=vllm", f"runs_dir={folder}", "sampler.weight_transfer=ipc")
    sampler = VllmSampler(config, RENDERER, world, logs)
    sampler.attach(policy, PROMPTS)
    return sampler


def live(rank: int, ranks: int, store: str, to: str) -> None:
    """Three rounds, in which engines of the second node are killed. Rank 0 leaves what it got."""
    world, folder = join_node(rank, ranks, store), Path(to)
    sampler, found = attached(world, folder, folder / "logs", pytest.MonkeyPatch()), list[Any]()

    def drawn() -> None:
        def work() -> list[list[int]]:
            return [list(row[0].token_ids) for row in sampler.sample(PROMPTS, 1, SETTINGS, seed=1)]

        found.append(sampler.ranks.on_main(work))

    def kill() -> None:
        """An engine of the last node, by that node's leader."""

        def on_last() -> None:
            if world.is_leader and world.node == max(world.nodes):
                os.kill(writers(sampler.nodes.engines._workers[-1].log)[0], signal.SIGKILL)

        on_every_rank(on_last)

    facts = sampler.publish(folder / "weights", 0, False)
    drawn()
    kill()  # while it samples
    drawn()
    kill()  # while the trainer trains
    sampler.publish(folder / "weights", 1, False)
    drawn()
    kill()  # before it is put to sleep
    sampler.ranks.on_main(sampler.sleep)
    sampler.publish(folder / "weights", 2, False)
    drawn()
    dealt = sampler.dealt()
    left = on_every_rank(lambda: [str(p) for p in Path("/dev/shm").glob(f"humanline-*-{world.node}")])
    sampler.close()
    if rank == 0:
        content = {"facts": facts, "drawn": found, "dealt": dealt, "left": left, "nodes": world.nodes}
        (folder / "found.json").write_text(json.dumps(content))
    stop()


def fail(rank: int, ranks: int, store: str, to: str) -> None:
    """Each rank leaves the errors that it got."""
    world, folder = join_node(rank, ranks, store), Path(to)
    for how in FAILURES:
        with pytest.MonkeyPatch.context() as patch:
            if how == "unequal" and world.node == 1:
                patch.setattr(torch.cuda, "device_count", lambda: 2)
            patch.setattr(FakeTransfer, "lost", how == "lost" and world.node == 1)
            logs = folder / (f"logs-{world.node}" if how == "apart" else "logs")
            message = ""
            try:
                attached(world, folder, logs, patch).publish(folder / "weights", 0, False)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
        (folder / f"{how}-{rank}").write_text(message)
    stop()
