"""Scores under the initial weights, made once before training and kept on disk: the reference of offline
training, the zero point of every evaluation and of ``drift``, and the data report's likelihoods."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from common.errors import StoppedError
from data.batches import Size, cut, dealing, microbatch
from data.types import Example, Microbatch, Sequence
from models.distributed import barrier, gather_objects
from models.reference import Reference
from models.score_cache import ScoreCache
from reports.progress import progress
from trainers.basic import BasicTrainer

SECONDS_PER_SHARD = 20.0


def rows_of(batch: list[Example]) -> list[Sequence]:
    """Every row of a batch that needs a reference, mismatched ones included."""
    return [
        row
        for example in batch
        for row in (*example.rows, *([example.mismatched] if example.mismatched else []))
    ]


def initial_scores(
    trainer: BasicTrainer,
    batches: list[list[Example]],
    size: Size,
    reference: Reference,
    parts: dict[str, str],
    what: str,
    arranged: bool = False,
) -> dict[str, Tensor]:
    """Key -> [C] log-probabilities (nats, float32, CPU) of every row of ``batches`` under the policy as it is
    now.

    ``reference`` decides by its keys whether scores belong to (step, row), made from the very microbatches of
    ``size`` examples that will be trained, or to the row, made in batches of ``size`` rows. ``parts``: what
    the scores depend on, the cache's key. Rows that the cache has are not scored again; a killed run goes on
    where it was. ``arranged``: the trainer has arranged the batches already.
    """
    if not arranged:
        batches = [trainer.arrange(batch) for batch in batches]
    wanted = {reference.key(i, row): row for i, batch in enumerate(batches) for row in rows_of(batch)}
    if not reference.by_row:
        several = trainer.packing and trainer.world.size > 1
        parts = parts | {
            "cut": f"{size}{' examples' * isinstance(size, int)} x {trainer.world.size} ranks"
            + f", {dealing(True)}" * several,
            "packing": str(trainer.packing),
        }
        parts["rows"] = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    cache = ScoreCache(Path(trainer.config.cache_dir), parts, trainer.world.rank)
    known = _on_every_rank(cache)
    missing = {key: row for key, row in wanted.items() if key not in known}
    todo = list(_work(trainer, batches, missing, size, reference))
    new: dict[str, Tensor] = {}
    written = time.monotonic()
    for step, micros in progress(todo, what, unit="forward", shown=trainer.world.is_main and bool(todo)):
        new.update(reference.scored(trainer.policy, step, micros()))
        if time.monotonic() - written > SECONDS_PER_SHARD:
            cache.write(new)
            new, written = {}, time.monotonic()
    if new:
        cache.write(new)
    barrier()
    if todo:
        known = _on_every_rank(cache)
    if any(key not in known for key in wanted):
        raise StoppedError(
            f"{cache.folder}: scores that were just written are not there; is cache_dir a folder that every "
            "rank sees?"
        )
    return {key: known[key] for key in wanted}


def _on_every_rank(cache: ScoreCache) -> dict[str, Tensor]:
    """The scores that every rank can read: the same everywhere, so that all agree on what is left to do.
    Nobody goes on, and writes, before everybody has read."""
    shards = cache.shards()
    seen = set.intersection(*map(set, gather_objects(list(shards))))
    return {key: values for name in sorted(seen) for key, values in shards[name].items()}


def _work(
    trainer: BasicTrainer,
    batches: list[list[Example]],
    missing: dict[str, Sequence],
    size: Size,
    reference: Reference,
) -> Iterator[tuple[int, Callable[[], list[Microbatch]]]]:
    """(step, how to make this rank's microbatches) of what is missing: as many on every rank."""
    if not reference.by_row:
        steps = {int(key.split("/")[0]) for key in missing}
        yield from ((i, partial(trainer.share, batch, size)) for i, batch in enumerate(batches) if i in steps)
        return
    assert isinstance(size, int), "rows that are scored alone are counted"
    rows = sorted(missing.values(), key=len, reverse=True)
    stride = size * trainer.world.size
    for first in range(0, len(rows), stride):
        alone = [Example(prompt_id=row.key, rows=(row,)) for row in rows[first : first + stride]]
        yield 0, partial(_alone, trainer, alone, size)


def _alone(trainer: BasicTrainer, examples: list[Example], size: int) -> list[Microbatch]:
    mine = cut(examples, trainer.world.rank, trainer.world.size, size, 1, trainer.packing)
    return [microbatch(part, trainer.world.device, trainer.packing) for part in mine]
