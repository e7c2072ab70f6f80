"""Any number of ranks, any number of microbatches: the same losses, gradient norms and weights as one
process, for each loss, plain and humanline, on data as uneven as can be."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from config.schema import Config
from data.batches import Segment
from data.types import Example, Sequence
from jobs.evaluation import Evaluator
from models.distributed import World, start
from models.policy import Policy
from tests.distributed.joining import in_world
from tests.engine import engine_config, make_trainer, run, weights
from tests.tiny import KINDS, VOCABULARY, tiny_policy
from tests.unit.models.test_families import tiny

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
SETTINGS = {
    "mixture": "model.router_aux_loss_coef=0.5",
    "sharing": "model.share_prompts=true",
    "gathered": "model.reshard_after_forward=false",
    "batch": "loss.shape=dppo loss.divergence_bound=0.003 loss.advantage=batch",
    "distance": "sync_mode=kl sync_kl=0.02",
}
"""A word of a cell's name -> its settings."""
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
        for part, words in SETTINGS.items():
            more += words.split() if part in cell else []
        sizes = (
            f"model.batch_size={units}",
            f"model.microbatches={accumulation}",
            "model.eval_batch_size=12",
        )
        made.append(engine_config(cache, loss, *sizes, *more))
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
        few = Segment(groups[:5], config.model.batch_size, sum(map(len, groups[:5])), seed=0)
        named = {"few": Evaluator(trainer, few, None, torch.float32)}
        evaluator = Evaluator(trainer, segment, None, torch.float32, named=named)
        if k == 1:
            evaluator.prepare({"cell": cell})
        _, lines = run(config, segment, trainer)
        final = weights(trainer)
        for key, value in (evaluator.evaluate() if k == 1 else {}).items():
            results[f"{name}/{key}"] = np.array([value])
        for key in KEYS + MORE_KEYS.get(cell, ()):
            results[f"{name}/{key}"] = np.array(
                [line[key] if line[key] is not None else np.nan for line in lines]
            )
        results[f"{name}/weights"] = torch.cat([w.flatten() for w in final.values()]).numpy()
    if dist.get_rank() == 0:
        np.savez(out, **results)


def worker(world: World, folder: Path) -> None:
    """``folder`` has the ``configs``, pickled."""
    run_cells(pickle.loads((folder / "configs").read_bytes()), folder / "out.npz", world)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    start()
    run_cells(configs(folder, accumulation=2), folder / "out.npz")
    return np.load(folder / "out.npz")


@pytest.fixture(scope="module", params=[(2, 1, 2), (4, 2, 1), (2, 2, 2)], ids=str)
def several(request, tmp_path_factory):
    """What so many ranks give, which hold so many copies of the model and cut their share into so many."""
    ranks, replicas, accumulation = request.param
    folder = tmp_path_factory.mktemp("several")
    (folder / "configs").write_bytes(pickle.dumps(configs(folder, accumulation)))
    in_world(worker, ranks, folder, replicas=replicas)
    return np.load(folder / "out.npz")


@pytest.mark.parametrize(("loss", "k"), CELLS)
def test_ranks_change_nothing(single, several, loss, k):
    name = f"{loss}-{k}"
    begin = np.concatenate([p.detach().numpy().ravel() for p in policy_of(loss).parameters()])
    one, many = single[f"{name}/weights"].astype(float), several[f"{name}/weights"].astype(float)
    way = np.linalg.norm(one - begin)
    assert way > 0.05
    assert np.linalg.norm(many - one) < 1e-3 * way
    keys = [key.partition("/")[2] for key in single if key.startswith(f"{name}/") and "weights" not in key]
    assert {"loss", "grad_norm", "kl"} < set(keys) and ("eval_loss" in keys) == (k == 1)
    assert ("router_aux_loss" in keys) == ("mixture" in loss)
    assert "batch" not in loss or single[f"{name}/tokens_masked"].max() > 0
    if "distance" in loss:  # it moved by its distance, and by its age
        assert {b - a for a, b in pairwise(single[f"{name}/reference_step"])} >= {0, 2}
    for key in keys:
        assert len(single[f"{name}/{key}"]) == (1 if key.startswith("eval_") else 6)
        np.testing.assert_allclose(
            several[f"{name}/{key}"], single[f"{name}/{key}"], rtol=1e-3, atol=1e-4, err_msg=key
        )
