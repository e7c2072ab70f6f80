"""Progress in a log file and on a terminal."""

from __future__ import annotations

import io

import pytest

from common import progress as module
from common.progress import progress
from reports.progress import status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _always_due(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_REDRAWS", 0.0)


def run(stream: io.StringIO, **options) -> str:
    shown = {"lr": 5e-6, "tokens_per_second": 1234.5, "gpu_memory_gib": 3.04}
    with progress(6, "train", done=2, stream=stream, **options) as bar:
        for step in range(2, 6):
            bar.set_postfix_str(status({"step": step, "loss": step / 10, **shown}), refresh=False)
            bar.update()
    return stream.getvalue()


def test_a_log_file_gets_whole_lines():
    lines = run(io.StringIO()).split("\n")
    assert lines.pop() == ""
    assert "\r" not in "".join(lines)
    assert [line.split(",")[0] for line in lines] == [f"train: {n}/6 steps" for n in range(2, 7)]
    assert lines[-1].endswith("loss 0.5000, lr 5.00e-06, 1,234 tokens/s, 3.0 GiB")


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
    bar = progress(3, "train", shown=False)
    bar.wait()
    bar.update()
    bar.measure()


def test_work_may_be_iterated_over():
    out = io.StringIO()
    assert list(progress((i for i in range(3)), "score", unit="row", stream=out)) == [0, 1, 2]
    assert "score: 3/? rows" in out.getvalue()


def test_status_leaves_out_what_is_not_there():
    assert status({"loss": None, "lr": 1e-5}) == "lr 1.00e-05"
    assert status({"step": 3}) == ""


def test_the_time_left_is_a_mean_over_what_was_measured():
    """Of ten steps the first takes 90 seconds, the others four, and every third of them twice that."""
    out, now = io.StringIO(), [0.0]
    bar = progress(10, "train", stream=out)
    bar._time = lambda: now[0]
    bar.start_t = bar.last_print_t = 0.0
    bar.wait()
    now[0] = 80.0
    bar.refresh()
    now[0] = 90.0
    bar.update()
    bar.measure()
    for step in range(1, 7):
        now[0] += 8.0 if step % 3 == 0 else 4.0
        bar.update()
    bar.total = 8
    now[0] += 0.0
    bar.refresh()
    bar.close()
    lines = out.getvalue().splitlines()
    assert "0/10 steps, 01:20 so far, ? to go" in lines[1] or "0/10 steps, 01:20 so far, ? to go" in lines[0]
    assert any("7/10 steps, 02:02 so far, 00:16 to go" in line for line in lines)
    assert any("7/8 steps, 02:02 so far, 00:05 to go" in line for line in lines)


def test_what_is_soon_done_shows_nothing():
    out = io.StringIO()
    assert list(progress([1, 2, 3], "evaluate", stream=out, delay=100.0)) == [1, 2, 3]
    assert out.getvalue() == ""


def test_a_line_stands_above_the_bar(capsys):
    bar = progress(2, "train", stream=io.StringIO())
    bar.say("round 0: 32 contexts")
    assert capsys.readouterr().out == "round 0: 32 contexts\n"
    bar.close()
