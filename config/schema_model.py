"""Settings of the model: what is loaded, how it is sharded and run, LoRA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from common.errors import one_of, require
from config.defaults import nested, yaml_defaults
from config.files import of_project

SELECTIVE = "selective"
"""A value of model.activation_checkpointing."""


@dataclass
@yaml_defaults("model/base.yaml:peft")
class PeftConfig:
    """LoRA (peft.LoraConfig). Dropout is not offered: the policy itself scores the reference, and these
    scores must not be random."""

    lora_r: int
    lora_alpha: int
    target_modules: Any

    def __post_init__(self) -> None:
        require(self.lora_r >= 1, "model.peft.lora_r", self.lora_r, "must be at least 1")
        require(self.lora_alpha >= 1, "model.peft.lora_alpha", self.lora_alpha, "must be at least 1")
        target = self.target_modules
        names = target if isinstance(target, list) else [target]
        require(
            bool(names) and all(isinstance(name, str) and name for name in names),
            "model.peft.target_modules",
            target,
            "name modules, as in [q_proj, v_proj], or all-linear",
        )


@dataclass
@yaml_defaults("model/base.yaml")
class ModelConfig:
    name: str
    name_or_path: str
    revision: str | None
    tokenizer_name_or_path: str | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    trust_remote_code: bool
    attn_implementation: str
    dtype: str
    export_dtype: str | None
    from_config: bool
    head: str | None
    control_tokens: dict[str, str]
    batch_size: int
    gradient_accumulation_steps: int
    microbatch_tokens: int | None
    eval_batch_size: int
    max_length: int
    max_prompt_length: int
    max_grad_norm: float
    logit_temperature: float
    activation_checkpointing: Any
    reshard_after_forward: bool | None
    compile: bool
    packing: bool | None
    share_prompts: bool | None
    router_aux_loss_coef: float | None
    use_peft: bool
    quantization: str | None
    peft: PeftConfig = nested(PeftConfig)

    def __post_init__(self) -> None:
        self.name_or_path = of_project(self.name_or_path) or ""
        for key in (
            "batch_size",
            "gradient_accumulation_steps",
            "eval_batch_size",
            "max_length",
            "max_prompt_length",
        ):
            require(getattr(self, key) >= 1, f"model.{key}", getattr(self, key), "must be at least 1")
        require(
            self.max_prompt_length < self.max_length,
            "model.max_prompt_length",
            self.max_prompt_length,
            f"must be less than model.max_length={self.max_length}, or no room is left for a completion",
        )
        require(
            self.max_grad_norm > 0,
            "model.max_grad_norm",
            self.max_grad_norm,
            "must be above 0 (use inf for no clipping)",
        )
        require(
            0 < self.logit_temperature < math.inf,
            "model.logit_temperature",
            self.logit_temperature,
            "divides the logits: must be above 0, and finite",
        )
        require(
            self.head != "reward" or self.logit_temperature == 1,
            "model.logit_temperature",
            self.logit_temperature,
            "divides the logits of a language model; a reward model has none",
        )
        require(
            self.router_aux_loss_coef is None or 0 < self.router_aux_loss_coef < math.inf,
            "model.router_aux_loss_coef",
            self.router_aux_loss_coef,
            "must be above 0, or null for no auxiliary loss",
        )
        key, value = "model.activation_checkpointing", self.activation_checkpointing
        one_of(key, value, (False, True, SELECTIVE))
        require(
            value != SELECTIVE or not self.compile,
            key,
            value,
            "chooses among a layer's operations, of which model.compile=true makes one: choose true, or "
            "model.compile=false",
        )
        odd = [key for key in self.chat_template_kwargs or {} if not key.isidentifier()]
        require(not odd, "model.chat_template_kwargs", odd, "are no names that a chat template could read")
        one_of("model.head", self.head, (None, "value", "reward"))
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        one_of("model.export_dtype", self.export_dtype, (None, "float32", "bfloat16", "float16"))
        self._check_adapters()
        self._check_microbatches()

    def _check_adapters(self) -> None:
        require(
            self.head != "reward" or not self.use_peft,
            "model.use_peft",
            True,
            "a reward model's head is trained: no adapters",
        )
        one_of("model.quantization", self.quantization, (None, "nf4"))
        require(
            self.quantization is None or self.use_peft,
            "model.quantization",
            self.quantization,
            "keeps weights that are not trained in 4 bits: use null, or train adapters on them with "
            "model.use_peft=true",
        )

    @property
    def shards_again(self) -> bool:
        """Whether layers are sharded again after their forward, unless the memory plan finds room for
        them."""
        return self.reshard_after_forward is not False

    @property
    def cut_by_plan(self) -> bool:
        """Whether the memory plan may cut a batch that does not fit a GPU in one pass: no setting says how
        it is cut."""
        return self.microbatch_tokens is None and self.gradient_accumulation_steps == 1

    def _check_microbatches(self) -> None:
        require(
            self.batch_size % self.gradient_accumulation_steps == 0,
            "model.gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            f"must divide model.batch_size={self.batch_size}",
        )
        require(
            self.microbatch_tokens is None or self.microbatch_tokens >= 1,
            "model.microbatch_tokens",
            self.microbatch_tokens,
            "must be at least 1, or null for microbatches of as many examples each",
        )
        require(
            self.microbatch_tokens is None or self.gradient_accumulation_steps == 1,
            "model.gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            "counts the passes of a step, and model.microbatch_tokens="
            f"{self.microbatch_tokens} finds out how many: set one of them",
        )
