"""The typed configuration: which settings exist, their types and ranges, and which combinations are refused.

``load`` turns what Hydra composed into a ``Config`` or raises ``ConfigError``, whose message has the key, the
value and the remedy. Nothing here imports torch, so that a wrong command line is refused within a second.
Checks that need the data, the tokenizer or the number of ranks happen where these become known. They raise
the same error, and they still run before weights are loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from common.errors import one_of, require
from config.defaults import nested, yaml_defaults
from config.schema_correction import CorrectionConfig
from config.schema_data import DataConfig
from config.schema_environment import EnvironmentConfig
from config.schema_evaluations import check_keep_best, evaluation_sets
from config.schema_humanline import BetaConfig
from config.schema_model import ModelConfig
from config.schema_optimizer import OPTIMIZERS, MuonConfig
from config.schema_plan import PlanConfig
from config.schema_retention import RetentionConfig
from config.schema_rewards import RewardConfig, completed
from config.schema_rounds import RoundsConfig
from config.schema_sampler import SamplerConfig
from config.schema_trainer import TrainerConfig, check_trainer_keys
from config.variant import variant

PAPERS_MAX_TOKENS = 2048


@dataclass
@yaml_defaults("config.yaml:wandb")
class WandbConfig:
    enabled: bool
    project: str | None
    entity: str | None
    name: str | None
    group: str | None
    tags: list[str]
    dir: str | None


@dataclass
@yaml_defaults("config.yaml")
class Config:
    """All settings that a run depends on. The yaml files in this folder say what each key means."""

    model: ModelConfig
    data: DataConfig
    loss: dict[str, Any]
    trainer: TrainerConfig
    seed: int
    exp_name: str | None
    runs_dir: str
    cache_dir: str
    overwrite: bool
    resume: bool
    resume_with_other: list[str]
    dry_run: bool
    idle_settings: str
    humanline: bool
    log_epsilon_P: float
    log_epsilon_R: float
    humanline_mode: str
    humanline_rule: dict[str, Any]
    sync_freq: int
    sync_mode: str | None
    sync_alpha: float
    sync_kl: float
    ratio_reference: str
    online: bool
    reference_batch_size: int | None
    diagnostics: bool
    log_drift: bool
    drift_examples: int | None
    n_epochs: int | None
    n_examples: int | None
    n_eval_examples: int | None
    n_eval_prompts: int | None
    n_eval_samples: int
    evaluations: dict[str, Any]
    eval_every: int | None
    save_every: int | None
    async_save: bool
    keep_checkpoints: int
    keep_best: str | None
    patience: int | None
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scheduler: str
    warmup: float
    min_lr_ratio: float
    max_skipped_steps: int
    replicas: int
    watchdog_seconds: float
    trackers: dict[str, Any]
    callbacks: dict[str, Any]
    push_to_hub: str | None
    hub_private: bool
    report: bool
    wandb: WandbConfig = nested(WandbConfig)
    sampler: SamplerConfig = nested(SamplerConfig)
    environment: EnvironmentConfig = nested(EnvironmentConfig)
    reward: dict[str, Any] | None = None
    rounds: RoundsConfig = nested(RoundsConfig)
    humanline_sampling: BetaConfig = nested(BetaConfig)
    correction: CorrectionConfig = nested(CorrectionConfig)
    muon: MuonConfig = nested(MuonConfig)
    retention: RetentionConfig = nested(RetentionConfig)
    plan: PlanConfig = nested(PlanConfig)

    def __post_init__(self) -> None:
        for key in ("name", "_target_"):
            found = self.loss.get(key)
            require(
                isinstance(found, str) and found != "", f"loss.{key}", found, "must be a text; loss= sets it"
            )
        if self.reward is not None:
            self.reward = completed(self.reward)
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        require(0 < self.lr < math.inf, "lr", self.lr, "must be above 0, and finite")
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
            "patience",
        ):
            value = getattr(self, key)
            least = 0 if key == "eval_every" else 1
            require(value is None or value >= least, key, value, f"must be at least {least}, or null")
        for key in ("n_eval_samples", "sync_freq", "keep_checkpoints", "max_skipped_steps", "replicas"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        require(self.watchdog_seconds > 0, "watchdog_seconds", self.watchdog_seconds, "must be above 0")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must lie in [0, 2^32)")
        check_keep_best(self.keep_best, self.evaluations)
        evaluation_sets(self.evaluations, self.data)
        require(
            self.patience is None or (self.keep_best is not None and self.eval_every != 0),
            "patience",
            self.patience,
            f"counts evaluations (eval_every={self.eval_every}) of one number (keep_best={self.keep_best}): "
            "give both",
        )
        one_of("idle_settings", self.idle_settings, ("refuse", "note"))
        one_of("optimizer", self.optimizer, OPTIMIZERS)
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
            "cannot go with resume=true: overwrite=true deletes the run, resume=true goes on with it; give "
            "one",
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
                f"loss={self.loss['name']} has no reference model, so there is nothing to clip or to sync "
                "(paper §5.1); "
                "use a loss with one (dpo, kto, grpo) or humanline=false",
            )
        self._check_method()
        self._check_correction()
        if self.online:
            self._check_online()

    def _check_method(self) -> None:
        """Check the requirements that humanline's modes, the modes of syncing and the loss's own settings
        have of each other."""
        check_trainer_keys(self.loss, self.trainer)
        for key in ("frac_unique_desirable", "frac_unique_undesirable"):
            labelled = self.trainer.labelled_examples and not self.online
            require(
                labelled or getattr(self.data, key) == 1,
                f"data.{key}",
                getattr(self.data, key),
                f"takes single examples out of pairs, which loss={self.loss['name']} "
                f"{'online ' if self.online else ''}does not read",
            )
        require(
            not self.online or self.trainer.online,
            "online",
            True,
            f"loss={self.loss['name']} trains on a fixed data set: its samples would not be what it learns "
            "from",
        )
        require(
            self.data.logprob_range is None or self.trainer.logprob_range,
            "data.logprob_range",
            self.data.logprob_range,
            f"orders completions by what the model thinks of them; loss={self.loss['name']} trains one that "
            "only scores them",
        )
        one_of("humanline_mode", self.humanline_mode, ("clip", "sample", "rule"))
        require(
            self.humanline_mode != "rule" or "_target_" in self.humanline_rule,
            "humanline_rule",
            self.humanline_rule,
            "names no function: humanline_rule._target_=my_rules.soft, and its numbers beside it",
        )
        require(
            self.humanline or self.humanline_mode == "clip",
            "humanline_mode",
            self.humanline_mode,
            "says how humanline=true treats a token; humanline=false leaves all as they are",
        )
        self._check_syncing()

    def _check_syncing(self) -> None:
        """Check what the modes of syncing require of the numbers and of the loss."""
        modes = ("humanline", "trust_region", "ema", "reset", "kl", "delayed", "never")
        one_of("sync_mode", self.sync_mode, (None, *modes))
        require(
            self.sync_mode is None or self.has_reference,
            "sync_mode",
            self.sync_mode,
            f"loss={self.loss['name']} has no reference model, so there is nothing to sync",
        )
        require(
            self.rounds.reset_reference or self.has_reference,
            "rounds.reset_reference",
            False,
            f"loss={self.loss['name']} has no reference model that could stay",
        )
        require(
            self.humanline or self.sync_mode != "humanline",
            "sync_mode",
            self.sync_mode,
            "needs humanline=true; for syncing without clipping add log_epsilon_P=-.inf log_epsilon_R=.inf",
        )
        require(
            self.syncing != "delayed" or not self.keeps_reference,
            "rounds.reset_reference",
            False,
            f"is not for sync_mode=delayed: its scores are made sync_freq={self.sync_freq} steps ahead, when "
            "the next round's samples do not exist yet",
        )
        require(self.sync_kl > 0, "sync_kl", self.sync_kl, "is a bound in nats a token: must be above 0")
        require(
            self.syncing != "kl" or self.sync_freq > 1,
            "sync_freq",
            self.sync_freq,
            "must be above 1 with sync_mode=kl: after so many steps the reference moves in any case",
        )
        one_of("loss.kl_anchor", self.loss.get("kl_anchor", "reference"), ("reference", "initial"))
        require(0 < self.sync_alpha <= 1, "sync_alpha", self.sync_alpha, "must lie in (0, 1]")
        require(
            self.sync_alpha == 1 or self.syncing in ("trust_region", "ema"),
            "sync_alpha",
            self.sync_alpha,
            "is for sync_mode=trust_region and ema; in every other mode the reference becomes the policy "
            "itself",
        )
        require(
            self.syncing != "ema" or self.sync_alpha < 1,
            "sync_alpha",
            self.sync_alpha,
            "must be below 1 with sync_mode=ema, whose reference moves towards the policy step by step",
        )

    def _check_correction(self) -> None:
        """Check what a correction, or a ratio to the behaviour policy, requires of the loss, and of the
        sampler, by whose log-probabilities it divides."""
        correction, of = self.correction, self.trainer.corrections
        fitting = " or ".join(of) or "nothing"
        require(
            correction._target_ is None or correction.weighs in of,
            "correction",
            correction.name,
            f"weighs {correction.weighs}, and of loss={self.loss['name']} {fitting} can be weighed; use "
            "correction=none or another loss",
        )
        one_of("ratio_reference", self.ratio_reference, ("reference", "behavior"))
        if self.ratio_reference == "behavior":
            self._check_ratio_to_behavior()
        wanted = self.model.logit_temperature
        same = self.sampler.temperature == wanted and self.sampler.top_p == 1
        require(
            same or not (self.online and self.reads_behavior) or correction.mismatch == "allow",
            *self.behavior_setting,
            f"divides by log-probabilities at temperature {wanted:g} (model.logit_temperature) and top-p 1, "
            f"but the samples are drawn with sampler.temperature={self.sampler.temperature:g} and "
            f"sampler.top_p={self.sampler.top_p:g}; set sampler.temperature={wanted:g} sampler.top_p=1, or "
            "correction.mismatch=allow",
        )

    def _check_ratio_to_behavior(self) -> None:
        """Check what ratio_reference=behavior requires of the loss, the correction and the syncing."""
        key = ("ratio_reference", "behavior")
        require(
            "tokens" in self.trainer.corrections,
            *key,
            f"is for losses that weigh tokens by a ratio (grpo, dr_grpo, ppo_group), and this is "
            f"loss={self.loss['name']}",
        )
        require(
            not self.correction.reads_behavior or self.correction.name == "negative_masked",
            *key,
            f"has the behaviour policy in the ratio already; correction={self.correction.name} would divide "
            "by it once more: use correction=none or negative_masked",
        )
        require(
            self.syncing != "kl",
            *key,
            "leaves sync_mode=kl no distance from the reference to measure; use another sync_mode",
        )

    def _check_online(self) -> None:
        """Check what online rounds require of the other settings."""
        require(
            self.reward is not None,
            "reward",
            None,
            "online=true scores the policy's samples: choose a file of config/reward, as in reward=armorm "
            "or reward=verifier",
        )
        self.check_room()
        self.check_samples()
        require(
            self.rounds.samples >= 2 or self.rounds.feedback == "threshold",
            "rounds.samples",
            self.rounds.samples,
            f"must be at least 2: rounds.feedback={self.rounds.feedback} compares the samples of a context",
        )
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
        require(
            self.rounds.feedback in self.trainer.feedback,
            "rounds.feedback",
            self.rounds.feedback,
            f"is not for loss={self.loss['name']}: use {' or '.join(self.trainer.feedback)}",
        )

    def check_room(self) -> None:
        """Raise ConfigError unless the longest sample fits behind the longest prompt. Otherwise the sample
        would be trained on without its end."""
        most, model = self.max_tokens, self.model
        require(
            most + model.max_prompt_length <= model.max_length,
            "sampler.max_tokens",
            most,
            f"samples must fit behind the prompt: {most} + "
            f"model.max_prompt_length={model.max_prompt_length} is more than "
            f"model.max_length={model.max_length}; sampler.max_tokens=null takes what is left",
        )

    def check_samples(self) -> None:
        """Raise ConfigError for several samples a prompt that would all be the same answer."""
        require(
            self.sampler.temperature > 0 or self.rounds.samples == 1,
            "sampler.temperature",
            self.sampler.temperature,
            f"draws the same answer rounds.samples={self.rounds.samples} times: use a temperature above 0, "
            "or rounds.samples=1",
        )

    @property
    def max_tokens(self) -> int:
        """Length of the longest sample in tokens. It is ``sampler.max_tokens``; if that is null, the smaller
        of the paper's 2,048 (§5) and what ``model.max_length`` leaves behind the longest prompt."""
        if self.sampler.max_tokens is not None:
            return self.sampler.max_tokens
        return min(PAPERS_MAX_TOKENS, self.model.max_length - self.model.max_prompt_length)

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
