"""``--help`` of every program that argparse serves: a ``%`` in a help text breaks nothing but this."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
PROGRAMS = [
    name[:-3].replace("/", ".")
    for name in TRACKED
    if not name.startswith("tests/")
    and "options_of(" in (text := (ROOT / name).read_text())
    and 'if __name__ == "__main__":' in text
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_how_it_is_used(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert not ended.value.code and "usage: " in capsys.readouterr().out
