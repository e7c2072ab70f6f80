"""The typed configuration: which settings exist, their types and ranges, and which combinations are refused.

``load`` turns what Hydra composed into a ``Config`` or raises ``ConfigError``, whose message has the key, the
value and the remedy. Nothing here imports torch, so that a wrong command line is refused within a second.
Checks that need the data, the tokenizer or the number of ranks happen where these become known. They raise
the same error, and they still run before weights are loaded.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from common.errors import ConfigError, require
from config.schema_data import DataConfig, check_keep_best, evaluation_sets
from config.schema_model import ModelConfig
from config.schema_rewards import RewardConfig, completed
from config.schema_sampler import RoundsConfig, SamplerConfig
from config.schema_trainer import Accepts, LossKeys, TrainerConfig, accepted_by, check_trainer_keys
from config.sections import (
    All,
    Auto,
    Count,
    Natural,
    NotNegative,
    Off,
    Positive,
    PositiveShare,
    Share,
    SmallShare,
    Text,
    Unbounded,
    dataclass,
    must,
    need,
    nested,
    without_words,
    yaml_defaults,
)

PAPERS_MAX_TOKENS = 2048
SyncMode = Literal["humanline", "trust_region", "ema", "reset", "kl", "delayed", "never"]
LOWER = "is the lower bound of the token log-ratio in nats (the paper's is -1.5): must be 0 or less"
MASKS_ALONE = ("negative_masked", "trust_region_masked")
"""Corrections that read the behaviour policy and multiply no ratio to it."""
UPPER = "is the upper bound of the token log-ratio in nats (the paper's is 1.5): must be 0 or more"
CARDS = {
    "A100-40GB": (39.4, 312e12),
    "A100-80GB": (79.2, 312e12),
    "H100": (79.1, 989e12),
    "H100-96GB": (94.5, 989e12),
    "H200": (139.8, 989e12),
    "B200": (178.3, 2250e12),
    "L4": (22.0, 121e12),
    "L40S": (44.4, 362e12),
    "A10": (22.0, 125e12),
    "A40": (44.4, 150e12),
    "A6000": (47.4, 155e12),
    "RTX3090": (23.6, 71e12),
    "RTX4090": (23.5, 165e12),
    "RTX5090": (31.3, 210e12),
}
"""Card -> (GiB of memory that a program can use on it, dense bfloat16 operations a second by the vendors'
datasheets)."""
MOST_MEMORY = 512
"""GiB that a number typed for a card may be at most."""


@dataclass
@yaml_defaults("config.yaml:plan")
class PlanConfig:
    """config/config.yaml says what each key means."""

    card: Auto[Text]
    ranks: Auto[Count]

    def __post_init__(self) -> None:
        if self.card is not None:
            card_memory("plan.card", self.card)


def card_memory(key: str, card: str) -> float:
    """Return the memory in GiB of a card, given by its name (4090 or rtx4090 for RTX4090) or directly as a
    number. Raises ConfigError about ``key`` if it is neither, or a number that no card has."""
    for name, (memory, _) in CARDS.items():
        if name.lower() in (card.lower(), f"rtx{card.lower()}"):
            return memory
    try:
        size = float(card)
    except ValueError:
        size = math.nan
    names = f"is none of {', '.join(CARDS)}, and no number of GiB up to {MOST_MEMORY}"
    if not (0 < size <= MOST_MEMORY):
        raise ConfigError(key, card, names)
    return size


@dataclass
@yaml_defaults("config.yaml:wandb")
class WandbConfig:
    enabled: bool
    project: Text | None
    entity: Text | None
    name: Text | None
    group: Text | None
    tags: list[Text]
    dir: Text | None


@dataclass
@yaml_defaults("config.yaml:humanline_sampling")
class BetaConfig:
    """The constants of Definition 4.2. The defaults are those of Theorem 4.3 for the paper's clipping range,
    e^-1.5 to e^1.5, at k = 100 and a bound of 10: the thresholds are spread around the ends of that range."""

    M_P: Positive
    M_R: Positive
    gamma_P: Positive
    beta_P: Positive
    gamma_R: Positive
    beta_R: Positive


@dataclass
@yaml_defaults("config.yaml:retention")
class RetentionConfig:
    """What an evaluation measures about the retention of the initial weights' behaviour."""

    kl: bool
    prompts: Auto[Count]
    tokens: Auto[Count]

    def counts(self, device: str) -> tuple[int, int]:
        """Return (how many held-out prompts the initial weights answer at most, the tokens of an answer at
        most). A CPU answers few and short, so that a run begins within a minute."""
        prompts, tokens = (8, 64) if device == "cpu" else (64, 256)
        return self.prompts or prompts, self.tokens or tokens


