"""The policy: a causal language model whose forward is token log-probabilities, how it is loaded, and what is refused.

It stays in eval mode for ever: the reference is scored by the policy itself, which must not be random. Rows are padded on the
right, and no attention mask is passed: under a causal mask no completion token can see the padding after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from config.schema import ConfigError, ModelConfig, require
from data.types import Sequences
from models.attention import PACKED, packable, row_limits
from models.logprobs import chunked_entropies, chunked_logprobs

ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
SOFTCAP_ATTENTION = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Kernels that apply Gemma-2's attn_logit_softcapping; transformers' sdpa drops it without a word."""


class Policy(nn.Module):
    """The model that is trained: ``policy(sequences)`` is the only forward there is, for training, scoring and evaluation alike."""

    model: PreTrainedModel | PeftModel

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        config = causal_lm(model).config.get_text_config()
        # Between hidden state and logit: Cohere multiplies, Granite divides, Gemma-2 caps. check_head finds whatever else there is.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.packs = False
        self.train(False)

    def train(self, mode: bool = True) -> Policy:
        """Eval mode whatever is asked for: dropout would make the policy differ from itself as its reference."""
        return super().train(False)

    def forward(self, sequences: Sequences, entropy: bool = False) -> Tensor:
        """[R, T] float32: log p(token | what is before it) at completion cells, nats; 0 where the mask is False. With ``entropy``
        that of the distribution which each token is drawn from instead, nats, without gradient.

        Without a completion token (rows that fill a batch up) it is zeros that still hang on every trained weight, so that a
        sharded backward runs on every rank.
        """
        before = self.hidden(sequences).index_select(0, sequences.predict)
        return self.entropies(sequences, before) if entropy else self.logprobs(sequences, before)

    def hidden(self, sequences: Sequences) -> Tensor:
        """[B L, D] the last hidden state at every position, B and L flattened."""
        limits: dict[str, Any] = {}
        if self.packs and sequences.position_ids is not None:
            limits = row_limits([max(len(row), 1) for row in sequences.rows], sequences.input_ids.device)
        body = causal_lm(self.model).base_model
        out = body(
            input_ids=sequences.input_ids, position_ids=sequences.position_ids, use_cache=False, **limits
        )
        return out.last_hidden_state.flatten(0, 1)

    def logprobs(self, sequences: Sequences, before: Tensor) -> Tensor:
        """[R, T] log-probabilities of the completion tokens from the hidden states [M, D] that predict them."""
        # The head's weight is read here, not in __init__: once sharded it is whole only inside this forward.
        head = output_head(self.model)
        values = chunked_logprobs(
            before, head.weight, head.bias, sequences.targets, scale=self.scale, softcap=self.softcap
        )
        return on_grid(sequences, values)

    def entropies(self, sequences: Sequences, before: Tensor) -> Tensor:
        """[R, T] the entropies of the distributions that the hidden states [M, D] give."""
        head = output_head(self.model)
        return on_grid(
            sequences,
            chunked_entropies(before, head.weight, head.bias, scale=self.scale, softcap=self.softcap),
        )

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        synced_gpus: bool = False,
    ) -> Tensor:
        """[B, P + new] token ids, by transformers' generate with a KV cache. input_ids [B, P] are padded on the left;
        attention_mask [B, P] says where. ``synced_gpus``: weights are sharded, so all ranks run as many forwards as the slowest."""
        generate, config = cast(Callable[..., Tensor], self.model.generate), causal_lm(self.model).config
        if self.packs:  # that kernel knows of no cache and of no padding on the left
            config._attn_implementation = "sdpa"
        try:
            with torch.no_grad():
                return generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=generation_config,
                    logits_processor=logits_processor,
                    synced_gpus=synced_gpus,
                )
        finally:
            if self.packs:
                config._attn_implementation = PACKED

    def use_packed_attention(self) -> None:
        """Attention by models.attention, where this model can: a packed row attends to itself alone, and transformers does not search
        padded ones for packed ones, for which the host would wait. Elsewhere it does, and masks packed rows."""
        model = causal_lm(self.model)
        self.packs = packable(model.config, model.config._attn_implementation)
        if self.packs:
            model.config._attn_implementation = PACKED

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise ConfigError if the model does more between hidden state and logits than forward knows of.

        The model's own head is run on random hidden states (its body is left out) and compared. Call it before sharding.
        """
        model, head = causal_lm(self.model), output_head(self.model)
        body, weight = model.base_model, head.weight
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 4, weight.shape[1], generator=generator).to(weight)
        targets = torch.randint(weight.shape[0], (4,), generator=generator).to(weight.device)
        forward = body.forward
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast(torch.FloatTensor, hidden))
        body.forward = lambda *args, **kwargs: output
        try:
            logits = model(
                input_ids=torch.zeros(1, 4, dtype=torch.int64, device=weight.device), use_cache=False
            ).logits[0]
        finally:
            body.forward = forward
        theirs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ours = chunked_logprobs(hidden[0], weight, head.bias, targets, scale=self.scale, softcap=self.softcap)
        # Their logits are rounded to the model's dtype; ours are not.
        allowed = 4 * torch.finfo(weight.dtype).eps * (1 + logits.abs().max().item()) + 1e-4
        error, name = (theirs - ours).abs().max().item(), type(model).__name__
        require(
            error <= allowed,
            "model.name_or_path",
            model.config.name_or_path or name,
            f"{name} does something to its logits that is not known here (log-probabilities differ by {error:.2g} nats)",
        )


class ValuePolicy(Policy):
    """A policy with a value head on the hidden states that its own head reads: offline PPO's critic.

    The head starts at 0 and reads the states detached: it learns from the policy's features and leaves them alone.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__(model)
        weight = output_head(model).weight
        self.value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, sequences: Sequences, entropy: bool = False, values: bool = False) -> Tensor:
        """[R, T] as a Policy's; with ``values`` [2, R, T]: beside them the values of the states before each completion token."""
        if not values:
            return super().forward(sequences, entropy)
        before = self.hidden(sequences).index_select(0, sequences.predict)
        head = self.value_head
        value = before.detach().float() @ head.weight[0].float() + head.bias.float()
        return torch.stack([self.logprobs(sequences, before), on_grid(sequences, value)])


