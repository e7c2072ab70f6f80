"""The files of a model folder, read and checked by their headers alone, before torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError, DataError
from common.files import read_object, regular_file
from config.files import walk
from config.schema_model import ModelConfig

KEY = "model.name_or_path"
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
"""Dtype in a header -> name of the dtype in which a model with such weights is exported."""
_PACKED = re.compile(r"\.(qweight|qzeros|weight_packed|weight_scale(_inv)?|absmax|SCB|quant_state\..*)$")
"""Names of the tensors in which GPTQ, AWQ, compressed-tensors, fp8 and bitsandbytes keep a weight."""


_SIZES = re.compile(r"(layers?|heads?|experts|_size|_dim|embd|inner)$")
_ANY_SIZE = 1_000_000
"""A size up to which a model is built at once, whatever its files hold."""


@dataclass(frozen=True)
class Stored:
    """A tensor, as the header of its file describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def packed(self) -> bool:
        """Whether it is a quantised weight, or belongs to one."""
        return (
            self.dtype.startswith(("F4", "F6", "F8"))
            or (self.dtype[0] in "IU" and self.name.endswith(".weight"))
            or _PACKED.search(self.name) is not None
        )


def check_named(config: ModelConfig) -> None:
    """Raise ConfigError, before torch is imported, where ``model.name_or_path`` is a folder whose files
    cannot be trained (``check_files``)."""
    one_file = f"is one file; python -m tools.gguf {config.name_or_path} FOLDER writes a model's folder"
    if config.name_or_path.endswith(".gguf"):
        raise ConfigError(KEY, config.name_or_path, one_file)
    if not config.from_config:
        folder = Path(config.path)
        tensors = check_files(KEY, config.name_or_path, folder)
        if tensors is not None:
            fields = read_object(folder / CONFIG)
            check_positions(config, {**fields, **(fields.get("text_config") or {})})
            check_targets(config, tensors)


