"""The plan of the evidence: said before its runs, within its hours, with the power that it promises; it goes
on where it was, and its page decides nothing before the end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from common.errors import ConfigError
from data.adder import accuracy
from launch.composing import Composer, compose_config
from study import runner
from study.__main__ import main
from study.factors import CHANGES, REVERSED, pairs
from study.page import decide, planned_power, write_page
from study.plan import PLANS, PUBLISHED, known, pace, read_plan, spent_hours
from study.records import Record, append_record, command, read_records
from study.runner import run_plan
from study.tasks import TITLES

FILE = PLANS["evidence"]
PLAN = read_plan(FILE)
(RECORDS,) = PUBLISHED["evidence"]


def record(run, score=0.5, cpu=36.0):
    before, after = (
        {"eval_accuracy_sampled": points, "eval_kl_initial": kl} for points, kl in ((0.4, 0.0), (score, 0.2))
    )
    seconds = {"train": 5.0, "sample": 0.0, "cpu": cpu, "wall": 40.0}
    return Record(run.name, run.cell, run.seed, command(run), before, after, 80, 640, seconds)


def test_the_tests_are_one_small_family_with_seeds_of_their_own_and_the_power_they_promise():
    assert len(PLAN.tests) <= 12 and {block.task for block in PLAN.tests} == {"adder", "instruct"}
    for block in PLAN.tests:
        power, fewer = (planned_power(block.test, len(block.sweep.seeds) - n, PLAN.level) for n in (0, 1))
        assert power >= 0.8 and (fewer < 0.8 or len(block.sweep.seeds) == 10), block.sweep.name
    fresh = {run.seed for block in PLAN.tests for run in block.runs}
    others = {run.seed for block in PLAN.blocks if block.test is None for run in block.runs}
    assert min(fresh) > 1000 > max(others)


def test_the_spreads_that_seeds_were_planned_with_are_those_of_the_published_records():
    published: dict = {}
    for block in PLAN.tests:
        task, (b, a) = published.setdefault(block.task, {}), block.test.measured
        if not task:
            for one in read_records(RECORDS.parents[1] / "paper" / f"{TITLES[block.task]}.jsonl"):
                task.setdefault(one.cell, {})[one.seed] = 100 * one.after["eval_accuracy_sampled"]
        apart = np.array([task[b][seed] - task[a][seed] for seed in task[b].keys() & task[a].keys()])
        upper = apart.std(ddof=1) * ((len(apart) - 1) / stats.chi2.ppf(0.2, len(apart) - 1)) ** 0.5
        assert abs(upper - block.test.deviation) < 0.01, block.sweep.name


def test_the_plan_fits_its_hours_and_every_arm_is_a_run_that_train_accepts(tmp_path):
    """At the pace of the published runs, as the study itself reckons."""
    assert sum(PLAN.hours.values()) <= 16
    slower = pace(PLAN, known(PLAN, tmp_path, [RECORDS]))
    cost = dict.fromkeys(PLAN.hours, 0.0)
    for block, run in PLAN.runs():
        cost[block.part] += slower * PLAN.cost(block, run) / 3600 * (block.part != "surface" or run.seed < 3)
    assert all(cost[part] <= hours for part, hours in PLAN.hours.items()), cost
    assert sum(len(block.runs) for block in PLAN.blocks if block.sweep.name.startswith("factors")) <= 60
    composer = Composer()
    for block in PLAN.blocks:
        for run in {block.sweep.coordinates[run.cell][0]: run for run in block.runs}.values():
            config = composer.config(run)
            assert config.data.eval_split == ("test" if block.test else "validation")
            assert (config.rounds.examples if config.online else config.n_examples) in (640, 1280)


def test_schedules_of_one_lag_have_one_mean_lag():
    lags = [block for block in PLAN.blocks if block.sweep.name.startswith("lag")]
    for block in lags:
        for arm, settings in block.sweep.cells.items():
            if arm != "fixed":
                freq, alpha = settings["sync_freq"], settings.get("sync_alpha", 1.0)
                behind = freq if settings.get("sync_mode") == "delayed" else (freq + 1) / 2
                assert behind / alpha == int(arm[1]), (block.sweep.name, arm)
    assert len(lags) == 6


def of_sums(change, split="train"):
    words = ["data=adder", "data.source=study.factors.pairs", f"data.subset={change}", "idle_settings=note"]
    return pairs(compose_config(words).data, split)


def test_each_factor_changes_one_thing_about_the_training_pairs():
    found = {change: of_sums(change).groups for change in CHANGES}
    assert len({len(groups) for groups in found.values()}) == 1
    turned = [group.rewards[0] < group.rewards[1] for group in found["noise"]]
    assert abs(sum(turned) / len(turned) - REVERSED) < 0.02
    for change in ("short", "one", "three"):
        for group in found[change]:
            right, wrong = (completion.text for completion in group.completions)
            truth = [group.prompt.reference_answer]
            assert (accuracy([right], truth), accuracy([wrong], truth)) == ([1.0], [0.0]), (change, group)
            assert group.rewards == (10.0, 0.0)
    texts = {change: [one.text for g in found[change] for one in g.completions] for change in CHANGES}
    assert max(map(len, texts["short"])) <= 3
    assert all(text.count(";") == 2 and "0+" not in text[1:4] for text in texts["one"])
    direct = sum(";" not in text for text in texts["three"]) / len(texts["three"])
    assert abs(direct - 1 / 3) < 0.03, "three forms"
    assert of_sums("noise", "eval").groups == of_sums("three", "eval").groups
    with pytest.raises(ConfigError, match="noise, short, one, three"):
        of_sums("flipped")


def test_a_killed_study_goes_on_repeats_nothing_and_stops_at_its_hours(tmp_path, monkeypatch):
    plan = replace(PLAN.only(["factors-none", "confirm-sums"]), hours={"factors": 1.0, "confirm": 0.1})
    of, done, told = {run.name: run for _, run in plan.runs()}, [], []

    def some(runs, runs_dir, jobs, cost_of, after):
        for run in runs[:7]:
            (runs_dir / run.name).mkdir(parents=True)
            done.append(run.name)
            after(run.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_all", some)
    monkeypatch.setattr(runner, "read_record", lambda run, folder: record(of[folder.name]))
    files: list = []
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, tmp_path / "runs", tmp_path, files, 1, told.append)
    lines = [json.loads(line)["name"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert lines == done and len(set(done)) == len(done) and not list((tmp_path / "runs").iterdir())
    assert [name.startswith("factors") for name in done] == [True] * 12 + [False] * 7
    shutil.move(tmp_path / "runs.jsonl", tmp_path / "published.jsonl")  # another checkout knows them too
    files.append(tmp_path / "published.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path / "runs", tmp_path, files, 1, told.append)
    assert done[-1] not in lines and len(done) <= 12 + 0.1 * 3600 / 36
    assert run_plan(plan, tmp_path / "runs", tmp_path, files, 1, told.append) == []
    assert "confirm 10 of" in told[-1] and "About 0.0 CPU hours left" in told[-1]


def scores(apart):
    """Records of every test's runs: the second cell ``apart``(name, seed) points ahead of the first."""
    found = {}
    for block in PLAN.tests:
        first, _ = block.sweep.cells
        for run in block.runs:
            ahead = 0.0 if run.cell.endswith(f"-{first}") else apart(block.sweep.name, run.seed) / 100
            found[run.name] = record(run, 0.5 + ahead)
    return found


