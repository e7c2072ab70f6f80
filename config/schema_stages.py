"""Settings of ``eval.py``, ``sample.py`` and ``label.py`` in addition to those of a run. Their yaml files say
what each key means."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from common.errors import require
from common.files import check_name
from config.sections import (
    All,
    Auto,
    Count,
    Natural,
    NotNegative,
    Text,
    dataclass,
    must,
    need,
    nested,
    yaml_defaults,
)

Kind = Literal["accuracy", "compare", "alpacaeval", "lm_eval"]
"""Each is a module of ``evals``; the docstring of that package describes its contract."""
READ = ("model", "data", "sampler", "reward", "seed", "runs_dir", "cache_dir")
"""The settings of a run that an evaluation reads."""
OneOrMore = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


@dataclass
@yaml_defaults("eval.yaml:accuracy")
class AccuracyConfig:
    """``kind=accuracy``: greedy accuracy, and pass@k from several samples per prompt (Chen et al. 2021, eq.
    1)."""

    greedy: bool
    samples: Annotated[Natural, "must be at least 1, or 0 for greedy accuracy alone"]
    k: Annotated[list[Count], must(bool, "give at least one, as in accuracy.k=[1]")]
    verifier: Text | None

    def __post_init__(self) -> None:
        nothing = "with accuracy.greedy=false nothing is left to measure"
        need(self, self.greedy or self.samples > 0, "samples", nothing)
        for k in self.k:
            several = f"pass@k needs at least k samples a prompt: raise accuracy.samples={self.samples}"
            require(k <= self.samples or not self.samples, "accuracy.k", k, several)


@dataclass
@yaml_defaults("eval.yaml:compare")
class CompareConfig:
    """``kind=compare``: a reward compares two models' answers to the same prompts."""

    samples: Count
    tie: Annotated[NotNegative, "is the largest difference of two rewards that is a tie"]


@dataclass
@yaml_defaults("eval.yaml:alpacaeval")
class AlpacaEvalConfig:
    """``kind=alpacaeval``: a judge compares answers to AlpacaEval's instructions with a baseline's answers,
    through the alpaca_eval library."""

    annotations: Text | None
    outputs: Text | None
    reference: Text | None
    model: Text
    annotator: Text

    def __post_init__(self) -> None:
        one = self.annotations is None or self.outputs is None
        judged = "are judgements, alpacaeval.outputs are answers still to be judged: give one of them"
        need(self, one, "annotations", judged)


@dataclass
@yaml_defaults("eval.yaml:lm_eval")
class LmEvalConfig:
    """``kind=lm_eval``: tasks of EleutherAI's harness, run by the lm_eval library."""

    tasks: list[Text]
    include_path: Text | None
    num_fewshot: Auto[Natural]
    batch_size: Count
    chat_template: Auto[bool]
    unsafe_code: bool


@dataclass
@yaml_defaults("eval.yaml")
class EvalStage:
    """Settings of ``eval.py`` itself."""

    kind: Kind
    run: OneOrMore
    step: Annotated[Natural, "is a step's number"] | None
    answers: Text | None
    against: OneOrMore
    name: Text | None
    out: Text | None
    overwrite_out: bool
    split: Literal["train", "eval"]
    limit: All[Count]
    resamples: Annotated[int, Field(ge=100), "must be at least 100: fewer give no confidence interval"]
    confidence: Annotated[float, Field(gt=0, lt=1), "must lie in (0, 1)"]
    accuracy: AccuracyConfig = nested(AccuracyConfig)
    compare: CompareConfig = nested(CompareConfig)
    alpacaeval: AlpacaEvalConfig = nested(AlpacaEvalConfig)
    lm_eval: LmEvalConfig = nested(LmEvalConfig)

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name("name", self.name)
        tasks = "name at least one, as in lm_eval.tasks=[gsm8k,ifeval]"
        require(bool(self.lm_eval.tasks) or self.kind != "lm_eval", "lm_eval.tasks", [], tasks)
        compares = self.kind == "compare"
        need(self, self.step is None or bool(self.run), "step", "is a checkpoint of a run: give run=")
        need(self, not self.answers or not self.run, "answers", "is instead of run=: give one of them")
        need(self, compares or not self.against, "against", "is for kind=compare")
        compare_only = "is for kind=compare; other kinds sample their own"
        need(self, compares or not self.answers, "answers", compare_only)
        other = "kind=compare needs a run, a model or a file of answers, as in against=runs/y"
        require(bool(self.against) or not compares, "against", None, other)
        counted = not compares or len(self.against) in (1, max(1, len(self.run)))
        each = f"give one, or as many as run= has ({len(self.run)}), in the same order"
        need(self, counted, "against", each)


@dataclass
@yaml_defaults("sample.yaml")
class SampleStage:
    """``sample.py``: ``rounds.samples`` answers to each prompt of the data, sampled from ``model`` by
    ``sampler``."""

    run: Text | None
    out: Text
    format: Literal["groups", "alpacaeval", "halos"]
    split: Literal["train", "eval"]
    skip: Natural
    limit: All[Count]
    overwrite_out: bool

    def __post_init__(self) -> None:
        _check_suffix(self)


@dataclass
@yaml_defaults("label.yaml")
class LabelStage:
    """``label.py``: scores by ``reward`` of the samples in a file, and the feedback made from them according
    to ``rounds``."""

    out: Text
    format: Literal["groups", "binary", "pairwise", "scalar"]
    overwrite_out: bool
    samples: Text = field(metadata={"key": "in"})  # "in" is a Python keyword

    def __post_init__(self) -> None:
        _check_suffix(self)


def _check_suffix(stage: SampleStage | LabelStage) -> None:
    """Raise ConfigError unless the file's name has the suffix of the format. Readers tell JSON lines from a
    single JSON list by it."""
    suffix = ".jsonl" if stage.format == "groups" else ".json"
    message = f"with format={stage.format} the file's name must end with {suffix}"
    need(stage, stage.out.endswith(suffix), "out", message)
