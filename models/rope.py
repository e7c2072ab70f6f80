"""How far the positions of rotary embeddings reach before the score of one row depends on the other rows of
its batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from common.errors import require
from config.schema_model import ModelConfig

LONGROPE = ("longrope", "su")
"""The rotary embeddings of Phi-3 and Phi-4, which have one set of factors for short texts and one for long
ones; ``su`` is their first name."""
DYNAMIC = "dynamic"


def check_longrope(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for rows that may be longer than the switch from LongRoPE's short factors to its long
    ones.

    Transformers takes the long factors for all rows of a batch as soon as one of them is longer, so that the
    scores of a short row would depend on its batch. While it generates, it drops the keys and values so far.
    vLLM takes the long factors for all rows.
    """
    switch = min(_switches(hf_config.get_text_config()), default=None)
    require(
        switch is None or config.max_length <= switch,
        "model.max_length",
        config.max_length,
        f"with the LongRoPE of {config.name_or_path} a row's scores do not depend on the other rows of its "
        f"batch up to {switch} tokens (original_max_position_embeddings): give as many at most, and "
        "model.max_prompt_length less",
    )


def reach(hf_config: PretrainedConfig) -> int | None:
    """Return the number of positions beyond which a row must not be computed together with others; None where
    any number does no harm. A table of positions ends there, and LongRoPE and dynamic scaling change the
    factors of all rows."""
    text = hf_config.get_text_config()
    kinds = [_kind(one) for one in _ropes(text)]
    if kinds and not any(kind in LONGROPE or DYNAMIC in kind for kind in kinds):
        return None
    ends = [getattr(text, "max_position_embeddings", None), *_switches(text)]
    return min((end for end in ends if end), default=None)


def _switches(text: PretrainedConfig) -> Iterator[int]:
    """Yield the length at which each LongRoPE of the model switches to its long factors."""
    for one in _ropes(text):
        if _kind(one) in LONGROPE:
            original = getattr(text, "original_max_position_embeddings", None)
            yield int(original or one.get("original_max_position_embeddings") or text.max_position_embeddings)


def _ropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the model's rotary embeddings, which may be several by kind of layer; [] where
    it has none."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [one for one in parameters.values() if isinstance(one, dict)] or [parameters] * bool(parameters)


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
