"""What the report says of the mechanism: numbers in nats whatever a cell's beta is, and nothing of what was
not measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from study.plan import FULL, TASKS, read_plan
from study.records import Record
from study.tuning import Tuned
from study.why import example_weight, why_figures, why_sections, why_table

PLANNED = read_plan(TASKS["instruct"])
CHOSEN = {cell: {"lr": 1e-5, PLANNED.then[cell][0]: 2.0} for cell in PLANNED.main}


def ended(cell: str, seed: int = 1, **after: float) -> Record:
    """A run that measured what is given."""
    return Record(
        name=f"{cell}-s{seed}",
        cell=cell,
        seed=seed,
        command=[],
        before={"eval_length_sampled": 20.0, "eval_accuracy_sampled": 0.6},
        after={"eval_accuracy_sampled": 0.7} | {f"eval_{key}": value for key, value in after.items()},
        steps=80,
        examples=640,
        seconds={"train": 8.0, "sample": 0.0, "cpu": 15.0, "wall": 20.0},
        traces={"reward_margin": math.log(3)},
        clipped=0.25 if cell.endswith("hl") else None,
    )


def test_how_far_answers_moved_is_in_nats_whatever_beta_is():
    moved = {"reward_chosen": 3.0, "reward_rejected": -1.0, "length_sampled": 25.0, "kl_initial": 0.5}
    runs = [ended("dpo-offline", 1, **moved), ended("dpo-offline", 2, **moved | {"reward_chosen": 5.0})]
    runs += [ended("grpo-offline-hl", 1, **moved), ended("kto-online", 1)]
    head, *rows = why_table(PLANNED, runs, CHOSEN)
    told = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(told) == ["dpo-offline", "kto-online", "grpo-offline-hl"], (
        "main cells with runs, in their order"
    )
    dpo, grpo = told["dpo-offline"], told["grpo-offline-hl"]
    assert (dpo["chosen moved"], dpo["rejected moved"]) == ("+2.0", "-0.5"), "by the beta that was tuned, 2"
    assert (grpo["chosen moved"], grpo["rejected moved"]) == ("+3.0", "-1.0"), "its beta is no reward's"
    assert dpo["length"] == "20.0 → 25.0" and dpo["KL from start"] == "0.500"
    assert dpo["tokens clipped"] == "–" and grpo["tokens clipped"] == "25.00%"
    assert dpo["weight of an example"] == "0.25" and grpo["weight of an example"] == "–"
    assert told["kto-online"]["chosen moved"] == told["kto-online"]["length"] == "–"


def test_without_a_tuned_beta_the_plans_own_counts_and_then_the_losss():
    run = ended("dpo-offline", reward_chosen=1.0, reward_rejected=0.0)
    adder = read_plan(TASKS["adder"])
    ((_, *rest),) = why_table(adder, [run], {})[1:]
    assert rest[1] == "+10.0", "of loss=dpo, 0.1"
    kto = replace(run, cell="kto-offline")
    ((_, *rest),) = why_table(adder, [kto], {})[1:]
    assert rest[1] == "+4.0", "of loss=kto, 0.25"


@pytest.mark.parametrize(("margin", "weight"), [(0.0, 0.5), (math.log(3), 0.25), (-math.log(3), 0.75)])
def test_an_example_weighs_less_the_surer_the_policy_is(margin, weight):
    assert example_weight(replace(ended("dpo-offline"), traces={"reward_margin": margin})) == pytest.approx(
        weight
    )


def test_figures_are_drawn_of_what_there_is():
    runs = [ended("dpo-offline", seed, reward_chosen=1.0, kl_initial=0.1) for seed in (1, 2)]
    assert set(why_figures(PLANNED, runs, CHOSEN, None)) == {"moves", "displacement", "frontier"}
    assert why_figures(PLANNED, [], CHOSEN, None) == {} and why_sections(PLANNED, [], CHOSEN, {}) == []
    grids = {cell: {0.5: [0.6, 0.7], 1.0: [0.65]} for cell in PLANNED.main}
    shared = [ended(cell, seed) for cell in PLANNED.cells(FULL)["share"] for seed in (1, 2)]
    every = why_figures(PLANNED, [*runs, *shared], CHOSEN, Tuned(then=grids))
    assert set(every) == {"moves", "displacement", "frontier", "anchor", "share"}


def test_the_gain_by_share_is_paired_by_seed_and_placed_by_how_unlikely_the_data_are():
    def run(cell: str, seed: int, value: float, logprob: float) -> Record:
        one = ended(cell, seed, accuracy_sampled=value)
        return replace(one, before=one.before | {"train_logprob_chosen": logprob})

    runs = [run("dpo-offline", s, 0.6 + s / 100, -1.5) for s in (1, 2)]
    runs += [run("dpo-offline-hl", s, 0.65 + s / 100, -9.0) for s in (1, 2, 3)]
    runs += [run("dpo-own50", s, 0.6, -0.9) for s in (1, 2)] + [
        run("dpo-own50-hl", s, 0.59, -9.0) for s in (1, 2)
    ]
    (_, figure) = why_figures(PLANNED, runs, CHOSEN, None)["share"]
    left, right = figure.axes
    (plain, moved) = [line for line in left.lines if line.get_label() in ("dpo-offline", "dpo-offline-hl")]
    assert list(plain.get_xdata()) == [0.0, 0.5] and next(iter(moved.get_ydata())) == pytest.approx(0.67)
    placed = sorted(
        (line.get_xdata()[0], line.get_ydata()[0]) for line in right.lines if line.get_marker() == "o"
    )
    assert placed == [(0.9, pytest.approx(-1.0)), (1.5, pytest.approx(5.0))]


def test_a_run_lies_where_its_own_beta_puts_it_and_online_runs_are_another_correlation():
    runs = [ended("dpo-offline", s, reward_chosen=2.0 * s, accuracy_sampled=0.5 + s / 100) for s in range(10)]
    runs += [ended("dpo-noise0", s, reward_chosen=99.0, accuracy_sampled=0.9) for s in (1,)]
    runs += [ended("dpo-online", s, reward_chosen=1.0 * s, accuracy_sampled=0.9 - s / 100) for s in range(10)]
    _, figure = why_figures(PLANNED, runs, CHOSEN, None)["displacement"]
    dpo = figure.axes[0]
    xs = [float(line.get_xdata()[0]) for line in dpo.lines if len(line.get_xdata())]
    assert xs == [*range(10), 49.5, *(s / 2 for s in range(10))], "by the beta that was tuned, 2"
    assert "ρ +1.00 offline" in dpo.get_title() and "ρ -1.00 online" in dpo.get_title()
    assert figure.axes[1].get_title() == "KTO"
