"""A run's numbers as lines for the terminal: steps, rounds, and evaluations with those of each named set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from config.schema_data import named_measure

MEASURES = (
    ("eval_accuracy_sampled", "sampled accuracy", "{:.1%}"),
    ("eval_accuracy_greedy", "greedy accuracy", "{:.1%}"),
    ("eval_length_sampled", "length of sampled answers (tokens)", "{:.1f}"),
    ("eval_reward_margin", "evaluation margin (β·nats)", "{:+.4f}"),
    ("eval_reward_accuracy", "evaluation reward accuracy", "{:.1%}"),
    ("eval_loss", "evaluation loss", "{:.4f}"),
    ("eval_drift", "drift from the initial weights (nats/token)", "{:+.4f}"),
    ("eval_kl_initial", "KL from the initial weights (nats/token)", "{:.4f}"),
)
"""(key, label, form) of what an evaluation measures, in the order of tables."""
_SHOWN = (
    ("eval_reward_margin", "margin {:+.4f}"),
    ("eval_reward_accuracy", "reward accuracy {:.1%}"),
    ("eval_accuracy_sampled", "sampled accuracy {:.1%}"),
    ("eval_accuracy_greedy", "greedy accuracy {:.1%}"),
    ("eval_loss", "loss {:.4f}"),
    ("eval_kl_initial", "KL from the start {:.4f}"),
)


def names_of(keys: Iterable[str]) -> list[str]:
    """Return the named sets that have a measure among ``keys``, in the order of the keys."""
    return list(dict.fromkeys(parts[0] for key in keys if (parts := named_measure(key)) is not None))


def of_name(key: str, name: str) -> str:
    """Return a key of the run's own set as the named set has it: ``eval_loss`` becomes
    ``eval_<name>_loss``."""
    return f"eval_{name}_{key.removeprefix('eval_')}"


def evaluation_lines(step: int, values: Mapping[str, float | None]) -> list[str]:
    """Return an evaluation as lines for the terminal: one for the run's own set, then one for each named
    set."""

    def measured(keys: Mapping[str, str]) -> str:
        parts = (form.format(values[key]) for key, form in keys.items() if values.get(key) is not None)
        return ", ".join(parts) or "nothing to measure"

    main = measured(dict(_SHOWN))
    named = {name: {of_name(key, name): form for key, form in _SHOWN} for name in names_of(values)}
    return [
        f"evaluation at step {step}: {main}",
        *(f"  {name}: {measured(keys)}" for name, keys in named.items()),
    ]


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
