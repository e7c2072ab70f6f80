"""The records that the vLLM sampler and its worker process exchange, without torch and without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TokenRow = list[int]


@dataclass(frozen=True)
class EngineOptions:
    """The options with which an engine is created, once. It then lives as long as its process."""

    dtype: str
    max_length: int
    """longest prompt and completion together, tokens"""
    tensor_parallel: int
    gpu_memory_utilization: float
    max_sequences: int | None
    """most sequences in flight; None: vLLM's choice"""
    enforce_eager: bool
    sleeps: bool
    """whether the engine must be able to release its GPU memory"""
    temperature: float = 1.0
    """temperature of the log-probabilities of sampled tokens"""
    transfer: str | None = None
    """vLLM's backend of weight transfer; None: weights come only from folders"""
    model_config: str = ""
    """config.json of a model that is started without weights"""
    cpu_kv_cache_gb: float = 1.0
    """size of the KV cache without a GPU, GiB; the engine fills all of it with zeros when it starts"""


@dataclass(frozen=True)
class GenerateRequest:
    """One sample to be drawn. It holds everything that determines the sample: nothing comes from the model's
    config or generation_config.json."""

    prompt: TokenRow
    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


def sampling_params(request: GenerateRequest) -> dict[str, Any]:
    """Return every field of vLLM's ``SamplingParams`` that could change a sample. ``ignore_eos``: only this
    project's stop tokens end a sample. Otherwise the engine would add the end token that the model's config
    names."""
    return {
        "n": 1,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


@dataclass(frozen=True)
class Generated:
    """One sample as the engine drew it."""

    token_ids: tuple[int, ...]
    """the sampled tokens, including the stop token that ended the sample"""
    finished: bool
    """False if the length limit cut the sample"""
    logprobs: tuple[float, ...]
    """the engine's own log-probability of each token, nats: at temperature 1 and without top-p if
    ``EngineOptions.temperature`` is 1, else after temperature and top-p"""
