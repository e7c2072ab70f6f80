"""What real steps take on CPU ranks, counted by torch's own allocator: the truth that the memory plan is held
against."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.worker_process import LAUNCHER
from data.batches import Segment
from jobs.assembly import make_loss, trainer_class
from jobs.memory_simulation import Question, as_folder, deal_heaviest
from models.distributed import start, stop
from models.loading import load_sharded
from models.storage_tracker import local_part

ROOT = Path(__file__).resolve().parent.parent


def real_peaks(question: Question, folder: Path) -> list[int]:
    """Bytes that each rank had most at any time of the second step."""
    if question.ranks == 1:
        return [peak_of(question)]
    asked = folder / "question"
    asked.write_bytes(pickle.dumps(question))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    ranks = []
    for rank in range(question.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(question.ranks)}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        rest = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
        words = [sys.executable, "-m", "tests.real_memory", str(asked)]
        ranks.append(
            subprocess.Popen(
                words, cwd=ROOT, env=rest | place | where, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def peak_of(question: Question) -> int:
    """The peak of this rank's second step."""
    assert question.found is not None and not question.gpu
    world = start(question.config.replicas)
    try:
        with as_folder(question, question.found) as asked:
            model = replace(asked.config.model, from_config=True)
            config = replace(asked.config, model=model)
            policy, _ = load_sharded(config.model, world, seed=0)
            trainer = trainer_class(config)(config, policy, make_loss(config), world)
            deal_heaviest(trainer)
            batch = question.batch
            segment = Segment((tuple(batch),), len(batch), len(batch) * 3, seed=0)
            if config.has_reference:
                trainer.start_segment(segment)
            trainer.step(segment)
            states = [*policy.parameters(), *policy.buffers()]
            states += [v for state in trainer.optimizer.state.values() for v in state.values()]
            storages = {s.data_ptr(): s.nbytes() for s in (local_part(t).untyped_storage() for t in states)}
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                trainer.step(segment)
            return sum(storages.values()) + most_allocated(watched)
    finally:
        stop()


def most_allocated(watched: profile) -> int:
    """The most that the allocator had given out and not taken back, over what it had at the beginning."""
    events = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(peak_of(pickle.loads(Path(sys.argv[1]).read_bytes()))))
