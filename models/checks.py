"""Checks of a model's architecture against the settings, before its weights are read: kernels of attention,
routers of a mixture, rotary embeddings, adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from common.errors import ConfigError
from config.files import section
from config.schema_model import ModelConfig
from models.policy import causal_lm
from models.weight_files import KEY, check_positions

if TYPE_CHECKING:
    from peft import PeftModel

FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
"""Kernel of 16 bits -> whether it is installed."""
SOFTCAP_ATTENTION = ("eager", "flex_attention", *FLASH_ATTENTION)
"""Kernels that apply Gemma-2's attn_logit_softcapping; transformers' sdpa silently drops it."""
ATTENTION = ("sdpa", *SOFTCAP_ATTENTION)
LONGROPE = ("longrope", "su")
"""The rotary embeddings of Phi-3 and Phi-4, which have one set of factors for short texts and one for long
ones; ``su`` is their first name."""
DYNAMIC = "dynamic"
TARGETS = "model.peft.target_modules"


def check_architecture(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for a model that is not a causal language model or that is shorter than
    model.max_length, and as the checks below do."""
    check_embedded(config, hf_config)
    own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if not own_code and type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            KEY, config.name_or_path, f"is a {hf_config.model_type}, not a causal language model"
        )
    check_kernel(config, hf_config)
    check_routing(config, hf_config)
    check_longrope(config, hf_config)
    check_positions(config, hf_config.get_text_config().to_dict())


def check_embedded(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for another model with the settings of the embedded one, which are made for that
    model's task."""
    embedded = section("model/adder.yaml:model")
    config_file = Path(embedded["name_or_path"], "config.json")
    if not config.name.startswith(embedded["name"]) or not config_file.is_file():
        return
    words = json.loads(config_file.read_text(encoding="utf-8"))["vocab_size"]
    if hf_config.get_text_config().vocab_size != words:
        raise ConfigError(
            KEY,
            config.name_or_path,
            f"is not the embedded model, and model={config.name} has that one's settings: texts of "
            f"{embedded['max_length']} tokens, control tokens, learning rate; type model=hub "
            f"model.name_or_path={config.name_or_path}",
        )


def check_kernel(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an attention kernel that transformers does not offer for this architecture, that
    does not compute in ``model.dtype``, that is not installed, or that would drop a feature of the model."""
    key, kernel = "model.attn_implementation", config.attn_implementation
    offered = kernels_of(hf_config)
    cap = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    there = f"a {hf_config.model_type} has no such attention; use {' or '.join(offered)}"
    if kernel not in offered:
        raise ConfigError(key, kernel, there)
    in_16_bits = "computes in bfloat16 or float16 alone; use model.dtype=bfloat16, or sdpa"
    if kernel in FLASH_ATTENTION:
        if config.dtype == "float32":
            raise ConfigError(key, kernel, in_16_bits)
        if not FLASH_ATTENTION[kernel]():
            raise ConfigError(key, kernel, "is not installed; use sdpa")
    dropped = f"would drop this model's attn_logit_softcapping={cap}; use eager"
    if cap is not None and kernel not in SOFTCAP_ATTENTION:
        raise ConfigError(key, kernel, dropped)


def kernels_of(hf_config: PretrainedConfig) -> list[str]:
    """Return the attention kernels that transformers offers for this architecture. (An architecture with its
    own remote code raises an error itself when it is built.)"""
    mapping = AutoModelForCausalLM._model_mapping
    if type(hf_config) not in mapping:
        return list(ATTENTION)
    model: Any = mapping[type(hf_config)]
    offered = {"sdpa": model._supports_sdpa, "flex_attention": model._supports_flex_attn}
    offered |= dict.fromkeys(FLASH_ATTENTION, model._supports_flash_attn)
    return [name for name in ATTENTION if offered.get(name, True)]


def is_mixture(hf_config: PretrainedConfig) -> bool:
    """Return whether this architecture is a mixture of experts with an auxiliary loss of its own, whose
    routing transformers can record."""
    kind = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    records = getattr(kind, "_can_record_outputs", None) or {}
    text = hf_config.get_text_config()
    return "router_logits" in records and all(
        getattr(text, name, None) is not None for name in ("router_aux_loss_coef", "num_experts_per_tok")
    )


def check_routing(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an auxiliary loss that does not apply to this model or cannot be computed."""
    key, value = "model.router_aux_loss_coef", config.router_aux_loss_coef
    if value is None:
        return
    if not is_mixture(hf_config):
        raise ConfigError(key, value, f"a {hf_config.model_type} has no router to balance; use off")
    if config.compile is True:
        raise ConfigError(key, value, "needs model.compile=false: compiled layers do not tell how they route")


def routing_notice(config: ModelConfig, hf_config: PretrainedConfig) -> str | None:
    """Return the message about a mixture of experts at the start of a run; None for another model."""
    if not is_mixture(hf_config):
        return None
    default = hf_config.get_text_config().router_aux_loss_coef
    if config.router_aux_loss_coef is None:
        return (
            "a mixture of experts, trained without an auxiliary loss: nothing keeps its experts in use "
            f"(model.router_aux_loss_coef; its own config says {default:g})"
        )
    return (
        f"a mixture of experts, its routers' auxiliary loss times {config.router_aux_loss_coef:g} "
        f"(its own config says {default:g})"
    )


def check_longrope(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for rows that may be longer than the switch from LongRoPE's short factors to its long
    ones.

    Transformers takes the long factors for all rows of a batch as soon as one of them is longer, so that the
    scores of a short row would depend on its batch. While it generates, it drops the keys and values so far.
    vLLM takes the long factors for all rows.
    """
    switch = min(_switches(hf_config.get_text_config()), default=None)
    if switch is not None and config.max_length > switch:
        raise ConfigError(
            "model.max_length",
            config.max_length,
            f"with the LongRoPE of {config.name_or_path} a row's scores do not depend on the other rows of "
            f"its batch up to {switch} tokens (original_max_position_embeddings): give as many at most, and "
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


def check_adapters(model: PreTrainedModel | PeftModel, config: ModelConfig) -> None:
    """Raise ConfigError for adapters that could not be merged into the exported model."""
    from peft.tuners import lora
    from peft.tuners.lora import LoraLayer

    merged = (lora.Linear, lora.Embedding)  # what ``models.export`` merges
    target, plain = config.peft.target_modules, causal_lm(model)
    if isinstance(plain.get_output_embeddings(), LoraLayer):
        raise ConfigError(
            TARGETS,
            target,
            "puts adapters on the output head, which stays a plain linear layer: leave it out (all-linear "
            "does)",
        )
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, merged):
            raise ConfigError(
                TARGETS,
                target,
                f"puts adapters on {name}, a {type(module).__name__}, which are not merged here: leave it "
                "out",
            )
    tied = bool(getattr(plain.config.get_text_config(), "tie_word_embeddings", False))
    if tied and isinstance(plain.get_input_embeddings(), LoraLayer):
        raise ConfigError(
            TARGETS,
            target,
            "puts adapters on the embedding, whose matrix is this model's output head too: leave it out",
        )
