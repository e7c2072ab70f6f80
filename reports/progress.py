"""A run's numbers as words behind its bar, and as lines above it."""

from __future__ import annotations

from typing import Any


def status(record: dict[str, Any]) -> str:
    """Return the numbers of a metrics line that are worth watching, as far as it has them."""
    shown = (
        ("loss", "loss {:.4f}"),
        ("reward_margin", "margin {:+.3f}"),
        ("reward_accuracy", "accuracy {:.0%}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("gpu_memory_gib", "{:.1f} GiB"),
    )
    return ", ".join(form.format(record[key]) for key, form in shown if record.get(key) is not None)


def round_line(index: int, metrics: dict[str, Any]) -> str:
    """Return a round's sampling metrics as a line for the terminal."""
    reward = "no reward" if metrics["reward"] is None else f"reward {metrics['reward']:.3f}"
    return (
        f"round {index}: {metrics['contexts']} contexts, {metrics['keep_rate']:.0%} kept, {reward}, "
        f"{metrics['length']:.0f} tokens a sample, {metrics['finished']:.0%} finished; "
        f"sampled in {metrics['sample_seconds']:.1f} s, scored in {metrics['score_seconds']:.1f} s"
    )
