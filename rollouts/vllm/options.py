"""The options of vLLM's engines, and the environment of their processes, as the settings give them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, require
from config.schema_sampler import AUTO, SamplerConfig

KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's variable for the size of the KV cache without a GPU, in whole GiB. It overrides the engine's own
option, so the engines of a run are started without it."""
WITHOUT_GPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of an engine where there is no GPU.

Such engines are eager (``enforce_eager``). vLLM nevertheless compiles a function which counts the tokens
that are likelier than a sampled one: seconds of a compiler at each start for a number that nobody reads here,
and an error where there is no compiler."""


def with_engines(config: SamplerConfig, gpus: int, ranks: int | None) -> SamplerConfig:
    """Return the settings with the number of engines of this machine, which has ``gpus`` GPUs, as
    ``data_parallel``. ``ranks``: how many of them have a rank of the trainer; None: there is no trainer.
    Every GPU samples where that is ``auto``. Raises ConfigError for engines that need more GPUs than there
    are, or than have a rank where engines share them."""
    there = gpus if ranks is None or not config.shares_devices else min(gpus, ranks)
    if not gpus or config.devices:
        return replace(config, data_parallel=config.copies)
    size, auto = config.tensor_parallel, max(1, there // config.tensor_parallel)
    if config.data_parallel == AUTO:
        return replace(config, data_parallel=auto)
    has = f"has {gpus}" + ("" if ranks is None else f", {min(gpus, ranks)} of them with a rank")
    remedy = f"needs {size} GPU(s) for each engine, and this machine {has}: use auto, which is {auto}"
    require(config.copies in range(1, auto + 1), "sampler.data_parallel", config.data_parallel, remedy)
    return config


def shape_folder(model_config: str, cache: Path) -> Path:
    """Return a folder below ``cache`` with this config.json alone, the same one at every start: in the key of
    what vLLM has compiled, a model in another folder is another model."""
    folder = cache / "engines" / hashlib.sha256(model_config.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{os.getpid()}.part"
    part.write_text(model_config, encoding="utf-8")
    part.replace(folder / "config.json")  # several engines may start at once: theirs are equal
    return folder


def engine_environment(
    config: SamplerConfig, replica: int, environment: Mapping[str, str], beside: int = 1
) -> dict[str, str]:
    """Return the variables that an engine's process gets on top of the owner's environment: its GPUs, its
    share of the cores, and vLLM's own switches. ``beside``: number of nodes that share this machine.

    ``sampler.devices`` counts within the owner's CUDA_VISIBLE_DEVICES, if that is set.
    """
    size = config.tensor_parallel
    devices = (config.devices or list(range(size * config.copies)))[replica * size : (replica + 1) * size]
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible and max(devices) >= len(visible):
        raise ConfigError(
            "sampler.devices", devices, f"are counted from 0 among CUDA_VISIBLE_DEVICES={','.join(visible)}"
        )
    threads, engines = {}, config.copies * beside
    if engines > 1 and "OMP_NUM_THREADS" not in environment:
        # Otherwise every engine would have a thread per core, and on a CPU they would wait for each other.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // engines))}
    return threads | {
        "CUDA_VISIBLE_DEVICES": ",".join(visible[d] if visible else str(d) for d in devices),
        # the engine core runs in the worker process: it ends with the worker, and starts faster
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        # In float32 vLLM's attention leaves the precision of its products to Triton, whose own choice is
        # TF32: off by 1e-3 nats and more, and the probe would refuse the engine.
        "TRITON_F32_DEFAULT": "ieee",
    }
