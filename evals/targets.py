"""Turn the command line into the targets of an evaluation: runs, checkpoints, models and files of answers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError, require
from config.load import RECORD, check_version, load_saved, settings_of
from config.schema import Config
from config.schema_stages import READ, EvalStage
from evals.base import Target

Settings = dict[str, Any]
ANSWERS = (".json", ".jsonl")


def refuse_unread(overridden: Sequence[str], stage_keys: Sequence[str], runs: bool, tree: Any) -> None:
    """Raise ConfigError for a key of the command line that an evaluation does not read.

    ``overridden``: the dotted keys of the command line; ``stage_keys``: eval.py's own keys; ``runs``: whether
    ``run`` is given, which already names the model; ``tree``: the composed settings."""
    for key in overridden:
        top, value = key.split(".")[0], _at(tree, key)
        shown = "…" if value is None or isinstance(value, dict) else value  # a file's content says nothing
        require(
            top in (*READ, *stage_keys, "hydra"),
            key,
            shown,
            f"is not read by an evaluation: it reads {', '.join((*stage_keys, *READ))}",
        )
        require(
            not runs or key not in ("model", "model.name_or_path", "model.revision"),
            key,
            shown,
            "run= says which model; leave one of them out",
        )


def expanded(paths: Sequence[str]) -> list[Path]:
    """Return the run folders, with patterns that contain ``*`` expanded.

    Raises ConfigError for a pattern that matches no run."""
    folders: list[Path] = []
    for path in paths:
        here = [Path(path)]
        if "*" in path:
            here = sorted(p.parent for p in Path().glob(f"{os.path.relpath(path)}/config.yaml"))
        require(bool(here), "run", path, "finds no folder of a run (one with a config.yaml)")
        folders += here
    return folders


def run_of(path: Path, step: int | None, key: str = "run") -> tuple[Path, int | None]:
    """Return (the run's folder, the checkpoint's step or None) for ``run=`` (or the setting
    ``key``), which may name a checkpoint.

    Raises ConfigError if there is no such run, or if it has no final model and no step is given."""
    if path.parent.name == "checkpoints" and path.name.startswith("step_"):
        require(step is None, "step", step, f"{key}={path} already names a checkpoint")
        step = _step(path)
        there = f"; there are {', '.join(map(str, _steps(path.parent)))}" if _steps(path.parent) else ""
        require(
            step is not None, key, path, f"is no whole checkpoint, whose name is step_ and a number{there}"
        )
        path = path.parent.parent
    if not (path / "config.yaml").is_file():
        a_model = (path / "config.json").is_file()
        why = (
            "is not the folder of a run: it has no config.yaml"
            if path.is_dir()
            else "there is no such folder"
        )
        what = "is a model's folder, not a run's: give model=hub model.name_or_path= and out="
        raise ConfigError(key, path, what if a_model else why)
    if step is None and not (path / "model" / "config.json").is_file():
        steps = _steps(path / "checkpoints")
        exported = f"python export.py {quote(str(path))} --step N --to DIR first, then {key}=DIR, with N"
        other = "evaluate a checkpoint: step=…" if key == "run" else exported
        raise ConfigError(
            key,
            path,
            "is not finished: it has no model/. Finish it (train.py with resume=true)"
            + (f", or {other} of {', '.join(map(str, steps))}" if steps else ""),
        )
    return path, step


def _step(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint's folder; None for one that is being written, or is somebody else's."""
    match = re.fullmatch(r"step_([0-9]+)", checkpoint.name)
    return int(match[1]) if match else None


