"""GGUF files as models: what is read equals transformers' reader and gguf's own arithmetic; what would not is
refused by name."""

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

from common.errors import ConfigError
from config.schema_model import ModelConfig
from models.export import export, full_state
from models.pretrained import check_model, load_policy, load_tokenizer
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
    out.add_block_count(BLOCKS)
    out.add_context_length(64)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(WIDTH)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KEYS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(5000.0)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(split)
    out.add_token_list(tokens)
    out.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    out.add_token_merges(["Ġ Ġ"])
    out.add_eos_token_id(len(tokens) - 1)
    out.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    keys = WIDTH // HEADS * KEYS
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
    shapes |= dict.fromkeys(("attn_output", "ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))
    every = {"token_embd.weight": tensor(rng, kind, len(tokens), WIDTH)}
    every |= {"output_norm.weight": tensor(rng, Kind.F32, WIDTH)}
    for i in range(BLOCKS):
        every |= {f"blk.{i}.{name}.weight": tensor(rng, kind, *shape) for name, shape in shapes.items()}
        every |= {
            f"blk.{i}.{name}.weight": tensor(rng, Kind.F32, WIDTH) for name in ("attn_norm", "ffn_norm")
        }
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


def settings(path: Path, **more: Any) -> ModelConfig:
    given = {"dtype": "float32", "max_length": 32, "max_prompt_length": 16} | more
    return ModelConfig(name="tiny", name_or_path=str(path), **given)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.F16])
def test_each_tensor_is_transformers_and_the_formats_own(tmp_path: Path, family: str, kind: Kind) -> None:
    path = written(tmp_path / "tiny.gguf", family, kind)
    model = load_policy(settings(path), torch.device("cpu")).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    mine, every = model.state_dict(), theirs.state_dict()
    assert mine.keys() == every.keys() and all(torch.equal(mine[name], every[name]) for name in every)
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}
    for name, own in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj")):
        one = stored[f"blk.1.{name}.weight"]
        values = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).astype(np.float32))
        assert values.std() > 0 and torch.equal(mine[f"model.layers.1.{own}.weight"], values)
    assert model.config.rope_parameters["rope_theta"] == 5000.0


def test_a_file_becomes_a_folder_that_is_the_same_model_each_time(tmp_path: Path) -> None:
    """The export of a run, too: nothing in it says that the weights are quantised."""
    path = written(tmp_path / "tiny.gguf", "llama", Kind.Q4_1)
    convert(path, tmp_path / "one", {"README.md": "dequantised"})
    convert(path, tmp_path / "two", {"README.md": "dequantised"})
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert "README.md" in names and "chat_template.jinja" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    of_file, of_folder = (
        load_policy(settings(where), torch.device("cpu")).model.state_dict()
        for where in (path, tmp_path / "one")
    )
    assert all(torch.equal(of_file[name], of_folder[name]) for name in of_file)
    text = "In  2024,   12 cats"
    assert load_tokenizer(settings(path)).encode(text) == AutoTokenizer.from_pretrained(
        tmp_path / "one"
    ).encode(text)
    policy = load_policy(settings(path, use_peft=True), torch.device("cpu"))
    export(full_state(policy), policy, load_tokenizer(settings(path)), tmp_path / "run", torch.float32)
    assert "quantization_config" not in (tmp_path / "run" / "config.json").read_text()


def test_texts_are_split_as_the_file_says(tmp_path: Path) -> None:
    """SmolLM's rule splits off digits first, so that spaces before one stay together; transformers takes
    GPT-2's."""
    path = written(tmp_path / "tiny.gguf", "llama", Kind.Q8_0)
    tokenizer = load_tokenizer(settings(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert theirs.convert_ids_to_tokens(theirs.encode("a  12")) == ["a", "Ġ", "Ġ", "1", "2"]
    other = written(tmp_path / "other.gguf", "llama", Kind.Q8_0, split="chameleon")
    check_model(settings(other))
    with pytest.raises(ConfigError, match=r"'chameleon'.*tokenizer_name_or_path"):
        load_tokenizer(settings(other))
    load_tokenizer(settings(other, tokenizer_name_or_path=str(path)))


@pytest.mark.parametrize(
    ("family", "kind", "more", "named"),
    [
        ("gemma2", Kind.Q4_0, {}, "family gemma2"),
        ("llama", Kind.Q5_1, {}, "type Q5_1"),
        ("llama", Kind.Q4_0, {"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type=yarn"),
        ("llama", Kind.Q4_0, {"llama.expert_count": 8}, "llama.expert_count=8"),
        ("llama", Kind.Q4_0, {"llama.attention.key_length": 32}, "llama.attention.key_length=32"),
        ("llama", Kind.Q4_0, {"rope_freqs.weight": np.ones(32, np.float32)}, "rope_freqs.weight"),
        ("llama", Kind.Q4_0, {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}, "blk.0.attn_q.bias"),
        (
            "qwen2",
            Kind.Q4_0,
            {"blk.1.attn_k.bias": None},
            "lacks 1 tensors of a qwen2 model, such as blk.1.attn_k.bias",
        ),
        ("llama", Kind.Q4_0, {"llama.rope.scaling.type": "none", "llama.attention.key_length": 64}, None),
    ],
)
def test_a_file_that_would_be_read_as_another_model_is_refused_by_name(
    tmp_path: Path, family: str, kind: Kind, more: dict[str, Any], named: str | None
) -> None:
    path = written(tmp_path / "tiny.gguf", family, kind, more=more)
    if named is None:
        check_model(settings(path))
        return
    with pytest.raises(ConfigError) as refused:
        check_model(settings(path))
    assert named in str(refused.value) and "model.name_or_path" in str(refused.value)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", "llama", Kind.Q4_0)
    whole = path.read_bytes()
    for size in (0, 10, 1000, len(whole) // 2, len(whole) - 64):
        (cut := tmp_path / f"cut{size}.gguf").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="not a whole GGUF file"):
            check_model(settings(cut))


def test_the_model_that_make_smollm2_makes_says_so_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match="make smollm2"):
        check_model(settings(Path("assets/smollm2/none")))
