"""Progress in a log file and on a terminal."""

from __future__ import annotations

import io

import pytest

from reports import progress as module
from reports.progress import progress, status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _always_due(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_REDRAWS", 0.0)


def run(stream: io.StringIO, **options) -> str:
    with progress(6, "train", done=2, stream=stream, **options) as bar:
        for step in range(2, 6):
            bar.set_postfix_str(
                status({"step": step, "loss": step / 10, "lr": 5e-6, "tokens_per_second": 1234.5}),
                refresh=False,
            )
            bar.update()
    return stream.getvalue()


def test_a_log_file_gets_whole_lines():
    lines = run(io.StringIO()).split("\n")
    assert lines.pop() == ""
    assert "\r" not in "".join(lines)
    assert [line.split(",")[0] for line in lines] == [f"train: {n}/6 steps" for n in range(2, 7)]
    assert lines[-1].endswith("loss 0.5000, lr 5.00e-06, 1,234 tokens/s")


def test_a_log_file_is_not_flooded(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 1000.0)
    assert run(io.StringIO()).count("\n") == 2  # the first and the last


def test_a_terminal_gets_one_line_redrawn():
    text = run(Terminal())
    assert text.count("\n") == 1
    assert "6/6" in text.split("\r")[-1]
    assert "loss 0.5000" in text.split("\r")[-1]


def test_other_ranks_show_nothing():
    assert run(io.StringIO(), shown=False) == ""


def test_work_may_be_iterated_over():
    out = io.StringIO()
    assert list(progress((i for i in range(3)), "score", unit="row", stream=out)) == [0, 1, 2]
    assert "score: 3/? rows" in out.getvalue()


def test_status_leaves_out_what_is_not_there():
    assert status({"loss": None, "lr": 1e-5}) == "lr 1.00e-05"
    assert status({"step": 3}) == ""
