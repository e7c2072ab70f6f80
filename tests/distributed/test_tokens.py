"""Two ranks start on the same data: one tokenises it, the other reads what that wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from data.chat import Renderer, make_renderer
from data.sources import load_splits
from jobs.plan import make_plan
from jobs.preflight import LoadedData
from models.pretrained import load_tokenizer
from tests.distributed.joining import join
from tests.programs import in_ranks
from tests.tiny import make_config
from trainers.assembly import trainer_class


def worker(rank: int, folder: str) -> None:
    """Rank 1 cannot tokenise what rank 0 has; each writes the keys of its rows."""
    join(rank, 2, f"{folder}/store")
    config = make_config(f"cache_dir={folder}/cache", "n_eval_examples=8")
    renderer, own = make_renderer(load_tokenizer(config.model), config.model, config.data), Renderer.sequences

    def few(self: Renderer, rows: object) -> object:
        rows = list(rows)  # type: ignore[call-overload]
        assert rank == 0 or len(rows) < 2000, "rank 1 tokenised the training rows"
        return own(self, rows)

    Renderer.sequences = few  # type: ignore[assignment,method-assign]
    data = LoadedData(*load_splits(config.data), {})
    plan = make_plan(config, trainer_class(config), renderer, data)
    np.save(
        f"{folder}/{rank}.npy",
        np.array([row.key for group in plan.train.groups for example in group for row in example.rows]),
    )
    dist.destroy_process_group()


def test_one_rank_tokenises_and_the_other_reads(tmp_path: Path) -> None:
    in_ranks(worker, (str(tmp_path),), 2)
    first, second = (np.load(tmp_path / f"{rank}.npy") for rank in (0, 1))
    assert len(first) >= 2000 and (first == second).all()
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
