"""Export of the trained model as transformers and vLLM load it, with safetensors, config, tokenizer, chat
template and generation config."""

from __future__ import annotations

import copy
import glob
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from models.distributed import is_main
from models.policy import Policy, causal_lm, is_adapted
from models.quantization import quantised, unpack
from models.sharding import local
from models.weight_files import INDEX

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_BASE = ".base_layer.weight"


def full_state(policy: Policy) -> dict[str, Tensor]:
    """Return every weight whole, on the CPU, under transformers' names, with adapters merged in float32.
    Every rank calls it; the result is empty on all but the first. Weights are float32, except those of a LoRA
    base that had nothing to merge. Parts that only training needs (a value head, a slow reference, running
    means) are left out."""
    state = {}
    for name, tensor in _plain_weights(policy):
        if is_main():
            state[name] = tensor.to("cpu", copy=True)
    return state


def whole_weights(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of what ``export`` writes of ``full_state``, one at a time, on the weights'
    device. Each tensor is whole on every rank and may be the policy's own. Every rank goes through all of it,
    in step with the others. Tied weights come under each of their names."""
    model = causal_lm(policy.model)
    for _, layer in itertools.groupby(_plain_weights(policy), key=lambda pair: _layer_of(pair[0])):
        # Some models hold their weights in other tensors than their checkpoints do (fused experts).
        stored = revert_weight_conversion(model, dict(layer))
        for name, tensor in stored.items():
            yield name, _cast(tensor, dtype)


def _plain_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each weight whole, as ``full_state`` has it, with adapters merged: W + scaling
    B A, in float32 (Hu et al. 2021, eq. 3)."""
    named = {
        name.removeprefix("model."): tensor
        for name, tensor in get_model_state_dict(policy).items()
        if isinstance(tensor, Tensor) and name.startswith("model.")
    }
    layers, packed = _adapted(policy), quantised(policy.model)
    for name, tensor in named.items():
        if layers and ".lora_" in name:
            continue
        value = local(tensor.detach())
        if (of := packed.get(name)) is not None:
            name = f"{name.removesuffix('packed')}weight"
            value = unpack(value, of.table.to(value.device), of.columns).to(of.dtype)
        if name.endswith(_BASE) and (layer := layers.get(name.removesuffix(_BASE))) is not None:
            value = _merged(name.removesuffix(_BASE), layer, value, lambda key: local(named[key].detach()))
        yield (_plain(name) if layers else name), value


def _layer_of(name: str) -> str:
    """Return the beginning of ``name`` up to its first number, which is the same for all weights of one
    layer."""
    first = re.match(r"(.*?\.\d+)\.", name)
    return first[1] if first else ""


def _adapted(policy: Policy) -> dict[str, LoraLayer]:
    if not is_adapted(policy.model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in policy.model.named_modules() if isinstance(module, LoraLayer)}


def _merged(name: str, layer: LoraLayer, base: Tensor, get: Callable[[str], Tensor]) -> Tensor:
    from peft.tuners import lora

    (adapter,) = layer.active_adapters
    embeds = isinstance(layer, lora.Embedding)
    names = f"lora_embedding_{{}}.{adapter}" if embeds else f"lora_{{}}.{adapter}.weight"
    down, up = (get(f"{name}.{names.format(half)}").float() for half in "AB")
    delta = (up @ down) * layer.scaling[adapter]
    return base.float() + (delta.T if embeds or getattr(layer, "fan_in_fan_out", False) else delta)


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def export(
    state: dict[str, Tensor],
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    stops: tuple[int, ...] = (),
) -> None:
    """Write the model to ``folder``, whole or not at all: first to a folder beside it, which is then renamed.
    ``state`` comes from ``full_state``; one rank calls this. ``stops``: the tokens that end an answer, first
    the one that ends a turn; the model's own generation stops there too.

    Tied weights are written once, as transformers does. What transformers loads from ``folder`` equals
    ``state`` cast to ``dtype``. The weights are written first: what else cannot be written is left out, with
    a warning. Raises OSError where the disk refuses; nothing of it is left then.
    """
    model = causal_lm(policy.model)
    vocabulary = model.config.get_text_config().vocab_size
    with whole_folder(folder) as part:
        part.mkdir(parents=True)
        cast = {name: _cast(tensor, dtype) for name, tensor in state.items()}
        _write_weights(_tie(cast, model), model, part)
        _or_warn("its own code", lambda: _write_code(model, part))
        config = json.loads(config_json(policy, dtype))
        if model.can_generate():
            config = _stopping(config, stops)
            generation = json.loads(model.generation_config.to_json_string(keys_to_pop=["compile_config"]))
            _write_json(part / "generation_config.json", _stopping(generation, stops))
        elif stops and (pad := tokenizer.pad_token_id) not in (None, stops[0]) and pad < vocabulary:
            config["pad_token_id"] = pad  # so that transformers can score rows of several lengths
        _write_json(part / "config.json", config)
        _or_warn("the tokenizer", lambda: tokenizer.save_pretrained(part))


def _write_weights(state: dict[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
    """Write safetensors files, in the tensors of the model's checkpoints, as its save_pretrained does."""
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    parts = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size="50GB"
    )
    for file, names in parts.filename_to_tensors.items():
        save_file({name: state[name].contiguous() for name in names}, folder / file, {"format": "pt"})
    if parts.is_sharded:
        index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
        _write_json(folder / INDEX, index)


def _write_code(model: PreTrainedModel, folder: Path) -> None:
    """Write the code of a model whose classes came with it, and name it in the model's config."""
    config: Any = model.config
    for instance in (model, config):
        if instance._auto_class is not None:
            custom_object_save(instance, folder, config)


def _stopping(config: dict[str, Any], stops: tuple[int, ...]) -> dict[str, Any]:
    """Return the content of a config whose ``eos_token_id`` has these tokens too."""
    there = config.get("eos_token_id")
    existing = there if isinstance(there, list) else [] if there is None else [there]
    every = list(dict.fromkeys([*existing, *stops]))
    return config if every == existing else config | {"eos_token_id": every if every[1:] else every[0]}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _or_warn(what: str, write: Callable[[], object]) -> None:
    """Call ``write``. An error other than the system's is a warning."""
    try:
        write()
    except Exception as error:
        if _system_error(error) is not None:
            raise
        print(f"warning: the model is exported without {what}: {type(error).__name__}: {error}", flush=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which replaces ``folder`` once the context ends. Raises OSError where it
    cannot be written; nothing of it is left then, and ``folder`` is as it was.

    The folders beside ``folder`` are named by this process. If it is killed they stay until the next export:
    ``.NAME-PROCESS.part`` is not finished, ``.NAME-PROCESS.old`` is the folder that was replaced.
    """
    _remove_left(folder)
    part, old = (folder.with_name(f".{folder.name}-{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        yield part
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if (number := _system_error(error)) is None:
            raise
        raise OSError(number, f"the model could not be written: {error}", str(folder)) from error
    replaces = folder.exists()
    if replaces:
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if replaces:
            old.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
        raise
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove what killed exports to ``folder`` left beside it; those of living processes stay."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}-*"):
        name = re.fullmatch(rf"\.{re.escape(folder.name)}-(\d+)\.(part|old)", left.name)
        if name and (int(name[1]) == os.getpid() or not Path("/proc", name[1]).exists()):
            shutil.rmtree(left, ignore_errors=True)


def config_json(policy: Policy, dtype: torch.dtype) -> str:
    """Return the ``config.json`` that ``export`` writes."""
    model = causal_lm(policy.model)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # as save_pretrained does
    config.dtype = dtype
    return str(config.to_json_string(use_diff=True))


def _system_error(error: Exception) -> int | None:
    """Return the system's error number of ``error``, or None where it has none. safetensors and tokenizers
    give it only in their message."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return error.errno if isinstance(error, OSError) else int(match[1]) if match else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _tie(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Make every name of one parameter refer to the same tensor: gathering made copies, which would be
    written twice."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer.", ".")
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]
    return state