@dataclass
@yaml_defaults("correction/none.yaml")
class CorrectionConfig:
    """Corrections for samples that another policy drew. The yaml files in config/correction say what each key
    means."""

    name: Text
    _target_: Text | None
    reads_behavior: bool
    low: Annotated[NotNegative, "is a bound of a ratio"]
    high: Annotated[float, Unbounded]
    delta: float
    mismatch: Literal["refuse", "allow"]

    def __post_init__(self) -> None:
        need(self, self.high > self.low, "high", f"must be above correction.low={self.low}")


@dataclass
@yaml_defaults("config.yaml")
class Config:
    """All settings that a run depends on. The yaml files in this folder say what each key means."""

    model: ModelConfig
    data: DataConfig
    loss: Annotated[dict[str, Any], AfterValidator(partial(without_words, schema=LossKeys))]
    trainer: TrainerConfig
    seed: Annotated[int, Field(ge=0, lt=2**32), "must lie in [0, 2^32)"]
    deterministic: bool
    exp_name: Text | None
    runs_dir: Annotated[Text, must(bool, "must name a folder; . is the working directory")]
    cache_dir: Annotated[Text, must(bool, "must name a folder; . is the working directory")]
    overwrite: bool
    resume: bool
    resume_with_other: list[Text]
    dry_run: bool
    idle_settings: Literal["refuse", "note"]
    humanline: bool
    log_epsilon_P: Annotated[float, Field(le=0), Unbounded, LOWER]
    log_epsilon_R: Annotated[float, Field(ge=0), Unbounded, UPPER]
    humanline_mode: Literal["clip", "sample", "rule"]
    humanline_rule: dict[str, Any]
    sync_freq: Count
    sync_mode: Auto[SyncMode]
    sync_alpha: PositiveShare
    sync_kl: Annotated[Positive, Unbounded, "is a bound in nats a token"]
    ratio_reference: Literal["reference", "behavior"]
    online: bool
    reference_batch_size: Auto[Count]
    diagnostics: bool
    log_drift: bool
    drift_examples: All[Count]
    n_epochs: Auto[Count]
    n_examples: All[Count]
    n_eval_examples: All[Count]
    n_eval_prompts: All[Count]
    n_eval_samples: Count
    n_kept_answers: All[Count]
    evaluations: dict[str, Any]
    eval_every: Auto[Natural]
    save_every: Auto[Count]
    async_save: bool
    keep_checkpoints: Count
    keep_best: Off[Text]
    patience: Off[Count]
    optimizer: Text
    lr: Annotated[Positive, "must be above 0, and finite"]
    beta1: SmallShare
    beta2: SmallShare
    eps: Positive
    weight_decay: NotNegative
    scheduler: Literal["constant", "cosine", "linear"]
    warmup: Annotated[Share, "is a fraction of the steps"]
    min_lr_ratio: Share
    max_skipped_steps: Count
    replicas: Count
    watchdog_seconds: Positive
    trackers: dict[str, Any]
    callbacks: dict[str, Any]
    report: bool
    wandb: WandbConfig = nested(WandbConfig)
    sampler: SamplerConfig = nested(SamplerConfig)
    reward: Annotated[dict[str, Any], AfterValidator(completed)] | None = None
    rounds: RoundsConfig = nested(RoundsConfig)
    humanline_sampling: BetaConfig = nested(BetaConfig)
    correction: CorrectionConfig = nested(CorrectionConfig)
    retention: RetentionConfig = nested(RetentionConfig)
    plan: PlanConfig = nested(PlanConfig)

    def __post_init__(self) -> None:
        for key in ("name", "_target_"):
            value = self.loss.get(key)
            named = isinstance(value, str) and value != ""
            if not named:
                raise ConfigError(f"loss.{key}", value, "must be a text; loss= sets it")
        check_keep_best(self.keep_best, self.evaluations)
        evaluation_sets(self.evaluations, self.data)
        self._check_run()
        self._check_method()
        self._check_syncing()
        self._check_correction()
        if self.online:
            self._check_online()

    def _check_run(self) -> None:
        """Check what the settings of the run's length and place require of each other."""
        counted = self.patience is None or (self.keep_best is not None and self.eval_every != 0)
        both = "counts evaluations (eval_every, not 0) of one number (keep_best): give both"
        need(self, counted, "patience", both)
        one = "cannot go with resume=true: one deletes the run, the other goes on with it; give one"
        need(self, not (self.overwrite and self.resume), "overwrite", one)
        named = self.optimizer == "AdamW" or "." in self.optimizer
        known = "must be AdamW, or the import path of a torch optimizer, as bitsandbytes.optim.AdamW8bit"
        need(self, named, "optimizer", known)
        ends = self.n_epochs is not None or self.n_examples is not None
        need(self, ends, "n_epochs", "give n_epochs or n_examples")

    def _check_method(self) -> None:
        """Check what humanline and the loss's own settings require of each other."""
        name, accepts = f"loss={self.loss['name']}", self.accepts
        below = f"must be below log_epsilon_R={self.log_epsilon_R}"
        need(self, self.log_epsilon_P < self.log_epsilon_R, "log_epsilon_P", below)
        nothing = f"{name} has no reference model to clip against (paper §5.1); use loss=dpo, kto or grpo"
        need(self, not self.humanline or self.has_reference, "humanline", nothing)
        function = "names no function: humanline_rule._target_=my_rules.soft, and its numbers beside it"
        ruled = self.humanline_mode != "rule" or "_target_" in self.humanline_rule
        need(self, ruled, "humanline_rule", function)
        check_trainer_keys(self.loss, accepts)
        labelled = accepts.labelled_examples and not self.online
        single = f"takes single examples out of pairs, which {name} {'online ' * self.online}does not read"
        for key in ("frac_unique_desirable", "frac_unique_undesirable"):
            need(self.data, labelled or getattr(self.data, key) == 1, key, single)
        fixed = f"{name} trains on a fixed data set: its samples would not be what it learns from"
        need(self, not self.online or accepts.online, "online", fixed)
        ordered = self.data.logprob_range is None or accepts.logprob_range
        scores = f"orders completions by their likelihood; {name} trains a model that only scores them"
        need(self.data, ordered, "logprob_range", scores)

    def _check_syncing(self) -> None:
        """Check what the modes of syncing require of the numbers and of the loss."""
        name, mode = f"loss={self.loss['name']}", self.syncing
        nothing = f"{name} has no reference model, so there is nothing to sync"
        need(self, self.sync_mode is None or self.has_reference, "sync_mode", nothing)
        kept = self.rounds.reset_reference or self.has_reference
        need(self.rounds, kept, "reset_reference", f"{name} has no reference model that could stay")
        clips = "needs humanline=true; to sync without clipping add log_epsilon_P=-.inf log_epsilon_R=.inf"
        need(self, self.humanline or self.sync_mode != "humanline", "sync_mode", clips)
        delayed = mode == "delayed" and self.keeps_reference
        ahead = "is not for sync_mode=delayed, which scores ahead of rounds that are not sampled yet"
        need(self.rounds, not delayed, "reset_reference", ahead)
        moves = "must be above 1 with sync_mode=kl: after so many steps the reference moves in any case"
        need(self, mode != "kl" or self.sync_freq > 1, "sync_freq", moves)
        partly = self.sync_alpha == 1 or mode in ("trust_region", "ema")
        whole = "is for sync_mode=trust_region and ema; in every other mode the reference becomes the policy"
        need(self, partly, "sync_alpha", whole)
        steps = "must be below 1 with sync_mode=ema, whose reference moves towards the policy step by step"
        need(self, mode != "ema" or self.sync_alpha < 1, "sync_alpha", steps)

    def _check_correction(self) -> None:
        """Check what a correction, or a ratio to the behaviour policy, requires of the loss, and of the
        sampler, by whose log-probabilities it divides."""
        correction, sampler, wanted = self.correction, self.sampler, self.model.logit_temperature
        weighed = correction._target_ is None or self.accepts.corrections
        tokens = f"weighs tokens, and of loss={self.loss['name']} nothing can be weighed; use correction=none"
        if not weighed:
            raise ConfigError("correction", correction.name, tokens)
        if self.ratio_reference == "behavior":
            self._check_ratio_to_behavior()
        same = sampler.temperature == wanted and sampler.top_p == 1
        masks = self.ratio_reference != "behavior" and correction.name in MASKS_ALONE
        require(
            same or not (self.online and self.reads_behavior) or correction.mismatch == "allow",
            *self.behavior_setting,
            f"{'masks tokens' if masks else 'divides'} by log-probabilities at temperature {wanted:g} "
            f"(model.logit_temperature) and top-p 1, but the samples are drawn with "
            f"sampler.temperature={sampler.temperature:g} and sampler.top_p={sampler.top_p:g}; set "
            f"sampler.temperature={wanted:g} sampler.top_p=1, or correction.mismatch=allow",
        )

    def _check_ratio_to_behavior(self) -> None:
        """Check what ratio_reference=behavior requires of the loss, the correction and the syncing."""
        key, correction = "ratio_reference", self.correction
        weighs = f"is for losses of ratios (grpo, dr_grpo, ppo_group), and this is loss={self.loss['name']}"
        need(self, self.accepts.corrections, key, weighs)
        once = not correction.reads_behavior or correction.name in MASKS_ALONE
        masks = " or ".join(f"correction={name}" for name in ("none", *MASKS_ALONE))
        twice = f"already divides by what correction={correction.name} divides by: use {masks}"
        need(self, once, key, twice)
        no_distance = "leaves sync_mode=kl no distance from the reference to measure; use another sync_mode"
        need(self, self.syncing != "kl", key, no_distance)

    def _check_online(self) -> None:
        """Check what online rounds require of the other settings."""
        name, rounds, accepts = f"loss={self.loss['name']}", self.rounds, self.accepts
        scores = "online=true needs a file of config/reward to score samples: reward=armorm, reward=verifier"
        need(self, self.reward is not None, "reward", scores)
        grown = "are learned offline: start from a run that has them, model.name_or_path=runs/NAME"
        need(self.model, not self.model.new_tokens, "new_tokens", grown)
        self.check_room()
        self.check_samples()
        longest = f"must be at most sampler.max_tokens={self.max_tokens}, before which the penalty grows"
        need(rounds, rounds.overlong is None or rounds.overlong <= self.max_tokens, "overlong", longest)
        several = f"must be at least 2: rounds.feedback={rounds.feedback} compares the samples of a context"
        need(rounds, rounds.samples >= 2 or rounds.feedback == "threshold", "samples", several)
        alone = "gives all samples with their scores: use loss.rewards=scores, or rounds.feedback=pair"
        labels = "rewards" in accepts.loss_keys and self.loss["rewards"] == "labels"
        need(rounds, not labels or rounds.feedback != "group", "feedback", alone)
        chooses = "chooses among completions that are there before training; online=true samples its own"
        need(self.data, self.data.logprob_range is None, "logprob_range", chooses)
        offline = "is for offline: set rounds.contexts, or rounds.examples"
        need(self, self.n_examples is None, "n_examples", offline)
        fitting = f"is not for {name}: use {' or '.join(accepts.feedback)}"
        need(rounds, rounds.feedback in accepts.feedback, "feedback", fitting)

    def check_room(self) -> None:
        """Raise ConfigError unless the longest sample fits behind the longest prompt. Otherwise the sample
        would be trained on without its end."""
        most, model = self.max_tokens, self.model
        fits = most + model.max_prompt_length <= model.max_length
        sums = f"{most} + model.max_prompt_length={model.max_prompt_length} is more than"
        limit = f"model.max_length={model.max_length}; sampler.max_tokens=auto takes what is left"
        if not fits:
            raise ConfigError(
                "sampler.max_tokens", most, f"samples must fit behind the prompt: {sums} {limit}"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError unless ranks divide into replicas, and a batch into ranks x microbatches."""
        need(self, ranks % self.replicas == 0, "replicas", f"must divide the number of ranks, {ranks}")
        parts = f"{ranks} x {self.model.microbatches}"
        whole = self.model.batch_size % (self.model.microbatches * ranks) == 0
        need(self.model, whole, "batch_size", f"must be a multiple of ranks x model.microbatches = {parts}")

    def check_samples(self) -> None:
        """Raise ConfigError for several samples a prompt that would all be the same answer."""
        differ = self.sampler.temperature > 0 or self.rounds.samples == 1
        same = f"draws {self.rounds.samples} times the same: use a temperature above 0, or rounds.samples=1"
        need(self.sampler, differ, "temperature", same)

    @property
    def max_tokens(self) -> int:
        """Length of the longest sample in tokens. It is ``sampler.max_tokens``; if that is auto, the smaller
        of the paper's 2,048 (§5) and what ``model.max_length`` leaves behind the longest prompt."""
        if self.sampler.max_tokens is not None:
            return self.sampler.max_tokens
        return min(PAPERS_MAX_TOKENS, self.model.max_length - self.model.max_prompt_length)

    @property
    def accepts(self) -> Accepts:
        """What the loss's trainer accepts, as its class says."""
        return accepted_by(self.trainer._target_)

    @property
    def has_reference(self) -> bool:
        """Whether the loss uses log-ratios against a reference, as its yaml says."""
        return bool(self.loss.get("reference", True))

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference persists across rounds, which requires a second copy of the weights."""
        return self.online and self.has_reference and not self.rounds.reset_reference

    @property
    def reads_behavior(self) -> bool:
        """Whether the log-probabilities of the policy that wrote a completion are read."""
        return self.correction.reads_behavior or self.ratio_reference == "behavior"

    @property
    def behavior_setting(self) -> tuple[str, str]:
        """The setting, and its value, that asks for these log-probabilities."""
        if self.ratio_reference == "behavior":
            return "ratio_reference", "behavior"
        return "correction", self.correction.name

    @property
    def stays_initial(self) -> bool:
        """Whether the reference is the initial weights for the whole run."""
        return self.syncing == "never" and (not self.online or self.keeps_reference)

    @property
    def reward_gets_columns(self) -> bool:
        """Whether a reward of the run may get the columns of the prompts' rows by their names."""
        maker = str(self.reward["_target_"]) if self.online and self.reward else "rollouts.rewards.none"
        package, _, name = maker.removesuffix(".make").rpartition(".")
        return package != "rollouts.rewards" or name in ("function", "weighted")

    @property
    def reward_config(self) -> RewardConfig:
        """The reward's settings, typed. Only valid if ``reward`` is given."""
        assert self.reward is not None, "asked for by whoever needs one"
        return RewardConfig.from_tree(self.reward)

    @property
    def syncing(self) -> str:
        """The mode of ``trainers.syncing`` that decides when the reference follows the policy."""
        return self.sync_mode or ("humanline" if self.humanline else "never")

    @property
    def variant(self) -> str:
        """The name of the paper's variant (offline or online, with or without humanline)."""
        return variant(self.online, self.humanline, self.sync_mode)


def variant(online: bool, humanline: bool, sync_mode: str | None) -> str:
    """Return one of the paper's four variants: offline, online, offline+humanline or online+humanline. A mode
    of syncing that is not the paper's is appended."""
    other = sync_mode not in (None, "humanline", "never")
    mode = f"+{sync_mode}".replace("_", "-") if other else ""
    return ("online" if online else "offline") + "+humanline" * humanline + mode
