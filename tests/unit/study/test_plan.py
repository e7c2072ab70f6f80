"""The study's plan: equal examples, equal tuning, every setting one that a run accepts, and an order in which
early runs cover all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import yaml

from common.errors import ConfigError
from launch.composing import Composer, compose_config
from study.__main__ import forecast, main
from study.plan import CHOSEN as FILE_OF_CHOSEN
from study.plan import FULL, MAIN, PLAN, QUICK, TASKS, read_chosen, read_plan
from study.records import read_records
from study.tuning import best, beyond, tune
from tests.tiny import ROOT

PLANNED = read_plan()
CHOSEN = {cell: dict(zip(PLANNED.tuned(cell), (1e-4, 0.3), strict=True)) for cell in PLANNED.main}
STORIES = read_plan(TASKS["instruct"])
TWO = pytest.mark.parametrize("plan", [PLANNED, STORIES], ids=["adder", "instruct"])


@TWO
def test_offline_grpo_alone_starts_from_another_clip(plan):
    widths = {cell: plan.then[cell][1] for cell in plan.main if cell.startswith("grpo")}
    assert widths.pop("grpo-offline") == 0.5 and set(widths.values()) == {0.15}


@TWO
def test_every_main_cell_sees_as_many_examples_in_as_many_steps(plan):
    assert len(plan.main) == 18
    chosen = {cell: dict(zip(plan.tuned(cell), (1e-5, 0.3), strict=True)) for cell in plan.main}
    composer, ks = Composer(), {}
    for run in {run.cell: run for run in plan.runs(FULL, chosen)}.values():
        config = composer.config(run)
        assert config.data.eval_split == "test"
        if run.cell not in plan.main:
            continue
        examples = config.rounds.examples if config.online else config.n_examples
        assert examples / config.model.batch_size == 80
        assert examples == (640 if config.loss["name"] == "dpo" else 1280), "a pair is two sequences"
        assert config.humanline == ("-hl" in run.cell) and config.online == ("-online" in run.cell)
        if config.online:
            length = config.rounds.contexts_per_round * (1 if config.loss["name"] == "dpo" else 2)
            assert length / config.model.batch_size == 16, "a round's steps"
        elif config.humanline:
            ks.setdefault(config.loss["name"], set()).add(config.sync_freq)
    assert set(map(frozenset, ks.values())) == {frozenset({1, 4, 16})}


def tuned(plan, peak, anchor=None):
    """Tuning whose metric is highest at ``peak`` (cell -> lr) and, where given, at ``anchor`` times what the
    second setting is before tuning."""
    asked = []

    def metric(run):
        name = run.name.split("-lr")[0]
        off = abs(math.log(run.settings["lr"] / peak[name]))
        if anchor is not None:
            key, before = plan.then[name.removeprefix("tune-")]
            off += abs(math.log(run.settings[key] / before / anchor))
        return -off

    def measure(runs):
        asked.extend(runs)
        return {run.name: metric(run) for run in runs}

    return tune(plan, measure), asked


@TWO
def test_learning_rate_and_anchor_are_tuned_alike_in_every_cell(plan):
    lr = plan.lrs[3]
    found, _ = tuned(plan, {f"tune-{cell}": lr for cell in plan.main}, anchor=1.0)
    counts = {cell: sum(r.cell.startswith(f"tune-{cell}-lr") for r in found.runs) for cell in plan.main}
    assert set(counts.values()) == {(6 + 4) * 3} and len(plan.tuning_seeds) == 3
    assert plan.lrs[1:] == pytest.approx([1.5 * lr for lr in plan.lrs[:-1]], rel=0.02)
    assert {run.settings["data.eval_split"] for run in found.runs} == {"validation"}
    assert not {run.seed for run in plan.runs(FULL, found.chosen)} & set(plan.tuning_seeds)
    assert found.chosen == {cell: {"lr": lr, plan.then[cell][0]: plan.then[cell][1]} for cell in plan.main}
    assert {plan.then[cell][0] for cell in plan.main} == {"loss.beta", "loss.epsilon"}


def test_no_cell_is_tuned_more_than_another_and_none_on_what_is_reported():
    found, asked = tuned(PLANNED, {f"tune-{cell}": 1e-4 for cell in PLANNED.main})
    counts = {cell: sum(r.cell.startswith(f"tune-{cell}-lr") for r in found.runs) for cell in PLANNED.main}
    assert set(counts.values()) == {(6 + 4 + 3) * len(PLANNED.tuning_seeds)}, "and each as often longer"
    assert {run.name for run in asked} == {run.name for run in found.runs}
    assert {run.settings["data.eval_split"] for run in found.runs} == {"validation"}
    first = {
        run.cell.partition("-lr")[0]: run for run in found.runs
    }  # they differ in the numbers that are tuned, and in seeds
    assert len(first) == len(PLANNED.main)
    assert all(compose_config(run.overrides()).data.eval_split == "validation" for run in first.values())
    final = {run.seed for run in PLANNED.runs(FULL, CHOSEN)}
    assert not final & set(PLANNED.tuning_seeds)
    assert len({run.name for run in found.runs}) == len(found.runs)
    assert {one["lr"] for one in found.chosen.values()} == {1e-4}
    for cell, (key, before) in PLANNED.then.items():
        assert found.chosen[cell][key] == pytest.approx(before / 4 / 2**3, rel=0.01), "of equals the smallest"


def test_the_runs_of_the_first_seed_come_first():
    found, _ = tuned(PLANNED, {f"tune-{cell}": 1e-4 for cell in PLANNED.main})
    lrs = [
        run
        for cell, (key, before) in PLANNED.then.items()
        for run in found.runs
        if run.cell.startswith(f"tune-{cell}-lr") and run.settings[key] == before
    ]
    lrs.sort(key=found.runs.index)
    assert len(lrs) == 6 * 3 * len(PLANNED.main)
    assert [run.seed for run in lrs] == sorted(run.seed for run in lrs)


def test_a_grid_whose_best_is_at_its_edge_is_made_longer_by_its_own_ratio():
    peak = {f"tune-{cell}": STORIES.lrs[2] for cell in STORIES.main} | {
        "tune-dpo-offline": 2.1 * STORIES.lrs[-1],
        "tune-kto-online": 1e-9,
    }
    found, _ = tuned(STORIES, peak)
    assert sorted(found.lrs["grpo-offline"]) == list(STORIES.lrs)
    added = sorted(set(found.lrs["dpo-offline"]) - set(STORIES.lrs))
    wanted = [STORIES.lrs[-1] * 1.5**n for n in (1, 2, 3)]
    assert added == pytest.approx(wanted, rel=0.01), "till one is worse"
    assert found.chosen["dpo-offline"]["lr"] == added[1]
    added = sorted(set(found.lrs["kto-online"]) - set(STORIES.lrs))
    wanted = [STORIES.lrs[0] / 1.5**n for n in (3, 2, 1)]
    assert added == pytest.approx(wanted, rel=0.01), "three times at most"
    assert [len(found.then[cell]) for cell in ("dpo-offline", "grpo-online")] == [8, 8], "and its own edge"
    assert len({run.name for run in found.runs}) == len(found.runs)


@pytest.mark.parametrize(
    ("grid", "choice", "more"),
    [([1, 2, 4], 4, 8), ([4, 1, 2], 1, 0.5), ([1, 2, 4], 2, None), ([3], 3, None)],
)
def test_what_lies_beyond_a_grid(grid, choice, more):
    assert beyond(grid, choice) == more


def test_the_anchor_is_tuned_from_what_a_cell_has_and_for_each_loss_its_own():
    assert STORIES.then["grpo-offline"] == ("loss.epsilon", 0.5)
    assert STORIES.then["grpo-online"] == ("loss.epsilon", 0.15)
    assert STORIES.then["dpo-offline-hl-k16"] == ("loss.beta", 1.0)
    run = STORIES.tuning_run("kto-online", 4e-5, 0.625, 100)
    config = compose_config(run.overrides())
    assert (config.loss["beta"], config.lr, config.data.eval_split) == (0.625, 4e-5, "validation")
    assert config.n_eval_prompts == 192
    final = next(run for run in STORIES.runs(FULL, {c: {"lr": 1e-5} for c in STORIES.main}))
    assert compose_config(final.overrides()).n_eval_prompts is None, "a result is measured on all of them"


@pytest.mark.parametrize("mode", [FULL, QUICK])
def test_every_run_is_one_that_train_accepts(mode):
    cells = {run.cell: run for run in PLANNED.runs(mode, CHOSEN)}
    assert set(cells) == {cell for part in PLANNED.cells(mode).values() for cell in part}
    composer = Composer()
    for run in cells.values():
        composer.config(run)


def test_seeds_are_ten_in_full_and_three_in_quick_and_can_be_given():
    def seeds(runs, cell):
        return sorted(run.seed for run in runs if run.cell == cell)

    full, quick = PLANNED.runs(FULL, CHOSEN), PLANNED.runs(QUICK, CHOSEN)
    assert all(len(seeds(full, cell)) >= 10 for cell in PLANNED.cells(FULL)[MAIN])
    assert all(seeds(quick, cell) == [1, 2, 3] for part in PLANNED.cells(QUICK).values() for cell in part)
    given = PLANNED.runs(QUICK, CHOSEN, [11, 12])
    assert all(seeds(given, cell) == [11, 12] for cell in PLANNED.cells(QUICK)[MAIN])


def test_quick_has_the_four_variants_of_every_loss_and_full_all_of_them():
    four = {
        f"{loss}-{v}"
        for loss in ("dpo", "kto", "grpo")
        for v in ("offline", "offline-hl", "online", "online-hl")
    }
    assert set(STORIES.cells(QUICK)[MAIN]) == set(PLANNED.cells(QUICK)[MAIN]) == four
    assert set(STORIES.cells(FULL)[MAIN]) == set(STORIES.main) > four
    assert list(STORIES.cells(QUICK)) == list(PLANNED.cells(QUICK)) == [MAIN], "both fit into twenty minutes"


@TWO
def test_what_a_study_takes_is_said_before_it_begins(plan):
    online = sum("online" in cell for cell in plan.quick)
    assert len(plan.all_runs(QUICK)) == 3 * len(plan.quick)
    cost = plan.seconds
    seconds = 3 * (cost["offline"] * (len(plan.quick) - online) + cost["online"] * online)
    assert f"about {seconds / 3600:.1f} CPU hours, {seconds / 3600 / 2:.1f} hours 2 at a time" in forecast(
        plan, QUICK, 2
    )
    assert seconds < 2 * 15 * 60
    full = plan.all_runs(FULL)
    tuning = [run for run in full if run.cell.startswith("tune-")]
    assert len(tuning) == len(plan.main) * 3 * (6 + 4) == len({run.name for run in tuning})
    assert len(full) - len(tuning) == 10 * sum(map(len, plan.cells(FULL).values()))


def test_both_tasks_stay_within_sixteen_hours():
    plans = (PLANNED, STORIES)
    assert sum(plan.cost(run) for plan in plans for run in plan.all_runs(FULL)) < 16 * 3600


def test_three_seeds_of_everything_come_before_a_fourth_of_anything():
    order = PLANNED.runs(FULL, CHOSEN)
    first = next(i for i, run in enumerate(order) if run.seed == 4)
    cells = [run.cell for run in order[:first]]
    assert all(cells.count(cell) == 3 for part in PLANNED.cells(FULL).values() for cell in part)


def test_a_further_cell_has_the_tuned_settings_of_the_cell_it_is_like():
    chosen = chosen_apart()
    runs = {run.cell: run.settings for run in PLANNED.runs(FULL, chosen)}
    further, like = runs["dpo-offline-hl-k64"], runs["dpo-offline-hl"]
    assert further["lr"] == chosen["dpo-offline-hl"]["lr"]
    assert runs["rare-64x-hl-k16"]["lr"] == chosen["grpo-online"]["lr"]
    assert {key for key in further if further[key] != like.get(key)} == {"sync_freq"}


def chosen_apart():
    """What tuning chose, another value for each cell."""
    return {
        cell: dict(zip(PLANNED.tuned(cell), (1e-5 * (i + 1), float(i + 1)), strict=True))
        for i, cell in enumerate(PLANNED.main)
    }


def test_what_a_further_cell_changes_is_not_replaced_by_what_was_tuned():
    chosen = chosen_apart()
    runs = {run.cell: run.settings for run in PLANNED.runs(FULL, chosen)}
    assert runs["dpo-offline-hl"].items() >= chosen["dpo-offline-hl"].items()
    own = [runs[cell]["loss.epsilon"] for cell in ("rare-online", "grpo-offline-eps1", "grpo-offline-eps4")]
    assert own == [0.2, 1.0, 4.0]
    assert (runs["dpo-weak"]["loss.beta"], runs["kto-weak-hl"]["loss.beta"]) == (0.1, 0.25)
    assert runs["kto-weak-hl"]["lr"] == chosen["kto-offline-hl"]["lr"]


def test_of_equals_the_smallest_is_chosen():
    assert best({1e-4: [0.5], 3e-5: [0.6, 0.8], 1e-3: [0.7]}) == 3e-5


def test_quick_says_what_to_do_where_nothing_was_tuned(tmp_path):
    with pytest.raises(ConfigError, match="study full"):
        read_chosen(tmp_path / "chosen.yaml", PLANNED)


def test_what_full_chose_is_there_for_quick_and_was_tried():
    chosen = read_chosen(PLAN.with_name(FILE_OF_CHOSEN), PLANNED)
    for cell, found in chosen.items():
        key, before = PLANNED.then[cell]
        doublings = math.log2(found[key] / before)
        assert found["lr"] in PLANNED.lrs and doublings == pytest.approx(round(doublings), abs=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_the_published_choices_follow_from_the_published_runs_and_none_is_at_a_grid_s_edge(task):
    plan, published = read_plan(TASKS[task]), ROOT / "docs" / "study" / task / "runs.jsonl"
    known = {record.name: record.after.get(plan.metric) for record in read_records(published)}
    found = tune(plan, lambda runs: {run.name: known[run.name] for run in runs})
    assert found.chosen == read_chosen(TASKS[task].with_name(FILE_OF_CHOSEN), plan)
    for cell in plan.main:
        for key, grid in (("lr", found.lrs[cell]), (plan.then[cell][0], found.then[cell])):
            assert min(grid) < found.chosen[cell][key] < max(grid), (cell, key)


def test_a_cell_like_none_is_refused(tmp_path):
    raw = yaml.safe_load(PLAN.read_text())
    raw["experiments"]["k"]["cells"]["dpo-offline-hl-k64"]["like"] = "dpo-offlin"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="is none of"):
        read_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("losses: [", "--plan"),
        ("- 1", "mapping"),
        ("{}", "base"),
        (None, "tuning: seeds"),
        ("extra", "extra"),
        ("k", "experiments.k"),
    ],
)
def test_what_is_no_plan_is_refused_by_the_part_that_is_wrong(text, key, tmp_path):
    raw = yaml.safe_load(PLAN.read_text())
    if text is None:
        del raw["tuning"]["seeds"]
    elif text == "extra":
        raw["extra"] = {}
    elif text == "k":
        raw["experiments"]["k"]["cells"] = ["dpo"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw) if text in (None, "extra", "k") else text)
    with pytest.raises(ConfigError, match=key):
        read_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    "text",
    ["cells: {", "cells: {}", "cells: {dpo-offline: {lr: 1.0e-4}}", "cells: {dpo-offline: {lr: fast}}"],
)
def test_what_is_not_chosen_for_every_cell_is_refused(text, tmp_path):
    (tmp_path / "chosen.yaml").write_text(text)
    with pytest.raises(ConfigError, match="chosen"):
        read_chosen(tmp_path / "chosen.yaml", PLANNED, ["dpo-offline"])


def test_plans_are_plain_values():
    assert replace(PLANNED) == read_plan()


@pytest.mark.parametrize("name", ["../elsewhere", "..", "a b", "$(id)"])
def test_the_study_s_name_is_no_path(name, capsys):
    assert main([QUICK, "--name", name]) == 2
    assert f"--name={name}: becomes the name of a folder" in capsys.readouterr().err
