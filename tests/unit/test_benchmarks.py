"""The benchmarks: the floor recomputed by hand, fair halves, and scripts that run where they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import balance, gpu, padding, quick, ranks, rounds, shared_prompts, two_trees
from benchmarks.floor import Forward, floor, forward
from benchmarks.measure import Sample, Spread, alternate, counted_products, in_a_row, ratio
from benchmarks.offline_vs_humanline import floor_of, prepare, settings_of
from benchmarks.parts import (
    Settings,
    drawn_pairs,
    fixed_pairs,
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
from models.policy import checkpoint_activations, decoder_blocks
from rollouts.ledger import RoundFolder
from tests.integration.online import run_online
from tests.tiny import make_config
from trainers.basic import BasicTrainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base():
    return random_policy(shape("tiny"), torch.device("cpu"))


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


def test_padding_to_the_maximum_changes_no_loss(base):
    pairs = drawn_pairs(4, 512, prompt=10, completion=10, longest=48)
    losses = [in_a_row(padding.prepare(variant, pairs, 48, base, 2))() for variant in padding.VARIANTS]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] == pytest.approx(losses[2], abs=1e-5)
    grid = padding.collate_to(48, [pairs[0][0]], torch.device("cpu"))
    assert grid.input_ids.shape == (1, 48)


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
    words = "--data adder hh drawn --examples 64 --longest 256 --ranks 2 4 --shapes 4x1 2x2 --batches 2"
    monkeypatch.setattr(sys, "argv", ["balance", *words.split()])
    balance.main()
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 2 ", "| 4 "))]
    assert "adder: 64 pairs" in text and "drawn: 64 pairs" in text and "hh:" not in text and len(rows) == 4
    for row in rows:
        for before, after in (cell.split(" -> ") for cell in row[1:3]):
            assert float(before) < float(after) <= 1
    # by hand: by length the rank of 2 + 1 waits for that of 9 + 7; by tokens that of 7 + 2 for that of 9 + 1
    lone = [
        Example(str(n), (Sequence(np.zeros(1, np.int32), np.zeros(n - 1, np.int32)),)) for n in (9, 7, 2, 1)
    ]
    found = balance.measure(lone, 2, 2, 1, batches=1)
    assert (found.tokens_before, found.tokens_after) == (9.5 / 16, 9.5 / 10)
    assert 0 < found.operations_before < found.operations_after < 1


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


NEEDED = "torch", "transformers", "accelerate", "peft"
BARE = f"""
import importlib.metadata, importlib.util, re, runpy, sys
wanted, seen = list({NEEDED!r}), set()
while wanted:
    name = wanted.pop()
    if name in seen: continue
    seen.add(name)
    try: requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError: continue
    wanted += [re.split('[^A-Za-z0-9._-]', r)[0].lower().replace('_', '-') for r in requires if 'extra ==' not in r]
