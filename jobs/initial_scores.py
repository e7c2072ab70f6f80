"""Score rows under the initial weights once before training and keep the scores on disk.

They serve as the reference of offline training, the zero point of every evaluation and of ``drift``, and the
likelihoods of the data report.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import StoppedError
from common.progress import SOON, Bar, progress
from config.schema_model import ModelConfig
from data.batches import Size, deal, dealing, microbatch
from data.types import Example, Microbatch, Sequence
from models.distributed import World, barrier, gather_objects
from models.fingerprint import architecture_digest
from models.reference import Reference, sequences_of
from models.score_cache import ScoreCache, ScoreTable
from trainers.basic import BasicTrainer

SECONDS_PER_SHARD = 20.0
WINDOW = 65_536
"""Number of rows in memory at once where the scores belong to rows (``Reference.by_row``)."""


def rows_of(batch: list[Example]) -> list[Sequence]:
    """Return every row of a batch that needs a reference, mismatched rows included."""
    return [
        row
        for example in batch
        for row in (*example.rows, *([example.mismatched] if example.mismatched else []))
    ]


def scored_with(model: ModelConfig, weights: str, texts: str, world: World) -> dict[str, str]:
    """Return everything that scores under the initial weights depend on, whatever the rows: the key of their
    cache. ``weights`` and ``texts``: fingerprints of the weights and of how texts become tokens. Raises
    ConfigError if the model's config cannot be loaded."""
    temperature = model.logit_temperature
    return {
        "weights": weights,
        "architecture": architecture_digest(model),
        "text": texts,
        "dtype": model.dtype,
        "attention": model.attn_implementation,
        "device": world.device.type,
        "torch": torch.__version__,
        **({"layers": "compiled"} if model.compile else {}),
        **({} if temperature == 1 else {"logit_temperature": str(temperature)}),
    }


def initial_scores(
    trainer: BasicTrainer,
    batches: Seq[list[Example]],
    size: Size,
    reference: Reference,
    parts: dict[str, str],
    what: str,
    arranged: bool = False,
) -> ScoreTable:
    """Return [C] log-probabilities (nats, float32, CPU) by key, of every row of ``batches`` under the policy.

    The policy has its current weights. ``batches`` is iterated several times, one batch at a time.

    The keys of ``reference`` decide how rows are scored. Either a score belongs to (step, row) and comes from
    the same microbatches of ``size`` examples that will be trained, or it belongs to the row and comes from
    batches of ``size`` rows. ``parts``: everything the scores depend on, the cache's key. Cached rows are not
    scored again, so a killed run continues where it was. ``arranged``: the trainer has already arranged the
    batches. Raises StoppedError if scores that were just written cannot be read back.
    """
    if not arranged:
        batches = Lazy(batches, trainer.arrange)
    wanted, lengths = keys_and_lengths(batches, reference)
    if not reference.by_row:
        several = trainer.dealer.packing and trainer.world.size > 1
        parts = parts | {
            "cut": f"{size}{' examples' * isinstance(size, int)} x {trainer.world.size} ranks"
            + f", {dealing(True, trainer.dealer.shares_prompts, trainer.dealer.work)}" * several,
            "packing": "prompts shared" if trainer.dealer.shares_prompts else str(trainer.dealer.packing),
        }
        parts["rows"] = hashlib.sha256(b"\n".join(wanted.tolist())).hexdigest()
    cache = ScoreCache(Path(trainer.config.cache_dir), parts, trainer.world.rank)
    table = _on_every_rank(cache)
    left = table.missing(wanted)
    missing, tokens = wanted[left], int(lengths[left].sum())
    work = _work(trainer, batches, missing, size, reference)
    new: dict[str, Tensor] = {}
    written = time.monotonic()
    shown = trainer.world.is_main and tokens > 0
    with progress(tokens, what, unit="token", shown=shown, delay=SOON) as bar:
        for step, micros in work:
            new.update(reference.scored(trainer.policy, step, _counted(micros, bar, trainer.world.size)))
            if time.monotonic() - written > SECONDS_PER_SHARD:
                cache.write(new)
                new, written = {}, time.monotonic()
    if new:
        cache.write(new)
    barrier()
    if len(missing):
        table = _on_every_rank(cache)
    if table.missing(wanted).any():
        raise StoppedError(
            f"{cache.folder}: scores that were just written are not there; is cache_dir a folder that every "
            "rank sees?"
        )
    return table


