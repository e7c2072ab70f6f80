"""Curves of the four variants' runs, step by step: a column for each loss, a row for each metric.

    python -m study.curves runs/constraints/main-*-s1001 --to curves.svg
    python -m study.curves runs/NAME runs/OTHER --metrics loss,grad_norm

A run's loss and variant are those of its settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from common.errors import require
from common.files import write_whole
from common.options import options_of
from config.cli import guarded
from launch.pictures import in_words
from reports.metrics import read_metrics
from study.figures import VARIANTS, canvas, svg

METRICS = "reward_chosen,reward_rejected"


def curves_figure(runs: Mapping[Path, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> Figure:
    """Draw ``metrics`` of each step of the runs (folder -> its metrics). Raises ConfigError for a folder
    without settings and for a metric that no run has."""
    cells = {folder: cell_of(folder) for folder in runs}
    losses = list(dict.fromkeys(loss for loss, _ in cells.values()))
    size = 11 * len(losses) / 3, 1.9 * len(metrics)
    figure, axes = canvas(len(losses), *size, len(metrics), sharex="col", sharey="row")
    for row, metric in zip(axes, metrics, strict=True):
        known = any(metric in line for lines in runs.values() for line in lines)
        require(known, "--metrics", metric, "no run has such a metric")
        for folder, (loss, variant) in cells.items():
            points = [(line["step"], line[metric]) for line in runs[folder] if line.get(metric) is not None]
            row[losses.index(loss)].plot(*zip(*points, strict=True), color=VARIANTS[variant], linewidth=1)
        row[0].set_ylabel(in_words(metric), fontsize=8)
    for ax, loss in zip(axes[0], losses, strict=True):
        ax.set_title(loss.upper(), fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    there = {variant for _, variant in cells.values()}
    drawn = [Line2D([], [], color=VARIANTS[name], label=name) for name in VARIANTS if name in there]
    figure.legend(handles=drawn, ncols=4, loc="outside upper center", fontsize=8)
    return figure


def cell_of(folder: Path) -> tuple[str, str]:
    """Return (the loss of a run, its variant as the study names it). Raises ConfigError."""
    path = folder / "config.yaml"
    require(path.is_file(), "RUN", str(folder), "is no run's folder: it has no config.yaml")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    ours = isinstance(settings, dict) and {"loss", "online", "humanline"} <= settings.keys()
    require(ours, "RUN", str(folder), "is no training run's folder: its config.yaml has other settings")
    variant = f"{'online' if settings['online'] else 'offline'}{'-hl' if settings['humanline'] else ''}"
    return settings["loss"]["name"], variant


def main() -> None:
    parser = options_of("python -m study.curves", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--metrics", default=METRICS, help=f"a row each; {METRICS} if not given")
    parser.add_argument("--to", type=Path, default=Path("curves.svg"), help="where the picture goes")
    options = parser.parse_args()

    def write() -> None:
        runs = {folder: read_metrics(folder / "metrics.jsonl") for folder in options.runs}
        options.to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.to, svg(curves_figure(runs, options.metrics.split(","))).decode())
        print(options.to)

    guarded(write)


if __name__ == "__main__":
    main()
