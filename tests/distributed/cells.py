"""What every rank runs: each loss, plain and humanline, on data as uneven as can be; rank 0 writes what came
out."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from config.schema import Config
from data.batches import Segment
from data.types import Example, Sequence
from jobs.evaluation import Evaluator
from models.distributed import World
from models.policy import Policy
from tests.distributed.joining import join
from tests.engine import engine_config, make_trainer, run, weights
from tests.tiny import KINDS, VOCABULARY, tiny_policy
from tests.unit.models.test_families import tiny

LR = 0.003
PAIRS = 23
"""Six steps of four, the last of three: no four ranks are filled, and three follow a sync of every third."""
CELLS = [(loss, k) for loss in ("dpo", "kto", "grpo") for k in (None, 1, 3)] + [
    ("dpo of a mixture", 1),
    ("grpo by the batch", 3),
    ("dpo by its distance", 3),
    ("dpo sharing prompts", 1),
    ("grpo sharing prompts", 3),
    ("kto staying gathered", 1),
]
MORE_KEYS = {
    "dpo of a mixture": ("router_aux_loss",),
    "grpo by the batch": ("tokens_masked",),
    "dpo by its distance": ("reference_step", "reference_kl"),
}
KEYS = ("loss", "grad_norm", "kl", "clipped_low", "reward_accuracy")


def policy_of(cell: str) -> Policy:
    """What a cell trains."""
    return tiny("mixtral") if "mixture" in cell else tiny_policy()


def uneven_groups(kind: str) -> tuple[tuple[Example, ...], ...]:
    """Pairs whose desirable halves are long and whose undesirable ones are short (so that, dealt by length,
    some rank has no desirable example), many of one token, one prompt very long."""
    rng = np.random.default_rng(5)
    groups = []
    for g in range(PAIRS):
        prompt = rng.integers(3, VOCABULARY, 30 if g == 7 else rng.integers(1, 6)).astype(np.int32)
        long, short = (1, 1) if 8 <= g < 16 else (int(rng.integers(10, 25)), int(rng.integers(1, 4)))
        chosen, rejected = (
            Sequence(prompt, rng.integers(3, VOCABULARY, n).astype(np.int32)) for n in (long, short)
        )
        if kind == "pairs":
            groups.append((Example(f"p{g}", (chosen, rejected)),))
        else:
            groups.append((Example(f"p{g}", (chosen,), 1.0), Example(f"p{g}", (rejected,), -1.0)))
    return tuple(groups)


def configs(cache: Path, accumulation: int) -> list[Config]:
    """The settings of every cell."""
    made = []
    for cell, k in CELLS:
        loss = cell.split()[0]
        units = 4 if loss == "dpo" else 8
        more = [f"sync_freq={k}", "humanline=true"] if k else []
        more.append(f"model.packing={str(k is not None).lower()}")  # so dealt by tokens, else by length
        if "mixture" in cell:
            more.append("model.router_aux_loss_coef=0.5")
        if "sharing" in cell:
            more.append("model.share_prompts=true")
        if "gathered" in cell:
            more.append("model.reshard_after_forward=false")
        if "batch" in cell:
            more += ["loss.shape=dppo", "loss.divergence_bound=0.003", "loss.advantage=batch"]
        if "distance" in cell:
            more += ["sync_mode=kl", "sync_kl=0.02"]
        config = replace(
            engine_config(
                cache,
                loss,
                f"model.batch_size={units}",
                f"model.microbatches={accumulation}",
                "model.eval_batch_size=12",
                *more,
            ),
            lr=LR,
        )
        made.append(config)
    return made


def run_cells(settings: list[Config], out: Path, world: World | None = None) -> None:
    """Train every cell for 6 steps of 4 pairs (the last of 3); rank 0 writes losses, gradient norms and final
    weights."""
    results: dict[str, np.ndarray] = {}
    for (cell, k), config in zip(CELLS, settings, strict=True):
        loss = cell.split()[0]
        groups = uneven_groups(KINDS[loss])
        segment = Segment(groups, config.model.batch_size, sum(map(len, groups)), seed=0)
        name, trainer = f"{cell}-{k}", make_trainer(config, policy_of(cell), world)
        evaluator = None
        if k == 1:
            few = Segment(groups[:5], config.model.batch_size, sum(map(len, groups[:5])), seed=0)
            named = {"few": Evaluator(trainer, few, None, torch.float32)}
            evaluator = Evaluator(trainer, segment, None, torch.float32, named=named)
        if evaluator is not None:
            evaluator.prepare({"cell": cell})
        _, lines = run(config, segment, trainer)
        final = weights(trainer)
        for key, value in ({} if evaluator is None else evaluator.evaluate()).items():
            results[f"{name}/{key}"] = np.array([value])
        for key in KEYS + MORE_KEYS.get(cell, ()):
            results[f"{name}/{key}"] = np.array(
                [line[key] if line[key] is not None else np.nan for line in lines]
            )
        results[f"{name}/weights"] = torch.cat([w.flatten() for w in final.values()]).numpy()
    if dist.get_rank() == 0:
        np.savez(out, **results)


def worker(rank: int, ranks: int, replicas: int, store: str, folder: str) -> None:
    """One of ``ranks`` spawned processes; ``folder`` has their ``configs``, pickled."""
    world = join(rank, ranks, store, replicas)
    settings = pickle.loads((Path(folder) / "configs").read_bytes())
    run_cells(settings, Path(folder) / "out.npz", world)
    dist.destroy_process_group()
