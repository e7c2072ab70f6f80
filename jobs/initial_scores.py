"""Score rows under the initial weights once before training and keep the scores on disk.

They serve as the reference of offline training, the zero point of every evaluation and of ``drift``, and the
likelihoods that select groups (``data.logprob_range``) and are reported (paper §5.2.1, Figure 6).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, StoppedError
from common.files import read_sealed, sealed, write_whole
from common.progress import SOON, Bar, progress
from common.secrets import scrub, scrub_text
from config.schema_model import ModelConfig
from data.batches import Size, deal, dealing, microbatch
from data.examples import ExampleGroups, Examples, columns_of, picked_groups, row_keys
from data.quality import DataReport, Selection, select
from data.types import Example, Microbatch, Sequence
from jobs.plan import Plan, training_segment
from jobs.run_folder import SELECTION, RunFolder
from models.distributed import World, barrier, gather_objects, on_main
from models.fingerprint import architecture_digest
from models.reference import Reference, sequences_of
from models.score_cache import KeyIndex, ScoreCache, ScoreTable
from reports.data_tables import page as data_page
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
    trainer: BasicTrainer, batches: Seq[list[Example]], missing: np.ndarray, size: Size, reference: Reference
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


# -- the likelihood of the training data -----------------------------------------------------------

Scores = Mapping[str, Tensor]
"""Row key -> [C] log-probabilities of its completion tokens under the initial weights, nats"""


def score_groups(trainer: BasicTrainer, groups: ExampleGroups, parts: dict[str, str]) -> Scores:
    """Return the scores of every row of these groups under the policy's current weights.

    Scores that the cache on disk has are read from it."""
    size = trainer.config.reference_batch_size or trainer.config.model.eval_batch_size
    return initial_scores(
        trainer, [list(group) for group in groups], size, Reference(by_row=True), parts, "score training data"
    )


def choose_groups(
    trainer: BasicTrainer, examples: Examples, parts: dict[str, str], folder: Path
) -> tuple[Examples, Selection, Scores]:
    """Return the examples that ``data.logprob_range`` keeps, the selection, and the scores of all rows.

    The result is the same on every rank. Groups are ranked by the mean log-probability of all completion
    tokens that they train on. For a pair this mean covers chosen and rejected together: the paper speaks of
    "the average token log-probability of the output" and does not say how a pair's two outputs are combined.
    So DPO, KTO and GRPO keep the same pairs. Raises StoppedError (``select``) and ConfigError
    (``kept_before``).
    """
    share = trainer.config.data.logprob_range
    assert share is not None
    scores = score_groups(trainer, examples.groups, parts)
    fresh = select(group_means(examples.groups, scores), share)
    selection = on_main(lambda: kept_before(folder / SELECTION, fresh))
    kept = picked_groups(examples.groups, np.array(selection.kept, np.int64))
    return replace(examples, groups=kept), selection, scores


def group_means(groups: ExampleGroups, scores: Scores) -> np.ndarray:
    """Return the mean log-probability of each group's completion tokens, [groups] float64, nats.

    A row counts once, even if several examples share it."""
    keys, columns = row_keys(groups), columns_of(groups)
    sums, counts = (_of_each_row(keys, scores, what) for what in (lambda row: row.double().sum(), len))
    ends = np.append(0, np.cumsum(columns.counts))[np.cumsum(columns.sizes)]
    out = np.empty(len(groups))
    for g, (first, last) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        rows = [first + r for r in np.sort(np.unique(keys[first:last], return_index=True)[1])]
        out[g] = sum(sums[rows].tolist()) / sum(counts[rows].tolist())
    return out


def _of_each_row(keys: np.ndarray, scores: Scores, what: Callable[[Tensor], Any]) -> np.ndarray:
    """Return [rows] float64, ``what`` of the scores of each of the rows ``keys``; NaN for one that was not
    scored. Scores are read in their own order, in which their files are read once."""
    names, row_values = np.zeros(len(scores) + 1, "S32"), np.full(len(scores) + 1, math.nan)
    for i, (key, values) in enumerate(scores.items()):
        names[i], row_values[i] = key, float(what(values))
    order = np.argsort(names)
    at = order[np.minimum(np.searchsorted(names[order], keys), len(scores))]
    return np.where(names[at] == keys, row_values[at], math.nan)


def kept_before(path: Path, fresh: Selection) -> Selection:
    """Return ``fresh`` with the groups that the file ``path`` recorded when the run started.

    If there is no file, they are written to it. A resumed run trains on the groups it
    started with, even if the last bits of a score have changed since (another number of ranks, another GPU).
    Raises ConfigError for a damaged file.
    """
    if not path.exists():
        write_whole(path, sealed({"selection": {"kept": list(fresh.kept)}}))
        return fresh
    try:
        return replace(fresh, kept=tuple(read_sealed(path)["selection"]["kept"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = (
            f"is damaged ({type(error).__name__}: {error}): it says which groups this run trains on; "
            "put it back, or start another run (exp_name)"
        )
        raise ConfigError("data.logprob_range", list(fresh.range), f"{path} {why}") from error


def completion_means(groups: ExampleGroups, scores: Scores) -> dict[str, np.ndarray]:
    """Return the mean token log-probability of each completion, nats, under "chosen" and "rejected".

    Desirable completions count as chosen, undesirable ones as rejected. NaN where a completion was not
    scored."""
    keys, signs = row_keys(groups), columns_of(groups).signs
    means = _of_each_row(keys, scores, lambda row: row.double().mean())
    kinds = {"chosen": means[signs > 0], "rejected": means[~(signs > 0)]}
    return {kind: values for kind, values in kinds.items() if len(values)}


def clippable_share(groups: ExampleGroups, scores: Scores, log_epsilon_R: float) -> float | None:
    """Return the share of these groups' tokens that can be clipped from above while the reference is the
    initial model, which is an upper bound: a log-probability is at most 0, so a log-ratio is at most
    −log pi_ref. A row counts once. None where nothing was scored."""
    keys = np.unique(row_keys(groups))
    tokens = np.nansum(_of_each_row(keys, scores, len))
    clippable = np.nansum(_of_each_row(keys, scores, lambda row: (row < -log_epsilon_R).sum()))
    return float(clippable / tokens) if tokens else None


def ready_rows(
    plan: Plan,
    report: DataReport,
    trainer: BasicTrainer,
    parts: dict[str, str],
    folder: RunFolder,
    likelihoods: list[float],
    say: Callable[[str], None],
) -> Plan:
    """Return the plan that is trained on, once its rows are scored where the trainer compares with the
    initial weights, and the data report is written. Every rank calls it.

    ``parts``: what scores depend on (``scored_with``). ``likelihoods``: the mean token log-probability of
    each of the initial weights' answers, nats. ``say`` prints on rank 0. Raises ConfigError where the loss
    cannot be trained on the groups that are kept."""
    scores: Scores | None = None
    config = trainer.config
    if config.data.logprob_range is not None:
        examples, selection, scores = choose_groups(trainer, plan.examples, parts, folder.path)
        plan = replace(plan, examples=examples, train=training_segment(config, examples.groups))
        trainer.check(config, plan.train)
        report = report.with_selection(selection, examples)
        say(
            f"{len(selection.kept)} of {selection.all.count} groups kept, by mean token log-probability in "
            f"[{selection.lowest:.3f}, {selection.highest:.3f}] nats: {plan.train.n_examples} "
            f"{trainer.counts} in all, {plan.steps} steps"
        )
    compared = _score(plan, trainer, parts)
    scores = compared if scores is None else scores
    if scores is not None:
        clips, groups = config.humanline and config.humanline_mode == "clip", plan.train.groups
        clippable = clippable_share(groups, scores, config.log_epsilon_R) if clips else None
        report = report.with_logprobs(completion_means(groups, scores), clippable, likelihoods)
    found = report.to_dict()
    on_main(lambda: folder.write("data_report.json", json.dumps(scrub(found), indent=2)))
    on_main(lambda: folder.write("data_report.md", scrub_text(data_page(found))))
    for warning in report.warnings():
        say(f"warning: {warning} (docs/symptoms.md)")
    return plan


def _score(plan: Plan, trainer: BasicTrainer, parts: dict[str, str]) -> Scores | None:
    """Score training rows under the initial weights, and hand the scores to the trainer; None where it needs
    none.

    All rows are scored where an offline run compares with the initial weights at every step, as its
    reference or as the anchor of its KL term. Otherwise only the rows of one batch in n are scored, if
    ``drift`` is logged."""
    config = trainer.config
    fixed = trainer.reference.fixed or trainer.reference.anchor is not None
    if not config.has_reference or config.online or not (fixed or config.log_drift):
        return None
    reference = Reference(by_row=trainer.reference.by_row or not fixed)
    by_row = config.reference_batch_size or config.model.eval_batch_size
    size = by_row if reference.by_row else trainer.dealer.size
    n = plan.train.n_examples
    every = 1 if fixed else max(1, n // (config.drift_examples or n))
    batches = Lazy(range(0, plan.steps, every), plan.train.batch)
    what = f"score training rows ({'n_examples' if fixed else 'log_drift, drift_examples'})"
    scores = initial_scores(trainer, batches, size, reference, parts, what)
    rows = OfRows(scores, keys_and_lengths(batches, reference)[0])
    trainer.reference.use_initial(scores, rows)
    return rows


class OfRows(Mapping[str, Tensor]):
    """Row key -> [C] log-probabilities, nats. A row in several steps has the scores of the last one."""

    def __init__(self, scores: Mapping[str, Tensor], keys: np.ndarray) -> None:
        """``keys``: those of ``scores`` that count, [n] byte strings in the order of the steps."""
        self._scores, self._keys = scores, keys
        self._index = KeyIndex(np.array([key.rpartition(b"/")[2] for key in keys.tolist()], "S32"))

    def _key(self, row: str) -> str:
        return str(self._keys[self._index.place(row)].decode())

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in the order in which the scores lie."""
        rows = ((key, key.rpartition("/")[2]) for key in self._scores)
        return (row for key, row in rows if row in self._index and self._key(row) == key)

    def __getitem__(self, row: str) -> Tensor:
        return self._scores[self._key(row)]
