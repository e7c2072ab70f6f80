"""What README.md and docs/*.md name is there; the settings of their tables compose; the example notebook and
the lines of its page run as in Jupyter, one cell after the other in one process. Their commands:
test_docs_commands.py."""

from __future__ import annotations

import gc
import json
import re
import shlex

import matplotlib as mpl
import pytest

from models.policy import Policy
from tests.docs import PAGES, ROOT, blocks, settings
from tests.tiny import compose_config
from train import compose, train

TABLES = {"from-halos-and-trl.md": "", "losses.md": "loss=grpo", "syncing.md": ""}
"""Pages whose tables name settings -> what those settings are for, where they do not say it themselves."""
FOLDERS = "config|data|models|trainers|rollouts|launch|tests|tools|docs|sweeps"


@pytest.mark.parametrize("page", TABLES)
def test_the_settings_of_the_tables_compose(page):
    found = [text for text in settings(page) if text != "num_labels=1"]
    for text in found:
        own = shlex.split(text)
        before = [] if any(word.startswith("loss=") for word in own) else TABLES[page].split()
        compose_config([*before, *own])
    assert len(found) > 40 or page != "from-halos-and-trl.md"


def test_every_file_and_make_target_that_is_named_is_there():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        text = page.read_text()
        named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)
        linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        missing = [n for n in named if not (ROOT / n).exists()]
        missing += [n for n in linked if not (page.parent / n).exists()]
        made = re.findall(r"(?:`|^    )make ([a-z0-9-]+)", text, re.MULTILINE)
        missing += [name for name in made if name not in targets]
        assert not missing, page


# -- the notebook ------------------------------------------------------------------------------------

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Where cells run: their names, and a folder for their runs."""
    mpl.use("Agg")
    monkeypatch.chdir(ROOT)
    small = ("n_eval_examples=8", "n_eval_prompts=8", "n_examples=128", "eval_every=64")
    places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache")
    names = {"__name__": "__main__", "compose": lambda *words: compose(*words, *small, *places)}

    def run(source: str) -> dict:
        source = source.replace("from train import compose, train", "from train import train")
        exec(compile(source, "cell", "exec"), names)
        return names

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
    def policies() -> list[Policy]:
        return [held for held in gc.get_objects() if issubclass(type(held), Policy)]

    gc.collect()
    others = policies()  # of tests before this one in the same process
    gc.disable()  # when it looks is chance, and models are large
    try:
        words = ("loss=dpo", "n_examples=4", "model.batch_size=2", "n_eval_examples=2", "n_eval_prompts=1")
        train(*compose(*words, "wandb.enabled=false", f"runs_dir={tmp_path}"))
        assert {id(held) for held in policies()} <= {id(held) for held in others}
    finally:
        gc.enable()


def test_the_lines_of_the_page_run(kernel):
    first, second = [b for b in blocks(ROOT / "docs" / "notebook.md") if b.language == "python"]
    names = kernel("\n".join(first.lines))
    assert len(names["metrics"]) == 4 and names["summary"]["after"]
    names = kernel("\n".join(second.lines))
    assert names["observed"]["stopped_early"] and names["observed"]["steps"] < 4
