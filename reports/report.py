"""The results of a run for people, as the table printed at its end and as ``report.html``.

    python -m reports.report runs/NAME      # draws it again, or for the first time

``summary.json``, which the trainer writes, has ``before`` and ``after`` (the ``eval_*`` metrics before and
after training), ``tokens_per_second``, ``seconds``, ``run_dir`` and ``command``. Missing parts are left out,
so a killed run can be reported too.
"""

from __future__ import annotations

if not __package__:  # started by its path, where nothing beside its folder is found
    raise SystemExit("error: type python -m reports.report")

import base64
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from common.files import write_whole
from common.options import options_of, run_folder
from common.secrets import scrub
from config.arguments import as_typed
from config.cli import answered
from reports import data_tables
from reports.answers import ABSENT, before_and_after, shortened
from reports.evaluations import MEASURES, names_of, of_name
from reports.metrics import numbers, read_metrics
from reports.outcome import symptoms, text_of
from reports.provenance import facts, variant


def compared(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, before, after), formatted, for every measure that was taken before or after training."""
    ends = [summary.get(end) or {} for end in ("before", "after")]
    rows = []
    named = names_of([*ends[0], *ends[1]])
    measures = [
        *MEASURES,
        *((of_name(key, name), f"{name}: {label}", form) for name in named for key, label, form in MEASURES),
    ]
    for key, label, form in measures:
        before, after = (
            ABSENT if end.get(key) is None else form.format(round(end[key], 6) + 0.0) for end in ends
        )  # no "-0.0000"
        if (before, after) != (ABSENT, ABSENT):
            rows.append((label, before, after))
    return rows


def final_table(summary: dict[str, Any]) -> str:
    """Return the plain text printed when a run ends: measures before and after, speed, the run's folder, and
    how to load its model."""
    rows = [("", "before", "after"), *compared(summary)]
    width = max(len(label) for label, _, _ in rows)
    lines = (
        [f"{label:<{width}}  {before:>9}  {after:>9}".rstrip() for label, before, after in rows]
        if len(rows) > 1
        else []
    )
    page = " (docs/symptoms.md)" * bool(symptoms(summary))
    facts = [] if (ending := text_of(summary)) is None else [("ended", f"{ending}{page}")]
    if summary.get("tokens_per_second") is not None:
        facts.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s in steps"))
    if summary.get("seconds") is not None:
        steps, wall = duration(summary["seconds"]), summary.get("wall_seconds")
        facts.append(("training", steps if wall is None else f"{duration(wall)}, of which steps {steps}"))
    facts += [(name, text) for name, text in memory_facts(summary) if name == "memory"]
    if run_dir := summary.get("run_dir"):
        facts.append(("run", str(run_dir)))
        loads = summary.get("loads_as", "AutoModelForCausalLM")
        facts.append(("load it", f'{loads}.from_pretrained("{Path(run_dir) / "model"}")'))
        if loads != "AutoModelForSequenceClassification":
            run = shlex.quote(as_typed("run", run_dir))
            words = f"python sample.py {run} split=eval rounds.samples=1 out=answers.jsonl"
            facts.append(("answers", words))
        facts.append(("share it", f"python export.py {shlex.quote(str(run_dir))} --push-to-hub ORG/NAME"))
    return "\n".join(
        [*lines, *([""] if lines and facts else []), *(f"{name:<9}  {value}" for name, value in facts)]
    )


def memory_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the fullest rank held, with what was predicted, and how its batches were cut, and why."""
    memory = summary.get("memory")
    if not memory:
        return []
    return [("memory", f"{memory['measured']}; {memory['predicted']}"), ("microbatches", memory["cut"])]


def duration(seconds: float) -> str:
    """Return ``seconds`` in everyday form: 42 s, 3 min 05 s, 2 h 03 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def write_report(run_dir: Path) -> Path:
    """Write the self-contained ``run_dir/report.html`` and return its path. It is made of config.yaml,
    metrics.jsonl, diagnostics.jsonl, answers.jsonl, summary.json and data_report.json, as far as they exist,
    without their secrets. Raises OSError, and ConfigError if a file is damaged."""
    from reports import charts  # matplotlib: a second, which a run's start is spared

    config = scrub(_read(run_dir / "config.yaml"))
    summary = scrub(_read(run_dir / "summary.json"))
    summary |= {end: dict(numbers(summary[end])) for end in ("before", "after") if end in summary}
    data = _data(run_dir / "data_report.json")
    records = read_metrics(run_dir / "metrics.jsonl")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    environment.filters["base64"] = lambda image: base64.b64encode(image).decode()
    page = environment.get_template("report.html").render(
        name=config.get("exp_name") or run_dir.name,
        headline=_headline(config, summary, records),
        command=summary.get("command"),
        compared=compared(summary),
        answers=before_and_after(run_dir),
        after="after" if summary else "so far",
        shortened=shortened,
        charts=charts.charts([*records, *_end(summary, records)]),
        diagnostics=charts.diagnostic_charts(read_metrics(run_dir / "diagnostics.jsonl")),
        settings=[*facts(config).items(), *memory_facts(summary)],
        data=data,
    )
    path = run_dir / "report.html"
    write_whole(path, page)
    return path


def _data(path: Path) -> dict[str, Any]:
    """Return what the page shows of the training data. Raises ConfigError if the file is damaged or is no
    data report."""
    data = scrub(_read(path))
    try:
        return {
            "facts": data_tables.facts(data),
            "tables": data_tables.tables(data),
            "example": data_tables.example(data),
            "warnings": data_tables.list_of(data, "warnings"),
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error


def _headline(config: dict[str, Any], summary: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return one line with the variant, loss, steps and duration."""
    loss = config.get("loss", {}).get("name")
    parts = [f"{variant(config)} {str(loss).upper()}"] if loss else []
    if records:
        last = records[-1]
        parts.append(f"{last['step'] + 1:,} steps")
        parts += [f"{last[key]:,} {key}" for key in ("examples", "tokens") if last.get(key) is not None]
    if summary.get("seconds") is not None:
        parts.append(duration(summary["seconds"]))
    if summary.get("tokens_per_second") is not None:
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
    parts += [] if (ending := text_of(summary)) is None else [ending]
    return " · ".join(parts if summary else [*parts, "not finished"])


def _end(summary: dict[str, Any], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluation of the trained model as a point after the last step, because a line's evaluation
    measures the weights before its step."""
    last = records[-1]["step"] if records else -1
    return [summary["after"] | {"step": last + 1}] if summary.get("after") else []


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; {} if there is no such file. Raises ConfigError for a
    damaged one."""
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        mapping = (json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    if not isinstance(mapping, dict):
        raise _damaged(path, "no mapping")
    return mapping


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError("RUN", path, f"is damaged ({why}); move it away to report the rest")


def main(words: Sequence[str]) -> int:
    """Draw the report of each run named; return 2 if one is no run, or cannot be read or written."""
    about = options_of("python -m reports.report", __doc__)
    about.add_argument("runs", nargs="+", type=run_folder, help="the folders of runs")
    folders = about.parse_args(words).runs

    def work() -> None:
        for folder in folders:
            there = (folder / "run.json").is_file()
            require(there, "RUN", folder, "is no run's folder; name one, as in runs/NAME")
            print(write_report(folder))

    return answered(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
