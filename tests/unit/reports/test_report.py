"""The report of a run and the table printed at its end."""

from __future__ import annotations

import base64
import copy
import functools
import json
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser

from data.examples import Examples
from data.quality import DataReport
from data.rows import Dropped, Loaded
from data.types import Completion, Example, Group, Prompt, Sequence, Turn
from reports import report
from reports.charts import PANELS, charts, points
from reports.report import final_table, write_report

MEASURES = ("accuracy_sampled", "accuracy_greedy", "length_sampled", "reward_margin", "reward_accuracy")
BEFORE, AFTER = (
    {f"eval_{name}": value for name, value in zip(MEASURES, values, strict=True)}
    for values in ((0.4375, 0.5, 3.25, -0.0, 0.5), (0.625, 0.75, 3.75, 0.25, 0.8))
)
BEFORE["eval_kl_initial"] = 0.0
SUMMARY = {
    "before": BEFORE,
    "after": AFTER,
    "tokens_per_second": 12345.6,
    "seconds": 125.2,
    "run_dir": "runs/x",
    "command": "python train.py loss=dpo humanline=true",
}
CONFIG = {
    **{"seed": 7, "humanline": True, "online": False, "sync_freq": 4, "lr": 5e-6},
    **{"log_epsilon_P": -1.5, "log_epsilon_R": 1.5},
    "loss": {"name": "dpo", "_target_": "trainers.losses.dpo.dpo", "beta": 0.1},
    "model": {"name_or_path": "some/model", "batch_size": 32},
    "data": {"name": "<pairs>"},
}
TRAINING = (
    *("loss", "grad_norm", "lr", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
    *("kl", "drift", "clipped_low", "clipped_high", "behavior_kl", "engine_gap", "effective_sample_size"),
    *("correction_weight", "correction_masked", "staleness", "tokens_per_second", "seconds"),
)
FILES = {"config": "config.yaml", "summary": "summary.json", "data": "data_report.json"}


def line(step: int, value: float | None = 0.5) -> dict:
    done = {"step": step, "examples": 32 * (step + 1), "tokens": 100 * (step + 1)}
    return done | {"reference_step": step // 4 * 4} | dict.fromkeys(TRAINING, value)


def make_run(run_dir: Path, lines: list[dict], **files: dict) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    for name, content in files.items():
        path = run_dir / FILES[name]
        path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content))
    return run_dir