def _steps(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order."""
    return sorted(step for path in checkpoints.glob("step_*") if (step := _step(path)) is not None)


def over_run(saved: Settings, composed: Settings, overridden: Sequence[str]) -> Settings:
    """Return a run's own settings with the command line's changes: whole groups (``data=gsm8k``) or keys.

    ``sampler.temperature`` and ``sampler.top_p`` always come from the evaluation, never from the run. The
    length limit of answers comes from the run, whichever sampler draws them."""
    out: Settings = {**saved, "reward": saved.get("reward") or composed.get("reward")}
    for key in overridden:
        if key in READ:
            out[key] = composed.get(key)
    if "sampler" in overridden:
        # the length limit belongs to the model; the command line has the default model's
        out["sampler"] = _with(out["sampler"], ["max_tokens"], _at(saved, "sampler.max_tokens"))
    for key in (*overridden, "sampler.temperature", "sampler.top_p"):
        first, *rest = key.split(".")
        if rest and first in (*READ, "rounds"):
            out[first] = _with(out.get(first) or {}, rest, _at(composed, key))
    return out


def _at(tree: Settings, key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _with(section: Settings, path: Sequence[str], value: Any) -> Settings:
    first, *rest = path
    return {**section, first: _with(section.get(first) or {}, rest, value) if rest else value}


def targets_of(
    stage: EvalStage, composed: Settings, overridden: Sequence[str], exported: Mapping[Path, Path]
) -> list[Target]:
    """Return the targets to evaluate.

    ``composed``: a run's settings as the command line alone gives them; ``overridden``: the dotted keys that
    it sets; ``exported``: run folder -> folder to which its checkpoint was exported. Raises ConfigError."""
    if stage.run:
        targets = [
            _of_run(*run_of(path, stage.step), stage, composed, overridden, exported)
            for path in expanded(stage.run)
        ]
    else:
        config = _checked(composed)
        require(
            stage.out is not None,
            "out",
            None,
            "is needed for what is no run: the folder of the result, as in out=evaluations/mine",
        )
        assert stage.out is not None
        answers = _answers("answers", stage.answers) if stage.answers else None
        files = (stage.alpacaeval.annotations, stage.alpacaeval.outputs) if stage.kind == "alpacaeval" else ()
        file = next(filter(None, files), None)  # no model answers then
        name = file or (answers.stem if answers else _named(Path(config.model.name_or_path)))
        targets = [Target(name, config, Path(stage.out), answers=answers)]
    seen = [target.out for target in targets]
    require(
        len(set(seen)) == len(seen),
        "run",
        [str(target.run) for target in targets],
        f"names a run twice, or puts several results into one folder (out={stage.out})",
    )
    against = stage.against * len(targets) if len(stage.against) == 1 else stage.against
    others = [
        _other(path, target, stage, composed, overridden)
        for path, target in zip(against, targets, strict=False)
    ]
    if not others:
        return targets
    return [replace(target, other=other) for target, other in zip(targets, others, strict=True)]


def _of_run(
    run: Path,
    step: int | None,
    stage: EvalStage,
    composed: Settings,
    overridden: Sequence[str],
    exported: Mapping[Path, Path],
) -> Target:
    config = settings_of_run(run, composed, overridden, exported.get(run))
    one = len(expanded(stage.run)) == 1
    out = run / "evals" if stage.out is None else Path(stage.out) if one else Path(stage.out) / run.name
    name = run.resolve().name
    return Target(name if step is None else f"{name} before step {step}", config, out, run, step)


def settings_of_run(
    run: Path, composed: Settings, overridden: Sequence[str], exported: Path | None = None
) -> Config:
    """Return a run's settings with the command line's changes, for its model, or one ``exported`` elsewhere.
    Raises ConfigError."""
    text = (run / RECORD).read_text(encoding="utf-8", errors="replace")
    check_version(text, run)
    saved = settings_of(text)
    trusted = "model.trust_remote_code" in overridden or not _at(saved, "model.trust_remote_code")
    require(
        trusted,
        "model.trust_remote_code",
        True,
        f"{run / RECORD} lets the model run code of its own; where you trust it add "
        "model.trust_remote_code=true",
    )
    answering = saved | {"online": False}  # what training asks of its samples does not hold for answers
    return _as_exported(_checked(over_run(answering, composed, overridden)), exported or run / "model")


def _other(
    path: str, target: Target, stage: EvalStage, composed: Settings, overridden: Sequence[str]
) -> Target:
    """Return the other side of a comparison, which answers ``target``'s prompts and is scored by its reward.

    ``path``: a file of answers, a run's folder, or a model."""
    mine = target.config
    if path.endswith(ANSWERS):
        file = _answers("against", path)
        return Target(file.stem, mine, target.out, answers=file)
    if (Path(path) / "config.yaml").is_file() or Path(path).parent.name == "checkpoints":
        run, step = run_of(Path(path), None, "against")
        require(
            step is None,
            "against",
            path,
            f"is a checkpoint: python export.py {quote(str(run))} --step {step} --to DIR first, "
            "then against=DIR",
        )
        theirs = _of_run(run, None, stage, composed, overridden, {})
        sampler = replace(mine.sampler, max_tokens=mine.max_tokens)  # the same length limit on both sides
        config = replace(theirs.config, data=mine.data, sampler=sampler, reward=mine.reward, seed=mine.seed)
        return replace(theirs, config=config, out=target.out, run=None)
    return Target(_named(Path(path)), _as_exported(mine, Path(path)), target.out)


def _named(model: Path) -> str:
    """Return the name of a model that belongs to no run: its folder, or its hub name without the owner."""
    return model.parent.name if model.name == "model" and model.parent.name else model.name


def _answers(key: str, path: str) -> Path:
    require(Path(path).is_file(), key, path, "there is no such file")
    return Path(path)


def _checked(settings: Settings) -> Config:
    return load_saved(yaml.safe_dump(settings))


def _as_exported(config: Config, path: Path) -> Config:
    """Return a run's settings for the model that it exported to ``path``.

    In the export adapters are merged, and tokenizer and chat template lie beside the weights."""
    model = replace(
        config.model,
        name_or_path=str(path),
        revision=None,
        tokenizer_name_or_path=None,
        from_config=False,
        use_peft=False,
        quantization=None,
        packing=False,
        compile=False,
        head=None if config.model.head == "value" else config.model.head,
        chat_template=None if config.data.apply_chat_template else config.model.chat_template,
        chat_template_kwargs=None,
    )
    return replace(config, model=model)
