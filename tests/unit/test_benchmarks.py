"""The benchmarks: the floor recomputed by hand, fair halves, and scripts that run where they must."""

from __future__ import annotations

import copy
import json
import re
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, quick, trl_compare
from benchmarks.measure import Sample, Spread, alternate, ratio
from benchmarks.quick import prepare, settings_of
from benchmarks.steps import (
    Forward,
    drawn_pairs,
    forward,
    make_trainer,
    random_policy,
    rows_of,
    score_all,
    segment_of,
    shape,
)
from config.cli import compose_config
from data.types import Sequence
from data.views import mismatched
from trainers.syncing import SyncedReference


@pytest.fixture(scope="module")
def base():
    return random_policy(shape("tiny"), torch.device("cpu"))


def fixed_pairs(count, vocabulary, length, completion, seed=0):
    """Return pairs of random tokens; every row has ``length`` tokens, of which ``completion`` are the
    answer."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        asked = rng.integers(3, vocabulary, length - completion).astype(np.int32)
        chosen, rejected = (rng.integers(3, vocabulary, completion).astype(np.int32) for _ in range(2))
        pairs.append((Sequence(asked, chosen), Sequence(asked, rejected)))
    return pairs


def whole_squares(config, rows):
    """As torch counts plain attention: over whole squares, not the causal half."""
    of = forward(config, rows)
    return Forward(of.body, 2 * of.attention, of.head)


@pytest.mark.parametrize(
    ("variant", "loss", "padded"),
    [("cached", "dpo", True), ("k=1", "kto", False), ("k=1", "grpo", True)],
)
def test_the_floor_of_a_step_is_what_a_real_step_multiplies(base, loss, variant, padded):
    """Policy forward and backward, the reference of the next batch, mismatched rows: to the last product, by
    torch's own count. Logits as few as these are kept, so none is computed twice."""
    settings, config = settings_of(variant, loss, padded), base.model.config
    plan = segment_of(settings, fixed_pairs(6, 512, 40, 25), 3)
    trainer = make_trainer(settings, copy.deepcopy(base))
    score_all(trainer, plan)

    def of_batch(i: int) -> tuple[Forward, Forward]:
        batch = mismatched(plan.batch(i), 10**6) if loss == "kto" else plan.batch(i)
        other = [e.mismatched for e in batch if e.mismatched is not None]
        return whole_squares(config, [row for e in batch for row in e.rows]), whole_squares(config, other)

    (rows, other), following = of_batch(0), of_batch(1)
    expected = rows.training_on_kept + other.scoring
    expected += sum(f.scoring for f in following) if variant == "k=1" else 0
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.step(trainer.dealer.dealt(plan, trainer.progress.position))
    assert float(counter.get_total_flops()) == expected and bool(other.scoring) == (loss == "kto")


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_variants_train_on_the_same_rows_and_a_gpus_step_counts_theirs(base, loss):
    pairs, losses = drawn_pairs(8, 512, longest=40), {}
    for variant in ("cached", "scored", "k=1"):
        pieces = prepare(variant, settings_of(variant, loss), pairs, 2, base)
        losses[variant] = [piece() for piece in pieces][-1]
    assert len(losses["cached"]) == 2 and losses["cached"] == losses["scored"]
    assert losses["cached"][0] == losses["k=1"][0]
    config = compose_config([f"loss={loss}", "humanline=true", "model.batch_size=4"])
    plan = gpu.steps_of(config, shape("tiny"), 2)
    one = forward(shape("tiny"), rows_of(plan))
    counted = gpu.operations_of(config, shape("tiny"), plan) * plan.steps
    assert plan.steps == 3 and (counted == one.training + one.scoring) == (loss != "kto")
    assert counted < 2 * one.training


def test_pieces_of_variants_alternate_and_a_ratio_is_of_neighbours():
    order = []

    def variant(name, pieces=2):
        return lambda: [lambda: order.append(name), lambda: order.append(name.upper())][:pieces]

    found = alternate({name: variant(name) for name in "ab"}, rounds=2)
    assert "".join(order) == "abBAbaABabBA" and len(found["a"]) == 2
    with pytest.raises(ValueError, match="longer"):
        alternate({"a": variant("a", 1), "b": variant("b")}, rounds=1)
    a, b = [Sample(2, 4), Sample(3, 30)], [Sample(1, 2), Sample(1, 10)]
    assert ratio(a, b) == ratio(a, b, "wall") == Spread(2.5, 2, 3)


def test_the_guard_measures_what_the_baseline_has_and_sees_a_real_slowdown(base, monkeypatch):
    """Every sync scores what is coming four times more than it must."""
    monkeypatch.setattr(quick, "ROUNDS", 1)
    monkeypatch.setattr(quick, "shape", lambda name, vocabulary=None: shape("tiny", vocabulary))
    assert set(quick.measure()) == set(json.loads(quick.BASELINE.read_text()))
    monkeypatch.setattr(quick, "ROUNDS", 2)
    before, sync = quick.humanline_cost("dpo", base), SyncedReference.sync

    def slow(self, segment, at, policy_step):
        for _ in range(5):
            sync(self, segment, at, policy_step)

    monkeypatch.setattr(SyncedReference, "sync", slow)
    worse = quick.worse(quick.humanline_cost("dpo", base), before)
    assert "dpo: humanline / offline with its own scoring" in worse
    assert quick.worse({"a": 1.14, "b": 1.16, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 1.0}) == ["b"]


def test_the_guard_s_exit_code(monkeypatch, tmp_path, capsys):
    """A cost that is worse twice fails; one that was better the second time does not."""
    (tmp_path / "baseline.json").write_text('{"a": 1.0, "b": 1.0}')
    monkeypatch.setattr(quick, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(sys, "argv", ["quick"])
    for again in (1.0, 1.3):
        found = iter([{"a": 1.3, "b": 1.0}, {"a": again, "b": 1.0}])
        monkeypatch.setattr(quick, "measure", lambda found=found: next(found))
        with pytest.raises(SystemExit) as stopped:
            quick.main()
        failed = again > quick.WORST
        assert stopped.value.code == failed and ("WORSE" in capsys.readouterr().out) == failed


def test_a_gpus_benchmark_runs_without_one(monkeypatch, capsys):
    """Its numbers of the embedded model, by words of train.py."""
    words = ["model=adder", "loss=kto", "humanline=true", "model.batch_size=8", "model.microbatches=2"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--steps", "1", *words])
    gpu.main()
    said = capsys.readouterr().out
    assert re.search(r"\d tokens/s, MFU 0\.0%; [\d.]+ tokens a step in .* balance 1\.00", said), said
    assert "peak: " in said and "estimate: the process takes" in said


def test_a_side_runs_in_a_process_of_its_own_that_may_take_so_much():
    words = ["--side", "ours", "--pairs", "2", "--batch-pairs", "2", "--model", "tiny"]
    found = trl_compare.of_side(words, memory=trl_compare.MOST)
    assert isinstance(found, trl_compare.Found) and len(found.losses) == 1 and found.peak > found.step >= 0
    assert trl_compare.of_side(words, memory=1.0) == "took more than 1 MiB"
