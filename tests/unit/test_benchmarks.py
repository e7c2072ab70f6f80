"""The benchmarks: the floor recomputed by hand, fair halves, scripts that run where they must, and the gates
on a real model, as far as they need none."""

from __future__ import annotations

import copy
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, quick, trl_compare
from benchmarks.measure import Sample, Spread, alternate, ratio
from benchmarks.quick import settings_of
from benchmarks.real import BAND, PAIRS, PROMPTS, Suite, engine, memory, sanity_pairs
from benchmarks.steps import (
    forward,
    make_trainer,
    random_policy,
    score_all,
    segment_of,
    shape,
)
from data.constraints import all_met
from data.types import Completion, Prompt, Sequence, Turn
from data.views import mismatched
from rollouts.rounds import SampledPrompt
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
    return of.products + 2 * of.attention


@pytest.mark.parametrize(("variant", "loss"), [("cached", "dpo"), ("k=1", "kto"), ("k=1", "grpo")])
def test_the_floor_of_a_step_is_what_a_real_step_multiplies(base, loss, variant):
    """Policy forward and backward, the reference of the next batch, mismatched rows: to the last product, by
    torch's own count. Logits as few as these are kept, so none is computed twice."""
    settings, config = settings_of(variant, loss), base.model.config
    plan = segment_of(settings, fixed_pairs(6, 512, 40, 25), 3)
    trainer = make_trainer(settings, copy.deepcopy(base))
    score_all(trainer, plan)

    def of_batch(i: int) -> tuple[float, float]:
        batch = mismatched(plan.batch(i), 10**6) if loss == "kto" else plan.batch(i)
        other = [e.mismatched for e in batch if e.mismatched is not None]
        return whole_squares(config, [row for e in batch for row in e.rows]), whole_squares(config, other)

    (rows, other), following = of_batch(0), of_batch(1)
    expected = 3 * rows + other + (sum(following) if variant == "k=1" else 0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.step(trainer.dealer.dealt(plan, trainer.progress.position))
    assert float(counter.get_total_flops()) == expected and bool(other) == (loss == "kto")


def test_pieces_of_variants_alternate_and_a_ratio_is_of_neighbours():
    order = []

    def variant(name, pieces=2):
        return lambda: [lambda: order.append(name), lambda: order.append(name.upper())][:pieces]

    found = alternate({name: variant(name) for name in "ab"}, rounds=2)
    assert "".join(order) == "abBAbaAB" and len(found["a"]) == 2
    with pytest.raises(ValueError, match="longer"):
        alternate({"a": variant("a", 1), "b": variant("b")}, rounds=1)
    a, b = [Sample(2, 4), Sample(3, 30)], [Sample(1, 2), Sample(1, 10)]
    assert ratio(a, b) == ratio(a, b, "wall") == Spread(2.5, 2, 3)


def test_the_guard_measures_what_the_baseline_has_and_sees_a_real_slowdown(base, monkeypatch):
    """Every sync scores what is coming four times more than it must."""
    monkeypatch.setattr(quick, "ROUNDS", 1)
    monkeypatch.setattr(quick, "shape", lambda name: shape("tiny"))
    assert set(quick.measure()) == set(json.loads(quick.BASELINE.read_text()))
    monkeypatch.setattr(quick, "ROUNDS", 2)
    before, sync = quick.humanline_cost("dpo", base), SyncedReference.sync

    def slow(self, at, policy_step):
        for _ in range(5):
            sync(self, at, policy_step)

    monkeypatch.setattr(SyncedReference, "sync", slow)
    worse = quick.worse(quick.humanline_cost("dpo", base), before)
    assert "dpo: humanline / offline with its own scoring" in worse
    assert quick.worse({"a": 1.14, "b": 1.16, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 1.0}) == ["b"]


def test_a_gpus_benchmark_runs_without_one(monkeypatch, capsys):
    """Its numbers of the embedded model, by words of train.py."""
    words = ["model=adder", "loss=kto", "humanline=true", "model.batch_size=8", "model.microbatches=2"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--steps", "1", *words])
    gpu.main()
    said = capsys.readouterr().out
    assert re.search(r"\d tokens/s, MFU 0\.0%; [\d.]+ tokens a step in .* balance 1\.00", said), said
    assert "peak: " in said and "estimate: the process takes" in said


def test_a_side_runs_in_a_process_of_its_own():
    args = Namespace(pairs=2, batch_pairs=2, model="tiny", at_once=1)
    found = trl_compare.of_side("ours", args)
    assert len(found.losses) == 1 and found.peak > 0
    trl_compare.check_equal([0.5], [0.5 + 1e-6])
    with pytest.raises(RuntimeError, match="losses differ"):
        trl_compare.check_equal([0.5], [0.6])
    (row,) = trl_compare.rows_of({"ours": [found]}, 2)
    assert row[2].startswith("1.000")


def sampled(i: int, right: int, of: int = 8) -> SampledPrompt:
    prompt = Prompt((Turn("user", f"Describe {i}. Do not use any commas."),), json.dumps({"no_comma": None}))
    texts = ["no comma"] * right + ["one, here"] * (of - right)
    return SampledPrompt(prompt, tuple(Completion(text=text) for text in texts))


def test_the_sanity_set_has_the_prompts_that_are_solved_now_and_then() -> None:
    pairs = list(sanity_pairs([sampled(i, i % 9) for i in range(40)]))
    assert len({pair.prompt.id for pair in pairs}) == PROMPTS
    for pair in pairs:
        texts = [completion.text or "" for completion in pair.completions]
        assert all_met(texts, [pair.prompt.reference_answer] * 2) == [1.0, 0.0] and pair.rewards == (1.0, 0.0)
        solved = int(pair.prompt.turns[0].content.split()[1].rstrip(".")) % 9 / 8
        assert BAND[0] <= solved <= BAND[1]
    assert max(sum(one.prompt == pair.prompt for one in pairs) for pair in pairs) == PAIRS


def test_each_gate_passes_by_what_the_run_found(tmp_path: Path) -> None:
    """The largest gap of engine and trainer; a peak beside its estimate."""
    (tmp_path / "config.yaml").write_text("model:\n  dtype: float32\n")
    suite = Suite(tmp_path, [], jobs=1)
    for vllm, largest, passed in ((True, 1e-6, True), (True, 0.5, False), (False, 0.5, None)):
        suite.vllm = vllm
        record = {"step": 0, "round_probe_largest": largest, "round_probe_mean": 1e-7}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        assert engine(suite, tmp_path).passed is passed
    suite.program = lambda *words, **of: ("  the process takes about 3.00 GiB\n", 0.0)
    for peak, passed in ((4.4, True), (2.1, True), (4.6, False), (1.9, False)):
        assert memory(suite, [], peak).passed is passed
