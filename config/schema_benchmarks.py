"""Settings of the evaluations by external programs, AlpacaEval 2, IFEval and the lm-eval harness.
config/eval.yaml says what each key means."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import require
from config.defaults import yaml_defaults


@dataclass
@yaml_defaults("eval.yaml:alpacaeval")
class AlpacaEvalConfig:
    """``kind=alpacaeval``: a judge compares answers to AlpacaEval's instructions with a baseline's answers,
    through the alpaca_eval library."""

    annotations: str | None
    outputs: str | None
    reference: str | None
    difficulty: str | None
    model: str | None
    base_url: str
    api_key_env: str | None
    annotator: str
    concurrency: int
    timeout: float
    retries: int
    max_missing: float
    dollars_per_million_tokens: float | None

    def __post_init__(self) -> None:
        require(
            self.annotations is None or self.outputs is None,
            "alpacaeval.annotations",
            self.annotations,
            "are judgements, alpacaeval.outputs are answers still to be judged: give one of them",
        )
        require(
            self.model is not None or self.annotations is None,
            "alpacaeval.model",
            None,
            "writes the answers and asks no judge; alpacaeval.annotations is judged already: leave one of "
            "them out",
        )
        require(
            self.model is not None or self.outputs is None,
            "alpacaeval.model",
            None,
            "writes the answers and asks no judge; alpacaeval.outputs is written already: leave one of them "
            "out",
        )
        require(
            self.base_url.startswith(("http://", "https://")),
            "alpacaeval.base_url",
            self.base_url,
            "is where /chat/completions is found: must start with http:// or https://",
        )
        require(self.concurrency >= 1, "alpacaeval.concurrency", self.concurrency, "must be at least 1")
        require(
            self.timeout > 0,
            "alpacaeval.timeout",
            self.timeout,
            "is seconds a call may take: must be above 0",
        )
        require(self.retries >= 0, "alpacaeval.retries", self.retries, "must be 0 or more")
        require(
            0 <= self.max_missing <= 1,
            "alpacaeval.max_missing",
            self.max_missing,
            "is the share of answers that may go without a judgement: must lie in [0, 1]",
        )
        price = self.dollars_per_million_tokens
        require(
            price is None or price >= 0,
            "alpacaeval.dollars_per_million_tokens",
            price,
            "must be 0 or more, or null",
        )


@dataclass
@yaml_defaults("eval.yaml:ifeval")
class IfevalConfig:
    """``kind=ifeval``: IFEval's prompts, answered by the settings' own sampler."""

    path: str | None
    max_tokens: int

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "ifeval.max_tokens", self.max_tokens, "must be at least 1")


@dataclass
@yaml_defaults("eval.yaml:lm_eval")
class LmEvalConfig:
    """``kind=lm_eval``: tasks of EleutherAI's harness, run by the lm_eval library."""

    tasks: list[str]
    include_path: str | None
    num_fewshot: int | None
    batch_size: int
    chat_template: bool | None
    system_instruction: str | None
    unsafe_code: bool
    bootstrap: int

    def __post_init__(self) -> None:
        require(
            self.num_fewshot is None or self.num_fewshot >= 0,
            "lm_eval.num_fewshot",
            self.num_fewshot,
            "must be 0 or more, or null",
        )
        require(self.batch_size >= 1, "lm_eval.batch_size", self.batch_size, "must be at least 1")
        require(self.bootstrap >= 0, "lm_eval.bootstrap", self.bootstrap, "must be 0 or more")
