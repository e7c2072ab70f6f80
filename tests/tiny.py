"""Small things that many tests need: a tiny model, random examples, a config made as the command line makes
it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from transformers import LlamaConfig, LlamaForCausalLM

from config.files import section
from config.load import load
from config.schema import Config
from config.schema_rewards import RewardConfig
from data.types import Example, Sequence
from models.policy import Policy

ROOT = Path(__file__).parent.parent
VOCABULARY = 61
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
"""The shape of a small model; that of ``tiny_tokenizer``'s vocabulary."""


def make_config(*overrides: str) -> Config:
    """What ``python train.py eval_every=0 <overrides>`` would be given. To compose takes a while, so the
    files are read once for all that choose the same, and what differs in its folders alone is checked
    once."""
    given = dict(o.split("=", 1) for o in overrides if PLACE.fullmatch(o))
    settings = ("eval_every=0", *(o for o in overrides if not PLACE.fullmatch(o)))
    composed = copy.deepcopy(_composed(settings))
    return dataclasses.replace(composed, **given)


def compose_config(overrides: list[str]) -> Config:
    """``config.cli.compose_config`` for settings that compose, as quick as ``make_config``."""
    return copy.deepcopy(_composed(tuple(overrides)))


def reward_of(kind: str, settings: Any, max_missing: float | None = None) -> RewardConfig:
    """The reward of config/reward/<kind>.yaml with other settings."""
    tree = section(f"reward/{kind}.yaml")
    share = float(tree["max_missing"]) if max_missing is None else max_missing
    needs = bool(tree.get("needs_reference")) or bool(getattr(settings, "needs_reference", False))
    return RewardConfig(kind, share, needs, str(tree["_target_"]), kind, settings)


PLACE = re.compile(r"(?:runs_dir|cache_dir)=(?!null$)[\w./-]+")


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Config:
    choices = tuple(o for o in overrides if _chooses(o))
    config = copy.deepcopy(_files(choices))
    words = [o for o in overrides if o not in choices]
    given = OverridesParser.create().parse_overrides(words)
    ConfigLoaderImpl._apply_overrides_to_config(given, config)  # as Hydra does when it has read the files
    return load(config)


def _chooses(override: str) -> bool:
    """Whether an override is more than the value of a setting that is there."""
    key = VALUE.match(override)
    return key is None or (ROOT / "config" / key[1].replace(".", "/")).is_dir()


VALUE = re.compile(r"(?!hydra\b)([a-zA-Z_][\w.]*)=")


@functools.cache
def _files(choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return compose("config", overrides=list(choices))


def tiny_llama(seed: int = 0, layers: int = 2, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    own = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": 128}
    config = LlamaConfig(**(TINY | own | {"initializer_range": 0.2}), tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


def save_tiny_adder(folder: Path) -> Path:
    """``folder`` as a model of two layers of 32 that has the embedded task's tokenizer and learnt nothing."""
    embedded = ROOT / "assets" / "adder" / "model"
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = LlamaConfig.from_pretrained(embedded)
    config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_policy(seed: int = 0, layers: int = 2, tied: bool = True) -> Policy:
    return Policy(tiny_llama(seed, layers, tied)).eval()


def random_row(rng: np.random.Generator, prompt: np.ndarray, longest: int = 12) -> Sequence:
    return Sequence(prompt, rng.integers(3, VOCABULARY, rng.integers(1, longest)).astype(np.int32))


def random_groups(
    n: int, seed: int = 0, kind: str = "pairs", longest: int = 12
) -> tuple[tuple[Example, ...], ...]:
    """``n`` groups as a trainer's examples: ``pairs``, ``labelled`` (the two halves of a pair) or
    ``weighted`` (groups of two)."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(n):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)
        chosen, rejected = random_row(rng, prompt, longest), random_row(rng, prompt, longest)
        if kind == "pairs":
            groups.append((Example(f"p{g}", (chosen, rejected)),))
        else:
            groups.append((Example(f"p{g}", (chosen,), 1.0), Example(f"p{g}", (rejected,), -1.0)))
    return tuple(groups)


KINDS = {"dpo": "pairs", "kto": "labelled", "grpo": "weighted", "sft": "weighted"}
