"""The typed configuration: what may be set, of which type, within which range, and which combinations make no sense.

``load`` turns what Hydra composed into a ``Config`` or raises ``ConfigError``, whose message says key, value and remedy. Nothing here
imports torch, so that a wrong command line is refused in a second. What needs the data, the tokenizer or the number of ranks to be
known is checked where those become known, with the same error, and still before weights are loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from config.checks import ConfigError, one_of, require, variant
from config.schema_method import TRAINER_KEYS, BetaConfig, check_trainer_keys
from config.schema_rewards import RewardConfig
from config.schema_rounds import RoundsConfig
from config.schema_sampler import SamplerConfig

T = TypeVar("T")

RESERVED_LOSS_KEYS = ("name", "_target_", "_partial_", "reference", *TRAINER_KEYS)
OFFLINE_ONLY = ("reward", "csft")
"""Trainers whose model does not answer prompts as it was trained to: a reward model, and one that wants its control token."""
OPERATIONAL = (
    "exp_name",
    "runs_dir",
    "cache_dir",
    "overwrite",
    "resume",
    "dry_run",
    "keep_checkpoints",
    "keep_best",
    "save_every",
    "wandb",
    "replicas",
    "watchdog_seconds",
)
"""Settings that change nothing of what is computed: a run may go on with others."""


@dataclass
class PeftConfig:
    """LoRA (peft.LoraConfig). Dropout is not offered: the reference is scored by the policy itself, which must not be random."""

    lora_r: int = 64
    lora_alpha: int = 256
    target_modules: Any = "all-linear"

    def __post_init__(self) -> None:
        require(self.lora_r >= 1, "model.peft.lora_r", self.lora_r, "must be at least 1")
        require(self.lora_alpha >= 1, "model.peft.lora_alpha", self.lora_alpha, "must be at least 1")


@dataclass
class ModelConfig:
    name: str = "???"
    name_or_path: str = "???"
    revision: str | None = None
    tokenizer_name_or_path: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str = "sdpa"
    dtype: str = "bfloat16"
    export_dtype: str | None = None
    from_config: bool = False
    head: str | None = None
    control_tokens: dict[str, str] = field(
        default_factory=lambda: {"chosen": "<|good|>", "rejected": "<|bad|>"}
    )
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    eval_batch_size: int = 64
    max_length: int = 2048
    max_prompt_length: int = 1024
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False
    compile: bool = False
    packing: bool | None = None
    use_peft: bool = False
    peft: PeftConfig = field(default_factory=PeftConfig)

    def __post_init__(self) -> None:
        for key in (
            "batch_size",
            "gradient_accumulation_steps",
            "eval_batch_size",
            "max_length",
            "max_prompt_length",
        ):
            require(getattr(self, key) >= 1, f"model.{key}", getattr(self, key), "must be at least 1")
        require(
            self.max_prompt_length < self.max_length,
            "model.max_prompt_length",
            self.max_prompt_length,
            f"must be less than model.max_length={self.max_length}, or no room is left for a completion",
        )
        require(
            self.max_grad_norm > 0,
            "model.max_grad_norm",
            self.max_grad_norm,
            "must be above 0 (use inf for no clipping)",
        )
        one_of("model.head", self.head, (None, "value", "reward"))
        require(
            self.head != "reward" or not self.use_peft,
            "model.use_peft",
            True,
            "a reward model's head is trained: no adapters",
        )
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        one_of("model.export_dtype", self.export_dtype, (None, "float32", "bfloat16", "float16"))
        require(
            self.batch_size % self.gradient_accumulation_steps == 0,
            "model.gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            f"must divide model.batch_size={self.batch_size}",
        )


@dataclass
class MixPart:
    """One set of ``data=mix``: a file of config/data, its weight, and another path to read it from."""

    name: str = "???"
    weight: float = 1.0
    path: str | None = None
    eval_path: str | None = None

    def __post_init__(self) -> None:
        require(self.weight > 0, "data.mix.weight", self.weight, f"of {self.name} must be above 0")


@dataclass
class DataConfig:
    """Where groups come from. ``source`` is the import path of ``f(config, split) -> data.sources.Loaded``."""

    name: str = "???"
    source: str = "???"
    path: str | None = None
    eval_path: str | None = None
    revision: str | None = None
    subset: str | None = None
    data_dir: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_fraction: float = 0.05
    format: str = "auto"
    columns: dict[str, str] | None = None
    system_prompt: str | None = None
    apply_chat_template: bool = True
    score_threshold: float = 0.0
    verifier: str | None = None
    frac_unique_desirable: float = 1.0
    frac_unique_undesirable: float = 1.0
    logprob_range: list[float] | None = None
    mix: list[MixPart] | None = None

    def __post_init__(self) -> None:
        for key in ("frac_unique_desirable", "frac_unique_undesirable"):
            require(
                0 <= getattr(self, key) <= 1,
                f"data.{key}",
                getattr(self, key),
                "is a share of the examples: must lie in [0, 1]",
            )
        mixes = self.source == "data.mix.mixed"
        require(
            bool(self.mix) == mixes,
            "data.mix",
            self.mix,
            "name the sets, as in 'data.mix=[{name: hh, weight: 0.7}, {name: shp, weight: 0.3}]'"
            if mixes
            else "is for data=mix",
        )
        require(self.score_threshold >= 0, "data.score_threshold", self.score_threshold, "must be 0 or more")
        ends = self.logprob_range
        require(
            ends is None or (len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1),
            "data.logprob_range",
            ends,
            "give two shares of the groups, from the least likely on, as in [0.25, 1]: 0 <= low < high <= 1; null keeps all",
        )
        require(
            0 <= self.eval_fraction < 1,
            "data.eval_fraction",
            self.eval_fraction,
            "is the share of the prompts held out for evaluation: must lie in [0, 1)",
        )


@dataclass
class WandbConfig:
    enabled: bool = True
    project: str = "humanline"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class TrainerConfig:
    name: str = "???"
    _target_: str = "???"


@dataclass
class Config:
    """Everything a run depends on. The yaml files in this folder say what each key means."""

    model: ModelConfig
    data: DataConfig
    loss: dict[str, Any]
    trainer: TrainerConfig
    wandb: WandbConfig
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reward: RewardConfig | None = None
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    seed: int = 1
    exp_name: str | None = None
    runs_dir: str = "runs"
    cache_dir: str = ".cache"
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    humanline: bool = False
    log_epsilon_P: float = -1.5
    log_epsilon_R: float = 1.5
    humanline_mode: str = "clip"
    humanline_sampling: BetaConfig = field(default_factory=BetaConfig)
    sync_freq: int = 1
    sync_mode: str | None = None
    sync_alpha: float = 1.0
    online: bool = False
    reference_batch_size: int | None = None
    diagnostics: bool = True
    log_drift: bool = True
    drift_examples: int | None = 1024
    n_epochs: int | None = 1
    n_examples: int | None = None
    n_eval_examples: int | None = 256
    n_eval_prompts: int | None = None
    n_eval_samples: int = 1
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 2
    keep_best: str | None = None
    optimizer: str = "AdamW"
    lr: float = 5e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-5
    weight_decay: float = 1e-2
    scheduler: str = "constant"
    warmup: float = 0.1
    min_lr_ratio: float = 0.0
    max_skipped_steps: int = 5
    replicas: int = 1
    watchdog_seconds: float = 300.0

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        require(self.lr > 0, "lr", self.lr, "must be above 0")
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, key, getattr(self, key), "must lie in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "must be above 0")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must be 0 or more")
        require(
            0 <= self.warmup <= 1, "warmup", self.warmup, "is a fraction of the steps: must lie in [0, 1]"
        )
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        for key in (
            "n_epochs",
            "n_examples",
            "n_eval_examples",
            "n_eval_prompts",
            "eval_every",
            "save_every",
            "reference_batch_size",
            "drift_examples",
        ):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "must be at least 1, or null")
        for key in ("n_eval_samples", "sync_freq", "keep_checkpoints", "max_skipped_steps", "replicas"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        require(self.watchdog_seconds > 0, "watchdog_seconds", self.watchdog_seconds, "must be above 0")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must lie in [0, 2^32)")
        one_of(
            "keep_best",
            self.keep_best,
            (
                None,
                "eval_loss",
                "eval_reward_margin",
                "eval_reward_accuracy",
                "eval_accuracy_sampled",
                "eval_accuracy_greedy",
            ),
        )
        one_of("optimizer", self.optimizer, ("AdamW",))
        one_of("scheduler", self.scheduler, ("constant", "cosine", "linear"))

    def _check_combinations(self) -> None:
        require(
            self.log_epsilon_P <= 0,
            "log_epsilon_P",
            self.log_epsilon_P,
            "is the lower bound of the token log-ratio in nats (the paper's is -1.5): must be 0 or less",
        )
        require(
            self.log_epsilon_R >= 0,
            "log_epsilon_R",
            self.log_epsilon_R,
            "is the upper bound of the token log-ratio in nats (the paper's is 1.5): must be 0 or more",
        )
        require(
            self.log_epsilon_P < self.log_epsilon_R,
            "log_epsilon_P",
            self.log_epsilon_P,
            f"must be below log_epsilon_R={self.log_epsilon_R}",
        )
        require(
            not (self.overwrite and self.resume),
            "overwrite",
            True,
            "cannot go with resume=true: overwrite=true deletes the run, resume=true goes on with it; give one",
        )
        require(
            self.n_epochs is not None or self.n_examples is not None,
            "n_epochs",
            None,
            "give n_epochs or n_examples",
        )
        if self.humanline:
            require(
                self.has_reference,
                "humanline",
                True,
                f"loss={self.loss['name']} has no reference model, so there is nothing to clip or to sync (paper §5.1); "
                "use a loss with one (dpo, kto, grpo) or humanline=false",
            )
        self._check_method()
        if self.online:
            self._check_online()

    def _check_method(self) -> None:
        """What humanline's modes, the ways to sync and the objective's own settings need of each other."""
        check_trainer_keys(self.loss, self.trainer.name)
        for key in ("frac_unique_desirable", "frac_unique_undesirable"):
            labelled = self.trainer.name in ("unpaired", "bco", "ppo", "csft") and not self.online
            require(
                labelled or getattr(self.data, key) == 1,
                f"data.{key}",
                getattr(self.data, key),
                f"takes single examples out of pairs, which loss={self.loss['name']} {'online ' if self.online else ''}does not read",
            )
        require(
            not self.online or self.trainer.name not in OFFLINE_ONLY,
            "online",
            True,
            f"loss={self.loss['name']} trains on a fixed data set: its samples would not be what it learns from",
        )
        require(
            self.data.logprob_range is None or self.trainer.name != "reward",
            "data.logprob_range",
            self.data.logprob_range,
            f"orders completions by what the model thinks of them; loss={self.loss['name']} trains one that only scores them",
        )
        one_of("humanline_mode", self.humanline_mode, ("clip", "sample"))
        require(
            self.humanline or self.humanline_mode == "clip",
            "humanline_mode",
            self.humanline_mode,
            "says how humanline=true treats a token; humanline=false leaves all as they are",
        )
        one_of("sync_mode", self.sync_mode, (None, "humanline", "trust_region", "never"))
        require(
            self.sync_mode is None or self.has_reference,
            "sync_mode",
            self.sync_mode,
            f"loss={self.loss['name']} has no reference model, so there is nothing to sync",
        )
        require(
            self.humanline or self.sync_mode != "humanline",
            "sync_mode",
            self.sync_mode,
            "needs humanline=true; for syncing without clipping add log_epsilon_P=-.inf log_epsilon_R=.inf",
        )
        require(0 < self.sync_alpha <= 1, "sync_alpha", self.sync_alpha, "must lie in (0, 1]")
        require(
            self.sync_alpha == 1 or self.syncing == "trust_region",
            "sync_alpha",
            self.sync_alpha,
            "is for sync_mode=trust_region; in every other mode the reference becomes the policy itself",
        )

    def _check_online(self) -> None:
        """What rounds need of the rest of the settings."""
        require(
            self.reward is not None,
            "reward",
            None,
            "online=true scores the policy's samples: choose a file of config/reward, as in reward=armorm or reward=verifier",
        )
        self.check_room()
        require(
            self.data.logprob_range is None,
            "data.logprob_range",
            self.data.logprob_range,
            "chooses among completions that are there before training; online=true samples its own",
        )
        require(
            self.n_examples is None,
            "n_examples",
            self.n_examples,
            "is for offline: set rounds.contexts, or rounds.examples",
        )
        feedback, trainer = self.rounds.feedback, self.trainer.name
        fits = {"threshold": "unpaired", "group": "grpo"}.get(feedback, trainer)
        require(
            trainer == fits,
            "rounds.feedback",
            feedback,
            f"is not for loss={self.loss['name']}: use pair, or random"
            + (", or group" if trainer == "grpo" else ""),
        )
        require(
            self.rounds.lag == 0 or self.sampler.name == "vllm",
            "rounds.lag",
            self.rounds.lag,
            "samples while it trains, which needs sampler=vllm; the embedded sampler is the policy itself",
        )

    def check_room(self) -> None:
        """Raise ConfigError unless the longest sample fits behind the longest prompt: it would be trained on without its end."""
        most, model = self.sampler.max_tokens, self.model
        require(
            most + model.max_prompt_length <= model.max_length,
            "sampler.max_tokens",
            most,
            f"samples must fit behind the prompt: {most} + model.max_prompt_length={model.max_prompt_length} is more than "
            f"model.max_length={model.max_length}",
        )

    @property
    def has_reference(self) -> bool:
        """Whether the loss takes log-ratios against a reference; its yaml says so."""
        return bool(self.loss.get("reference", True))

    @property
    def syncing(self) -> str:
        """When the reference follows the policy: humanline, trust_region or never."""
        return self.sync_mode or ("humanline" if self.humanline else "never")

    @property
    def variant(self) -> str:
        """Which of the paper's four this is."""
        return variant(self.online, self.humanline, self.sync_mode)


