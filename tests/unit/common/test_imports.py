"""Functions that a setting names by their import path."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiny import ROOT

MINE = "class Settings: ...\ndef score(prompt: Settings, completion: str) -> float: ...\n"
ASKED = """
import sys
sys.path[0] = sys.argv[1]
from common.imports import check_importable, import_function, written_type
if sys.argv[2] == "import":
    print(import_function("reward.function.path", "mine.score").__module__)
else:
    check_importable("reward.function.path", "mine.score")
    print(written_type("mine.score"))
from common.imports import import_function
print(import_function("x", "common.imports.importing").__name__)
print(sys.path[0] == sys.argv[1])
"""


@pytest.mark.parametrize(("what", "said"), [("import", "mine"), ("read", "mine.Settings")])
def test_a_module_of_the_working_directory_is_found_behind_the_projects_own(tmp_path, what, said):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "common.py").write_text("raise SystemExit('another module of this name')\n")
    asked = tmp_path / "asked.py"
    asked.write_text(ASKED)
    words = [sys.executable, str(asked), str(ROOT), what]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [said, "importing", "True"], done.stderr
