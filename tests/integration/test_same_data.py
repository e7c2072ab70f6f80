"""A run goes on with the data that it was started with, or not at all."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.tiny import ROOT, make_config
from tests.tiny_files import everything
from train import train

LINES = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)[:40]
FAST = ("model.batch_size=8", "n_eval_examples=8", "wandb.enabled=false", "data.verifier=null", "resume=true")


def go(folder: Path, lines: list[str], *more: str) -> dict:
    (folder / "pairs.jsonl").write_text("".join(lines))
    here = (f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"data.path={folder / 'pairs.jsonl'}")
    return train(make_config("loss=dpo", *here, *FAST, *more), "run")


def left(run: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a run's folder but its lock, which says who asked last."""
    return {name: content for name, content in everything(run).items() if name != "run.lock"}


def without_digest(checkpoint: Path) -> None:
    """Make a checkpoint into one of an earlier version."""
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop("data")
    content = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = [len(content), zlib.crc32(content)]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_does_not_go_on_with_other_rows(tmp_path: Path) -> None:
    assert go(tmp_path, LINES, "n_examples=16")["steps"] == 2
    run = tmp_path / "run"
    before = left(run)
    row = json.loads(LINES[7])
    row["completions"][1]["text"] += "1"
    for lines in ([*LINES[:7], json.dumps(row) + "\n", *LINES[8:]], LINES[::-1], LINES[:-1]):
        with pytest.raises(ConfigError, match=r"^data\.path=.*not those that this run was started with"):
            go(tmp_path, lines, "n_examples=24")
        assert left(run) == before, "nothing of the run is changed"
    assert go(tmp_path, LINES, "n_examples=24")["steps"] == 3, "and the old data go on"
    for checkpoint in (run / "checkpoints").iterdir():
        without_digest(checkpoint)
    assert go(tmp_path, LINES[::-1], "n_examples=32")["steps"] == 4, "a checkpoint that does not say goes on"


def test_a_run_of_rounds_does_not_go_on_with_other_prompts(tmp_path: Path) -> None:
    rounds = ("online=true", "reward=adder", "rounds.contexts=8", "rounds.contexts_per_round=8")
    go(tmp_path, LINES, *rounds)
    before = left(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^data\.path=.*go on with other prompts"):
        go(tmp_path, LINES[::-1], *rounds)
    assert left(tmp_path / "run") == before