def load(cfg: DictConfig) -> Config:
    """The checked Config of what Hydra composed. Raises ConfigError, see ``typed``."""
    return typed(cfg, Config)


def typed(cfg: DictConfig, schema: type[T]) -> T:
    """``cfg`` as the dataclass ``schema``.

    Raises ConfigError: an unknown key (with the nearest known one), a wrong type, a missing value, a value out of range, an
    impossible combination.
    """
    raw = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(raw, dict)
    _refuse_unknown({str(key): value for key, value in raw.items()}, schema, "")
    cfg = OmegaConf.create(_infinities(raw))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        key = (error.full_key or "").removeprefix(f"{schema.__name__}.")
        raise ConfigError(key, "???", "has no default; set it on the command line") from error
    except (ValidationError, ConfigKeyError) as error:
        key = error.full_key or "config"
        first_line = str(error.msg or error).splitlines()[0]
        raise ConfigError(key, OmegaConf.select(cfg, key), f"{first_line} (wrong type)") from error
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "config", "?", str(error).splitlines()[0]) from error
    assert isinstance(config, schema)
    return config


def _infinities(tree: Any) -> Any:
    """``tree`` with yaml's words for infinity as numbers: on the command line Hydra reads ``.inf`` as a text."""
    if isinstance(tree, dict):
        return {key: _infinities(value) for key, value in tree.items()}
    return (
        {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}.get(tree, tree)
        if isinstance(tree, str)
        else tree
    )


