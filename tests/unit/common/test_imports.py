"""Functions that a setting names by their import path."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import ConfigError
from common.imports import check_importable, import_function, module_and_name, modules_beside
from tests.tiny import ROOT

MINE = "class Settings: ...\ndef score(prompt: Settings, completion: str) -> float: ...\n"
ASKED = """
import sys
sys.path[0] = sys.argv[1]
from common.imports import check_importable, import_function, written_type
check_importable("reward.function.path", "mine.score")
print(written_type("mine.score"), "mine" in sys.modules)
print(import_function("reward.function.path", "mine.score").__module__)
print(import_function("x", "common.imports.importing").__name__)
print(sys.path[0] == sys.argv[1])
"""


def test_a_module_of_the_working_directory_is_found_behind_the_projects_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "common.py").write_text("raise SystemExit('another module of this name')\n")
    asked = tmp_path / "asked.py"
    asked.write_text(ASKED)
    words = [sys.executable, str(asked), str(ROOT)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["mine.Settings False", "mine", "importing", "True"], done.stderr


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("statistics.py", "statistics.score"),
        ("my-reward.py", "my-reward.score"),
        ("second.try.py", "second.try.py:score"),
        ("rewards/json.py", "./rewards/json.py:score"),
    ],
)
def test_a_file_may_have_any_name(tmp_path, monkeypatch, file, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (place := tmp_path / file).parent.mkdir(exist_ok=True)
    place.write_text("from beside import WORTH\n\ndef score(): return WORTH\n")
    (place.parent / "beside.py").write_text(f"WORTH = {file!r}\n")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    check_importable("reward.function.path", path)
    assert import_function("reward.function.path", path)() == file
    assert set(modules_beside(module_and_name(path)[0]).values()) == {place, place.parent / "beside.py"}
    with pytest.raises(ConfigError, match="cannot be imported"):
        check_importable("reward.function.path", path.replace("score", "scores"))
