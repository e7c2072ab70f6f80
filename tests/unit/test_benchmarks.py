"""The benchmarks: the floor recomputed by hand, fair halves, and scripts that run where they must."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import balance, quick, recipes, shared_prompts
from benchmarks.floor import Forward, floor, forward
from benchmarks.measure import Sample, Spread, alternate, in_a_row, ratio
from benchmarks.offline_vs_humanline import floor_of, prepare, settings_of
from benchmarks.parts import (
    Settings,
    drawn_pairs,
    fresh,
    make_trainer,
    random_policy,
    rows_of,
    score_all,
    segment,
    shape,
    train,
)
from benchmarks.profile import profiled, report
from data.batches import collate
from data.types import Example, Sequence
from data.views import mismatched
from launch.composing import compose_config
from models.policy import checkpoint_activations, decoder_blocks
from trainers.basic import BasicTrainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base():
    return random_policy(shape("tiny"), torch.device("cpu"))


def fixed_pairs(
    count: int, vocabulary: int, length: int, completion: int, seed: int = 0
) -> list[tuple[Sequence, Sequence]]:
    """Return pairs of random tokens; every row has ``length`` tokens, of which ``completion`` are the
    answer."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        asked = rng.integers(3, vocabulary, length - completion).astype(np.int32)
        chosen, rejected = (rng.integers(3, vocabulary, completion).astype(np.int32) for _ in range(2))
        pairs.append((Sequence(asked, chosen), Sequence(asked, rejected)))
    return pairs


def counted_products(work) -> float:
    """Return the operations of the matrix products that ``work`` does, by torch's own count. Attention is
    computed by plain products meanwhile, over whole squares, not the causal half."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def test_the_floor_is_what_the_model_multiplies():
    """Against torch's own count of a forward's products over a row without padding (its plain attention is
    the whole square)."""
    config = shape("tiny")
    policy = random_policy(config, torch.device("cpu"))
    row = fixed_pairs(1, 512, length=40, completion=40 - 1)[0][0]
    with torch.no_grad():
        counted = counted_products(lambda: policy(collate([row], torch.device("cpu"))))
    assert counted == whole_squares(forward(config, [row])).scoring


def whole_squares(of: Forward) -> Forward:
    """As torch counts plain attention."""
    return Forward(of.body, 2 * of.attention, of.head)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("variant", ["cached", "k=1"])
def test_the_floor_of_a_step_is_what_a_real_step_multiplies(base, loss, variant, padded):
    """Policy forward and backward, the reference of the next batch, mismatched rows: to the last product.
    Logits as few as these are kept, so none is computed twice."""
    settings, config = settings_of(variant, loss, 2, padded), base.model.config
    plan, trainer = segment(settings, fixed_pairs(6, 512, 40, 25), 3), make_trainer(settings, fresh(base))
    score_all(trainer, plan)

    def of_batch(i: int) -> tuple[Forward, Forward]:
        batch = mismatched(plan.batch(i), 10**6) if loss == "kto" else plan.batch(i)
        other = [e.mismatched for e in batch if e.mismatched is not None]
        return whole_squares(forward(config, [row for e in batch for row in e.rows])), whole_squares(
            forward(config, other)
        )

    (rows, other), following = of_batch(0), of_batch(1)
    expected = (
        rows.training_on_kept + other.scoring + (sum(f.scoring for f in following) if variant == "k=1" else 0)
    )
    assert counted_products(lambda: trainer.step(plan)) == expected
    assert bool(other.scoring) == (loss == "kto")


@pytest.mark.parametrize("padded", [False, True])
def test_the_profile_finds_every_operation_of_the_floor_and_all_of_the_time(base, padded):
    settings = settings_of("cached", "dpo", 2, padded)
    plan = segment(settings, fixed_pairs(4, 512, 40, 25), 2)
    took = time.perf_counter()
    steps, cheapest = profiled(make_trainer(settings, fresh(base)), plan, 2)
    took = time.perf_counter() - took
    one = forward(base.model.config, [row for e in plan.batch(0) for row in e.rows])
    for parts in steps:
        assert parts["body products"].operations == 3 * one.body and parts["head"].operations == 3 * one.head
        assert parts["attention"].operations == 3 * one.attention
        assert all(part.seconds > 0 for part in parts.values())
    assert len(steps) == 2 and sum(p.seconds for parts in steps for p in parts.values()) < took
    assert 0 < cheapest < took
    text = report(steps, cheapest, best=1e9)
    assert (
        f"| the step | {1e3 * min(sum(p.seconds for p in parts.values()) for parts in steps):.1f} | 100.0% |"
        in text
    )


def test_recomputed_activations_cost_a_unit_less_the_last_product(base):
    """torch stops recomputing a block once it has all that the backward reads: its last product, down, is
    read by nobody."""
    policy, settings = fresh(base), Settings("dpo", 2, 2, checkpointing=True)
    checkpoint_activations(decoder_blocks(policy))
    plan, trainer = segment(settings, fixed_pairs(2, 512, 40, 25)), make_trainer(settings, policy)
    score_all(trainer, plan)
    config, rows = policy.model.config, list(rows_of(plan))
    one = whole_squares(forward(config, rows))
    down = 2 * config.num_hidden_layers * config.hidden_size * config.intermediate_size * sum(map(len, rows))
    assert (
        counted_products(lambda: trainer.step(plan)) == one.training_on_kept + one.body + one.attention - down
    )


def test_the_page_on_performance_has_the_floor_s_numbers():
    """By hand: Qwen2.5-1.5B's shape at 16 pairs of 2,048 tokens, half completion."""
    rows = [Sequence(np.zeros(1024, np.int32), np.zeros(1024, np.int32))] * 32
    one = forward(shape("qwen2.5-1.5b"), rows)
    weights = 2 * 1536 * 128 * (12 + 2) + 3 * 1536 * 8960
    assert one.body == 2 * 28 * weights * 32 * 2048
    text = (ROOT / "docs" / "performance.md").read_text()
    for said in (
        f"{weights / 1e6:.1f} M",
        f"body {one.body / 1e12:.1f} T",
        f"attention {one.attention / 1e12:.1f} T",
        f"{one.training / 1e12:.0f} TFLOP",
        f"{one.training / 989e12:.2f} s",
    ):
        assert said in " ".join(text.split()), said


