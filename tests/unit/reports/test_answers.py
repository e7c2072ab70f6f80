"""Sample answers before and after training: what is kept, what a killed run leaves, what is shown."""

from __future__ import annotations

import json
import re

import pytest

from data.types import Prompt, Turn
from reports.answers import FILE, before_and_after, keep_answers, read_answers
from reports.report import write_report
from rollouts.verify import COLUMNS, conversation


def kept(folder, step, word, verdict=1.0, prompts=("1+1=", "2+2=", "3+3=", "4+4=", "5+5=")):
    rows = [("sampled", p, f"{word} {p} drawn {n}", "9", verdict) for p in prompts for n in range(2)]
    rows += [("greedy", p, f"{word} {p}", "9", verdict) for p in prompts]
    keep_answers(folder, step, COLUMNS, rows)


def steps(folder):
    return [line["step"] for line in read_answers(folder / FILE)]


def test_the_ends_of_a_run_are_compared_by_prompt(tmp_path):
    kept(tmp_path, 0, "old", verdict=0.0)
    kept(tmp_path, 20, "middle")
    kept(tmp_path, 40, "new", verdict=0.75, prompts=("3+3=", "1+1=", "2+2="))
    found = before_and_after(tmp_path)
    assert [(one.kind, one.prompt, one.before, one.after) for one in found] == [
        ("greedy", p, f"old {p} (0)", f"new {p} (0.75)") for p in ("1+1=", "2+2=", "3+3=")
    ]
    assert found[0].reference == "9"


@pytest.mark.parametrize("separator", ["\n", "\u2028", "\u2029", "\x85", "\x0c"])
def test_what_a_killed_run_left_of_later_steps_goes_and_no_line_separator_erases_more(
    tmp_path, separator, capsys
):
    """Nor does a damaged line cost another, and it is said."""
    for step in (0, 10, 20, 30):
        kept(tmp_path, step, f"life{separator}one, {step}")
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole.replace(b"one, 10 2+2= drawn 0", b"one, 10 2+2=\xffdrawn 0"))
    kept(tmp_path, 20, "life two")
    assert {*steps(tmp_path)} == {0, 10, 20} and steps(tmp_path).count(10) == 14
    assert f"{tmp_path / FILE}: 1 of its lines are damaged" in capsys.readouterr().out
    later = [line["answer"] for line in read_answers(tmp_path / FILE) if line["step"] == 20]
    assert len(later) == 15 and all(answer.startswith("life two") for answer in later)
    assert before_and_after(tmp_path)[0].before.split() == ["life", "one,", "0", "1+1=", "(1)"]


@pytest.mark.parametrize("text", [None, "", "{", '{"step": 0}\nnonsense\n', '{"a": 1}\n', "3\n"])
def test_a_file_that_is_not_there_or_damaged_shows_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert before_and_after(tmp_path) == []
    kept(tmp_path, 0, "only the beginning")
    found = before_and_after(tmp_path)
    assert [(one.before, one.after) for one in found[:1]] == [("only the beginning 1+1= (1)", "–")]


def test_the_report_shows_texts_as_texts_and_a_conversation_from_first_turn_to_last(tmp_path):
    said = [("system", "You help."), ("user", "My cup broke."), ("assistant", "Which? " * 300)]
    prompt = conversation(Prompt(tuple(Turn(*turn) for turn in [*said, ("user", "99028.")])))
    assert conversation(Prompt((Turn("user", "1+1="),))) == "1+1="
    keep_answers(tmp_path, 0, COLUMNS, [("read", prompt, "Thank you.", None, None)])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.search(r"<td>system: You help. user: My cup broke. .* … .* user: 99028.</td>", page)
    assert "each with its verdict" not in page and "<th>so far</th>" in page
    (tmp_path / FILE).unlink()
    (tmp_path / "summary.json").write_text(json.dumps({"before": {}, "after": {}}))
    for step in (0, 9):
        keep_answers(tmp_path, step, COLUMNS, [("greedy", "<b>why</b>?", f"<i>{step}</i>", "ß & co", 0.5)])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "&lt;b&gt;why&lt;/b&gt;?" in page and "&lt;i&gt;9&lt;/i&gt; (0.5)" in page and "ß &amp; co" in page
