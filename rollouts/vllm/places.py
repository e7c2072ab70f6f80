"""The layers of a model in which vLLM takes adapters, as vLLM itself reports them. ``python -m
rollouts.vllm.places`` is a process that builds the model without its weights."""

from __future__ import annotations

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.utils import get_supported_lora_modules, process_packed_modules_mapping
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import supports_lora

from common.ports import free_port
from common.worker_process import serve


def places(folder: str, max_length: int) -> tuple[str, ...] | None:
    """Return the names of the layers that may have adapters, as vLLM's own check of an adapter names them;
    None if this kind of model may have none."""
    config = EngineArgs(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=max_length, enforce_eager=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    with torch.device("meta"):
        model = initialize_model(config)
    if not supports_lora(model):
        return None
    packed = process_packed_modules_mapping(model)
    names = {part for name in get_supported_lora_modules(model) for part in packed.get(name, [name])}
    return tuple(sorted(names))


if __name__ == "__main__":
    serve({"places": places})
