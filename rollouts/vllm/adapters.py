"""The decision whether a LoRA run sends vLLM its adapters alone or merged into the model
(``sampler.adapters``). Adapters alone go to engines that hold the base model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import require
from common.worker_process import WorkerError, WorkerProcess
from config.schema import Config
from config.schema_model import ModelConfig
from models.adapters import adapted_modules
from models.pretrained import model_config
from rollouts.vllm.messages import EngineOptions
from rollouts.weights import model_folder

KEY = "sampler.adapters"
PLACES = "rollouts.vllm.places"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum adapter ranks that vLLM 0.32 can be configured with (``vllm.config.lora.MaxLoRARanks``)."""
MERGED = "sampler.adapters=merged hands the whole model over"


def highest_rank(rank: int) -> int:
    """Return the smallest of vLLM's ``RANKS`` that has room for adapters of this rank."""
    return next(most for most in RANKS if most >= rank)


def with_adapters(options: EngineOptions, model: ModelConfig) -> EngineOptions:
    """Return the options of engines that are sent this model's adapters alone."""
    return replace(options, lora_rank=highest_rank(model.peft.lora_r), lora_modules=adapted_modules(model))


def base_of_adapters(config: Config) -> Path | None:
    """Return the folder of the model on which engines start in order to be sent adapters; None if merged
    models are sent.

    Raises ConfigError for ``sampler.adapters=alone`` if that is not possible.
    """
    wanted = config.sampler.adapters
    if wanted == "merged" or not config.online:
        return None
    obstacle = next(obstacles(config), None)
    require(obstacle is None or wanted != "alone", KEY, wanted, str(obstacle))
    if obstacle is not None:
        return None
    base = model_folder(config).resolve()
    if wanted == "alone":
        check_places(config, base)
    return base


def check_places(config: Config, base: Path) -> None:
    """Raise ConfigError unless vLLM takes adapters in every layer that has them. vLLM is asked in a separate
    process. If that process fails, nothing is known yet, and the first hand-over will show."""
    with tempfile.TemporaryDirectory() as logs:
        worker = WorkerProcess(PLACES, log=Path(logs) / "places.log", env={"VLLM_NO_USAGE_STATS": "1"})
        try:
            places = worker.call(
                "places", str(base), config.model.max_length, timeout=config.sampler.start_timeout
            )
        except WorkerError:
            return
        finally:
            worker.close()
    name, wanted = config.model.name_or_path, config.sampler.adapters
    require(places is not None, KEY, wanted, f"vLLM has no places for adapters in {name}: {MERGED}")
    missing = sorted(set(adapted_modules(config.model)) - set(places))
    require(
        not missing,
        KEY,
        wanted,
        f"vLLM takes no adapters in {', '.join(missing)} of {name}: leave them out of "
        f"model.peft.target_modules, or {MERGED}",
    )


def obstacles(config: Config) -> Iterator[str]:
    """Yield the reasons why adapters cannot be sent alone, each with a remedy, as far as they are known
    before weights load."""
    model, sampler = config.model, config.sampler
    if not model.use_peft:
        yield "hands over adapters, and model.use_peft=false trains whole weights: leave it at auto"
        return
    if model.from_config:
        yield f"needs the model's own weights, and model.from_config=true draws them at random: {MERGED}"
    if model.quantization is not None:
        yield (
            f"the engine would have other weights under the adapters than model.quantization="
            f"{model.quantization} trains on: {MERGED}"
        )
    if sampler.weight_transfer not in ("auto", "disk"):
        yield (
            f"adapters go over as a small folder, and sampler.weight_transfer={sampler.weight_transfer} "
            f"moves whole models: use auto or disk there, or {MERGED}"
        )
    if model.peft.lora_r > RANKS[-1]:
        yield f"vLLM takes ranks up to {RANKS[-1]}, and model.peft.lora_r={model.peft.lora_r}: {MERGED}"
    if getattr(model_config(model), "quantization_config", None) is not None:
        yield f"{model.name_or_path} is stored quantised, and vLLM would compute with it as stored: {MERGED}"
