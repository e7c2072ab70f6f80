"""GGUF files as folders: what is read equals transformers' reader and gguf's own arithmetic; what would not
is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common.errors import UserError
from config.schema_model import ModelConfig
from models.pretrained import check_model, load_tokenizer
from tools.gguf import convert

WIDTH, HEADS, KEYS, BLOCKS = 256, 4, 2, 2
SCALES = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}
"""Where a block has its half-precision scales, which random bytes would make infinite."""


def tensor(rng: np.random.Generator, kind: Kind, *shape: int) -> tuple[np.ndarray, Kind]:
    """Random values of a type, as a file stores them."""
    if kind not in SCALES:
        return gguf.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind), kind
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for at in SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1), kind


def written(
    path: Path, family: str, kind: Kind, split: str = "smollm", more: dict[str, Any] | None = None
) -> Path:
    """A model of two layers whose matrices have the type ``kind``. ``more``: further keys of the header, and
    tensors."""
    rng, out = np.random.default_rng(0), gguf.GGUFWriter(path, family)
    tokens = [*bytes_to_unicode().values(), "ĠĠ", "<|im_start|>", "<|im_end|>"]
    numbers = {"block_count": BLOCKS, "context_length": 64, "embedding_length": WIDTH, "head_count": HEADS}
    numbers |= {"feed_forward_length": WIDTH, "head_count_kv": KEYS, "eos_token_id": len(tokens) - 1}
    texts = {"tokenizer_model": "gpt2", "tokenizer_pre": split, "token_list": tokens, "token_merges": ["Ġ Ġ"]}
    for name, value in (numbers | texts).items():
        getattr(out, f"add_{name}")(value)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(5000.0)
    out.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    out.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    keys = WIDTH // HEADS * KEYS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
    shapes |= dict.fromkeys(("attn_output", "ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))
    every = {"token_embd.weight": tensor(rng, kind, len(tokens), WIDTH)}
    every |= {"output_norm.weight": tensor(rng, Kind.F32, WIDTH)}
    for i in range(BLOCKS):
        every |= {f"blk.{i}.{name}.weight": tensor(rng, kind, *shape) for name, shape in shapes.items()}
        norms = ("attn_norm", "ffn_norm")
        every |= {f"blk.{i}.{name}.weight": tensor(rng, Kind.F32, WIDTH) for name in norms}
        if family == "qwen2":
            biases = [name for name in shapes if name in ("attn_q", "attn_k", "attn_v")]
            every |= {f"blk.{i}.{name}.bias": tensor(rng, Kind.F32, shapes[name][0]) for name in biases}
    for name, value in (more or {}).items():
        if isinstance(value, np.ndarray):
            every[name] = (value, Kind.F32)
        elif value is None:
            del every[name]
        else:
            out.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, (values, of) in every.items():
        out.add_tensor(name, values, raw_dtype=of)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def converted(path: Path, notes: dict[str, str] | None = None) -> Path:
    folder = path.parent / path.stem
    convert(path, folder, notes or {})
    return folder


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", Kind.Q4_1), ("qwen2", Kind.Q8_0), ("qwen2", Kind.Q4_K), ("llama", Kind.Q6_K)],
)
def test_each_tensor_is_transformers_and_the_formats_own(tmp_path: Path, family: str, kind: Kind) -> None:
    path = written(tmp_path / "tiny.gguf", family, kind)
    model = AutoModelForCausalLM.from_pretrained(converted(path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    mine, every = model.state_dict(), theirs.state_dict()
    assert mine.keys() == every.keys() and all(torch.equal(mine[name], every[name]) for name in every)
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}
    for name, own in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj")):
        one = stored[f"blk.1.{name}.weight"]
        values = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).astype(np.float32))
        assert values.std() > 0 and torch.equal(mine[f"model.layers.1.{own}.weight"], values)
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert "quantization_config" not in (tmp_path / "tiny" / "config.json").read_text()


def test_a_file_becomes_the_same_folder_each_time_with_texts_split_as_it_says(tmp_path: Path) -> None:
    """SmolLM's rule splits off digits first, so that spaces before one stay together; transformers takes
    GPT-2's."""
    path = written(tmp_path / "tiny.gguf", "llama", Kind.Q4_1)
    one = converted(path, {"README.md": "dequantised"})
    two = converted(path.rename(tmp_path / "again.gguf"), {"README.md": "dequantised"})
    names = sorted(file.name for file in one.iterdir())
    assert "README.md" in names and "chat_template.jinja" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    given = {"dtype": "float32", "max_length": 32, "max_prompt_length": 16}
    config = ModelConfig(name="tiny", name_or_path=str(one), **given)
    check_model(config)
    tokenizer = load_tokenizer(config)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="again.gguf")
    assert theirs.convert_ids_to_tokens(theirs.encode("a  12")) == ["a", "Ġ", "Ġ", "1", "2"]


OTHERS = [
    ("chatglm", "smollm", {}, "architecture chatglm is not supported"),
    ("llama", "smollm", {"llama.expert_count": 8}, "llama.expert_count=8"),
    ("llama", "smollm", {"llama.attention.key_length": 32}, "llama.attention.key_length=32"),
    ("llama", "smollm", {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}, "and transformers' model has"),
    ("qwen2", "smollm", {"blk.1.attn_k.bias": None}, "and transformers' model has"),
    ("llama", "chameleon", {}, "splits texts by the rule 'chameleon'"),
]


def test_a_file_that_would_be_read_as_another_model_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    for family, split, more, named in OTHERS:
        path = written(tmp_path / "tiny.gguf", family, Kind.Q4_0, split=split, more=more)
        with pytest.raises(UserError, match=named):
            converted(path)
    assert not (tmp_path / "tiny").exists()
    more = {"llama.rope.scaling.type": "none", "llama.attention.key_length": 64}  # as it is without
    whole = written(tmp_path / "whole.gguf", "llama", Kind.Q4_0, more=more).read_bytes()
    for size in (1000, len(whole) - 64):
        (cut := tmp_path / f"cut{size}.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match="cannot be read as a GGUF file"):
            converted(cut)
    converted(tmp_path / "whole.gguf")