class RewardModel(Policy):
    """A sequence classifier with one label: its reward is read at the last token of a row, which is its end-of-turn token.

    Any policy's trainer can run it: it stands where a Policy does, with rewards in place of log-probabilities.
    """

    def forward(self, sequences: Sequences, entropy: bool = False) -> Tensor:
        """[R, T] float32: the row's reward at its last completion token, 0 elsewhere, so that a row's sum is its reward."""
        width = sequences.input_ids.shape[1]
        lengths = torch.tensor([max(len(row), 1) for row in sequences.rows])
        packed = sequences.position_ids is not None
        last = lengths.cumsum(0) - 1 if packed else torch.arange(len(lengths)) * width + lengths - 1
        hidden = self.hidden(sequences).index_select(0, last.to(sequences.mask.device, non_blocking=True))
        rewards = hidden.float() @ score_head(self.model).weight[0].float()
        at_end = (
            torch.arange(sequences.mask.shape[1], device=hidden.device)
            == sequences.mask.sum(-1, keepdim=True) - 1
        )
        return torch.where(at_end, rewards[:, None], 0.0)

    def check_head(self) -> None:
        """Raise ConfigError unless the classifier's head is what forward takes it for."""
        score_head(self.model)


WRAPPERS: dict[str | None, type[Policy]] = {None: Policy, "value": ValuePolicy, "reward": RewardModel}
"""model.head -> what stands around the transformers model"""


