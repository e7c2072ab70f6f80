"""The options of vLLM's engines as the settings give them."""

from __future__ import annotations

from config.schema_sampler import SamplerConfig
from rollouts.vllm_messages import EngineOptions


def engine_options(config: SamplerConfig, max_length: int, dtype: str, temperature: float) -> EngineOptions:
    """Return the options with which an engine is created. The arguments are those of
    ``rollouts.vllm_sampler.VllmSampler``."""
    return EngineOptions(
        dtype=config.dtype or dtype,
        max_length=max_length,
        tensor_parallel=config.tensor_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_sequences=config.batch_size,
        enforce_eager=config.enforce_eager,
        sleeps=config.shares_devices,
        temperature=temperature,
    )
