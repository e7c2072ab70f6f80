"""The README of an exported model: where it comes from, in the format of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from config.schema_trainer import loss_numbers
from reports.provenance import git_commit, scrub, scrub_text, variant, versions
from reports.report import compared

ROOT = Path(__file__).parents[1]
PAPER = "Humanline: Online Alignment as Perceptual Loss (Liu, Muennighoff, Ethayarajh)"


def write_model_card(model_dir: Path, config: dict[str, Any], summary: dict[str, Any]) -> Path:
    """Write ``model_dir/README.md`` and return its path.

    ``config``: the run's, as plain data; ``summary``: as in summary.json, {} where it is not known. No secret of either gets in.
    """
    path = model_dir / "README.md"
    text = scrub_text(model_card(scrub(config), scrub(summary)))
    path.write_text(
        text.replace(f"{Path.home()}/", "~/"), encoding="utf-8"
    )  # who trained it, and where, is nobody's business
    return path


def model_card(config: dict[str, Any], summary: dict[str, Any]) -> str:
    """The card's text: YAML front matter, provenance, what evaluation said before and after."""
    model, data, loss = config["model"], config["data"], config["loss"]
    base = str(model["name_or_path"])
    taken = loss_numbers(loss, config.get("trainer", {}).get("loss_keys", []))
    numbers = ", ".join(f"{key} = {value}" for key, value in taken.items())
    front = ModelCardData(
        base_model=None if _is_path(base) else base,  # the hub takes ids alone
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["alignment", str(loss["name"]), variant(config)],
    )
    facts = {
        "Base model": base + (f", revision {model['revision']}" if model.get("revision") else ""),
        "Loss": str(loss["name"]) + (f" ({numbers})" if numbers else ""),
        "Variant": variant(config) + _humanline(config),
        "Data": str(data.get("path") or data["name"])
        + (f", revision {data['revision']}" if data.get("revision") else ""),
        "Seed": config["seed"],
        "Learning rate": f"{config['lr']:g}",
        "Batch size": model.get("batch_size"),
        "LoRA": f"rank {model['peft']['lora_r']}, merged" if model.get("use_peft") else None,
        "Command": f"`{summary['command']}`" if summary.get("command") else None,
        "Code": git_commit(ROOT),
        "Versions": ", ".join(f"{package} {version}" for package, version in versions().items()),
    }
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items() if value is not None)
    title = f"{Path(base).name}, {loss['name']}, {variant(config)}"
    return f"""---
{front.to_yaml().strip()}
---

# {title}

Trained with the humanline framework, which implements the paper *{PAPER}*.

| | |
|---|---|
{rows}
{_evaluation(summary)}"""


def _humanline(config: dict[str, Any]) -> str:
    if not config.get("humanline"):
        return ""
    return (
        " ("
        + ", ".join(f"{key} = {config[key]}" for key in ("log_epsilon_P", "log_epsilon_R", "sync_freq"))
        + ")"
    )


def _evaluation(summary: dict[str, Any]) -> str:
    """The table of before and after, "" where nothing was evaluated."""
    rows = "\n".join(f"| {label} | {before} | {after} |" for label, before, after in compared(summary))
    return (
        f"""
## Evaluation

On held-out data; rewards are unclipped and against the initial weights.

| | before | after |
|---|---|---|
{rows}
"""
        if rows
        else ""
    )


def _is_path(name: str) -> bool:
    """Whether a model's name is a folder rather than an id of the hub (``name`` or ``owner/name``)."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _cell(value: Any) -> str:
    """A value as one cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