def test_the_floor_of_humanline_is_four_thirds_at_most(base):
    plan = segment(Settings("dpo"), drawn_pairs(8, 512))
    found = floor_of("dpo", plan, base)
    one = forward(shape("tiny"), rows_of(plan))
    assert found.scored - found.cached == one.scoring
    assert found.ratio == pytest.approx(1 + one.scoring / one.training_on_kept) == pytest.approx(4 / 3)
    assert 5 / 4 < 1 + one.scoring / one.training < 4 / 3, "where logits are computed again"


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
    for variant in ("cached", "scored", "k=1", "k=4"):
        losses[variant] = in_a_row(prepare(variant, settings_of(variant, loss, 2), pairs, 2, base))()
    assert len(losses["cached"]) == 2 and losses["cached"] == losses["scored"]
    assert losses["cached"][0] == losses["k=1"][0] == losses["k=4"][0]


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_sharing_prompts_changes_no_loss(base, loss):
    rows = fixed_pairs(4, 512, length=24, completion=8)
    groups = shared_prompts.Drawn(loss, answers=4).groups(rows, 4, 512)
    assert shared_prompts.saved(groups) == 3 * 16 / (4 * 24), "of four rows' prompts three"
    settings = Settings(loss, 2 * len(groups[0]), len(groups[0]))
    both = [replace(settings, share_prompts=share) for share in (False, True)]
    losses = [in_a_row(shared_prompts.prepare(one, groups, base))() for one in both]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_benchmark_of_the_balance_measures_what_ranks_are_dealt(monkeypatch, capsys):
    """Without the real data, which a clone does not have; embedded pairs are there."""
    monkeypatch.setattr(balance, "KNOWN", {"hh": (ROOT / "nowhere", "hh")})
    words = "--data adder hh heavy --losses dpo kto --examples 64 --longest 256 --ranks 2 4"
    monkeypatch.setattr(sys, "argv", ["balance", *words.split(), "--shapes", "4x1", "2x2", "--batches", "2"])
    balance.main()
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 2 ", "| 4 "))]
    assert "adder, dpo: 64" in text and "heavy, kto: 64" in text and "hh" not in text and len(rows) == 8
    for row in rows:
        for cell in row[1:3]:
            before, _, after = cell.partition(" -> ")
            after, _, possible = after.partition(" of ")
            assert float(before) <= float(after) <= float(possible) + 0.01
    # by hand: tokens alone; the rank of 2 + 1 waits for that of 9 + 7
    turn = [[Example("a", (balance.row(0, 1, n - 1),)) for n in of] for of in ((9, 7), (2, 1))]
    assert balance.busy([turn], balance.Work(), False) == (9.5 / 16, 16)


def test_drawn_lengths_are_seeded_and_fit():
    a, b = (drawn_pairs(20, 512, longest=256) for _ in range(2))
    assert all(
        np.array_equal(x.completion_ids, y.completion_ids)
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )
    assert max(len(row) for pair in a for row in pair) <= 256
    assert len({len(row) for pair in a for row in pair}) > 5


def test_pieces_of_variants_alternate():
    order: list[str] = []
    found = alternate(
        {
            name: lambda name=name: [lambda: order.append(name), lambda: order.append(name.upper())]
            for name in "ab"
        },
        rounds=2,
    )
    assert "".join(order) == "abBAbaABabBA" and len(found["a"]) == 2
    with pytest.raises(ValueError, match="longer"):
        alternate({"a": lambda: [order.clear], "b": lambda: [order.clear] * 2}, rounds=1)


