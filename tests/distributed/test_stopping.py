"""Two ranks, of which only one is asked to stop: both stop at once, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import Requeue
from jobs.watch import RunWatch
from models import distributed
from models.distributed import stop
from models.reference import Reference
from rollouts.decoding import ManyEnded
from tests.distributed.joining import join
from tests.programs import in_ranks
from tests.quick_start import prepare_once
from train import compose, train
from trainers.scorer import TokenScorer

PARTS = {
    "step": (RunWatch, "observe"),
    "evaluation": (TokenScorer, "score_without_gradient"),
    "scores": (Reference, "scored"),
    "answers": (ManyEnded, "__call__"),
}
"""Phase -> what does a part of it: a microbatch, or a token of a batch."""
WORDS = (
    *("loss=dpo", "online=true", "humanline=true", "sync_freq=4", "retention.kl=false", "report=false"),
    *("rounds.contexts=32", "rounds.contexts_per_round=16", "rounds.samples=2", "sampler.max_tokens=24"),
    *("model.batch_size=8", "model.microbatches=4", "model.eval_batch_size=2", "eval_every=16"),
    *("n_eval_examples=12", "n_eval_prompts=4", "wandb.enabled=false", "lr=1e-3", "save_every=1000"),
)


def done(rank: int, folder: Path, name: str, attempt: int, *more: str) -> bool:
    """Do the run; return whether it ended by itself."""
    join(rank, 2, str(folder / f"store-{name}-{attempt}"))
    given = (f"exp_name={name}", f"runs_dir={folder}/runs", f"cache_dir={folder}/cache", *more)
    try:
        train(*compose(*WORDS, *given))
    except Requeue:
        return False
    finally:
        stop()
    return True


def worker(rank: int, at: str) -> None:
    prepare_once()
    distributed.STOP_SECONDS = 0.0  # type: ignore[misc]
    folder, counts = Path(at), {}
    assert done(rank, folder, "whole", 0)
    for phase, (cls, name) in PARTS.items():
        part, calls, asked = getattr(cls, name), 0, 0

        def counted(*args, part=part, second=folder / f"runs/{phase}/rounds/001", **named):  # type: ignore[no-untyped-def]
            nonlocal calls, asked
            calls += 1
            made = part(*args, **named)
            if rank == 1 and not asked and second.exists():
                asked = calls
                os.kill(os.getpid(), signal.SIGTERM)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls, name, counted)
            assert not done(rank, folder, phase, 0), phase
        counts[phase] = calls - asked if asked else calls
        assert done(rank, folder, phase, 1, "resume=true")
        one, other = (load_file(folder / f"runs/{run}/model/model.safetensors") for run in ("whole", phase))
        assert all(torch.equal(one[key], other[key]) for key in one), phase
    (folder / f"counts-{rank}.json").write_text(json.dumps(counts))


def test_ranks_stop_together_within_a_phase_where_one_is_asked(tmp_path):
    in_ranks(worker, (str(tmp_path),), 2)
    after = json.loads((tmp_path / "counts-1.json").read_text())
    assert after.keys() == PARTS.keys()
    assert all(count <= 2 for count in after.values()), after
