"""The record of command lines: what it cannot make or compare is refused, and nothing is written."""

from __future__ import annotations

import pytest

from tools.recorded import main


@pytest.mark.parametrize("words", ["out nosuch", "--compare none none"])
def test_what_is_no_run_and_no_record_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert not any(tmp_path.iterdir())
