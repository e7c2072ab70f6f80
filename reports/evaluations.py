"""Evaluations as text lines for the terminal, and the measures of each named evaluation set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from config.schema_evaluations import named_measure

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
