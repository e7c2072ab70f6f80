"""Settings of sampling, by ``sampler=embedded`` (transformers) or ``sampler=vllm`` (engines in their own
processes)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from config.sections import (
    Auto,
    Count,
    ExportDtype,
    NotNegative,
    Positive,
    PositiveShare,
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