def test_a_sample_is_the_sum_of_its_pieces():
    pieces = [lambda: time.sleep(0.02)] * 3
    found = alternate({"a": lambda: pieces}, rounds=1)["a"][0]
    assert found.wall >= 0.06 and found.cpu < found.wall


def test_a_ratio_is_of_neighbours():
    a, b = [Sample(2, 4), Sample(3, 30)], [Sample(1, 2), Sample(1, 10)]
    assert ratio(a, b) == Spread(2.5, 2, 3)
    assert ratio(a, b, "wall") == Spread(2.5, 2, 3)


def test_memory_is_that_of_the_work():
    code = (
        "from benchmarks.measure import memory_of; import torch\n"
        "print(memory_of(lambda: torch.ones(64 * 2**18).sum())['step'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 90


def test_the_guard_fails_on_a_loss_of_more_than_15_percent():
    assert quick.worse({"a": 1.14, "b": 1.16}, {"a": 1.0, "b": 1.0}) == ["b"]
    assert quick.worse({"a": 0.5}, {"a": 1.0}) == []


def test_the_guard_sees_a_real_slowdown(base, monkeypatch):
    """Every sync scores what is coming four times more than it must."""
    before, sync = quick.humanline_cost("dpo", base), BasicTrainer.sync

    def slow(self, segment, step):
        for _ in range(5):
            sync(self, segment, step)

    monkeypatch.setattr(BasicTrainer, "sync", slow)
    assert "dpo: humanline / offline with its own scoring" in quick.worse(
        quick.humanline_cost("dpo", base), before
    )


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_the_guard_s_exit_code(monkeypatch, tmp_path, capsys, slower):
    """A cost that is worse twice fails; one that was better the second time does not."""
    found = iter([{"a": 1.3, "b": 1.0}, {"a": slower, "b": 1.0}])
    (tmp_path / "baseline.json").write_text('{"a": 1.0, "b": 1.0}')
    monkeypatch.setattr(quick, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(quick, "measure", lambda: next(found))
    monkeypatch.setattr(sys, "argv", ["quick"])
    with pytest.raises(SystemExit) as stopped:
        quick.main()
    assert stopped.value.code == int(slower > quick.WORST)
    assert ("WORSE" in capsys.readouterr().out) == (slower > quick.WORST)


def test_the_baseline_has_what_the_guard_measures(base, monkeypatch):
    monkeypatch.setattr(quick, "ROUNDS", 1)
    monkeypatch.setattr(quick, "shape", lambda name, vocabulary=None: shape("tiny", vocabulary))
    assert set(quick.measure()) == set(json.loads(quick.BASELINE.read_text()))


def test_rows_are_those_of_the_loss_unit():
    pairs = drawn_pairs(4, 512)
    assert (
        segment(Settings("dpo", 2, 1), pairs).steps == 2 and segment(Settings("kto", 2, 1), pairs).steps == 4
    )
    assert all(isinstance(row, Sequence) for row in rows_of(segment(Settings("dpo", 2, 1), pairs)))


def test_training_reports_a_loss_a_step(base):
    settings = Settings("grpo", 4, 2, humanline=True)
    plan = segment(settings, drawn_pairs(4, 512, longest=32))
    assert (
        len(train(make_trainer(settings, random_policy(shape("tiny"), torch.device("cpu"))), plan))
        == plan.steps
        == 2
    )


def test_the_table_of_recipes_has_each_of_them_and_the_rates_that_operations_give():
    """The cells' memory is simulated by the command; the rates of a cell's choice are counted here again."""
    text = (ROOT / "docs" / "performance.md").read_text()
    head, _, *lines = re.search(r"(\| recipe \|.*\n(?:\|.*\n)+)", text)[1].splitlines()
    places = [re.fullmatch(r"(\d+) (\w+)", cell.strip()).groups() for cell in head.split("|")[2:-1]]
    rows = {re.findall(r"`([^`]+)`", line)[-1]: line for line in lines}
    named = [name for line in lines for name in re.findall(r"`([^`]+)`", line)]
    assert sorted(named) == sorted(name for names in recipes.recipes().values() for name in names)
    for name in ("dpo-offline-humanline", "kto-online-humanline-authors"):
        config, cells = compose_config([f"experiment={name}"]), rows[name].split("|")[2:-1]
        for (count, card), cell in zip(places, cells, strict=True):
            if (found := re.match(r" (\w+), [\d,]+ tokens; ([\d,]+) to ([\d,]+) ", cell)) is None:
                assert cell == " no "
                continue
            way = {"none": False, "selective": "selective", "full": True}[found[1]]
            said = tuple(float(number.replace(",", "")) for number in found.groups()[1:])
            assert said == recipes.rates(recipes.operations_of(config, way), int(count), card)
