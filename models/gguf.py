"""Models in GGUF files, llama.cpp's format, which transformers reads (``gguf_file=``).

That reader passes over what it does not know: a scaled rotary base, biases, experts, the way in which a
tokenizer splits a text. The weights would load and the model would be another one. So a file's header is read
first, and what would not come through as it is stored is refused by name.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = ("llama", "qwen2")
TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F32", "F16", "BF16")
BLOCK = (
    "attn_norm",
    "ffn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
BIASES = {"qwen2": ("attn_q", "attn_k", "attn_v"), "llama": ()}
WITHOUT_EFFECT: dict[str, Any] = {
    "rope.scaling.type": "none",
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
}
"""Keys that transformers' reader does not know -> the value with which a model has no such part."""
DIGITS = "smollm"
"""The way of splitting texts (``tokenizer.ggml.pre``) that splits off every digit, then does as GPT-2's."""
GPT2 = ("gpt-2", "gpt2", DIGITS)
"""Ways of splitting texts for which transformers takes GPT-2's, as it does for all that it does not know."""


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf") and Path(path).is_file()


def source(path: str) -> dict[str, Any]:
    """Return what ``from_pretrained`` is given for a model's folder, name or GGUF file."""
    if not is_gguf(path):
        return {"pretrained_model_name_or_path": path}
    return {"pretrained_model_name_or_path": str(Path(path).parent), "gguf_file": Path(path).name}


def check_gguf(key: str, path: str, early: bool = False) -> None:
    """Raise ConfigError for a GGUF file that is damaged, or that transformers would read as another model.
    ``early``: only by what is known without transformers."""
    problem, fields, tensor_types = _header(path, Path(path).stat().st_mtime_ns)
    known = None
    if problem is None and not early:
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        known = GGUF_CONFIG_MAPPING
    problem = problem or _problem(fields, tensor_types, known)
    require(
        problem is None,
        key,
        path,
        f"{problem}; give the model as transformers' folder, or as another GGUF file",
    )


def check_split(key: str, path: str) -> None:
    """Raise ConfigError for a GGUF file whose tokenizer splits texts in a way that transformers would replace
    by GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = _rule(path)
    known = sorted({*GGUF_PRE_TOKENIZER_SPLITS, *GPT2})
    require(
        kind != "gpt2" or split in known,
        key,
        path,
        f"has a tokenizer that splits texts by the rule {split!r}, and transformers would take another: name "
        f"the model's own in model.tokenizer_name_or_path (known: {', '.join(known)})",
    )


def split_as_stored(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Let the tokenizer of a GGUF file split off digits where the file says so and transformers does not."""
    from tokenizers import pre_tokenizers

    _, split = _rule(path)
    if split == DIGITS:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, whose weights are plain numbers by now, without the record that they were not."""
    untyped_model: Any = model
    if getattr(untyped_model, "hf_quantizer", None) is not None:
        del untyped_model.config.quantization_config
        untyped_model.hf_quantizer, untyped_model.is_quantized = None, False
    return model


def _rule(path: str) -> tuple[str | None, str | None]:
    """Return the kind of a file's tokenizer, and its rule of splitting."""
    _, fields, _ = _header(path, Path(path).stat().st_mtime_ns)
    return fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")


@lru_cache(maxsize=8)
def _header(path: str, changed: int) -> tuple[str | None, dict[str, Any], dict[str, str]]:
    """Return (what keeps a file from being read, or None; its fields but for long lists; the type of each of
    its tensors). ``changed``: when the file was written."""
    from gguf import GGUFReader  # not at the top: it takes time, and few models are GGUF files

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if _short(name)}
        tensor_types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        _problem(fields, tensor_types, None)  # has what every model has
    except (ValueError, IndexError, KeyError, TypeError, OSError) as error:
        return f"is not a whole GGUF file ({type(error).__name__}: {error})", {}, {}
    return None, fields, tensor_types


def _short(name: str) -> bool:
    """Return whether a field is none of the long lists, such as the vocabulary."""
    return not name.startswith("tokenizer.") or name in ("tokenizer.ggml.model", "tokenizer.ggml.pre")


def _problem(fields: dict[str, Any], tensor_types: dict[str, str], known: Any) -> str | None:
    """``fields``: the header; ``tensor_types``: the type of each tensor; ``known``: what transformers reads
    of each family, None: not looked at."""
    family = fields["general.architecture"]
    if family not in FAMILIES:
        return f"is of the family {family}, and {' and '.join(FAMILIES)} are read"
    if other := sorted(set(tensor_types.values()) - {*TYPES}):
        return f"has tensors of the type {', '.join(other)}, and {', '.join(TYPES)} are read"
    own = {k.removeprefix(f"{family}."): v for k, v in fields.items() if k.startswith(f"{family}.")}
    width = own.get("rope.dimension_count", own["embedding_length"] // own["attention.head_count"])
    neutral = WITHOUT_EFFECT | {"attention.key_length": width, "attention.value_length": width}
    for name, value in own.items():
        if known is not None and name not in known[family] and value != neutral.get(name):
            return f"has {family}.{name}={value}, which transformers' reader would drop"
    wanted = {f"blk.{i}.{name}.weight" for i in range(own["block_count"]) for name in BLOCK}
    wanted |= {f"blk.{i}.{name}.bias" for i in range(own["block_count"]) for name in BIASES[family]}
    wanted |= {"token_embd.weight", "output_norm.weight"}
    if lacking := sorted(wanted - {*tensor_types}):
        return f"lacks {len(lacking)} tensors of a {family} model, such as {lacking[0]}"
    if more := sorted({*tensor_types} - wanted - {"output.weight"}):
        return f"has {len(more)} tensors that a {family} model has not here, such as {more[0]}"
    return None
