"""Small runs whose memory is planned: three shapes of model, rows of different lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from data.types import Example, Sequence
from memory.simulate import MemoryRequest, with_layers
from tests.tiny import KINDS, make_config

SIZES = {"num_attention_heads": 4, "max_position_embeddings": 512}
SHAPES: dict[str, PretrainedConfig] = {
    "deep": LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_key_value_heads=2,
        **SIZES,
    ),
    "wide": Qwen2Config(
        vocab_size=500,
        hidden_size=192,
        intermediate_size=400,
        num_hidden_layers=2,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "many words": GemmaConfig(
        vocab_size=40000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        **SIZES,
    ),
}
WAYS = {
    "full": [],
    "checkpointed": ["model.activation_checkpointing=true"],
    "selective": ["model.activation_checkpointing=selective"],
    "LoRA": ["model.use_peft=true", "model.peft.lora_r=8"],
    "checkpointed LoRA": [
        "model.use_peft=true",
        "model.peft.lora_r=8",
        "model.activation_checkpointing=true",
    ],
}
NF4 = [*WAYS["LoRA"], "model.quantization=nf4"]


def question(
    shape: str, *overrides: str, ranks: int = 1, loss: str = "dpo", gpu: bool = False
) -> MemoryRequest:
    """A run of ``loss`` on 4 examples a rank in two turns."""
    settings = [
        "model.name=small",
        f"model.batch_size={4 * ranks}",
        "model.microbatches=2",
        "model.dtype=float32",
    ]
    config = make_config(
        f"loss={loss}", "humanline=true", "model.max_length=256", "model.packing=null", *settings, *overrides
    )
    rng = np.random.default_rng(0)

    def row(prompt: int) -> Sequence:
        ids = rng.integers(3, 250, prompt + int(rng.integers(30, 60))).astype(np.int32)
        return Sequence(ids[:prompt], ids[prompt:])

    pairs = KINDS.get(loss) == "pairs"
    batch = [
        Example(f"p{i}", (row(20 + i % 8), row(20 + i % 8)) if pairs else (row(25),), 1.0 - 2 * (i % 2))
        for i in range(4 * ranks)
    ]
    if config.model.share_prompts:  # a prompt for every two rows
        rows = [row for example in batch for row in example.rows]
        two = {id(b): replace(b, prompt_ids=a.prompt_ids) for a, b in zip(rows[::2], rows[1::2], strict=True)}
        batch = [replace(e, rows=tuple(two.get(id(row), row) for row in e.rows)) for e in batch]
    return MemoryRequest(config, batch, [], ranks, gpu, SHAPES[shape])


def with_many_layers(asked: MemoryRequest) -> MemoryRequest:
    assert asked.hf_config is not None
    return replace(asked, hf_config=with_layers(asked.hf_config, 10))


def whole(asked: MemoryRequest) -> MemoryRequest:
    return replace(asked, whole=True)
