"""What the vLLM sampler and its worker process say to each other: plain records, without torch and without
vLLM."""

from __future__ import annotations

from dataclasses import dataclass

TokenRow = list[int]

SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What two configs have in common if their models can take each other's weights."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made with, once; it then lives as long as its process."""

    dtype: str
    max_length: int
    """longest prompt and completion together, tokens"""
    tensor_parallel: int
    gpu_memory_utilization: float
    max_sequences: int | None
    """sequences in flight at most; None: vLLM's choice"""
    enforce_eager: bool
    sleeps: bool
    """whether it must be able to give its GPU memory back"""
    temperature: float = 1.0
    """the one at which log-probabilities of sampled tokens are wanted"""
    transfer: str | None = None
    """vLLM's backend of weight transfer; None: weights come from folders alone"""
    model_config: str = ""
    """config.json of a model that is started without weights"""
    lora_rank: int = 0
    """highest rank of the adapters that go over alone, onto the model that the engine is started with; 0:
    whole models go over"""
    lora_modules: tuple[str, ...] = ()
    """what the layers are called that have adapters"""


@dataclass(frozen=True)
class GenerateRequest:
    """One sample to be drawn. All that decides it is here: nothing comes from the model's config or
    generation_config.json."""

    prompt: TokenRow
    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Generated:
    """One sample as the engine drew it."""

    token_ids: tuple[int, ...]
    """with the stop token that ended it"""
    finished: bool
    """False when the length limit cut it"""
    logprobs: tuple[float, ...]
    """nats, one a token: the engine's own, at temperature 1 and without top-p"""
