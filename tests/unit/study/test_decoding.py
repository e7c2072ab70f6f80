"""study/decoding.py: the tables of the published pages are those of the published records."""

from __future__ import annotations

import pytest

from reports.statistics import SeedMean
from study.decoding import larger, main
from study.plan import PUBLISHED


@pytest.mark.parametrize("name", ["evidence", "constraints"])
def test_the_page_has_the_tables_of_its_records(name):
    page = PUBLISHED[name][0].with_name("report.md").read_text(encoding="utf-8")
    tables = [part for part in main(name).split("\n\n") if part.startswith("|")]
    assert len(tables) >= 2 and all(table in page for table in tables)


@pytest.mark.parametrize(
    ("value", "error", "said"), [(9.0, 1.0, "yes"), (-9.0, 1.0, "yes"), (0.5, 0.5, "no"), (4.7, 1.0, "open")]
)
def test_an_effect_is_larger_by_its_whole_interval(value, error, said):
    assert larger(SeedMean(value, error, 20), 5.0) == said