def _refuse_unknown(raw: dict[str, Any], schema: Any, prefix: str) -> None:
    """Raise ConfigError for a key that the schema does not have: it would be read by nobody."""
    known = get_type_hints(schema)
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            did_you_mean = (
                f"; did you mean {prefix}{near[0]}?" if near else f"; known here: {', '.join(sorted(known))}"
            )
            raise ConfigError(
                f"{prefix}{key}", value, f"is not a setting, nothing would read it{did_you_mean}"
            )
        if key == "mix" and isinstance(value, list):
            for i, part in enumerate(value):
                _refuse_unknown(part, MixPart, f"{prefix}mix[{i}].")
        section = next((hint for hint in (known[key], *get_args(known[key])) if is_dataclass(hint)), None)
        if section is not None and isinstance(value, dict):
            _refuse_unknown(value, section, f"{prefix}{key}.")


def load_saved(text: str) -> Config:
    """The configuration that ``dump`` wrote. Raises ConfigError."""
    made = OmegaConf.create(text)
    assert isinstance(made, DictConfig)
    return load(made)


def dump(config: Config) -> str:
    """The configuration as yaml, as ``config.yaml`` of a run has it."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def run_name(config: Config, overrides: list[str]) -> str:
    """``exp_name``, or one made of loss, model, data, variant, seed and a hash of the overrides that change what is computed."""
    if config.exp_name is not None:
        return config.exp_name
    other = sorted(o for o in overrides if o.split("=")[0].lstrip("+~") not in OPERATIONAL)
    digest = hashlib.sha256("\n".join(other).encode()).hexdigest()[:6]
    return f"{config.loss['name']}-{config.model.name}-{config.data.name}-{config.variant}-s{config.seed}-{digest}"


def changed(before: str, now: Config) -> str | None:
    """The first setting that differs between a run's config.yaml and ``now`` and changes what is computed; None if there is none."""
    old, new = (
        _flat(OmegaConf.to_container(OmegaConf.create(before))),
        _flat(OmegaConf.to_container(OmegaConf.structured(now))),
    )
    return next(
        (
            key
            for key in sorted(old | new)
            if key.split(".")[0] not in OPERATIONAL and old.get(key, "absent") != new.get(key, "absent")
        ),
        None,
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in _flat(item, f"{prefix}.{key}".lstrip(".")).items()
    }