def _counted(micros: list[Microbatch], bar: Bar, ranks: int) -> Iterator[Microbatch]:
    """Yield microbatches; the bar counts the tokens of each once it is scored, for all ``ranks``."""
    for i, micro in enumerate(micros, 1):
        bar.set_postfix_str(f"microbatch {i} of {len(micros)}" if len(micros) > 1 else "", refresh=False)
        yield micro
        tokens = sum(len(row) for part in sequences_of([micro]) for row in part.rows)
        bar.update(min(tokens * ranks, (bar.total or 0) - bar.n))


class Lazy(Seq[list[Example]]):
    """The batches that ``make`` makes of ``items``, each on access."""

    def __init__(self, items: Seq[Any], make: Callable[[Any], list[Example]]) -> None:
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any) -> Any:
        return self.make(self.items[at])


def keys_and_lengths(batches: Seq[list[Example]], reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys of all rows of ``batches`` in order of first occurrence, [rows] of dtype S,
    and the rows' tokens, [rows] int64."""
    keys, lengths = [np.zeros(0, "S1")], [np.zeros(0, np.int64)]
    for i, batch in enumerate(batches):
        rows = rows_of(batch)
        keys.append(np.array([reference.key(i, row).encode() for row in rows], "S"))
        lengths.append(np.array([len(row) for row in rows], np.int64))
    every = np.concatenate(keys)
    first = np.sort(np.unique(every, return_index=True)[1])
    return every[first], np.concatenate(lengths)[first]


def _on_every_rank(cache: ScoreCache) -> ScoreTable:
    """Return the scores that every rank can read, so that all ranks agree on what is left to score.

    The gather also keeps every rank from writing before all ranks have read."""
    shards = cache.shards()
    seen = set.intersection(*map(set, gather_objects(list(shards))))
    return ScoreTable([shards[name] for name in sorted(seen)])


Work = Iterator[tuple[int, list[Microbatch]]]
"""(step, this rank's microbatches of it); every rank has the same number of microbatches"""


def _work(
    trainer: BasicTrainer,
    batches: Seq[list[Example]],
    missing: np.ndarray,
    size: Size,
    reference: Reference,
) -> Work:
    """Return the work left to score. ``missing``: [n] keys, dtype S."""
    if not reference.by_row:
        steps = sorted({int(key.split(b"/")[0]) for key in missing.tolist()})
        return ((i, trainer.dealer.share(batches[i], size)) for i in steps)
    assert isinstance(size, int), "rows that are scored alone are counted"
    return alone(trainer, _windows(batches, missing), size)


def _windows(batches: Seq[list[Example]], missing: np.ndarray) -> Iterator[list[Sequence]]:
    """Yield the rows with these keys in lists of at most WINDOW rows, each list sorted longest first."""
    left = set(missing.tolist())
    rows: list[Sequence] = []
    for batch in batches:
        for row in rows_of(batch):
            key = row.key.encode()
            if key in left:
                left.remove(key)
                rows.append(row)
            if len(rows) == WINDOW or (rows and not left):
                yield sorted(rows, key=len, reverse=True)
                rows = []


def alone(trainer: BasicTrainer, windows: Iterable[list[Sequence]], size: int) -> Work:
    """Yield the work on rows that are scored alone, ``size`` at once on a rank."""
    world, packing, stride = trainer.world, trainer.dealer.packing, size * trainer.world.size
    for rows in windows:
        for first in range(0, len(rows), stride):
            examples = [Example(prompt_id=row.key, rows=(row,)) for row in rows[first : first + stride]]
            slots = deal(examples, world.size, size, 1, packing)
            yield 0, [microbatch(slot[world.rank], world.device, packing) for slot in slots]
