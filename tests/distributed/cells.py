"""What every rank runs: each loss, plain and humanline, on data as uneven as can be; rank 0 writes what came out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from data.batches import Segment
from data.types import Example, Sequence
from tests.engine import engine_config, make_trainer, run, weights
from tests.tiny import KINDS, VOCABULARY

STEPS, LR = 8, 0.003
CELLS = [(loss, k) for loss in ("dpo", "kto", "grpo") for k in (None, 1, 3)]


def uneven_groups(kind: str) -> tuple[tuple[Example, ...], ...]:
    """Pairs whose desirable halves are long and whose undesirable ones are short (so that, dealt by length, some rank has no
    desirable example), many of one token, one prompt very long; 31 pairs: the last batch fills no four ranks."""
    rng = np.random.default_rng(5)
    groups = []
    for g in range(31):
        prompt = rng.integers(3, VOCABULARY, 30 if g == 7 else rng.integers(1, 6)).astype(np.int32)
        long, short = (1, 1) if 8 <= g < 16 else (int(rng.integers(10, 25)), int(rng.integers(1, 4)))
        chosen, rejected = (Sequence(prompt, rng.integers(3, VOCABULARY, n).astype(np.int32)) for n in (long, short))
        if kind == "pairs":
            groups.append((Example(f"p{g}", (chosen, rejected)),))
        else:
            groups.append((Example(f"p{g}", (chosen,), 1.0), Example(f"p{g}", (rejected,), -1.0)))
    return tuple(groups)


def run_cells(cache: Path, out: Path, accumulation: int) -> None:
    """Train every cell for 8 steps of 4 pairs (the last of 3); rank 0 writes losses, gradient norms and final weights."""
    results: dict[str, np.ndarray] = {}
    for loss, k in CELLS:
        units = 4 if loss == "dpo" else 8
        humanline = [f"sync_freq={k}", "humanline=true"] if k else []
        config = replace(engine_config(cache, loss, f"model.batch_size={units}", f"model.gradient_accumulation_steps={accumulation}",
                                       *humanline), lr=LR)
        groups = uneven_groups(KINDS[loss])
        segment = Segment(groups, units, sum(map(len, groups)), seed=0)
        trainer, lines = run(config, segment, make_trainer(config))
        final = weights(trainer)
        name = f"{loss}-{k}"
        for key in ("loss", "grad_norm", "kl", "clipped_low", "reward_accuracy"):
            results[f"{name}/{key}"] = np.array([line[key] if line[key] is not None else np.nan for line in lines])
        results[f"{name}/weights"] = torch.cat([w.flatten() for w in final.values()]).numpy()
    if dist.get_rank() == 0:
        np.savez(out, **results)


def worker(rank: int, ranks: int, store: str, cache: str, out: str, accumulation: int) -> None:
    """One of ``ranks`` spawned processes."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", 120))))
    run_cells(Path(cache), Path(out), accumulation)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