def on_grid(sequences: Sequences, values: Tensor) -> Tensor:
    """[R, T] the [M] ``values`` of completion tokens in their cells, 0 elsewhere."""
    grid, width = (
        torch.zeros(sequences.mask.shape, device=values.device, dtype=values.dtype),
        sequences.mask.shape[1],
    )
    # Not a view of a flat tensor: FSDP2 hangs its pre-backward hook on what is returned.
    return grid.index_put((sequences.cells // width, sequences.cells % width), values)


def causal_lm(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model, with or without adapters around it."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def output_head(model: PreTrainedModel | PeftModel) -> nn.Linear:
    """The head that makes logits. Raises ConfigError unless it is a plain linear layer (adapters on it are not offered)."""
    head = causal_lm(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            "model.name_or_path",
            type(head).__name__,
            "the output head must be a plain linear layer, without "
            "adapters (model.peft.target_modules=all-linear leaves it alone)",
        )
    return head


def score_head(model: PreTrainedModel | PeftModel) -> nn.Linear:
    """The head of a sequence classifier. Raises ConfigError unless it is one linear layer without bias and with one label."""
    head = getattr(causal_lm(model), "score", None)
    if not (type(head) is nn.Linear and head.bias is None and head.out_features == 1):
        raise ConfigError(
            "model.name_or_path",
            type(causal_lm(model)).__name__,
            "its classifier's head is not one linear layer called "
            "score with one label: no reward model can be made of it here",
        )
    return head


def decoder_blocks(model: Policy | PreTrainedModel | PeftModel) -> list[nn.Module]:
    """The decoder layers of a model (or of a Policy), in order: the units of sharding and of activation checkpointing.

    Raises ConfigError for a model that keeps them in no list as long as its config's num_hidden_layers.
    """
    inner = causal_lm(model.model if isinstance(model, Policy) else model)
    layers = inner.config.get_text_config().num_hidden_layers
    for module in inner.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ConfigError(
        "model.name_or_path", type(inner).__name__, f"no list of its {layers} decoder layers was found"
    )


def checkpoint_activations(blocks: list[nn.Module]) -> None:
    """Keep only each block's input for the backward and recompute the rest. Call it before sharding, whose hooks must lie outside.

    transformers' own switch does nothing in eval mode; a wrapper module would change the names of the weights.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def resolve_model_path(name_or_path: str) -> str:
    """A run's folder stands for the model in it (``model/``); anything else for itself."""
    inner = Path(name_or_path) / "model"
    return str(inner) if (inner / "config.json").is_file() else name_or_path


def model_config(config: ModelConfig) -> PretrainedConfig:
    """The architecture, without weights. Raises ConfigError if it cannot be had."""
    path = _reachable("model.name_or_path", config.name_or_path, config.revision)
    try:
        return AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _not_found("model.name_or_path", config.name_or_path, error) from error


def check_model(config: ModelConfig) -> PretrainedConfig:
    """The architecture, once everything that can be refused without weights was not.

    Raises ConfigError: a model that cannot be found, that is no causal language model, that is shorter than model.max_length, or an
    attention kernel that is not installed or that would drop a feature of the model.
    """
    found = model_config(config)
    text, kernel = found.get_text_config(), config.attn_implementation
    known = type(found) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in (
        getattr(found, "auto_map", None) or {}
    )
    require(
        known,
        "model.name_or_path",
        config.name_or_path,
        f"is a {found.model_type}, not a causal language model",
    )
    require(kernel in ATTENTION, "model.attn_implementation", kernel, f"use one of {', '.join(ATTENTION)}")
    installed = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
    }
    require(
        kernel not in installed or installed[kernel](),
        "model.attn_implementation",
        kernel,
        "is not installed; use sdpa",
    )
    cap = getattr(text, "attn_logit_softcapping", None)
    require(
        cap is None or kernel in SOFTCAP_ATTENTION,
        "model.attn_implementation",
        kernel,
        f"would drop this model's attn_logit_softcapping={cap}; use eager",
    )
    positions = getattr(text, "max_position_embeddings", None) or config.max_length
    if config.head == "reward":
        found.num_labels = 1
        # A classifier pools at the last token that is not this one: were it also the end-of-turn token, it would pool before it.
        text.pad_token_id = None
    require(
        config.max_length <= positions,
        "model.max_length",
        config.max_length,
        f"the model has {positions} positions",
    )
    return found


def export_dtype(config: ModelConfig) -> torch.dtype:
    """What the trained model is written in: model.export_dtype, or what the loaded model was written in."""
    found = config.export_dtype or model_config(config).dtype or "float32"
    return found if isinstance(found, torch.dtype) else getattr(torch, found)


def empty_policy(config: ModelConfig) -> Policy:
    """The policy with its weights on the meta device, to be sharded and then filled (models.loading). Buffers are real."""
    found = check_model(config)
    with init_empty_weights(include_buffers=False):
        model = _auto(config).from_config(found, **_how(config))
        if config.use_peft:
            model = _with_lora(model, config)
        policy = WRAPPERS[config.head](model)
    return _finished(policy, config)


def _auto(config: ModelConfig) -> type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if config.head == "reward" else AutoModelForCausalLM


def _how(config: ModelConfig) -> dict[str, Any]:
    """How transformers builds the model. Masters are float32; with LoRA the base is frozen in model.dtype."""
    dtype = getattr(torch, config.dtype) if config.use_peft else torch.float32
    return {
        "attn_implementation": config.attn_implementation,
        "dtype": dtype,
        "trust_remote_code": config.trust_remote_code,
    }


def load_policy(config: ModelConfig, device: torch.device, seed: int = 0) -> Policy:
    """The policy on ``device``, float32 masters; with LoRA the base is frozen in model.dtype and the adapters are float32.

    ``seed`` is that of random weights (of adapters, or of all with model.from_config). Raises ConfigError if weights cannot be had.
    """
    found, common = check_model(config), _how(config)
    path = resolve_model_path(config.name_or_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.from_config:
            model = _auto(config).from_config(found, **common)
        else:
            try:
                model = _auto(config).from_pretrained(
                    path, config=found, use_safetensors=True, revision=config.revision, **common
                )
            except (OSError, ValueError) as error:
                raise _not_found("model.name_or_path", config.name_or_path, error) from error
        if config.use_peft:
            model = _with_lora(model, config)
    policy = WRAPPERS[config.head](model.to(device))
    policy.check_head()
    return _finished(policy, config)


def _finished(policy: Policy, config: ModelConfig) -> Policy:
    """The policy with its forward as the settings ask for it."""
    policy.use_packed_attention()
    if config.compile:
        for block in decoder_blocks(policy):
            block.forward = torch.compile(block.forward, dynamic=True)
    if config.activation_checkpointing:
        checkpoint_activations(decoder_blocks(policy))
    return policy


def _with_lora(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    target = config.peft.target_modules
    lora = LoraConfig(
        r=config.peft.lora_r,
        lora_alpha=config.peft.lora_alpha,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=target if isinstance(target, str) else list(target),
    )
    try:
        return get_peft_model(model, lora, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigError(
            "model.peft.target_modules", target, f"{error} (all-linear is always right)"
        ) from error


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or model.tokenizer_name_or_path's; model.chat_template (a jinja file), if given, replaces its own.

    A tokenizer without a padding token gets its end-of-sequence token for one: padding only fills, what counts is said by masks,
    and no embedding is resized. Raises ConfigError if it cannot be had, or has no end-of-sequence token.
    """
    own = config.tokenizer_name_or_path is None
    key = "model.name_or_path" if own else "model.tokenizer_name_or_path"
    name = config.tokenizer_name_or_path or config.name_or_path
    revision = config.revision if own else None
    path = _reachable(key, name, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _not_found(key, name, error) from error
    require(
        tokenizer.eos_token_id is not None,
        key,
        name,
        "has no end-of-sequence token; a completion could not end",
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        require(
            Path(config.chat_template).is_file(),
            "model.chat_template",
            config.chat_template,
            "no such file; give a jinja file, or null for the tokenizer's own",
        )
        tokenizer.chat_template = Path(config.chat_template).read_text()
    return tokenizer


def _reachable(key: str, name: str, revision: str | None) -> str:
    """The path to load from. Raises ConfigError for a name that is no folder, not cached and not on the hub: one request says so at
    once, where loading would retry for half a minute."""
    path = resolve_model_path(name)
    try:
        if not Path(path).is_dir() and not isinstance(
            try_to_load_from_cache(path, "config.json", revision=revision), str
        ):
            HfApi().model_info(path, revision=revision, timeout=10)
    except (OSError, ValueError, HTTPError) as error:
        raise _not_found(key, name, error) from error
    return path


def _not_found(key: str, value: str, error: Exception) -> ConfigError:
    """What a user can do about a model that could not be had."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if value.startswith((".", "/", "~")) or Path(value).exists():
        return ConfigError(
            key, value, f"is not the folder of a model (config.json, *.safetensors) or of a run: {reason}"
        )
    return ConfigError(
        key,
        value,
        "cannot be had: give a folder that exists, or the name of a model on the hub "
        f"(check the spelling, the network, and for gated models `hf auth login`): {reason}",
    )