absent = {{m for m, of in importlib.metadata.packages_distributions().items() if not {{d.lower().replace('_', '-') for d in of}} & seen}}
assert {{'hydra', 'omegaconf', 'datasets', 'wandb'}} <= absent and not {{'torch', 'numpy', 'tokenizers'}} & absent, absent
find_spec = importlib.util.find_spec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in absent: raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
importlib.util.find_spec = lambda name, package=None: None if name.split('.')[0] in absent else find_spec(name, package)
import socket
def refused(*a, **k): raise AssertionError('the network')
socket.socket.connect = socket.getaddrinfo = refused
import importlib, json, os
importlib.import_module('benchmarks.gpu')
for i, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        os.dup2(os.open(f'{{i}}.out', os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(f'{{i}}.err', os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = ['gpu', '--device', 'cpu', '--tiny', *words]
        runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)
        print('the end')
        break
    assert os.wait()[0]
"""  # noqa: E501
"""benchmarks.gpu where only what NEEDED depends on is installed, without a network; once for each list of
arguments, by a process forked from one that has imported it."""
MORE = (
    ("--variants", "cached", "live", "k=1", "k=4"),
    ("--variants", "k=1", "--drawn", "--padded", "--checkpointing", "--profile"),
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The folder with the output of benchmarks.gpu for MORE."""
    folder = tmp_path_factory.mktemp("bare")
    environment = os.environ | {"HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", BARE, json.dumps(MORE)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("more", MORE)
def test_the_gpu_script_runs_with_torch_transformers_accelerate_and_peft_alone(more, bare):
    out, err = ((bare / f"{MORE.index(more)}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    assert out.endswith("the end\n"), err[-2000:]
    variants = [word for word in more if word in ("cached", "live") or word.startswith("k=")]
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(("| dpo", "| kto", "| grpo"))]
    assert [tuple(row[:2]) for row in rows] == [
        (f"| {loss}", v) for loss in ("dpo", "kto", "grpo") for v in variants
    ]
    assert all(float(row[3].replace(",", "")) > 0 and row[-2] == "0.0" for row in rows), (
        "tokens a second, and no GPU's memory"
    )
    assert ("Self CPU" in out) == ("--profile" in more)


@pytest.mark.parametrize(("variant", "steps"), [("cached", 6), ("k=1", 6), ("k=4", 6), ("k=16", 6)])
def test_every_sync_among_the_timed_steps_scores_a_whole_cycle(base, variant, steps):
    k = gpu.cycle(variant)
    settings = Settings("dpo", 1, 1, humanline=variant != "cached", sync_freq=k)
    plan = segment(settings, fixed_pairs(gpu.planned_steps(variant, steps), 512, 4, 2))
    trainer = make_trainer(settings, fresh(base))
    timed = range(gpu.WARM_UP, gpu.WARM_UP + gpu.timed_steps(variant, steps))
    scored = [len(list(trainer.upcoming(plan, at + 1, at + 1))) for at in timed if trainer.syncing.due(at)]
    assert len(timed) >= steps and sum(scored) == (0 if variant == "cached" else len(timed))


def test_lengths_are_drawn_about_a_quarter_of_the_maximum(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--drawn", "--batch-pairs", "8"])
    args = gpu.arguments()
    args.length, args.batch_pairs = 2048, 64
    lengths = [len(row) for pair in gpu.make_pairs(args) for row in pair]
    assert 0.2 < np.mean(lengths) / 2048 < 0.3 and max(lengths) <= 2048


@pytest.mark.slow
@pytest.mark.usefixtures("quick_python")
def test_two_ranks_measure_what_one_does():
    """In processes of their own; the CPU time is that of both."""
    two = ranks.started(2, ["--model", "tiny", "--data", "drawn", "--steps", "1", "--batch-pairs", "4"])
    one = ranks.measure("tiny", "drawn", 1, 4, 2)
    assert one.cpu > 0 and two.wall > 0 and two.cpu > 0.5 * one.cpu


@pytest.mark.slow
@pytest.mark.usefixtures("quick_python")
def test_a_checkout_does_the_same_bits_as_itself(monkeypatch, capsys):
    words = "--model tiny --data drawn --steps 2 --batch-pairs 2"
    monkeypatch.setattr(sys, "argv", ["two_trees", str(ROOT), *words.split()])
    two_trees.main()
    text = capsys.readouterr().out
    assert "the weights are the same to the bit" in text
    assert len([line for line in text.splitlines() if line.startswith(("| before |", "| this |"))]) == 2


def test_both_checkouts_step_on_the_data_that_lie_beside_this_one(tmp_path, monkeypatch):
    file = tmp_path / "hh.jsonl"
    monkeypatch.setitem(two_trees.KNOWN, "hh", (file, "hh"))
    assert two_trees.data_here("hh") == "drawn"
    file.touch()
    assert two_trees.data_here("hh") == f"{file}:hh"
    assert two_trees.data_here("drawn") == "drawn" and two_trees.data_here("x.jsonl:hh") == "x.jsonl:hh"


def rounds_of(tmp_path, lag: int, count: int) -> Path:
    for i in range(count):
        seconds = {"sample": 1.0 + i, "score": 0.5, "publish": 0.25, "train": 2.0}
        RoundFolder(tmp_path / "rounds" / f"{i:03d}").note(
            {
                "seconds": seconds,
                "train_wall_seconds": 4.0,
                "metrics": {"sample_tokens_per_second": 100.0},
                "idle": {"trainer": 0.5, "sampler": 0.25},
            }
        )
    return tmp_path


@pytest.mark.parametrize(
    ("lag", "sampled", "whole"), [(0, 3.0, 3.0 + 0.5 + 0.25 + 4.0), (1, 2.5, 0.25 + 4.0)]
)
def test_rounds_are_read_from_what_a_run_wrote(tmp_path, lag, sampled, whole):
    found = rounds.Rounds.of(rounds_of(tmp_path, lag, 4), lag, wall=60.0)
    assert found.seconds("sample").median == sampled and found.whole.median == whole
    text = rounds.report({"vLLM": found})
    assert "50% / 25%" in text and "| 60 |" in text
    bars = {line.split()[-4]: line.split()[-1] for line in text.splitlines() if line.endswith(("#", "="))}
    assert set(bars["sample"]) == {"=" if lag else "#"} and set(bars["train"]) == {"#"}
    assert len(bars["sample"]) == rounds.BAR and len(bars["train"]) == round(rounds.BAR * 2.0 / sampled)


def test_too_few_rounds_are_said(tmp_path):
    with pytest.raises(ValueError, match="has 2 rounds"):
        rounds.Rounds.of(rounds_of(tmp_path, 1, 2), 1, wall=1.0)


def test_a_real_run_has_the_numbers_that_the_benchmark_of_rounds_reads(tmp_path):
    sizes = "rounds.contexts=16", "rounds.contexts_per_round=8"
    run = run_online(tmp_path, "r", "loss=dpo", "online=true", *rounds.VARIANTS["embedded"], *sizes)
    found = rounds.Rounds.of(run, 0, wall=1.0)
    assert len(found.records) == 1 and found.tokens_per_second > 0
    assert 0 < found.seconds("train").median <= found.records[0]["train_wall_seconds"] < found.whole.median


@pytest.mark.parametrize("variant", rounds.VARIANTS.values())
def test_the_variants_of_rounds_are_settings_that_exist(variant):
    assert make_config("loss=dpo", *rounds.COMMON, *variant).rounds.lag == ("rounds.lag=1" in variant)
