"""Which models are mixtures of experts, and what a run says of their routers. ``trainers.routing`` has the
auxiliary loss."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, PretrainedConfig

from common.errors import require
from config.schema_model import ModelConfig


def is_mixture(hf_config: PretrainedConfig) -> bool:
    """Return whether this architecture is a mixture of experts with an auxiliary loss of its own, whose
    routing transformers can record."""
    mapping = AutoModelForCausalLM._model_mapping
    records = (
        getattr(mapping[type(hf_config)], "_can_record_outputs", None) or {}
        if type(hf_config) in mapping
        else {}
    )
    text = hf_config.get_text_config()
    return "router_logits" in records and all(
        getattr(text, name, None) is not None for name in ("router_aux_loss_coef", "num_experts_per_tok")
    )


def check_routing(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an auxiliary loss that does not apply to this model or cannot be computed."""
    key, value = "model.router_aux_loss_coef", config.router_aux_loss_coef
    if value is None:
        return
    require(is_mixture(hf_config), key, value, f"a {hf_config.model_type} has no router to balance; use off")
    require(
        config.compile is not True,
        key,
        value,
        "needs model.compile=false: compiled layers do not tell how they route",
    )


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