class Page(HTMLParser):
    """What a reader of the page meets: its text, the charts (title -> SVG) and whatever it would have to
    fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.charts: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_data(self, data):
        self.text += data + " "

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]
        if tag == "img":
            self.charts[given["alt"]] = base64.b64decode(given["src"].partition("base64,")[2])


def test_the_report_says_what_ran_what_came_of_it_and_shows_every_curve(tmp_path):
    lines = [line(0) | BEFORE, *(line(step) for step in range(1, 10))]
    page = Page(write_report(make_run(tmp_path, lines, config=CONFIG, summary=SUMMARY)))
    said = re.sub(r"\s+", " ", page.text)
    for expected in (
        *("offline+humanline DPO", "10 steps", "320 examples", "dpo, beta 0.1", "sync_freq 4", "some/model"),
        *("<pairs>", SUMMARY["command"], "sampled accuracy 43.8% 62.5%", "+0.0000 +0.2500", "2 min 05 s"),
    ):
        assert expected in said, expected
    assert set(page.charts) == {panel.title for panel in PANELS}
    for svg in page.charts.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert page.fetched == []  # opens without a network


def data_report() -> DataReport:
    """One that says something of everything."""
    prompts, said = [Prompt((Turn("user", f"{i}+1="),)) for i in range(3)], Completion("2")
    groups = [Group(prompt, (said, said), (1.0, -1.0)) for prompt in prompts]
    rows = (Sequence(np.arange(4, dtype=np.int32), np.arange(1, 3 + i, dtype=np.int32)) for i in range(6))
    examples = [(Example(str(i), (next(rows), next(rows))),) for i in range(3)]
    lost = [Dropped("a.jsonl", 7, "no <text>"), Dropped("a.jsonl", 9, "no <text>")]
    loaded = Loaded(groups, read=1005, dropped=lost, origin="mine.jsonl", format="pairs", unused=("note",))
    held_out = Loaded(groups[:1], read=1, origin="others.jsonl")
    found = DataReport.of(loaded, held_out, Examples(tuple(examples), {"equal": 4}), {"oldest turns": 5})
    found = found.with_logprobs({"chosen": np.array([-0.25, -2.0, np.nan])}, clippable_share=0.125)
    return replace(found, example=("<bos>1+1=", "2<eos>"))


def test_the_report_shows_what_was_trained_on_as_tables(tmp_path):
    page = Page(write_report(make_run(tmp_path, [], config=CONFIG, data=data_report().to_dict())))
    shown = re.sub(r"\s+", " ", page.text)
    for expected in (
        "trained on mine.jsonl",
        "evaluated on others.jsonl",
        "read as pairs",
        "columns that nothing reads note",
        "to train on 1,005 rows read, 3 groups of 3 prompts, 3 examples",
        "first of the rows dropped a.jsonl, row 7: no <text>; a.jsonl, row 9: no <text>",
        "to evaluate on 1 groups",
        "prompts on both sides 1",
        "paper's lowest quarter 50.0%",
        "at first, at most 12.5%",
        "Warning. 1 prompts are both trained on and evaluated with",
        "Rows dropped reason rows no <text> 2",
        "Groups without an example reason groups equal 4",
        "Shortened reason times oldest turns 5",
        "prompt 6 4 4 4 4 4 4",
        "chosen 2 -1.125 -2.000",
        "prompt <bos>1+1= completion 2<eos>",
    ):
        assert expected in shown, expected


RUNS = {
    "gap": [line(0), line(1, None), line(2)],
    "evaluations": [{"step": 0} | BEFORE, {"step": 40} | AFTER],  # evaluations alone
    "no reference": [{"step": 0, "loss": 0.3, "reference_step": None}],
    "huge": [line(step, 1e30) for step in range(3)],
}


@pytest.mark.parametrize("lines", RUNS.values(), ids=RUNS)
def test_any_run_can_be_reported_also_an_unfinished_one(tmp_path, lines):
    page = Page(write_report(make_run(tmp_path, lines, config=CONFIG)))
    assert "not finished" in page.text
    counts = {p: [np.isfinite(points(lines, c.key)[1]).sum() for c in p.curves] for p in PANELS}
    assert set(page.charts) == {panel.title for panel, found in counts.items() if max(found) > 1}
    for panel in (panel for panel, found in counts.items() if max(found) == 1):
        number = rf"{panel.title}, .*step \d+\s+\S+ \({re.escape(panel.unit)}\)"
        assert re.search(number, page.text), panel.title
    for file in tmp_path.iterdir():
        file.unlink()
    assert "not finished" in Page(write_report(tmp_path)).text  # a folder without any file


def test_the_report_of_a_run_can_be_asked_for_later(tmp_path, capsys):
    run = make_run(tmp_path / "a-run", [line(0), line(1)])
    (run / "run.json").write_text("{}")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert Page(run / "report.html").charts
    assert report.main([str(tmp_path)]) == 2 and not (tmp_path / "report.html").exists()
    assert "is no run's folder" in capsys.readouterr().err
    for damaged in ('{"before":', "[1]"):
        (run / "summary.json").write_text(damaged)
        assert report.main([str(run)]) == 2
        assert "summary.json: is damaged" in capsys.readouterr().err.replace("RUN=", "")


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value of nested data."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


SELECTED = {"range": [0.25, 1], "kept": 3, "below": 1, "above": 2}
SAID = json.loads(json.dumps(data_report().to_dict() | {"selection": SELECTED}))
WRONG = ("text", -0.5, [1], {"a": 1}, None, "nothing")


def test_a_data_report_that_is_damaged_is_said_and_is_no_traceback(tmp_path, capsys):
    """Whatever place of it is another, or missing: shown, or refused with the file's name."""
    run = make_run(tmp_path, [], data=SAID)
    (run / "run.json").write_text("{}")
    refused = {}
    for number, place in enumerate(places(SAID)):
        damaged, wrong = copy.deepcopy(SAID), WRONG[number % len(WRONG)]
        *way, last = place
        inner = functools.reduce(operator.getitem, way, damaged)
        if wrong == "nothing":
            del inner[last]
        else:
            inner[last] = wrong
        make_run(run, [], data=damaged)
        capsys.readouterr()
        refused[place] = report.main([str(run)])
        if refused[place]:
            said = capsys.readouterr().err
            assert said.startswith(f"error: RUN={run / 'data_report.json'}: is damaged ("), place
            assert "move it away to report the rest" in said
    assert 5 < sum(map(bool, refused.values())) < len(refused)


def test_the_trained_model_is_the_last_point_of_the_evaluations(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("reports.charts.charts", lambda records: drawn.extend(records) or [])
    write_report(make_run(tmp_path, [line(0) | BEFORE, line(1)], summary=SUMMARY))
    steps, values = points(drawn, "eval_reward_margin")
    np.testing.assert_array_equal(steps, [0, 2])
    np.testing.assert_array_equal(values, [0.0, 0.25])
    assert len(points(drawn, "loss")[0]) == 2 and charts(drawn) == charts(drawn)


def test_the_final_table_has_all_that_a_user_wants_next():
    table = final_table(SUMMARY)
    for expected in (
        *("before", "after", "sampled accuracy", "43.8%", "62.5%", "greedy accuracy", "+0.2500"),
        *("12,346 tokens/s", "2 min 05 s", "runs/x"),
        'AutoModelForCausalLM.from_pretrained("runs/x/model")',
        "python sample.py run=runs/x split=eval rounds.samples=1 out=answers.jsonl",
        "python export.py runs/x --push-to-hub ORG/NAME",
    ):
        assert expected in table, expected
    assert "-0.0000" not in table
    assert all(text == text.rstrip() for text in table.splitlines())


def test_the_printed_command_names_the_folder_for_shell_and_hydra():
    for folder in ("dir ü x/a", "a=b", "a(b", "a,b", "~/a", "it's", "2024_10", 'a"b\\'):
        lines = final_table(SUMMARY | {"run_dir": folder}).splitlines()
        (command,) = (line.partition("python ")[2] for line in lines if line.startswith("answers"))
        (word,) = (word for word in shlex.split(command) if word.startswith("run="))
        assert OverridesParser.create().parse_override(word).value() == folder
    early = {"status": "stopped early", "stopped_early": True, "stopped_why": "callbacks.a asked for it"}
    assert "ended      stopped early: callbacks.a asked for it\n" in final_table(SUMMARY | early)
    skipped = final_table(SUMMARY | {"status": "finished", "steps": 9, "skipped_steps": 2})
    assert re.search(r"ended .*2 of 9 updates.*\(docs/symptoms\.md\)", skipped), "that page has a row"
