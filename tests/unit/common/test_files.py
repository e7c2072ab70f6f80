"""Files that are written whole, and names of folders."""

from __future__ import annotations

import os

import pytest

from common import files
from common.errors import ConfigError
from common.files import check_name, open_own, read_sealed, write_if_changed, write_whole
from common.lock import FileLock
from reports.metrics import LineFile
from tests.full_disk import full_disk
from tests.tiny_files import everything


def test_a_file_that_cannot_be_written_whole_stays_and_one_that_says_the_same_is_not_touched(tmp_path):
    path = tmp_path / "a" / "config.yaml"
    write_if_changed(path, "ä\n")
    before = everything(tmp_path)
    with full_disk(100), pytest.raises(OSError, match="too large"):
        write_whole(path, "new\n" * 100)
    with full_disk(0):
        write_if_changed(path, "ä\n")
    assert everything(tmp_path) == before, "nothing is changed, and nothing is left beside it"
    write_if_changed(path, "b\n")
    assert path.read_text() == "b\n"


RIGHT = ["dpo-adder-s1", "x_2.5+b=3", "...", ".a", "a" * 200]
WRONG = ["", ".", "..", "../a", "a/b", "/", "a b", "a\n", "ä", "a\0", "$(x)", "~", "a" * 201, None, "-rf"]


def test_a_name_is_one_plain_word():
    for name in RIGHT:
        check_name("exp_name", name)
    for name in WRONG:
        with pytest.raises(ConfigError, match=r"letters, digits and .* no - at the beginning") as refused:
            check_name("exp_name", name)
        assert refused.value.key == "exp_name" and refused.value.value == name


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\n\nb", "a\u2028b\x85c\n", "\n", "a\n\n"])
def test_the_lines_of_a_text_are_those_that_a_file_has(tmp_path, text):
    (tmp_path / "a").write_text(text, encoding="utf-8")
    with (tmp_path / "a").open(encoding="utf-8") as stream:
        assert files.lines_of(text) == [line.removesuffix("\n") for line in stream]


def test_nothing_is_written_through_a_link(tmp_path):
    """A run's lock, its lines, its logs and the temporary names of files that are written whole."""
    thesis, run = tmp_path / "thesis.txt", tmp_path / "run"
    run.mkdir()
    thesis.write_text("mine")
    for work in (
        lambda at: FileLock(at).acquire(),
        lambda at: LineFile(at, fresh=False),
        lambda at: open_own(at, os.O_RDWR | os.O_CREAT | os.O_APPEND),
    ):
        (run / "file").symlink_to(thesis)
        with pytest.raises(OSError, match="is a link"):
            work(run / "file")
        (run / "file").unlink()
    files.part_of(run / "config.yaml").symlink_to(thesis)
    write_whole(run / "config.yaml", "ours")
    assert (run / "config.yaml").read_text() == "ours" and [p.name for p in run.iterdir()] == ["config.yaml"]
    (run / "plain").symlink_to(thesis)
    write_whole(run / "plain", "ours")
    assert thesis.read_text() == "mine"


def test_a_changed_digit_in_a_sealed_file_is_noticed(tmp_path):
    write_whole(path := tmp_path / "counts.json", files.sealed({"examples": [32, 64], "of": {"é": 1.5}}))
    assert read_sealed(path) == {"examples": [32, 64], "of": {"é": 1.5}}
    for changed in (path.read_text().replace("64", "54"), '{"examples": [32]}'):
        path.write_text(changed)
        with pytest.raises(ValueError, match="another checksum"):
            read_sealed(path)