def check_positions(config: ModelConfig, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a ``model.max_length`` that the model has no positions for. ``fields``: of its
    config.json. Scaled rotary embeddings have their factor times as many as the model was made with."""
    positions = fields.get("max_position_embeddings")
    rope: dict[str, Any] = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if isinstance(positions, int) and (rope.get("rope_type") or rope.get("type")) in ("yarn", "linear"):
        key, factor = "rope_scaling.factor of config.json", rope.get("factor", 0)
        number = isinstance(factor, int | float) and factor >= 1
        if not number:
            raise ConfigError(key, factor, "must be a number of at least 1; copy or download the model again")
        first = rope.get("original_max_position_embeddings") or positions
        positions = max(positions, int(first * factor))
    if isinstance(positions, int) and config.max_length > positions:
        raise ConfigError(
            "model.max_length",
            config.max_length,
            f"the model has {positions} positions: give as many at most, and model.max_prompt_length less",
        )


def check_targets(config: ModelConfig, tensors: Iterable[str]) -> None:
    """Raise ConfigError for a module of ``model.peft.target_modules`` that none of the ``tensors`` is of."""
    modules = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in tensors} - {"lm_head"})
    targets = config.peft.target_modules
    for target in targets if config.use_peft and not isinstance(targets, str) else ():
        if not any(f".{target}." in f".{name}." for name in tensors):
            raise ConfigError(
                "model.peft.target_modules",
                list(targets),
                f"the model has no {target}; it has {', '.join(modules)}, and all-linear is always right",
            )


def check_files(key: str, name: str, folder: Path) -> dict[str, Stored] | None:
    """Return the tensors of the model in ``folder`` by name; None where ``folder`` is no model's, which
    others say.

    Raises ConfigError for a folder whose weights cannot be trained, with the file and a remedy: an adapter,
    weights that are quantised or no safetensors, and files that are missing, cut, damaged or of another
    model.
    """
    if not folder.is_dir():
        return None
    try:
        if (folder / ADAPTER).exists():
            refuse_adapter(key, name, folder)
        if not (folder / CONFIG).exists():
            return None
        refuse_quantised(key, name, fields := read_object(folder / CONFIG))
        tensors = read_tensors(folder)
    except (OSError, DataError) as error:
        raise ConfigError(key, name, f"{error}; copy or download the model again") from error
    refuse_sizes(key, name, fields, tensors)
    packed = next((stored.name for stored in tensors.values() if stored.packed), None)
    if packed is not None:
        raise ConfigError(key, name, _quantised(f"its files hold {packed}"))
    return tensors


def stored_tensors(config: ModelConfig) -> dict[str, Stored] | None:
    """Return the tensors in the model's files by name; None where not all of them are on this machine yet.
    Raises ConfigError (``check_files``)."""
    path = Path(config.path)
    if not path.is_dir():
        cached = try_to_load_from_cache(config.name_or_path, "config.json", revision=config.revision)
        path = Path(cached).parent if isinstance(cached, str) else path
        if not weights_are_there(path):
            return None
    return check_files(KEY, config.name_or_path, path)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads from ``folder``. Raises DataError, OSError."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(
            p.name for end in ("*.bin", "*.pt", "*.pth", "*.h5", "*.safetensors") for p in folder.glob(end)
        )
        raise DataError(
            f"{folder} has no {SINGLE}"
            + (
                f" but {', '.join(others[:3])}: only safetensors are loaded (a pickle may run code); write "
                "them by save_pretrained of transformers, or"
                if others
                else " and no " + INDEX
            )
        )
    names = weight_map(folder)
    return [folder / file for file in sorted(set(names.values()))]


def weights_are_there(folder: Path) -> bool:
    """Return whether all weight files of a model in the hub's cache have been downloaded."""
    try:
        return all(file.exists() for file in weight_files(folder))
    except (OSError, DataError):
        return False


def weight_map(folder: Path) -> dict[str, str]:
    """Return name of a tensor -> its file, from the index. Raises DataError, OSError."""
    files = read_object(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise DataError(f"{folder / INDEX} is damaged (it has no weight_map)")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{folder / INDEX} puts {name} into {file!r}, which is no file of its folder")
    return files


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors in the weight files of ``folder``. Raises DataError, OSError."""
    files = weight_files(folder)
    if missing := [file.name for file in files if not file.exists()]:
        raise DataError(
            f"{folder / INDEX} names {len(files)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:3])}"
        )
    tensors = {stored.name: stored for file in files for stored in read_header(file)}
    if files != [folder / SINGLE]:
        for name, file in weight_map(folder).items():
            if name not in tensors or tensors[name].file.name != file:
                raise DataError(f"{folder / INDEX} says that {name} is in {file}, which does not have it")
    return tensors


def read_header(file: Path) -> list[Stored]:
    """Return the tensors in a safetensors file, once its header is sound and the file
    has every byte that the header promises. Raises DataError, OSError."""
    with regular_file(file).open("rb") as stream:
        if stream.read(8).startswith(b"version "):
            raise DataError(f"{file} is the pointer of Git LFS, not the weights: git lfs pull fetches them")
    try:
        with safe_open(file, framework="np") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
            return [Stored(n, file, part.get_dtype(), tuple(part.get_shape())) for n, part in parts.items()]
    except SafetensorError as error:
        raise DataError(f"{file} is cut, damaged or no safetensors file ({error})") from error


def stored_dtype(tensors: dict[str, Stored]) -> str | None:
    """Return the name of the dtype that most of the weights are stored in; None where none is a float."""
    counts: dict[str, int] = {}
    for stored in tensors.values():
        if stored.dtype in FLOATS:
            counts[FLOATS[stored.dtype]] = counts.get(FLOATS[stored.dtype], 0) + stored.size
    return max(counts, key=lambda name: counts[name]) if counts else None


def refuse_sizes(key: str, name: str, fields: dict[str, Any], tensors: dict[str, Stored]) -> None:
    """Raise ConfigError for a number in config.json that the files do not have room for, more layers than
    tensors or a size beyond that of the largest: to build such a model would take for ever."""
    largest = max((stored.size for stored in tensors.values()), default=0)
    for field, value in walk(fields):
        if type(value) is int and _SIZES.search(field):
            most = max(len(tensors), 100) if "layer" in field else max(largest, _ANY_SIZE)
            there = f"its files hold {len(tensors)} tensors of at most {largest:,} values"
            remedy = "copy the config.json that was written with them"
            if not (value <= most):
                raise ConfigError(key, name, f"its config.json says {field}={value}, and {there}: {remedy}")


def refuse_quantised(key: str, name: str, config: dict[str, Any]) -> None:
    """Raise ConfigError for a model whose config.json says that its weights are stored quantised."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get("quantization_config"):
            about = part["quantization_config"]
            method = about.get("quant_method", "an unnamed method") if isinstance(about, dict) else about
            raise ConfigError(key, name, _quantised(f"quantization_config in config.json: {method}"))


def _quantised(how: str) -> str:
    return (
        f"is stored quantised ({how}) and cannot be trained so; give the model as it was before, with "
        "model.use_peft=true model.quantization=nf4 for frozen weights in 4 bits"
    )


def refuse_adapter(key: str, name: str, folder: Path, revision: str | None = None) -> None:
    """Raise ConfigError for an adapter, with the line that merges it into its base model. ``folder``: where
    it lies, or the cache of its repository on the hub, which may hold no more than the adapter's config."""
    try:
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    except (OSError, DataError) as error:
        raise ConfigError(key, name, f"is an adapter whose files are damaged: {error}") from error
    here = Path(name).is_dir()
    place = folder if here else name
    words = place if any(folder.glob("tokenizer*")) else base
    to = f"{str(folder if here else Path(name).name).rstrip('/')}-merged"
    which = f", revision='{revision}'" if revision else ""
    line = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"M.from_pretrained('{place}'{which}, dtype='auto').merge_and_unload()"
        f".save_pretrained('{to}'); "
        f"T.from_pretrained('{words}').save_pretrained('{to}')"
    )
    note = (
        f"; {ADAPTER} lies beside a whole model, and transformers would load {base} in its place: move it "
        "away to train that model"
        if (folder / CONFIG).exists()
        else ""
    )
    raise ConfigError(
        key, name, f'is an adapter of {base}: merge it with python -c "{line}" and give {to}{note}'
    )


def refuse_other_tensors(
    key: str,
    name: str,
    missing: set[str],
    unknown: set[str],
    shapes: Iterable[tuple[str, Iterable[int], Iterable[int]]],
) -> None:
    """Raise ConfigError for tensors that are ``missing`` from a model's files, ``unknown`` to the model or of
    other ``shapes`` (name, in the files, in the model)."""
    problems = [f"lack {named(missing)}, which would be drawn at random"] if missing else []
    problems += [f"hold {named(unknown)}, which the model does not have"] if unknown else []
    for tensor, there, here in sorted(shapes, key=lambda one: one[0])[:1]:
        problems.append(f"hold {tensor} of shape {list(there)}, and config.json makes it {list(here)}")
    if not problems:
        return
    remedy = "copy or download the model again, with the config.json that was written with it"
    if missing and all(tensor.startswith("lm_head.") for tensor in missing) and not unknown:
        remedy = (
            'where the model ties its head to the embedding, write "tie_word_embeddings": true in '
            f"config.json; else {remedy}"
        )
    if any(tensor.startswith("score.") for tensor in unknown):
        remedy = "they are a reward model's, whose head is a score: give the model that it was trained from"
    raise ConfigError(key, name, f"its files {'; they '.join(problems)}; {remedy}")


def named(tensors: Iterable[str]) -> str:
    """Return how many tensors these are, and the names of the first."""
    names = sorted(tensors)
    first = ", ".join(names[:3]) + (", …" if names[3:] else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({first})"
