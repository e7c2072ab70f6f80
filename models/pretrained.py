"""Building of a policy and its tokenizer from a folder or the hub, with the checks that refuse a model before
its weights are read."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.tokenization_utils_base import AddedToken
from transformers.utils import find_adapter_config_file

from common.errors import ConfigError, DataError
from common.files import read_object, resolve_model_path
from config.machine import speaks
from config.schema_model import ModelConfig
from data.templates import chosen_template
from models.checks import TARGETS, check_adapters, check_architecture
from models.distributed import return_freed_blocks
from models.heads import RewardModel, ValuePolicy
from models.policy import Policy, causal_lm, decoder_blocks, output_head, set_up_layers
from models.quantization import NF4, quantise
from models.sharding import local_part
from models.weight_files import (
    CONFIG,
    KEY,
    named,
    refuse_adapter,
    refuse_other_tensors,
    refuse_quantised,
    stored_dtype,
    stored_tensors,
)

if TYPE_CHECKING:
    from peft import PeftModel

SMOLLM2 = "assets/smollm2/"
"""Folder of the model that the Makefile makes."""
WRAPPERS: dict[str | None, type[Policy]] = {None: Policy, "value": ValuePolicy, "reward": RewardModel}
"""model.head -> the class that wraps the transformers model"""


def model_config(config: ModelConfig) -> PretrainedConfig:
    """Return the architecture, without weights. Raises ConfigError if it cannot be loaded."""
    path = reachable(KEY, config.name_or_path, config.revision)
    if adapter := find_adapter_config_file(path, revision=config.revision):
        get_tokenizer_config(path, revision=config.revision)  # into the cache, beside the adapter's
        refuse_adapter(KEY, config.name_or_path, Path(adapter).parent, config.revision)
    try:
        return AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # a config of any content, which transformers takes as it is
        raise not_found(KEY, config.name_or_path, error) from error


def check_model(config: ModelConfig) -> PretrainedConfig:
    """Return the architecture, with rows for ``model.new_tokens``, after every check that needs no weights.

    Raises ConfigError for a model that cannot be found, and as ``check_architecture`` does.
    """
    hf_config = model_config(config)
    check_architecture(config, hf_config)
    text = hf_config.get_text_config()
    if config.head == "reward":
        hf_config.num_labels = 1
        # A classifier pools at the last token that is not padding. If the padding token were also the
        # end-of-turn token, it would pool before that token.
        text.pad_token_id = None
    if not config.new_tokens:
        return hf_config
    # Many embeddings have more rows than their tokenizer has tokens.
    return with_rows(hf_config, max(text.vocab_size, len(load_tokenizer(config))))


def export_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype in which the trained model is written: model.export_dtype, or that of most weights in
    the loaded model's files. Without files here, it is the one that the model's config names, or float32."""
    stored = None if config.from_config or config.export_dtype else stored_dtype(stored_tensors(config) or {})
    dtype = config.export_dtype or stored or model_config(config).dtype or "float32"
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def check_weights(config: ModelConfig, hf_config: PretrainedConfig) -> list[str]:
    """Return notes about tensors of the model's files that it does not load, and of its own that are new.

    ``hf_config``: from ``check_model``. Raises ConfigError for files that are damaged or incomplete, or that
    do not hold the tensors of this architecture, as their headers tell; and for adapters that could not be
    exported. Files that are still to be downloaded are checked once they load.
    """
    if config.use_peft:
        check_adapters(empty_model(config, hf_config), config)
    new = ", ".join(config.new_tokens)
    notes = [f"{new}: tokens of their own, with new rows (model.new_tokens)"] if new else []
    if config.from_config:
        return notes
    hf_config = _as_stored(config, hf_config)
    refuse_quantised(KEY, config.name_or_path, hf_config.to_dict())
    stored = stored_tensors(config)
    if stored is None:
        return notes
    held = {
        name: torch.empty(tensor.shape, dtype=torch.float32, device="meta") for name, tensor in stored.items()
    }
    with init_empty_weights(include_buffers=False):
        kind: Any = type(_built(config, hf_config))
    model, info = _loaded(
        config,
        lambda: kind.from_pretrained(
            None, config=hf_config, state_dict=held, device_map={"": "meta"}, **_LOADS
        ),
    )
    return [*notes, *_notes(model, info, config, sorted(stored))]


_LOADS: dict[str, Any] = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
    "use_safetensors": True,
}
"""Arguments of from_pretrained by which it says what it could not load, instead of drawing it in silence."""


