"""The benchmarks: the floor recomputed by hand, fair halves, and scripts that run where they must."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import padding, quick
from benchmarks.floor import floor, forward
from benchmarks.measure import Sample, Spread, alternate, ratio
from benchmarks.offline_vs_humanline import floor_of, prepare, settings_of
from benchmarks.parts import Settings, drawn_pairs, fixed_pairs, make_trainer, random_policy, rows_of, segment, shape, train
from data.batches import collate
from data.types import Sequence

ROOT = Path(__file__).parents[2]
ABSENT = "omegaconf", "hydra", "datasets", "wandb", "vllm", "trl", "math_verify"


@pytest.fixture(scope="module")
def base():
    return random_policy(shape("tiny"), torch.device("cpu"))


def test_the_floor_is_what_the_model_multiplies():
    """Against torch's own count of a forward's products over a row without padding (its plain attention is the whole square)."""
    config = shape("tiny")
    policy = random_policy(config, torch.device("cpu"))
    row = fixed_pairs(1, 512, length=40, completion=40 - 1)[0][0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        policy(collate([row], torch.device("cpu")))
    ours = forward(config, [row])
    assert counter.get_total_flops() == pytest.approx(ours.body + ours.head + 2 * ours.attention, rel=1e-6)


def test_the_floor_of_humanline_is_four_thirds_at_most(base):
    plan = segment(Settings("dpo"), drawn_pairs(8, 512))
    found = floor_of("dpo", plan, base)
    one = forward(shape("tiny"), rows_of(plan))
    assert found.scored - found.cached == one.scoring
    assert found.ratio == pytest.approx(1 + one.scoring / one.training) and 5 / 4 < found.ratio < 4 / 3


def test_the_floor_of_kto_counts_mismatched_rows_twice(base):
    """Rows of one length and a head of no weight: (3 + 1 + 1 + 1) / (3 + 1) = 3/2."""
    config = shape("tiny")
    rows = [row for pair in fixed_pairs(4, 512, 32, 16) for row in pair]
    config.vocab_size = 0
    assert floor(config, rows, rows).ratio == pytest.approx(3 / 2)
    assert floor(config, rows).ratio == pytest.approx(4 / 3)


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_variants_train_on_the_same_rows_and_start_from_the_same_loss(base, loss):
    pairs = drawn_pairs(4, 512, longest=40)
    losses = {}
    for variant in ("cached", "k=1", "k=4"):
        work = prepare(variant, settings_of(variant, loss, 2), pairs, 2, base)
        losses[variant] = work()
    assert len(losses["cached"]) == 2
    assert losses["cached"][0] == losses["k=1"][0] == losses["k=4"][0]


def test_padding_to_the_maximum_changes_no_loss(base):
    pairs = drawn_pairs(4, 512, prompt=10, completion=10, longest=48)
    losses = [padding.prepare(variant, pairs, 48, base, 2)() for variant in padding.VARIANTS]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] == pytest.approx(losses[2], abs=1e-5)
    grid = padding.collate_to(48, [pairs[0][0]], torch.device("cpu"))
    assert grid.input_ids.shape == (1, 48)


def test_drawn_lengths_are_seeded_and_fit():
    a, b = (drawn_pairs(20, 512, longest=256) for _ in range(2))
    assert all(np.array_equal(x.completion_ids, y.completion_ids) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    assert max(len(row) for pair in a for row in pair) <= 256
    assert len({len(row) for pair in a for row in pair}) > 5


def test_variants_alternate():
    order: list[str] = []
    found = alternate({name: lambda name=name: lambda: order.append(name) for name in "ab"}, rounds=2)
    assert "".join(order) == "abbaab" and len(found["a"]) == 2


def test_a_ratio_is_of_neighbours():
    a, b = [Sample(2, 4), Sample(3, 30)], [Sample(1, 2), Sample(1, 10)]
    assert ratio(a, b) == Spread(2.5, 2, 3)
    assert ratio(a, b, "wall") == Spread(2.5, 2, 3)


def test_memory_is_that_of_the_work():
    code = ("from benchmarks.measure import memory_of; import torch\n"
            "print(memory_of(lambda: torch.ones(64 * 2**18).sum())['step'])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 90


def test_the_guard_fails_on_a_loss_of_more_than_15_percent():
    assert quick.worse({"a": 1.14, "b": 1.16}, {"a": 1.0, "b": 1.0}) == ["b"]
    assert quick.worse({"a": 0.5}, {"a": 1.0}) == []


def test_rows_are_those_of_the_loss_unit():
    pairs = drawn_pairs(4, 512)
    assert segment(Settings("dpo", 2, 1), pairs).steps == 2 and segment(Settings("kto", 2, 1), pairs).steps == 4
    assert all(isinstance(row, Sequence) for row in rows_of(segment(Settings("dpo", 2, 1), pairs)))


def test_training_reports_a_loss_a_step(base):
    settings = Settings("grpo", 4, 2, humanline=True)
    plan = segment(settings, drawn_pairs(4, 512, longest=32))
    assert len(train(make_trainer(settings, random_policy(shape("tiny"), torch.device("cpu"))), plan)) == plan.steps == 2


def test_the_gpu_script_runs_with_torch_transformers_accelerate_and_peft_alone():
    code = f"""
import importlib.util, runpy, sys
ABSENT, found = {ABSENT!r}, importlib.util.find_spec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ABSENT: raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
importlib.util.find_spec = lambda name, package=None: None if name.split('.')[0] in ABSENT else found(name, package)
sys.argv = 'gpu --shape tiny --length 32 --batch-pairs 2 --micro-pairs 1 --steps 1 --losses dpo kto --variants cached live k=1'.split()
runpy.run_module('benchmarks.gpu', run_name='__main__')
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| kto |") == 3 and done.stdout.count("| dpo |") == 3
