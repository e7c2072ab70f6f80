"""The settings of the evaluations that other people's programs make: AlpacaEval 2 and the lm-eval harness. config/eval.yaml says what
each key means."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import require


@dataclass
class AlpacaEvalConfig:
    """``kind=alpacaeval``: answers to AlpacaEval's instructions, compared with a baseline's by a judge, through the alpaca_eval library."""

    annotations: str | None = None
    outputs: str | None = None
    reference: str | None = None
    difficulty: str | None = None
    model: str | None = "gpt-4.1"
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str | None = "OPENAI_API_KEY"
    annotator: str = "weighted_alpaca_eval_gpt4_turbo"
    concurrency: int = 16
    timeout: float = 60.0
    retries: int = 5
    max_missing: float = 0.05
    dollars_per_million_tokens: float | None = None

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
            "writes the answers and asks no judge; alpacaeval.annotations is judged already: leave one of them out",
        )
        require(
            self.model is not None or self.outputs is None,
            "alpacaeval.model",
            None,
            "writes the answers and asks no judge; alpacaeval.outputs is written already: leave one of them out",
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
class LmEvalConfig:
    """``kind=lm_eval``: tasks of EleutherAI's harness, by the lm_eval library."""

    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    chat_template: bool | None = None
    system_instruction: str | None = None
    unsafe_code: bool = False
    bootstrap: int = 100_000

    def __post_init__(self) -> None:
        require(
            self.num_fewshot is None or self.num_fewshot >= 0,
            "lm_eval.num_fewshot",
            self.num_fewshot,
            "must be 0 or more, or null",
        )
        require(self.batch_size >= 1, "lm_eval.batch_size", self.batch_size, "must be at least 1")
        require(self.bootstrap >= 0, "lm_eval.bootstrap", self.bootstrap, "must be 0 or more")
