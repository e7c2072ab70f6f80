"""Settings of sampling, by ``sampler=embedded`` (transformers) or ``sampler=vllm`` (engines in their own
processes), and of online rounds (paper, Algorithm 1 and §5)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from config.sections import (
    All,
    Auto,
    Count,
    ExportDtype,
    Natural,
    NotNegative,
    Off,
    Positive,
    PositiveShare,
    SmallShare,
    Text,
    dataclass,
    must,
    need,
    yaml_defaults,
)

Seconds = Annotated[Positive, "is a number of seconds"]
AUTO = "auto"
Engines = Annotated[
    Any,
    must(lambda n: n == AUTO or (type(n) is int and n >= 1), "must be a whole number of at least 1, or auto"),
]


@dataclass
@yaml_defaults("sampler/embedded.yaml", "sampler/vllm.yaml")
class SamplerConfig:
    """The yaml files in config/sampler say what each key means. The defaults of temperature, top-p and length
    are the paper's (§5)."""

    name: Text
    _target_: Text
    separate: bool
    temperature: Annotated[NotNegative, "must be 0 (greedy) or more"]
    top_p: Annotated[PositiveShare, "must lie in (0, 1]; 1 keeps every token"]
    max_tokens: Auto[Count]
    stop: list[Text]
    batch_size: Auto[Count]
    dtype: Auto[ExportDtype]
    devices: Auto[list[int]]
    tensor_parallel: Count
    data_parallel: Engines
    gpu_memory_utilization: Annotated[PositiveShare, "is a share of the GPU's memory"]
    cpu_kv_cache_gb: Positive
    enforce_eager: bool
    start_timeout: Seconds
    timeout: Seconds
    weight_transfer: Literal["auto", "ipc", "nccl", "disk"]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        different = all(self.stop) and len(set(self.stop)) == len(self.stop)
        need(self, different, "stop", "must name each string once, and none without characters")
        every = "needs sampler=vllm; the embedded sampler already uses every rank"
        single = self.devices is not None or self.data_parallel in (AUTO, 1) or self.separate
        need(self, single, "data_parallel", every)
        embedded = "needs sampler=vllm; embedded uses the trainer's own"
        need(self, self.devices is None or self.separate, "devices", embedded)
        wanted, devices = self.tensor_parallel * self.copies, self.devices or ()
        for_each = f"tensor_parallel={self.tensor_parallel} x data_parallel={self.data_parallel}"
        many = f"a multiple of {self.tensor_parallel}" if self.data_parallel == AUTO else wanted
        different = self.devices is None or len(set(devices)) == len(devices) == wanted
        need(self, different, "devices", f"must name {many} different GPUs ({for_each})")
        transfer, shares = self.weight_transfer, self.shares_devices
        others = "needs an engine on the trainer's GPUs, and sampler.devices has others: use nccl or auto"
        need(self, transfer != "ipc" or shares, "weight_transfer", others)
        apart = "needs an engine with GPUs of its own: name them in sampler.devices, or use ipc or auto"
        need(self, transfer != "nccl" or not shares, "weight_transfer", apart)

    @property
    def copies(self) -> int:
        """Number of engines: data_parallel; where it is auto, as many as ``devices`` are enough for, or one
        (``rollouts.vllm.options.with_engines`` counts the machine's GPUs)."""
        if self.data_parallel != AUTO:
            return int(self.data_parallel)
        return max(1, len(self.devices or ()) // self.tensor_parallel)

    @property
    def shares_devices(self) -> bool:
        """Whether the engine runs on the trainer's own GPUs and therefore must free its memory while the
        trainer trains."""
        return self.devices is None


CENTRES = ("mean", "median")
"""Values of rounds.threshold that are taken from the scores."""
DESIRABLE = (
    "is the score from which a sample is desirable: a number, as in rounds.threshold=0.5, or mean or median, "
    "of the round's scores"
)
Threshold = Annotated[
    Any,
    must(lambda at: at in CENTRES or type(at) in (int, float), DESIRABLE),
    must(lambda at: at in CENTRES or math.isfinite(at), "must be finite"),
]


@dataclass
@yaml_defaults("config.yaml:rounds")
class RoundsConfig:
    """How the policy is sampled and how the samples are used. config/config.yaml says what each key means."""

    contexts: Count
    contexts_per_round: Count
    examples: All[Count]
    samples: Count
    feedback: Literal["pair", "random", "min", "threshold", "group"]
    tau: Annotated[NotNegative, "is the least difference of two rewards"]
    threshold: Threshold
    zero_variance: Auto[Literal["drop", "keep"]]
    truncated: Literal["keep", "drop", "mask"]
    overlong: Off[Annotated[Count, "counts tokens: must be at least 1, or off for no penalty"]]
    overlong_penalty: Annotated[Positive, "is taken from a score: must be above 0"]
    fill: bool
    lag: Annotated[Natural, "counts rounds"]
    passes: Count
    replay: Annotated[SmallShare, "is a share of a round's contexts"]
    compress: bool
    keep_weights: bool
    reset_reference: bool

    def __post_init__(self) -> None:
        most = f"must be at most rounds.contexts={self.contexts}, the whole run's"
        need(self, self.contexts_per_round <= self.contexts, "contexts_per_round", most)
        taken, each = self.replayed(1), self.contexts_per_round
        both = f"is {taken} of rounds.contexts_per_round={each} contexts: a round replays one and samples one"
        need(self, self.replay == 0 or 0 < taken < each, "replay", both)
        unseen = "needs rounds.lag=0: with a lag the next round is under way when this one's yield is known"
        need(self, self.lag == 0 or self.examples is None, "examples", unseen)
        no_pair = "needs rounds.feedback=group: equal rewards make no pair"
        need(self, self.zero_variance != "keep" or self.feedback == "group", "zero_variance", no_pair)
        compares = "needs rounds.feedback=group, whose advantages compare all samples; use drop"
        need(self, self.truncated != "mask" or self.feedback == "group", "truncated", compares)

    def replayed(self, index: int) -> int:
        """Return the number of contexts of round ``index`` that are taken from earlier rounds; the first
        round has none."""
        return round(self.contexts_per_round * self.replay) if index > 0 else 0

    def sampled(self, index: int) -> int:
        """Return the number of contexts that round ``index`` samples itself (or, with ``fill``, keeps)."""
        return self.contexts_per_round - self.replayed(index)

    @property
    def most_contexts(self) -> int:
        """Maximum number of contexts that the rounds of a run train on, replayed ones included."""
        more = self.contexts - self.contexts_per_round
        rounds_after = max(0, -(-more // self.sampled(1)))
        return self.contexts + rounds_after * self.replayed(1)

    @property
    def keeps_equal(self) -> bool:
        """Whether groups of equal rewards are trained on. They have advantage 0 and their tokens are counted,
        so that compared runs with verifiable rewards take the same number of steps."""
        return self.feedback == "group" and self.zero_variance != "drop"