def values(records):
    found = {}
    for one in records.values():
        found.setdefault(one.cell, {})[one.seed] = 100 * one.after["eval_accuracy_sampled"]
    return found


def test_decisions_are_of_whole_tests_alone_and_of_the_whole_family(tmp_path):
    def apart(name, seed):
        wiggle = 0.1 * (-1) ** seed + 0.001 * (seed % 7)
        return wiggle + {"confirm-low-rate": 4.0, "confirm-high-rate": -9.0}.get(name, 0.0)

    records = scores(apart)
    words = {d.block.sweep.name: d.word for d in decide(PLAN, values(records))}
    assert words.pop("confirm-low-rate") == "**decided: higher**"
    assert words.pop("confirm-high-rate") == "**decided: lower**"
    assert all("decided: the same" in word for word in words.values()), words
    last = next(name for name in records if name.startswith("confirm-low-rate-k1"))
    missing = {name: one for name, one in records.items() if name != last}
    by_name = {d.block.sweep.name: d for d in decide(PLAN, values(missing))}
    assert by_name["confirm-low-rate"].effect is None and by_name["confirm-low-rate"].word.startswith("not")
    write_page("evidence", FILE, PLAN, missing, tmp_path)
    (row,) = (
        line
        for line in (tmp_path / "report.md").read_text().splitlines()
        if "--only confirm-low-rate`" in line
    )
    n = len(next(b for b in PLAN.tests if b.sweep.name == "confirm-low-rate").sweep.seeds)
    assert f"| {n - 1} of {n} | – | – | – | not decided" in row


