"""The first page: both tasks' main figure, and the claims that both were asked."""

from __future__ import annotations

from reports.statistics import Mean
from study.claims import Answer, Claim, Findings
from study.first_page import write_first_page
from study.report import NOT_RUN

VALUES = {
    f"{loss}-{variant}": {seed: level + seed / 500 for seed in (1, 2, 3)}
    for loss, shift in (("dpo", 0.0), ("kto", 0.05), ("grpo", 0.1))
    for variant, level in (
        ("offline", 0.5 + shift),
        ("online", 0.7 + shift),
        ("offline-hl", 0.6),
        ("online-hl", 0.8),
    )
}
BETTER = Claim("Humanline helps", "Figure 1", "a → b", "main", "greater", (), "guess")
OTHER = Claim("Clips matter", "Table 6", "a = b", "clip", "same", (), "guess")


def answer(claim, loss, verdict, difference=None):
    value = None if difference is None else Mean(difference, 0.01, 3)
    return Answer(claim, f"{loss}-offline-hl", f"{loss}-offline", verdict, value)


def findings(title, *answers, values=VALUES):
    return Findings("", title, "share", tuple(answers), values, 0.49, 0.05, 3, 7)


def test_each_task_has_a_panel_and_each_claim_a_word_for_each_loss(tmp_path):
    said = write_first_page(
        tmp_path,
        {
            "adder": findings(
                "Sums", answer(BETTER, "dpo", "reversed", -0.064), answer(BETTER, "grpo", "seen", 0.041),
                answer(OTHER, "dpo", "seen", 0.0),
            ),
            "instruct": findings("Stories", answer(BETTER, "dpo", NOT_RUN), values={}),
        },
    )  # fmt: skip
    page = (tmp_path / "report.md").read_text()
    assert str(tmp_path) in said
    assert "| DPO reversed (-6.4); GRPO seen (+4.1) | DPO not run |" in page
    assert "Clips matter" not in page, "the page has the claims of the main cells alone"
    assert "| adder | KTO | 55.4 (3) | 75.4 (3) | 60.4 (3) | 80.4 (3) |" in page
    assert "| instruct | KTO | – | – | – | – |" in page
    assert "**Sums**: 3 of 7 planned runs; [every claim, figure and run](adder/report.md)" in page
    svg = (tmp_path / "figure1.svg").read_text()
    assert svg.startswith("<?xml")


def test_without_a_run_there_is_no_figure(tmp_path):
    write_first_page(
        tmp_path, {"adder": findings("Sums", values={}), "instruct": findings("Stories", values={})}
    )
    assert not (tmp_path / "figure1.svg").exists() and "figure1" not in (tmp_path / "report.md").read_text()
