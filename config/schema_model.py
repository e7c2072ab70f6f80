"""Settings of the model: what is loaded, how it is sharded and run, LoRA."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from common.errors import require
from common.files import resolve_model_path
from config.files import of_project
from config.sections import (
    Auto,
    Count,
    Dtype,
    ExportDtype,
    Off,
    Positive,
    Text,
    Unbounded,
    dataclass,
    must,
    need,
    nested,
    yaml_defaults,
)

SELECTIVE, AUTO = "selective", "auto"
"""Values of model.activation_checkpointing; that the estimate of memory decides."""
EXAMPLES_EACH = "must be at least 1, or auto for microbatches of as many examples each"


def _are_names(target: Any) -> bool:
    named = target if isinstance(target, list) else [target]
    return bool(named) and all(isinstance(name, str) and name for name in named)


@dataclass
@yaml_defaults("model/base.yaml:peft")
class PeftConfig:
    """LoRA (peft.LoraConfig). Dropout is not offered: the policy itself scores the reference, and these
    scores must not be random."""

    lora_r: Count
    lora_alpha: Count
    target_modules: Annotated[Any, must(_are_names, "name modules, as in [q_proj, v_proj], or all-linear")]


@dataclass
@yaml_defaults("model/base.yaml")
class ModelConfig:
    name: Text
    name_or_path: Annotated[Text, AfterValidator(of_project)]
    revision: Text | None
    tokenizer_name_or_path: Text | None
    chat_template: Text | None
    chat_template_kwargs: Annotated[dict[str, Any], ", as in {enable_thinking: false}"] | None
    trust_remote_code: bool
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]
    dtype: Dtype
    export_dtype: Auto[ExportDtype]
    from_config: bool
    head: Off[Literal["value", "reward"]]
    control_tokens: dict[str, Text]
    new_tokens: list[Text]
    batch_size: Count
    microbatches: Count
    microbatch_tokens: Auto[Annotated[Count, EXAMPLES_EACH]]
    eval_batch_size: Count
    max_length: Count
    max_prompt_length: Count
    max_grad_norm: Annotated[Positive, Unbounded, "must be above 0 (use inf for no clipping)"]
    logit_temperature: Annotated[Positive, "divides the logits: must be above 0, and finite"]
    activation_checkpointing: Literal[False, True, "selective", "auto"]
    reshard_after_forward: bool
    compile: bool
    packing: Auto[bool]
    share_prompts: Auto[bool]
    router_aux_loss_coef: Off[Annotated[Positive, "must be above 0, and finite"]]
    use_peft: bool
    quantization: Off[Literal["nf4"]]
    peft: PeftConfig = nested(PeftConfig)

    def __post_init__(self) -> None:
        no_room = f"must be less than model.max_length={self.max_length}, or no room is left for a completion"
        need(self, self.max_prompt_length < self.max_length, "max_prompt_length", no_room)
        no_logits = "divides the logits of a language model; a reward model has none"
        need(self, self.head != "reward" or self.logit_temperature == 1, "logit_temperature", no_logits)
        apart = all(self.new_tokens) and len(set(self.new_tokens)) == len(self.new_tokens)
        need(self, apart, "new_tokens", "must name each token once, and none without characters")
        frozen = "need a trained embedding, which adapters leave as it is: use model.use_peft=false"
        need(self, not (self.new_tokens and self.use_peft), "new_tokens", frozen)
        odd = [key for key in self.chat_template_kwargs or {} if not key.isidentifier()]
        require(not odd, "model.chat_template_kwargs", odd, "are no names that a chat template could read")
        trained = "a reward model's head is trained: no adapters"
        need(self, self.head != "reward" or not self.use_peft, "use_peft", trained)
        adapted = "keeps untrained weights in 4 bits: use off, or train adapters with model.use_peft=true"
        need(self, self.quantization is None or self.use_peft, "quantization", adapted)
        divides = self.batch_size % self.microbatches == 0
        need(self, divides, "microbatches", f"must divide model.batch_size={self.batch_size}")
        counted = f"counts a step's passes, as does model.microbatch_tokens={self.microbatch_tokens}"
        one = self.microbatch_tokens is None or self.microbatches == 1
        need(self, one, "microbatches", f"{counted}: set one of them")

    @property
    def path(self) -> str:
        """Return what to load: the model inside a run's folder, another folder, or a name on the hub."""
        return resolve_model_path(self.name_or_path)

    @property
    def cut_by_estimate(self) -> bool:
        """Whether the estimate of memory may cut a batch that does not fit a GPU in one pass: no setting says
        how it is cut."""
        return self.microbatch_tokens is None and self.microbatches == 1
