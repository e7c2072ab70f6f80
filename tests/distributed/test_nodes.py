"""vLLM's engines on two nodes of two ranks, with processes that only pretend to be engines, and weights that
are sharded over all ranks: who is asked for what, and what becomes of a node whose engine is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from models.distributed import World, on_every_rank
from models.policy import decoder_blocks
from models.sharding import shard
from rollouts.samplers import SamplingSettings
from rollouts.vllm import engines as vllm_engines
from rollouts.vllm import handover
from rollouts.vllm.sampler import VllmSampler, sample_seed
from tests.distributed.joining import in_world
from tests.fake_transfer import PROMPTS, RENDERER, FakeTransfer
from tests.programs import writers
from tests.tiny import make_config, tiny_policy

SETTINGS = SamplingSettings(temperature=0.7, top_p=0.95, max_tokens=8)
FAILURES = {
    "unequal": "ConfigError: sampler.data_parallel=auto: would be 1 on ",
    "apart": "ConfigError: runs_dir=",
    "lost": "TransferError: weight transfer by ipc failed: node 1 (",
}
"""How the second node differs -> how the message of all ranks begins."""


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


def live(world: World, folder: Path) -> None:
    """Three rounds, in which engines of the second node are killed. Rank 0 leaves what it got."""
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
    if world.is_main:
        content = {"facts": facts, "drawn": found, "dealt": dealt, "left": left, "nodes": world.nodes}
        (folder / "found.json").write_text(json.dumps(content))


def fail(world: World, folder: Path) -> None:
    """Each rank leaves the errors that it got."""
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
        (folder / f"{how}-{world.rank}").write_text(message)


def test_a_node_whose_engine_is_killed_alone_gets_the_weights_and_draws_again(tmp_path):
    in_world(live, 4, tmp_path, nodes=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == [0, 0, 1, 1] and found["left"] == [[]] * 4
    facts = found["facts"]
    assert (facts["sampler_nodes"], facts["sampler_engines"], facts["weight_transfer"]) == (2, 2, "ipc")
    cut, processes = len(PROMPTS) // 2, []
    for drawn in found["drawn"]:
        wanted = [[*RENDERER.prompt_ids(p).tolist(), sample_seed(1, p.id, 0) % 1000] for p in PROMPTS]
        assert [row[:-1] for row in drawn] == wanted
        first, second = ({row[-1] for row in part} for part in (drawn[:cut], drawn[cut:]))
        assert len(first) == len(second) == 1 and first != second
        processes.append((first.pop(), second.pop()))
    assert len({first for first, _ in processes}) == 1 and len({second for _, second in processes}) == 4
    dealt = found["dealt"]["nodes"]
    assert [node["requests"] for node in dealt] == [4 * cut, 4 * (len(PROMPTS) - cut)]
    assert sum(node["tokens"] for node in dealt) == sum(len(row) for drawn in found["drawn"] for row in drawn)


def test_a_node_that_differs_ends_all_ranks_with_one_message(tmp_path):
    in_world(fail, 4, tmp_path, nodes=2)
    for how, begin in FAILURES.items():
        messages = {(tmp_path / f"{how}-{rank}").read_text() for rank in range(4)}
        assert len(messages) == 1 and messages.pop().startswith(begin)