def test_wide_differences_decide_nothing():
    found = decide(PLAN, values(scores(lambda name, seed: 30.0 * (-1) ** seed)))
    assert {d.word for d in found} == {"not decided"}


def test_the_published_records_are_all_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_all", lambda *rest: pytest.fail("ran something"))
    assert main(["evidence", "--report", "--out", str(tmp_path)]) == 0
    if RECORDS.is_file():
        there = known(PLAN, tmp_path / "none", [RECORDS])
        assert set(there) >= {one.name for one in read_records(RECORDS)}, "every record is of the plan"


def test_the_page_shows_a_surface_a_law_and_the_lag_as_soon_as_they_are_there(tmp_path):
    """A score that falls with distance: at a common setting humanline is behind, and the law is seen."""
    records = {}
    for block, run in PLAN.runs():
        if run.seed == 1 and not block.test:
            rate = run.settings["lr"] * (3 if run.settings.get("humanline") else 1)
            after = {"eval_accuracy_sampled": 0.2 - 0.05 * np.log(rate), "eval_kl_initial": 1000 * rate}
            records[run.name] = replace(record(run), after=after)
    write_page("evidence", FILE, PLAN, records, tmp_path)
    page = (tmp_path / "report.md").read_text()
    begun = next(i for i, name in enumerate(records) if name.startswith("lag-")) + 2
    few = {name: one for i, (name, one) in enumerate(records.items()) if i % 3 and i < begun}
    write_page("evidence", FILE, PLAN, few, tmp_path / "few")
    assert "not decided, " in (tmp_path / "few" / "report.md").read_text()
    assert (
        "**a law**" in page
        and "; 0 of" in page
        and {"surface.svg", "lag.svg"} < {p.name for p in tmp_path.iterdir()}
    )


def test_a_record_is_added_whole(tmp_path):
    for _, run in PLAN.runs()[:3]:
        append_record(tmp_path / "runs.jsonl", record(run))
    assert [one.name for one in read_records(tmp_path / "runs.jsonl")] == [
        run.name for _, run in PLAN.runs()[:3]
    ]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--seeds", "3"], "--seeds"),
        (["--only", "surfaces"], "--only"),
        (["--only", "confirm", "--seeds", "3"], "--seeds"),
    ],
)
def test_what_the_plan_says_is_not_said_again(words, key, tmp_path, capsys):
    assert (
        main(["evidence", *words, "--out", str(tmp_path / "out"), "--runs-dir", str(tmp_path / "runs")]) == 2
    )
    assert key in capsys.readouterr().err and not (tmp_path / "out").exists()


SHARED = """
seconds: {adder: {offline: 9, online: 25}}
parts:
  main:
    hours: 1
    tuned: true
    keep: [1001]
    seeds: [1001, 1002]
    blocks: {main-dpo: {task: adder, loss: dpo, cells: {offline: {}, offline-hl: {}, online: {}}}}
  tests:
    hours: 1
    tuned: true
    blocks:
      test-dpo:
        task: adder
        loss: dpo
        cells: {offline: {}, offline-hl: {}}
        test: {claim: c, held: h, kind: different, effect: 1, deviation: 1, measured: [a, b], seeds: 3}
"""


def test_a_run_of_two_blocks_is_done_once_and_the_seeds_to_keep_leave_their_folders(tmp_path, monkeypatch):
    (tmp_path / "plan.yaml").write_text(SHARED)
    plan, done = read_plan(tmp_path / "plan.yaml"), []
    of = {run.name: run for _, run in plan.runs()}

    def all_of(runs, runs_dir, jobs, cost_of, after):
        for run in runs:
            (runs_dir / run.name).mkdir(parents=True)
            done.append(run.name)
            after(run.name)
        return []

    monkeypatch.setattr(runner, "run_all", all_of)
    monkeypatch.setattr(runner, "read_record", lambda run, folder: record(of[folder.name]))
    assert run_plan(plan, tmp_path / "runs", tmp_path, [], 1, lambda said: None) == []
    mains = [run.name for block, run in plan.runs() if block.part == "main"]
    assert sorted(done) == sorted([*mains, "test-dpo-offline-s1003", "test-dpo-offline-hl-s1003"])
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {n for n in mains if n.endswith("s1001")}
    there = known(plan, tmp_path / "runs", [tmp_path / "runs.jsonl"])
    assert set(there) == set(of), "each block has all of its records"
    assert spent_hours(plan, there) == pytest.approx({"main": 0.06, "tests": 0.02})
    assert plan.base(plan.tests[0], ["offline-hl"]) == "test-dpo-offline", "not main's"
