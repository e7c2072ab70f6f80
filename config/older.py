"""Translation of settings that an older version wrote into today's schema, so that its runs can be read,
evaluated and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.files import FOLDER, section
from config.schema import Config
from config.schema_trainer import LossKeys
from config.typed import without_words

RENAMED = "gradient_accumulation_steps"
"""``model.microbatches`` of earlier versions. In transformers the word makes the batch larger."""
MOVED = {"rollouts.vllm_sampling.VllmSampling": "rollouts.vllm.sampling.VllmSampling"}
"""Import path in earlier versions -> today's."""
COMPOSITION = ("defaults", "hydra")
"""Keys of config.yaml that are not settings."""
BASES = {"model": "base", "data": "_base", "correction": "none"}
"""Group -> its file that has every key. With the file none, a run may have been without the group."""


def as_today(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's config.yaml, with the keys added that its version did not have and
    without keys that no longer exist."""
    tree = dict(tree)
    if isinstance(loss := tree.get("loss"), dict):
        kept = {key: value for key, value in loss.items() if key != "_partial_"}
        tree["loss"] = without_words(_numbers_since(loss) | kept, LossKeys)
    if isinstance(trainer := tree.get("trainer"), dict):
        file = _of_target("trainer", trainer.get("_target_"))
        if "loss_keys" not in trainer:
            trainer = trainer | file
        elif set(trainer["loss_keys"] or ()) < set(file.get("loss_keys", ())):
            trainer = trainer | {"loss_keys": file["loss_keys"]}
        # what a trainer accepts changes nothing of what is computed
        accepts = {"feedback": file["feedback"]} if "feedback" in file else {}
        tree["trainer"] = {"corrections": [], "single_answers": True} | file | trainer | accepts
    if isinstance(model := tree.get("model"), dict) and RENAMED in model:
        passes = model[RENAMED]
        tree["model"] = {k: v for k, v in model.items() if k != RENAMED} | {"microbatches": passes}
    if "loss" in tree:
        tree = _with_keys_since(tree, section("config.yaml"))
        for group, base in BASES.items():
            given = tree.get(group) or ({} if base == "none" else None)
            if isinstance(given, dict):
                tree[group] = _with_keys_since(given, section(f"{group}/{base}.yaml"))
    if isinstance(reward := tree.get("reward"), dict) and "_target_" not in reward:
        given = {key: value for key, value in reward.items() if value is not None}
        kind = next((key for key in given if key not in ("name", "max_missing")), None)
        today = next(
            (f for f in _files("reward") if kind in f and f["name"] in (kind, reward.get("name"))), {}
        )
        traits = ("needs_reference", "_target_", "settings_type")
        tree["reward"] = given | {key: today[key] for key in traits if key in today}
    if isinstance(sampler := tree.get("sampler"), dict) and "_target_" not in sampler:
        today = next((f for f in _files("sampler") if f["name"] == sampler.get("name")), {})
        tree["sampler"] = sampler | {
            key: today[key] for key in ("_target_", "separate", "options") if key in today
        }
    if isinstance(sampler := tree.get("sampler"), dict):
        moved = {key: MOVED.get(value, value) for key, value in sampler.items() if key == "_target_"}
        tree["sampler"] = {"stop": []} | sampler | moved
    return without_words(tree, Config)


def _with_keys_since(tree: dict[str, Any], today: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the keys that only ``today``'s file has, at their defaults. These defaults are the
    behaviour that a run had before the keys existed. Sections that both have are completed in the same
    way."""
    out = dict(tree)
    for key, value in today.items():
        if key in COMPOSITION or str(value).startswith(("${", "???")):
            continue
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _with_keys_since(out[key], value)
        else:
            out.setdefault(key, value)
    return out


def _numbers_since(loss: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in today's file of this loss, at their defaults. These defaults are the behaviour
    that the loss had before the settings existed."""
    known = (dict(file["loss"]) for file in _files("loss"))
    same = (file for file in known if all(file[key] == loss.get(key) for key in ("name", "_target_")))
    today: dict[str, Any] = next(same, {})
    return {key: value for key, value in today.items() if not str(value).startswith("${")}


def _of_target(group: str, target: Any) -> dict[str, Any]:
    """Return the file of a group that names the class ``target``; {} if there is none."""
    return next((file for file in _files(group) if file.get("_target_") == target), {})


def _files(group: str) -> list[dict[str, Any]]:
    return [dict(section(f"{group}/{path.name}")) for path in sorted(Path(FOLDER / group).glob("*.yaml"))]
