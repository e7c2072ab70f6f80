"""The example notebook and the lines of its page, as Jupyter would run them: one cell after the other in one
process."""

from __future__ import annotations

import gc
import json

import matplotlib as mpl
import pytest

from tests.docs import ROOT, blocks
from train import compose, train

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Where cells run: their names, and a folder for their runs."""
    mpl.use("Agg")
    monkeypatch.chdir(ROOT)
    small = (
        "n_eval_examples=8",
        "n_eval_prompts=8",
        f"runs_dir={tmp_path}",
        f"cache_dir={tmp_path}/cache",
    )

    def composed(*words):
        return compose(*words, *small, "n_examples=128", "eval_every=64")

    names = {"__name__": "__main__"}

    def run(source: str) -> dict:
        source = source.replace("from train import compose, train", "from train import train")
        exec(compile(source, "cell", "exec"), names)
        return names

    names["compose"] = composed
    return run


def test_the_example_notebook_runs_from_top_to_bottom(kernel):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None, "is kept without what it showed"
            names = kernel("".join(cell["source"]))
    assert list(names["table"].columns) == ["plain", "humanline"] and len(names["table"]) == 2
    assert all((folder / "model" / "model.safetensors").is_file() for folder, _ in names["runs"].values())
    assert len(names["left"].lines) == len(names["right"].lines) == 2


def test_a_run_s_model_is_not_held_beside_the_next_one_s(tmp_path):
    from models.policy import Policy

    def policies() -> list[Policy]:
        return [held for held in gc.get_objects() if issubclass(type(held), Policy)]

    gc.collect()
    others = policies()  # of tests before this one in the same process
    gc.disable()  # when it looks is chance, and models are large
    try:
        words = ("loss=dpo", "n_examples=4", "model.batch_size=2", "n_eval_examples=2", "n_eval_prompts=1")
        train(*compose(*words, "wandb.enabled=false", f"runs_dir={tmp_path}"))
        assert [held for held in policies() if not any(held is other for other in others)] == []
    finally:
        gc.enable()


def test_the_lines_of_the_page_run(kernel):
    first, second = [b for b in blocks(ROOT / "docs" / "notebook.md") if b.language == "python"]
    names = kernel("\n".join(first.lines))
    assert len(names["metrics"]) == 4 and names["summary"]["after"]
    names = kernel("\n".join(second.lines))
    assert names["observed"]["stopped_early"] and names["observed"]["steps"] < 4
