"""Settings of ``eval.py`` in addition to those of a run: what is evaluated, how, and where the result goes.
config/eval.yaml says what each key means."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import one_of, require
from common.files import check_name
from config.defaults import nested, yaml_defaults
from config.schema_benchmarks import AlpacaEvalConfig, IfevalConfig, LmEvalConfig

KINDS = ("accuracy", "compare", "alpacaeval", "ifeval", "lm_eval")
"""Allowed values of ``kind``. Each is a module of ``evals``; the docstring of that package describes its
contract."""
READ = ("model", "data", "sampler", "environment", "reward", "seed", "runs_dir", "cache_dir", "wandb")
"""The settings of a run that an evaluation reads."""


@dataclass
@yaml_defaults("eval.yaml:accuracy")
class AccuracyConfig:
    """``kind=accuracy``: greedy accuracy, and pass@k from several samples per prompt (Chen et al. 2021, eq.
    1)."""

    greedy: bool
    samples: int
    k: list[int]
    verifier: str | None

    def __post_init__(self) -> None:
        require(
            self.samples >= 0,
            "accuracy.samples",
            self.samples,
            "must be at least 1, or 0 for greedy accuracy alone",
        )
        require(
            self.greedy or self.samples > 0,
            "accuracy.samples",
            0,
            "with accuracy.greedy=false nothing is left to measure",
        )
        require(bool(self.k), "accuracy.k", self.k, "give at least one, as in accuracy.k=[1]")
        for k in self.k:
            require(k >= 1, "accuracy.k", k, "must be at least 1")
            require(
                k <= self.samples or not self.samples,
                "accuracy.k",
                k,
                f"pass@k needs at least k samples a prompt: raise accuracy.samples={self.samples}, or leave "
                f"{k} out",
            )


@dataclass
@yaml_defaults("eval.yaml:compare")
class CompareConfig:
    """``kind=compare``: a reward compares two models' answers to the same prompts."""

    samples: int
    tie: float

    def __post_init__(self) -> None:
        require(self.samples >= 1, "compare.samples", self.samples, "must be at least 1")
        require(
            self.tie >= 0,
            "compare.tie",
            self.tie,
            "is the largest difference of two rewards that is a tie: must be 0 or more",
        )


@dataclass
@yaml_defaults("eval.yaml")
class EvalStage:
    """Settings of ``eval.py`` itself."""

    kind: str
    run: list[str]
    step: int | None
    answers: str | None
    against: list[str]
    name: str | None
    out: str | None
    overwrite_out: bool
    split: str
    limit: int | None
    resamples: int
    confidence: float
    accuracy: AccuracyConfig = nested(AccuracyConfig)
    compare: CompareConfig = nested(CompareConfig)
    alpacaeval: AlpacaEvalConfig = nested(AlpacaEvalConfig)
    ifeval: IfevalConfig = nested(IfevalConfig)
    lm_eval: LmEvalConfig = nested(LmEvalConfig)

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("split", self.split, ("train", "eval"))
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "must be at least 1, or null")
        require(
            self.resamples >= 100,
            "resamples",
            self.resamples,
            "must be at least 100: fewer give no confidence interval",
        )
        require(0 < self.confidence < 1, "confidence", self.confidence, "must lie in (0, 1)")
        require(
            self.step is None or self.step >= 0,
            "step",
            self.step,
            "is a step's number: must be 0 or more, or null",
        )
        if self.name is not None:
            check_name("name", self.name)
        self._check_targets()

    def _check_targets(self) -> None:
        compares = self.kind == "compare"
        require(self.step is None or bool(self.run), "step", self.step, "is a checkpoint of a run: give run=")
        require(
            not self.answers or not self.run, "answers", self.answers, "is instead of run=: give one of them"
        )
        require(compares or not self.against, "against", self.against, "is for kind=compare")
        require(
            compares or not self.answers,
            "answers",
            self.answers,
            "is for kind=compare; other kinds sample their own",
        )
        require(
            bool(self.against) or not compares,
            "against",
            None,
            "kind=compare needs what to compare with: a run, a model or a file of answers, as in "
            "against=runs/y",
        )
        require(
            not compares or len(self.against) in (1, max(1, len(self.run))),
            "against",
            self.against,
            f"give one, or as many as run= has ({len(self.run)}), in the same order",
        )