def _loaded(config: ModelConfig, load: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the (model, loading info) of ``load``. Raises ConfigError if it fails, which also a model's own
    code may do with any error, or if tensors are missing, unknown or of another shape."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.disabled = True  # its table of what was not loaded is said in our words
    try:
        model, info = load()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise not_found(KEY, config.name_or_path, error) from error
    finally:
        logger.disabled = False
    missing, unknown = set(info["missing_keys"]), set(info["unexpected_keys"])
    if config.head == "reward":  # its head is new, and the language model's is left out
        within = f"{model.base_model_prefix}."
        missing = {name for name in missing if name.startswith(within)}
        unknown = {name for name in unknown if name.startswith(within)}
    refuse_other_tensors(KEY, config.name_or_path, missing, unknown, info["mismatched_keys"])
    return model, info


def _notes(model: PreTrainedModel, info: dict[str, Any], config: ModelConfig, names: list[str]) -> list[str]:
    """Return a sentence each about the tensors in the files that this model leaves out, and about its new
    ones."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    unread = {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
    unread |= set(info["unexpected_keys"])
    new = set(info["missing_keys"])
    return [
        *([f"{config.name_or_path}: {type(model).__name__} does not read {named(unread)}"] if unread else []),
        *([f"{config.name_or_path}: {named(new)} new, drawn with the seed"] if new else []),
    ]


def empty_policy(config: ModelConfig, untied: bool = False) -> Policy:
    """Return the policy with its weights on the meta device, to be sharded and then filled (models.loading).
    Buffers are real. Tied weights are one parameter, as FSDP2 has to know when it shards them. ``untied``:
    head and embedding are two, whatever the config says."""
    hf_config = check_model(config)
    if untied:
        say_untied(hf_config)
    with init_empty_weights(include_buffers=False):
        policy = WRAPPERS[config.head](empty_model(config, hf_config))
    causal_lm(policy.model).tie_weights()
    return _finished(policy, config)


def empty_model(config: ModelConfig, hf_config: PretrainedConfig) -> PreTrainedModel | PeftModel:
    """Return the model, with its adapters, on the meta device; buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = _built(config, hf_config)
        return _with_lora(model, config) if config.use_peft else model


def _built(config: ModelConfig, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of this architecture, with random weights. Raises ConfigError where there is none of
    these sizes."""
    try:
        model: PreTrainedModel = _auto(config).from_config(hf_config, **_how(config))
    except Exception as error:  # the model's own code, which may raise anything
        raise not_found(KEY, config.name_or_path, error) from error
    return model


def say_untied(hf_config: PretrainedConfig) -> None:
    """Make a config say that head and embedding are two matrices."""
    for part in (hf_config, hf_config.get_text_config()):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


def is_untied(model: PreTrainedModel) -> bool:
    """Return whether head and embedding are two although the model's config ties them: its files hold two
    matrices that differ, and transformers has kept both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    says = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return bool(says) and isinstance(head, nn.Linear) and head.weight is not embedding.weight


def _auto(config: ModelConfig) -> type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if config.head == "reward" else AutoModelForCausalLM


def _how(config: ModelConfig, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return transformers' arguments for building the model. Master weights are float32; with LoRA the base
    is frozen in model.dtype. ``dtype``: another one than these."""
    return {
        "attn_implementation": config.attn_implementation,
        "dtype": dtype or (getattr(torch, config.dtype) if config.use_peft else torch.float32),
        "trust_remote_code": config.trust_remote_code,
    }


def load_policy(
    config: ModelConfig, device: torch.device, seed: int = 0, stored: torch.dtype | None = None
) -> Policy:
    """Return the policy on ``device``, with float32 master weights; with LoRA the base is frozen in
    model.dtype and the adapters are float32.

    ``seed`` is that of random weights (of adapters, or of all with model.from_config). ``stored``: leave the
    weights in this dtype and, on the CPU, in the files (``stored_alike``), for whoever reads a part of them
    and then calls ``check_finite``. Raises ConfigError if weights cannot be loaded.
    """
    hf_config = check_model(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = _built(config, hf_config) if config.from_config else _read(config, hf_config, stored)
        if config.use_peft:
            model = _with_lora(model, config)
    policy = WRAPPERS[config.head](model.to(device))
    if device.type == "cpu":
        return_freed_blocks(sum(p.nbytes for p in policy.parameters()))
    with in_float32(output_head(policy.model)) if stored else nullcontext():
        policy.check_head()  # in 16 bits it would have to allow more
    return _finished(policy, config)


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Give a module float32 weights within the context; its own are not touched."""
    originals = [(p, p.data) for p in module.parameters()]
    for p, values in originals:
        p.data = values.float()
    try:
        yield
    finally:
        for p, values in originals:
            p.data = values


def _as_stored(config: ModelConfig, hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the architecture without the rows of ``model.new_tokens``."""
    if not config.new_tokens:
        return hf_config
    return with_rows(hf_config, model_config(config).get_text_config().vocab_size)


def _read(config: ModelConfig, hf_config: PretrainedConfig, stored: torch.dtype | None) -> PreTrainedModel:
    """Return the model with the weights of its files, on the CPU, as ``load_policy`` does. Raises
    ConfigError."""
    stored_tensors(config)  # names the file that is damaged
    auto, path = _auto(config), config.path
    load_options = {"config": _as_stored(config, hf_config), "revision": config.revision} | _how(
        config, stored
    )
    model: PreTrainedModel
    model, _ = _loaded(config, lambda: auto.from_pretrained(path, **load_options, **_LOADS))
    if stored is None:
        check_finite(model, config)
    if is_untied(model):
        say_untied(model.config)
        cause = "config.json ties head and embedding, but the files hold two matrices that differ: both"
        if speaks(os.environ):
            print(
                f"{config.name_or_path}: {cause} are trained, and the exported config ties nothing",
                flush=True,
            )
    if config.new_tokens:
        tokenizer = load_tokenizer(replace(config, new_tokens=[]))
        new = add_tokens(tokenizer, config.new_tokens)
        ids = tokenizer.get_vocab()
        grow(model, hf_config.get_text_config().vocab_size, [ids[text] for text in new])
    return model


def check_finite(model: nn.Module, config: ModelConfig) -> None:
    """Raise ConfigError for weights, in this rank's part, that are not finite numbers; it names a tensor and
    the file that has it."""
    name = next((name for name, p in model.named_parameters() if not _finite(local_part(p.detach()))), None)
    if name is None:
        return
    place = next(
        (
            f"{tensor} in {file}"
            for file in sorted({stored.file for stored in (stored_tensors(config) or {}).values()})
            for tensor, values in load_file(file).items()
            if not _finite(values)
        ),
        f"{name}, once loaded in {config.dtype}",
    )
    raise ConfigError(
        KEY,
        config.name_or_path,
        f"has weights that are not finite numbers (NaN or infinity): {place}; fetch the model again, or take "
        "an earlier checkpoint",
    )


def _finite(values: torch.Tensor) -> bool:
    return values.element_size() < 2 or not values.is_floating_point() or bool(values.isfinite().all())


def _finished(policy: Policy, config: ModelConfig) -> Policy:
    """Set up the policy's forward as the settings ask for it, and return the policy."""
    policy.temperature = config.logit_temperature
    policy.use_packed_attention()
    if config.compile or config.activation_checkpointing is not False:
        set_up_layers(policy, config.activation_checkpointing, config.compile)
    return policy


def _with_lora(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    from peft import LoraConfig, get_peft_model  # a second, which a run without adapters is spared

    target = config.peft.target_modules
    lora = LoraConfig(
        r=config.peft.lora_r,
        lora_alpha=config.peft.lora_alpha,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=target if isinstance(target, str) else list(target),
    )
    try:
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigError(TARGETS, target, f"{error} (all-linear is always right)") from error
    if config.quantization == NF4:
        quantise(decoder_blocks(adapted))
    return adapted


# Tokens that a model's tokenizer lacks (``model.new_tokens``), like the control tokens of ``loss=csft``, are
# special tokens of it, each with one id. The embedding and the output head get a row for each, the mean of
# the rows that were there. Unlike a draw, the mean is the same in every run, and no new token is more likely
# than an average one.


def add_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[str]:
    """Add the texts that the tokenizer does not have as one token, and return them."""
    if not texts:
        return []  # a vocabulary is a large dictionary to ask for
    vocabulary = tokenizer.get_vocab()
    new = [text for text in texts if text not in vocabulary]
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in new], special_tokens=True
    )
    return new


def with_rows(hf_config: PretrainedConfig, rows: int) -> PretrainedConfig:
    """Return the config with this many rows in the embedding."""
    resized: PretrainedConfig = copy.deepcopy(hf_config)
    resized.get_text_config().vocab_size = rows
    return resized


@torch.no_grad()
def grow(model: PreTrainedModel, rows: int, new: Sequence[int]) -> None:
    """Give the embedding and the head ``rows`` rows, and those of the ids ``new`` the mean of the rows before
    the first of them."""
    if not new:
        return
    embedding: Any = model.get_input_embeddings()
    if rows > embedding.weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in end.parameters(recurse=False) if isinstance(end, nn.Module) else ():
            values[list(new)] = values[: min(new)].float().mean(0).to(values.dtype)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, or that of model.tokenizer_name_or_path, with the chat template that
    model.chat_template and model.chat_template_kwargs ask for.

    A tokenizer without a padding token uses its end-of-sequence token for padding: padding only fills, masks
    say which tokens count, and no embedding is resized. Raises ConfigError if the tokenizer cannot be loaded
    or has no end-of-sequence token.
    """
    bundled = config.tokenizer_name_or_path is None
    key = KEY if bundled else "model.tokenizer_name_or_path"
    name = config.tokenizer_name_or_path or config.name_or_path
    revision = config.revision if bundled else None
    path = reachable(key, name, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # tokenizers raises bare Exceptions for a file that it cannot read
        raise not_found(key, name, error) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(key, name, "has no end-of-sequence token; a completion could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    add_tokens(tokenizer, config.new_tokens)
    chosen, variables = config.chat_template, config.chat_template_kwargs
    if chosen is not None or variables:
        tokenizer.chat_template = chosen_template(tokenizer, chosen, variables)
    return tokenizer


def reachable(key: str, name: str, revision: str | None) -> str:
    """Return the path to load from. Raises ConfigError for a run without a model, and for a name that is not
    a folder, not cached and not on the hub. One request finds this out at once, where loading would retry for
    half a minute."""
    path = resolve_model_path(name)
    if (Path(path) / "config.yaml").is_file() and not (Path(path) / "config.json").is_file():
        raise ConfigError(
            key,
            name,
            "is a run that has no model yet: let it end (resume=true), or write its newest checkpoint's with "
            f"python export.py {quote(name)}",
        )
    if not Path(path).is_dir() and path.startswith(SMOLLM2):
        raise ConfigError(
            key,
            name,
            "is not made yet: make smollm2, or give model.name_or_path=HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    try:
        if not Path(path).is_dir() and not isinstance(
            try_to_load_from_cache(path, "config.json", revision=revision), str
        ):
            HfApi().model_info(path, revision=revision, timeout=10)
    except (OSError, ValueError, HTTPError) as error:
        raise not_found(key, name, error) from error
    return path


def wrong_field(file: Path) -> str | None:
    """Return the field of a config.json, with its value, with transformers' default in place of which a model
    of one layer can be built; None where all is well or no single field is to blame."""
    try:
        fields = read_object(file)
    except (OSError, DataError):
        return None
    part = fields.get("text_config") if isinstance(fields.get("text_config"), dict) else fields
    assert isinstance(part, dict)

    def builds(without: str, layers: dict[str, int]) -> bool:
        left = {key: value for key, value in part.items() if key not in (without, "layer_types")} | layers
        try:
            hf_config = AutoConfig.for_model(**(left if part is fields else fields | {"text_config": left}))
            with init_empty_weights():
                AutoModelForCausalLM.from_config(hf_config)
        except Exception:
            return False
        return True

    one = {"num_hidden_layers": 1}
    if builds("", one):
        names = ["num_hidden_layers"] * (not builds("", {}))
    else:
        names = [name for name in part if name != "model_type" and builds(name, one)]
    return f"{names[0]}={part.get(names[0])!r}" if names else None


def not_found(key: str, value: str, error: Exception) -> ConfigError:
    """Return the ConfigError that says what a user can do about a model that could not be loaded."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    files = (file for file in (Path(value, "model", CONFIG), Path(value, CONFIG)) if file.is_file())
    if (file := next(files, None)) is not None and (field := wrong_field(file)):
        return ConfigError(
            key, value, f"its config.json says {field}, and no model can be built so: {reason}"
        )
    if value.startswith((".", "/", "~")) or Path(value).exists():
        return ConfigError(
            key, value, f"is not the folder of a model (config.json, *.safetensors) or of a run: {reason}"
        )
    return ConfigError(
        key,
        value,
        "was not found: give a folder that exists, or the name of a model on the hub "
        f"(check the spelling, the network, and for gated models `hf auth login`): {reason}",
    )
