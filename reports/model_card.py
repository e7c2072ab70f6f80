"""The README of an exported model, in the format of the Hugging Face hub, which tells where the model comes
from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from common.files import write_whole
from common.markdown import literal, table
from common.secrets import scrub, scrub_text
from reports.answers import LINES, Answered, before_and_after, shortened
from reports.outcome import text_of
from reports.provenance import facts, git_commit, variant, versions
from reports.report import compared, memory_facts

ROOT = Path(__file__).parents[1]
_HUB_ID = re.compile(r"\w[\w.\-]*(/\w[\w.\-]*)?", re.ASCII)
_TAG = re.compile(r"[^\w.+\-]+", re.ASCII)
_FOLDERS = re.compile(r"(?<![\w.~:/<…\-])/(?:[^\s/'\"|<>&]+/)+(?=[^\s/])")
"""Matches the folders of an absolute path, without its last part; the slashes of a URL or of a relative path
do not match."""
PAPER = "Humanline: Online Alignment as Perceptual Loss (Liu, Muennighoff, Ethayarajh)"


def write_model_card(model_dir: Path, config: dict[str, Any], summary: dict[str, Any]) -> Path:
    """Write ``model_dir/README.md`` and return its path.

    ``config``: the run's settings as plain data; ``summary``: the content of summary.json, {} if it is not
    known; of a checkpoint's weights it has ``checkpoint`` alone, which says when they were saved. Secrets are
    removed, and an absolute path outside the working directory and the home is cut to its last part.
    """
    path = model_dir / "README.md"
    answers = before_and_after(model_dir.parent) if summary.keys() - {"checkpoint"} else []
    text = scrub_text(model_card(scrub(config), scrub(summary)) + _answers(answers) + _padding(model_dir))
    # Paths could reveal who trained the model, and where.
    text = text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
    write_whole(path, _FOLDERS.sub("…/", text))
    return path


def model_card(config: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the card's text: YAML front matter, provenance, and the evaluation before and after training."""
    model, loss = config["model"], config["loss"]
    base = str(model["name_or_path"])
    on_hub = _HUB_ID.fullmatch(base) is not None and not Path(base).exists()
    front = ModelCardData(
        base_model=base if on_hub else None,  # the hub accepts only an id
        library_name="transformers",
        pipeline_tag="text-classification" if model.get("head") == "reward" else "text-generation",
        tags=["alignment", _TAG.sub("-", str(loss["name"])), variant(config)],
    )
    found = facts(config) | {
        "Checkpoint": summary.get("checkpoint"),
        "Ended": text_of(summary),
        "Memory of a rank": dict(memory_facts(summary)).get("memory"),
        "Command": summary.get("command") or None,
        "Code": git_commit(ROOT),
        "Versions": ", ".join(f"{package} {version}" for package, version in versions().items()),
    }
    cells = {key: literal(str(value)) for key, value in found.items() if value is not None}
    rows = [(key, f"<code>{cell}</code>" if key == "Command" else cell) for key, cell in cells.items()]
    title = literal(f"{Path(base).name}, {loss['name']}, {variant(config)}")
    return f"""---
{front.to_yaml().strip()}
---

# {title}

Trained with the humanline framework, which implements the paper *{PAPER}*.

{table(("", ""), rows)}
{_evaluation(summary)}"""


def _evaluation(summary: dict[str, Any]) -> str:
    """Return the table of measures before and after; "" if nothing was evaluated."""
    if not (rows := compared(summary)):
        return ""
    about = "On held-out data; rewards are unclipped and against the initial weights."
    return f"\n## Evaluation\n\n{about}\n\n{table(('', 'before', 'after'), rows)}\n"


def _answers(answers: list[Answered]) -> str:
    """Return the first prompts' answers before and after; "" if there are none."""
    parts = [
        f"- {one.title(f'*{literal(shortened(one.prompt))}*')}\n"
        f"  - before: {literal(shortened(one.before))}\n"
        f"  - after: {literal(shortened(one.after))}"
        for one in answers[:LINES]
    ]
    return "\n## Answers\n\n" + "\n".join(parts) + "\n" if parts else ""


def _padding(model_dir: Path) -> str:
    """Return how a reward model's rows are padded; "" for other models."""
    written = model_dir / "config.json"
    config = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return ""
    if config.get("pad_token_id") is not None:
        how = f"Rows are padded on the right with token {config['pad_token_id']}, as config.json says."
    else:
        how = (
            "Its tokenizer pads with the token that ends a turn, at which the reward is read. To score rows "
            "of several lengths in one batch, pad them on the right with another token and name it: "
            "`tokenizer.pad_token, model.config.pad_token_id = tokenizer.convert_ids_to_tokens(0), 0`."
        )
    return (
        f"\n## Scoring\n\nThe reward is the one logit, read at a row's last token, which ends a turn. {how}\n"
    )
