"""Curves of runs: a column for each loss, a colour for each variant, and what is no run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from common.errors import ConfigError
from reports.metrics import read_metrics
from study.curves import curves_figure
from study.figures import VARIANTS


def a_run(folder: Path, loss: str, online: bool, humanline: bool, chosen: list[float | None]) -> Path:
    folder.mkdir()
    settings = {"loss": {"name": loss}, "online": online, "humanline": humanline}
    (folder / "config.yaml").write_text(json.dumps(settings))
    lines = [{"step": i, "reward_chosen": value} for i, value in enumerate(chosen)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_each_run_is_a_line_in_its_loss_s_column_and_its_variant_s_colour(tmp_path: Path) -> None:
    folders = [
        a_run(tmp_path / "a", "dpo", False, False, [0.0, -1.0, -3.0]),
        a_run(tmp_path / "b", "dpo", False, True, [0.0, None, -0.5]),
        a_run(tmp_path / "c", "kto", True, True, [0.0, 2.0]),
    ]
    figure = curves_figure({f: read_metrics(f / "metrics.jsonl") for f in folders}, ["reward_chosen"])
    dpo, kto = figure.axes
    assert [ax.get_title() for ax in (dpo, kto)] == ["DPO", "KTO"]
    plain, humanline = dpo.lines
    assert list(plain.get_ydata()) == [0.0, -1.0, -3.0] and list(humanline.get_xdata()) == [0, 2]
    colors = [to_hex(line.get_color()).upper() for line in (plain, humanline, *kto.lines)]
    assert colors == [VARIANTS[name] for name in ("offline", "offline-hl", "online-hl")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "offline",
        "offline-hl",
        "online-hl",
    ]


def test_what_is_no_run_and_a_metric_that_none_has_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", "dpo", False, False, [0.0])
    with pytest.raises(ConfigError, match="no run has such a metric"):
        curves_figure({run: read_metrics(run / "metrics.jsonl")}, ["reward_chsen"])
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        curves_figure({tmp_path: []}, ["reward_chosen"])
    (tmp_path / "config.yaml").write_text("plan: 1\n")
    with pytest.raises(ConfigError, match="other settings"):
        curves_figure({tmp_path: []}, ["reward_chosen"])
