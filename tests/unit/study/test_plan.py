"""The plan of the paper's comparisons: equal examples, settings that a run accepts, what tuning chose; and
what is no plan is refused by the part that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import yaml
from scipy.stats import chi2

from common.errors import ConfigError
from launch.composing import Composer
from study.__main__ import QUICK_SEEDS, main
from study.figures import VARIANTS, variants_figure
from study.page import beside_table, effects_of
from study.plan import MAIN, PLANS, PUBLISHED, known, read_plan
from study.records import SAMPLED, read_records
from study.tasks import FOLDERS, TITLES, read_task

PAPER = read_plan(PLANS["paper"])
COMPOSER = Composer()
CELLS = tuple(VARIANTS)


@pytest.mark.parametrize("part", PAPER.hours)
def test_every_cell_is_a_run_that_train_accepts_on_the_test_s_prompts(part):
    for block in PAPER.only([part]).blocks:
        for run in {run.cell: run for run in block.runs}.values():
            assert COMPOSER.config(run).data.eval_split == "test"


def test_every_tuned_cell_sees_as_many_examples_in_as_many_steps():
    for block in PAPER.only([MAIN]).blocks:
        assert list(block.sweep.cells) == ["offline", "offline-hl", "online", "online-hl"]
        for run in {run.cell: run for run in block.runs}.values():
            config = COMPOSER.config(run)
            examples = config.rounds.examples if config.online else config.n_examples
            assert examples / config.model.batch_size == 80
            assert examples == (640 if block.loss == "dpo" else 1280), "a pair is two sequences"
            assert config.humanline == ("-hl" in run.cell) and config.online == ("-online" in run.cell)
            if config.online:
                length = config.rounds.contexts_per_round * (1 if block.loss == "dpo" else 2)
                assert length / config.model.batch_size == 16, "a round's steps"
            elif config.humanline:
                assert config.sync_freq == {"adder": 16, "instruct": 1}[block.task]


def test_the_real_model_s_cells_see_as_many_answers_in_as_many_steps_and_are_tuned_on_validation():
    plan = read_plan(PLANS["constraints"])
    for block in plan.only(["tune", "tune-kto"]).blocks:
        for run in {run.cell: run for run in block.runs}.values():
            config = COMPOSER.config(run)
            examples = config.rounds.examples if config.online else config.n_examples
            assert examples / config.model.batch_size == 16
            assert examples == {"dpo": 64, "kto": 128, "grpo": 256}[block.loss]
            assert config.humanline == ("-hl-" in run.cell) and config.online == ("-online" in run.cell)
            assert config.data.eval_split == "validation" and config.model.dtype == "bfloat16"
            if config.online:
                length = config.rounds.contexts_per_round * {"dpo": 1, "kto": 2, "grpo": 8}[block.loss]
                assert length / config.model.batch_size == 4, "a round's steps"


def test_a_figure_has_a_row_for_each_task_of_its_blocks_and_a_column_for_each_loss():
    constraints = read_plan(PLANS["constraints"]).only([MAIN]).blocks
    for blocks, panels in ((constraints, 3), (PAPER.only([MAIN]).blocks, 6)):
        figure = variants_figure(blocks, {next(iter(blocks[0].sweep.coordinates)): {1: 30.0}})
        assert len(figure.axes) == panels and all(ax.get_title() for ax in figure.axes)


def test_a_cell_has_the_tuned_settings_of_the_cell_it_is_like_but_for_its_own_changes():
    cells = {run.cell: run.settings for _, run in PAPER.runs()}
    like, further = cells["main-sums-dpo-offline-hl"], cells["k-sums-dpo-offline-hl-k64"]
    assert {key for key in further if further[key] != like.get(key)} == {"sync_freq"}
    assert (like["lr"], like["loss.beta"]) == (6.75e-5, 3.2)
    assert cells["rare-sums-grpo-every-64"]["lr"] == cells["main-sums-grpo-online"]["lr"]
    assert cells["rare-sums-grpo-every-64"]["loss.epsilon"] == 0.2, "its own, not the tuned one"
    task = read_task(FOLDERS["adder"])
    assert "lr" not in task.settings("dpo-offline", tuned=False)
    with pytest.raises(ConfigError, match="tuned=dpo-offline: has no tuned settings"):
        replace(task, tuned={}).settings("dpo-offline", tuned=True)


@pytest.mark.parametrize("task", ["adder", "instruct"])
def test_what_tuning_chose_follows_from_the_published_runs_and_is_at_no_grid_s_edge(task):
    """The best rate at the first anchor, then the best anchor at that rate; of equals the smaller."""
    scores: dict = {}
    for record in read_records(PUBLISHED["paper"][list(FOLDERS).index(task)]):
        if record.cell.startswith("tune-"):
            cell, _, at = record.cell.removeprefix("tune-").rpartition("-lr")
            point = tuple(map(float, at.split("-anchor")))
            scores.setdefault(cell, {}).setdefault(point, []).append(record.after[SAMPLED])
    chosen = read_task(FOLDERS[task]).tuned
    assert set(scores) == set(chosen)
    for cell, points in scores.items():
        rates: dict = {}
        for lr, anchor in points:
            rates.setdefault(anchor, []).append(lr)
        first = max(rates, key=lambda anchor: len(rates[anchor]))
        best_lr = max(sorted(rates[first]), key=lambda lr: fmean(points[lr, first]))
        anchors = sorted(anchor for lr, anchor in points if lr == best_lr)
        best = max(anchors, key=lambda anchor: fmean(points[best_lr, anchor]))
        assert list(chosen[cell].values()) == pytest.approx([best_lr, best]), cell
        assert min(rates[first]) < best_lr < max(rates[first]) and anchors[0] < best < anchors[-1], cell


def test_the_published_page_is_made_of_the_published_records(tmp_path, monkeypatch):
    assert main(["paper", "--report", "--out", str(tmp_path)]) == 0
    page = PUBLISHED["paper"][0].with_name("report.md")
    assert (tmp_path / "report.md").read_bytes() == page.read_bytes()
    assert len(known(PAPER, tmp_path, PUBLISHED["paper"])) == len(PAPER.runs()) == 1320


def test_the_real_model_s_settings_follow_from_its_tuning_and_its_spread_from_the_pilot(tmp_path):
    """Of a cell the best score; of a loss's common setting the best mean of `offline` and `offline-hl`; of
    equals the smaller rate, then the smaller anchor."""
    plan = read_plan(PLANS["constraints"])
    records = known(plan, tmp_path, PUBLISHED["constraints"])
    scores: dict = {}
    for block, run in plan.only(["tune", "tune-kto"]).runs():
        cell, point = run.cell.removeprefix("tune-").partition("-lr")[0], anchor_of(block.loss, run.settings)
        scores.setdefault(cell, {})[point] = records[run.name].after[SAMPLED]
    chosen = read_task(FOLDERS["constraints"]).tuned
    assert set(scores) == set(chosen) and {len(points) for points in scores.values()} == {8}
    for cell, points in scores.items():
        assert anchor_of(cell.partition("-")[0], chosen[cell]) == best_of(points), cell
    tests = {block.sweep.name: block for block in plan.tests}
    assert set(tests) == {
        f"test-{loss}-{at}" for loss in ("dpo", "grpo", "kto") for at in ("common", "tuned")
    }
    for name, block in tests.items():
        common = best_of(
            {p: v + scores[f"{block.loss}-offline-hl"][p] for p, v in scores[f"{block.loss}-offline"].items()}
        )
        for run in block.runs:
            cell = run.cell.removeprefix(f"{name}-")
            wanted = common if name.endswith("common") else best_of(scores[f"{block.loss}-{cell}"])
            assert anchor_of(block.loss, run.settings) == wanted, run.name
    pilot = {cell: {} for cell in tests["test-dpo-tuned"].test.measured}
    for one in records.values():
        if one.cell in pilot:
            pilot[one.cell][one.seed] = 100 * one.after[SAMPLED]
    humanline, plain = pilot.values()
    apart = [humanline[seed] - plain[seed] for seed in plain]
    upper = stdev(apart) * ((len(apart) - 1) / chi2.ppf(0.2, len(apart) - 1)) ** 0.5
    assert len(apart) == 3 and all(abs(upper - block.test.deviation) < 0.01 for block in plan.tests)


def anchor_of(loss, settings):
    return settings["lr"], settings["loss.epsilon" if loss == "grpo" else "loss.beta"]


def best_of(points):
    return min(points, key=lambda point: (-points[point], *point))


def test_beside_a_cell_s_score_stand_its_length_and_distance():
    records = known(PAPER, FOLDERS["adder"], PUBLISHED["paper"])
    header, *rows = beside_table(PAPER.only([MAIN]).blocks, records)
    assert len(rows) == 24
    row = dict(zip(header, next(r for r in rows if r[:2] == ["main-stories-kto", "online-hl"]), strict=True))
    runs = [json.loads(line) for line in PUBLISHED["paper"][1].read_text().splitlines()]
    runs = [run for run in runs if run["cell"] == "kto-online-hl"]
    assert row["seeds"] == str(len(runs)) == "10"
    for name, side, key, digits in (
        ("KL", "after", "eval_kl_initial", 3),
        ("tokens", "after", "eval_length_sampled", 1),
        ("tokens, start", "before", "eval_length_sampled", 1),
        ("CPU s", "seconds", "cpu", 0),
    ):
        assert row[name] == f"{fmean(run[side][key] for run in runs):.{digits}f}", name


def test_each_cell_is_compared_with_what_it_is_like():
    records = known(PAPER, FOLDERS["adder"], PUBLISHED["paper"])
    values: dict = {}
    for one in records.values():
        values.setdefault(one.cell, {})[one.seed] = 100 * one.after[SAMPLED]
    found = {(e.runs, e.cell): e for block in PAPER.blocks for e in effects_of(PAPER, [block], values)}
    assert len(found) == len(values) - 6, "all but the six of plain offline training"
    assert found["main-stories-kto", "online"].base == "offline"
    assert found["k-sums-grpo", "offline-hl-k4"].base == "main-sums-grpo-offline-hl"
    effect = found["share-stories-dpo", "own50-hl"]
    own, other = values["share-stories-dpo-own50-hl"], values["main-stories-dpo-offline-hl"]
    assert effect.base == "main-stories-dpo-offline-hl" and effect.difference.n == 10
    assert effect.difference.value == pytest.approx(fmean(own[seed] - other[seed] for seed in range(1, 11)))


def test_quick_is_the_main_part_with_three_seeds_and_takes_minutes():
    quick = PAPER.only([MAIN]).with_seeds(QUICK_SEEDS)
    assert len(quick.runs()) == 2 * 3 * 4 * 3
    assert sum(quick.cost(*one) for one in quick.runs()) < 3600, "half an hour on two cores"


def test_the_runs_are_part_after_part_and_seed_after_seed():
    places = list(PAPER.hours)
    order = [(places.index(block.part), run.seed) for block, run in PAPER.runs()]
    assert order == sorted(order)
    task_words = {block.task for block in PAPER.only(["stories"]).blocks}
    assert task_words == {"instruct"} and TITLES["instruct"] == "stories"


def broken(change):
    raw = yaml.safe_load(PLANS["paper"].read_text())
    change(raw)
    return yaml.safe_dump(raw)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("losses: [", "is no YAML"),
        ("- 1", "mapping"),
        ("{}", "seconds"),
        (broken(lambda raw: raw.update(extra={})), "extra"),
        (broken(lambda raw: raw["parts"]["k"].pop("hours")), "hours"),
        (broken(lambda raw: raw["parts"]["k"].update(tuned="yes")), "tuned"),
        (broken(lambda raw: raw["parts"].update(k=3)), "parts: k"),
        (broken(lambda raw: raw["seconds"].pop("adder")), "has no seconds"),
        (broken(lambda raw: raw["seconds"].update(adder=3)), "seconds.adder"),
        (broken(lambda raw: raw["parts"]["k"]["blocks"].update(a=3)), "blocks: a"),
        (broken(lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"]["cells"].update(a=3)), "cells: a"),
        (broken(lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"].update(grid={"lr": 1})), "grid: lr"),
        (
            broken(lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"].update(test={"kind": "same"})),
            "claim",
        ),
        (broken(lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"].update(task="sums")), "is none of"),
        (broken(lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"].update(cells=["dpo"])), "cells"),
        (
            broken(
                lambda raw: raw["parts"]["k"]["blocks"]["k-sums-dpo"]["cells"].update(a={"like": "oflin"})
            ),
            "dpo-oflin.*is none of",
        ),
    ],
    ids=lambda text: text if len(text) < 40 else "broken",
)
def test_what_is_no_plan_is_refused_by_the_part_that_is_wrong(text, key, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=key):
        read_plan(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quick", "--jobs", "0"], "--jobs=0"),
        (["quick", "--seeds", "a"], "--seeds=a"),
        (["paper", "--seeds", "1,2,1"], "names a seed twice"),
        (["paper", "--only", "nothing"], "is no part, task or block; there are ablation"),
        (["quick", "--only", "ablation"], "is no part, task or block; there are main"),
        (["paper", "--records", "missing.jsonl"], "--records=missing.jsonl: is not a file"),
        (["paper", "--report", "--records", str(PLANS["paper"])], "line 1 is no record"),
        (["paper", "--report", "--only", "k"], "--only=k: chooses runs"),
        (["missing.yaml"], "plan=missing.yaml: is neither a plan of the study nor a file"),
        (["full", "--task", "adder"], "study=full: is written otherwise now: python -m study paper"),
        (["evidence-report"], "python -m study evidence --report"),
        (["quick", "--task=adder"], "--only sums or --only stories"),
        (["quick", "--plan", "mine.yaml"], "python -m study FILE"),
        (["quick", "--name", "../elsewhere"], "--name=../elsewhere: becomes the name of a folder"),
        (["quick", "--name", "a b"], "--name=a b: becomes the name of a folder"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_runs(words, said, tmp_path, capsys):
    folders = ["--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*words, *folders]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out" / "report.md").exists()
