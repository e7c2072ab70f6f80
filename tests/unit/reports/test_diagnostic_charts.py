"""The figures of diagnostics.jsonl."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from jobs.diagnostics import BINS, EDGES, SIDES
from reports.charts import diagnostic_charts

FIRST = {
    **{"step": -1, "every": 2, "edges": list(EDGES), "sides": list(SIDES), "entropy": 0.4},
    **{"log_epsilon_P": -1.5, "log_epsilon_R": 1.5, "clips": True},
    "noise": {"rms": 3e-6, "max": 1e-5, "tokens": 90},
}


def side(rng: np.random.Generator, drift: float | None = -0.1) -> dict:
    counts = rng.integers(0, 9, BINS).tolist()
    found = {"rows": 8, "tokens": sum(counts), "length": 9.5, "log_ratio": 0.01, "spread": 0.2}
    return found | {"drift": drift, "histogram": counts}


def intervals(*sides: str, drift: float | None = -0.1) -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {"step": 2 * i + 1, "first_step": 2 * i, "entropy": 0.3, **{name: side(rng, drift) for name in sides}}
        for i in range(5)
    ]


def titles(lines: list[dict]) -> list[str]:
    found, _ = diagnostic_charts(lines)
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for _, svg in found)
    return [title for title, _ in found]


SPREAD, DRIFT, ENTROPY = ALL = [
    "Spread of the log-ratios",
    "Drift from the initial weights",
    "Entropy of the policy",
]
UNMEASURED = [
    {"noise": None, "entropy": None},
    {"noise": {"rms": 0.0, "max": 0.0, "tokens": 9}},
]
"""No held-out data; no noise at all."""


def test_every_figure_is_drawn_but_of_what_was_not_measured():
    for sides in (("chosen", "rejected"), ("chosen", "rejected", "neutral"), ("rejected",)):
        assert titles([FIRST, *intervals(*sides)]) == ALL, "a KTO run may see no desirable example"
    for change in UNMEASURED:
        entropy = {key: change[key] for key in ("entropy",) if key in change}
        lines = [FIRST | change, *(line | entropy for line in intervals("chosen", drift=None))]
        assert titles(lines) == [SPREAD, *([] if entropy else [ENTROPY])]


def test_one_interval_is_numbers_and_a_spread_of_0_has_no_logarithm():
    """Policy and reference are the same weights in the first step."""
    one = side(np.random.default_rng(0), 0.0) | {"spread": 0.0}
    silent = FIRST | {"noise": None}
    lines = [silent, *({"step": i, "first_step": i, "entropy": 0.4, "chosen": one} for i in range(2))]
    assert set(titles(lines)) == {DRIFT, ENTROPY} and diagnostic_charts(lines)[1] == []
    assert set(titles(lines[:2])) == {ENTROPY}
    assert diagnostic_charts(lines[:2])[1] == [(f"{DRIFT}, chosen, step 1", "0 (nats per token)")]
