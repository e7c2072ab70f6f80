"""The typed configuration: which settings exist, their types and ranges, and which combinations are refused.

``load`` turns what Hydra composed into a ``Config`` or raises ``ConfigError``, whose message has the key, the
value and the remedy. Nothing here imports torch, so that a wrong command line is refused within a second.
Checks that need the data, the tokenizer or the number of ranks happen where these become known. They raise
the same error, and they still run before weights are loaded.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from common.errors import require
from config.schema_data import DataConfig
from config.schema_evaluations import check_keep_best, evaluation_sets
from config.schema_model import ModelConfig
from config.schema_plan import PlanConfig
from config.schema_rewards import RewardConfig, completed
from config.schema_rounds import RoundsConfig
from config.schema_sampler import SamplerConfig
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
    runs_dir: Text
    cache_dir: Text
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
    push_to_hub: Off[Text]
    hub_private: bool
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
            require(named, f"loss.{key}", value, "must be a text; loss= sets it")
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
        need(
            self,
            self.patience is None or (self.keep_best is not None and self.eval_every != 0),
            "patience",
            "counts evaluations (eval_every, not 0) of one number (keep_best): give both",
        )
        need(
            self,
            not (self.overwrite and self.resume),
            "overwrite",
            "cannot go with resume=true: overwrite=true deletes the run, resume=true goes on with it; give "
            "one",
        )
        named = self.optimizer == "AdamW" or "." in self.optimizer
        need(self, named, "optimizer", "must be AdamW, or the import path of a torch optimizer: module.Class")
        ends = self.n_epochs is not None or self.n_examples is not None
        need(self, ends, "n_epochs", "give n_epochs or n_examples")

    def _check_method(self) -> None:
        """Check what humanline and the loss's own settings require of each other."""
        name = f"loss={self.loss['name']}"
        below = f"must be below log_epsilon_R={self.log_epsilon_R}"
        need(self, self.log_epsilon_P < self.log_epsilon_R, "log_epsilon_P", below)
        need(
            self,
            not self.humanline or self.has_reference,
            "humanline",
            f"{name} has no reference model, so there is nothing to clip or to sync (paper §5.1); use a loss "
            "with one (dpo, kto, grpo) or humanline=false",
        )
        need(
            self,
            self.humanline_mode != "rule" or "_target_" in self.humanline_rule,
            "humanline_rule",
            "names no function: humanline_rule._target_=my_rules.soft, and its numbers beside it",
        )
        leaves = "says how humanline=true treats a token; humanline=false leaves all as they are"
        need(self, self.humanline or self.humanline_mode == "clip", "humanline_mode", leaves)
        check_trainer_keys(self.loss, self.accepts)
        for key in ("frac_unique_desirable", "frac_unique_undesirable"):
            labelled = self.accepts.labelled_examples and not self.online
            need(
                self.data,
                labelled or getattr(self.data, key) == 1,
                key,
                f"takes single examples out of pairs, which {name} {'online ' if self.online else ''}does "
                "not read",
            )
        fixed = f"{name} trains on a fixed data set: its samples would not be what it learns from"
        need(self, not self.online or self.accepts.online, "online", fixed)
        need(
            self.data,
            self.data.logprob_range is None or self.accepts.logprob_range,
            "logprob_range",
            f"orders completions by what the model thinks of them; {name} trains one that only scores them",
        )

    def _check_syncing(self) -> None:
        """Check what the modes of syncing require of the numbers and of the loss."""
        name = f"loss={self.loss['name']}"
        nothing = f"{name} has no reference model, so there is nothing to sync"
        need(self, self.sync_mode is None or self.has_reference, "sync_mode", nothing)
        kept = self.rounds.reset_reference or self.has_reference
        need(self.rounds, kept, "reset_reference", f"{name} has no reference model that could stay")
        need(
            self,
            self.humanline or self.sync_mode != "humanline",
            "sync_mode",
            "needs humanline=true; for syncing without clipping add log_epsilon_P=-.inf log_epsilon_R=.inf",
        )
        need(
            self.rounds,
            self.syncing != "delayed" or not self.keeps_reference,
            "reset_reference",
            f"is not for sync_mode=delayed: its scores are made sync_freq={self.sync_freq} steps ahead, when "
            "the next round's samples do not exist yet",
        )
        need(
            self,
            self.syncing != "kl" or self.sync_freq > 1,
            "sync_freq",
            "must be above 1 with sync_mode=kl: after so many steps the reference moves in any case",
        )
        need(
            self,
            self.sync_alpha == 1 or self.syncing in ("trust_region", "ema"),
            "sync_alpha",
            "is for sync_mode=trust_region and ema; in every other mode the reference becomes the policy "
            "itself",
        )
        need(
            self,
            self.syncing != "ema" or self.sync_alpha < 1,
            "sync_alpha",
            "must be below 1 with sync_mode=ema, whose reference moves towards the policy step by step",
        )

    def _check_correction(self) -> None:
        """Check what a correction, or a ratio to the behaviour policy, requires of the loss, and of the
        sampler, by whose log-probabilities it divides."""
        correction = self.correction
        require(
            correction._target_ is None or self.accepts.corrections,
            "correction",
            correction.name,
            f"weighs tokens, and of loss={self.loss['name']} nothing can be weighed; use correction=none or "
            "another loss",
        )
        if self.ratio_reference == "behavior":
            self._check_ratio_to_behavior()
        wanted = self.model.logit_temperature
        same = self.sampler.temperature == wanted and self.sampler.top_p == 1
        masks = self.ratio_reference != "behavior" and correction.name in MASKS_ALONE
        require(
            same or not (self.online and self.reads_behavior) or correction.mismatch == "allow",
            *self.behavior_setting,
            f"{'masks tokens' if masks else 'divides'} by log-probabilities at temperature {wanted:g} "
            "(model.logit_temperature) and top-p 1, "
            f"but the samples are drawn with sampler.temperature={self.sampler.temperature:g} and "
            f"sampler.top_p={self.sampler.top_p:g}; set sampler.temperature={wanted:g} sampler.top_p=1, or "
            "correction.mismatch=allow",
        )

    def _check_ratio_to_behavior(self) -> None:
        """Check what ratio_reference=behavior requires of the loss, the correction and the syncing."""
        key = "ratio_reference"
        need(
            self,
            self.accepts.corrections,
            key,
            f"is for losses that weigh tokens by a ratio (grpo, dr_grpo, ppo_group), and this is "
            f"loss={self.loss['name']}",
        )
        need(
            self,
            not self.correction.reads_behavior or self.correction.name in MASKS_ALONE,
            key,
            f"has the behaviour policy in the ratio already; correction={self.correction.name} would divide "
            "by it once more: use correction=none, negative_masked or trust_region_masked",
        )
        no_distance = "leaves sync_mode=kl no distance from the reference to measure; use another sync_mode"
        need(self, self.syncing != "kl", key, no_distance)

    def _check_online(self) -> None:
        """Check what online rounds require of the other settings."""
        name, rounds = f"loss={self.loss['name']}", self.rounds
        need(
            self,
            self.reward is not None,
            "reward",
            "online=true scores the policy's samples: choose a file of config/reward, as in reward=armorm "
            "or reward=verifier",
        )
        grown = (
            "are learned offline: start from the model of a run that has them, model.name_or_path=runs/NAME"
        )
        need(self.model, not self.model.new_tokens, "new_tokens", grown)
        self.check_room()
        self.check_samples()
        longest = f"must be at most sampler.max_tokens={self.max_tokens}, before which the penalty grows"
        need(rounds, rounds.overlong is None or rounds.overlong <= self.max_tokens, "overlong", longest)
        several = f"must be at least 2: rounds.feedback={rounds.feedback} compares the samples of a context"
        need(rounds, rounds.samples >= 2 or rounds.feedback == "threshold", "samples", several)
        alone = "gives all samples with their scores: use loss.rewards=scores, or rounds.feedback=pair"
        labels = "rewards" in self.accepts.loss_keys and self.loss["rewards"] == "labels"
        need(rounds, not labels or rounds.feedback != "group", "feedback", alone)
        chooses = "chooses among completions that are there before training; online=true samples its own"
        need(self.data, self.data.logprob_range is None, "logprob_range", chooses)
        offline = "is for offline: set rounds.contexts, or rounds.examples"
        need(self, self.n_examples is None, "n_examples", offline)
        fitting = f"is not for {name}: use {' or '.join(self.accepts.feedback)}"
        need(rounds, rounds.feedback in self.accepts.feedback, "feedback", fitting)

    def check_room(self) -> None:
        """Raise ConfigError unless the longest sample fits behind the longest prompt. Otherwise the sample
        would be trained on without its end."""
        most, model = self.max_tokens, self.model
        fits = most + model.max_prompt_length <= model.max_length
        sums = f"{most} + model.max_prompt_length={model.max_prompt_length} is more than"
        limit = f"model.max_length={model.max_length}; sampler.max_tokens=auto takes what is left"
        require(fits, "sampler.max_tokens", most, f"samples must fit behind the prompt: {sums} {limit}")

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError unless ranks divide into replicas, and a batch into ranks x microbatches."""
        need(self, ranks % self.replicas == 0, "replicas", f"must divide the number of ranks, {ranks}")
        parts = f"{ranks} x {self.model.microbatches}"
        whole = self.model.batch_size % (self.model.microbatches * ranks) == 0
        need(self.model, whole, "batch_size", f"must be a multiple of ranks x model.microbatches = {parts}")

    def check_samples(self) -> None:
        """Raise ConfigError for several samples a prompt that would all be the same answer."""
        need(
            self.sampler,
            self.sampler.temperature > 0 or self.rounds.samples == 1,
            "temperature",
            f"draws the same answer rounds.samples={self.rounds.samples} times: use a temperature above 0, "
            "or rounds.samples=1",
        )

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
