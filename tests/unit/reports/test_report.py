"""The report of a run, its figures, and the table printed at its end."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser

from jobs.diagnostics import BINS, EDGES, SIDES
from reports import data_tables, report
from reports.charts import PANELS, charts, diagnostic_charts, points
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


IMAGE = re.compile(r'<img alt="(.*?)" src="data:image/svg\+xml;base64,(.*?)">')


def charts_of(page: str) -> dict[str, bytes]:
    """Title -> SVG."""
    return {html.unescape(title): base64.b64decode(image) for title, image in IMAGE.findall(page)}


DATA = {
    **{"origin": "mine.jsonl", "format": "pairs", "unused": ["note"], "clippable_share": 0.125},
    **{"read": 1005, "groups": 3, "prompts": 2, "examples": 4, "dropped": {"no <text>": 2}},
    "named": [{"file": "a.jsonl", "row": 7, "reason": "no <text>"}],
    "prompt_tokens": {"count": 6} | dict.fromkeys(data_tables.SPREAD, 4.25),
    "logprob": {"chosen": {"count": 2} | dict.fromkeys(data_tables.SPREAD, -1.125)},
    **{"example": ["<bos>1+1=", "2<eos>"], "warnings": ["1 prompts are shared"]},
}


def test_the_report_says_what_ran_on_what_and_what_came_of_it_and_shows_every_curve(tmp_path):
    lines = [line(0) | BEFORE, *(line(step) for step in range(1, 10))]
    page = write_report(make_run(tmp_path, lines, config=CONFIG, summary=SUMMARY, data=DATA)).read_text()
    said = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    for expected in (
        *("offline+humanline DPO", "10 steps", "320 examples", "dpo (beta = 0.1)", "sync_freq = 4"),
        *("some/model", "<pairs>", SUMMARY["command"], "2 min 05 s"),
        *("sampled accuracy 43.8% 62.5%", "+0.0000 +0.2500"),
        *("columns that nothing reads note", "at most 12.5%", "1,005 rows read, 3 groups of 2 prompts"),
        *("Rows dropped reason rows no <text> 2", "Warning. 1 prompts are shared.", "chosen 2 -1.125"),
    ):
        assert expected in said, expected
    assert set(charts_of(page)) == {panel.title for panel in PANELS}
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in charts_of(page).values())
    assert not re.search(r'(?:src|href)="(?!data:)', page), "opens without a network"


RUNS = {
    "gap": [line(0), line(1, None), line(2)],
    "evaluations": [{"step": 0} | BEFORE, {"step": 40} | AFTER],  # evaluations alone
    "no reference": [{"step": 0, "loss": 0.3, "reference_step": None}],
}


@pytest.mark.parametrize("lines", RUNS.values(), ids=RUNS)
def test_any_run_can_be_reported_also_an_unfinished_one(tmp_path, lines):
    page = write_report(make_run(tmp_path, lines, config=CONFIG)).read_text()
    assert "not finished" in page
    counts = {p: [np.isfinite(points(lines, c.key)[1]).sum() for c in p.curves] for p in PANELS}
    assert set(charts_of(page)) == {panel.title for panel, found in counts.items() if max(found) > 1}
    for file in tmp_path.iterdir():
        file.unlink()
    assert "not finished" in write_report(tmp_path).read_text()  # a folder without any file


def test_the_report_of_a_run_can_be_asked_for_later(tmp_path, capsys):
    run = make_run(tmp_path / "a-run", [line(0), line(1)])
    (run / "run.json").write_text("{}")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert charts_of((run / "report.html").read_text())
    assert report.main([str(tmp_path)]) == 2 and not (tmp_path / "report.html").exists()
    assert "is no run's folder" in capsys.readouterr().err
    selected = {"range": [0.25, 1], "kept": 3, "below": 1}
    for name, damaged in {
        "summary.json": ['{"before":', "[1]"],
        "data_report.json": ['{"labels": 3}', json.dumps({"selection": selected}), '{"example": 1}'],
    }.items():
        for text in damaged:
            (run / name).write_text(text)
            assert report.main([str(run)]) == 2
            assert f"{run / name}: is damaged (" in capsys.readouterr().err
        (run / name).unlink()


def test_the_trained_model_is_the_last_point_of_the_evaluations(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("reports.charts.charts", lambda records: drawn.extend(records) or [])
    write_report(make_run(tmp_path, [line(0) | BEFORE, line(1)], summary=SUMMARY))
    steps, values = points(drawn, "eval_reward_margin")
    np.testing.assert_array_equal(steps, [0, 2])
    np.testing.assert_array_equal(values, [0.0, 0.25])
    assert len(points(drawn, "loss")[0]) == 2 and charts(drawn) == charts(drawn)


def test_the_printed_command_names_the_folder_for_shell_and_hydra():
    for folder in ("dir ü x/a", "a=b", "a(b", "a,b", "~/a", "it's", "2024_10", 'a"b\\'):
        lines = final_table(SUMMARY | {"run_dir": folder}).splitlines()
        (command,) = (line.partition("python ")[2] for line in lines if line.startswith("answers"))
        (word,) = (word for word in shlex.split(command) if word.startswith("run="))
        assert OverridesParser.create().parse_override(word).value() == folder
        assert f'AutoModelForCausalLM.from_pretrained("{folder}/model")' in "\n".join(lines)
    assert "43.8%" in final_table(SUMMARY) and "-0.0000" not in final_table(SUMMARY)
    early = {"status": "stopped early", "stopped_early": True, "stopped_why": "callbacks.a asked for it"}
    assert "ended      stopped early: callbacks.a asked for it\n" in final_table(SUMMARY | early)
    skipped = final_table(SUMMARY | {"status": "finished", "steps": 9, "skipped_steps": 2})
    assert re.search(r"ended .*2 of 9 updates.*\(docs/symptoms\.md\)", skipped), "that page has a row"


FIRST = {
    **{"step": -1, "every": 2, "edges": list(EDGES), "sides": list(SIDES), "entropy": 0.4},
    **{"log_epsilon_P": -1.5, "log_epsilon_R": 1.5, "clips": True},
}


def intervals(*sides: str, count: int = 5, **changed: float | None) -> list[dict]:
    one = {"rows": 8, "tokens": 9, "length": 9.5, "log_ratio": 0.01, "spread": 0.2, "drift": -0.1} | changed
    one["histogram"] = [0] * BINS
    return [{"step": i, "first_step": i, "entropy": 0.3} | dict.fromkeys(sides, one) for i in range(count)]


def titles(lines: list[dict]) -> list[str]:
    found = diagnostic_charts(lines)
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for _, svg in found)
    return [title for title, _ in found]


SPREAD, DRIFT, ENTROPY = "Spread of the log-ratios", "Drift from the initial weights", "Entropy of the policy"


def test_every_figure_is_drawn_but_of_what_was_not_measured():
    for sides in (("chosen", "rejected"), ("rejected",)):
        found = titles([FIRST, *intervals(*sides)])
        assert found == [SPREAD, DRIFT, ENTROPY], "a KTO run may see no desirable example"
    for entropy in ({"entropy": None}, {}):  # without held-out data
        lines = [FIRST | entropy, *(line | entropy for line in intervals("chosen", drift=None))]
        assert titles(lines) == [SPREAD, *([] if entropy else [ENTROPY])]
    lines = [FIRST, *intervals("chosen", count=2, drift=0.0, spread=0.0)]  # in the first step
    assert titles(lines) == [DRIFT, ENTROPY] and titles(lines[:2]) == [ENTROPY], "one interval is no curve"
