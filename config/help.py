"""What ``python train.py --help`` prints: usage, examples, where settings are explained, and the choices.
With a name (``--help loss``, ``--help rounds``, ``--help loss=dpo``) it is that part of the settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from config.files import FOLDER, section
from config.idle import ELSEWHERE
from config.schema_eval import READ

EXAMPLES = {
    "train": (
        "loss=dpo humanline=true",
        "loss=dpo data=local data.path=pairs.jsonl model=hub model.name_or_path=org/model",
        "loss=grpo online=true reward=function reward.function.path=my_rewards.score",
        "experiment=dpo-offline-humanline dry_run=true",
        "loss=dpo exp_name=mine resume=true",
    ),
    "sample": (
        "run=runs/mine split=eval rounds.samples=1 out=answers.jsonl",
        "model=hub model.name_or_path=org/name data=local data.path=prompts.jsonl out=samples.jsonl",
    ),
    "label": ("in=samples.jsonl reward=adder out=feedback.jsonl",),
    "eval": ("run=runs/mine", "run=runs/mine kind=compare against=runs/other reward=armorm data=alpacaeval"),
}
HIDDEN = ("_base.yaml", "base.yaml")


def asked_for_help(words: Sequence[str]) -> list[str] | None:
    """Return the names behind ``--help``; None if help was not asked for."""
    at = next((i for i, word in enumerate(words) if word in ("--help", "-h")), None)
    return None if at is None else [word.lstrip("-") for word in words[at + 1 :]]


def help_on(program: str, names: Sequence[str]) -> str:
    """Return the help of a program; with ``names``, that of these parts of its settings."""
    if names:
        return "\n\n".join(_part(name, program) for name in names)
    title = (FOLDER.parent / f"{program}.py").read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
    examples = "\n".join(f"  python {program}.py {words}" for words in EXAMPLES[program])
    reads = _read_by(program)
    folders = sorted(
        path
        for path in FOLDER.iterdir()
        if path.is_dir() and path.name not in ("trainer", "templates") and (not reads or path.name in reads)
    )
    choices = "\n".join(
        f"  {f'{path.name}=':13}{', '.join(files)}" for path in folders if (files := _files(path))
    )
    python, last = f"python {program}.py", folders[-1]
    group, chosen = (last.name, f"{last.name}={_files(last)[0]}") if reads else ("loss", "loss=dpo")
    more = (
        f"\nits own settings; of a run's it reads {', '.join(reads)}:\n\n{_own(program)}"
        if reads
        else f"  {f'{python} … dry_run=true':44}what a run would do; -m does several, as in -m seed=1,2"
    )
    return f"""{title}

usage: {python} [SETTING=VALUE ...]     (--setting value is understood too)

{examples}

Each setting is explained where its default stands, in config/, and in docs/settings.md. Names of TRL and
HALOs are answered with those here (docs/from-halos-and-trl.md).
  {f"{python} --help {group}":44}the files of config/{group}; also {chosen}, model, seed …
  {f"{python} {chosen} --cfg job":44}every setting with its value
{more}

files to choose from:
{choices}"""


def _read_by(program: str) -> list[str]:
    """Return the settings of a run that a program reads; [] if it reads all of them."""
    of_stage = section("reads.yaml")["programs"].get(program, {}).get("reads", {})
    named = READ if program == "eval" else [key for key, when in of_stage.items() if when != ELSEWHERE]
    return list(dict.fromkeys(named))


def _own(program: str) -> str:
    """Return the settings of a program alone, as its file has them."""
    lines = (FOLDER / f"{program}.yaml").read_text("utf-8").splitlines()
    blocks = [_block(FOLDER / f"{program}.yaml", key) for line in lines if (key := _key(line))]
    return "\n".join(f"  {line}" for block in blocks for line in block.splitlines())


def _key(line: str) -> str:
    """Return the setting that a line of a program's file begins; "" if it begins none of its own."""
    match = re.match(r"(\w+):", line)
    return match[1] if match and match[1] not in ("defaults", "hydra") else ""


def _files(folder: Path) -> list[str]:
    return sorted(
        path.stem for path in folder.glob("*.yaml") if path.name[0] != "_" and path.name not in HIDDEN
    )


def _part(name: str, program: str) -> str:
    group, _, chosen = name.partition("=")
    folder = FOLDER / group
    if chosen and (folder / f"{chosen}.yaml").is_file():
        return _shown(folder / f"{chosen}.yaml", (folder / f"{chosen}.yaml").read_text("utf-8").rstrip())
    if folder.is_dir():
        files = _files(folder)
        width = max(len(f"{group}={file}") for file in files) + 1
        lines = [f"{f'{group}={file}':{width}}{_about(folder / f'{file}.yaml')}" for file in files]
        bases = [folder / base for base in HIDDEN if (folder / base).is_file()]
        return "\n\n".join(
            ["\n".join(lines), *(_shown(base, base.read_text("utf-8").rstrip()) for base in bases)]
        )
    section, _, last = name.rpartition(".")
    places = [
        FOLDER / "config.yaml",
        FOLDER / f"{program}.yaml",
        *(FOLDER / section.split(".")[0]).glob("*base.yaml"),
    ]
    blocks = {path: _block(path, last) for path in places if path.is_file()}
    shown = [_shown(path, block) for path, block in blocks.items() if block]
    return (
        "\n\n".join(shown)
        or f"{name}: no setting or folder of config/ has this name; docs/settings.md lists all"
    )


def _shown(path: Path, text: str) -> str:
    return f"{path.relative_to(FOLDER.parent)}:\n{text}"


def _about(path: Path) -> str:
    """Return the first line of a file of settings."""
    lines = (line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines())
    return next((line for line in lines if line and not line.startswith("@")), "")


def _block(path: Path, key: str) -> str:
    """Return the lines of a key, with its comments and what is inside it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        if match := re.match(rf"( *){re.escape(key)}:", line):
            deeper = rf"{match[1]} +\S"
            end = next((j for j in range(i + 1, len(lines)) if not re.match(deeper, lines[j])), len(lines))
            return "\n".join(lines[i:end])
    return ""
