"""Settings of sampling, by ``sampler=embedded`` (transformers) or ``sampler=vllm`` (engines in their own
processes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import one_of, require
from config.defaults import yaml_defaults

TRANSFERS = ("shared_memory", "ipc", "nccl", "disk")
"""How weights reach vLLM: vLLM's own backends ``ipc`` and ``nccl``, this project's ``shared_memory`` on one
machine, and ``disk``, a folder."""


@dataclass
@yaml_defaults("sampler/embedded.yaml", "sampler/vllm.yaml")
class SamplerConfig:
    """The yaml files in config/sampler say what each key means. The defaults of temperature, top-p and length
    are the paper's (§5)."""

    name: str
    _target_: str
    separate: bool
    temperature: float
    top_p: float
    max_tokens: int | None
    batch_size: int | None
    dtype: str | None
    devices: list[int] | None
    tensor_parallel: int
    data_parallel: int
    gpu_memory_utilization: float
    cpu_kv_cache_gb: float
    enforce_eager: bool
    start_timeout: float
    timeout: float
    weight_transfer: str
    adapters: str
    urls: list[str] | None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "sampler.temperature", self.temperature, "must be 0 (greedy) or more")
        require(0 < self.top_p <= 1, "sampler.top_p", self.top_p, "must lie in (0, 1]; 1 keeps every token")
        require(
            self.batch_size is None or self.batch_size >= 1,
            "sampler.batch_size",
            self.batch_size,
            "must be at least 1, or null",
        )
        one_of("sampler.weight_transfer", self.weight_transfer, ("auto", *TRANSFERS))
        one_of("sampler.adapters", self.adapters, ("auto", "merged", "alone"))
        require(
            self.adapters != "alone" or self.separate,
            "sampler.adapters",
            self.adapters,
            "needs sampler=vllm; the embedded sampler is the policy itself: leave it at auto",
        )
        one_of("sampler.dtype", self.dtype, (None, "float32", "bfloat16", "float16"))
        require(
            self.max_tokens is None or self.max_tokens >= 1,
            "sampler.max_tokens",
            self.max_tokens,
            "must be at least 1, or null",
        )
        for key, value in (
            ("tensor_parallel", self.tensor_parallel),
            ("data_parallel", self.data_parallel),
        ):
            require(value >= 1, f"sampler.{key}", value, "must be at least 1")
        require(self.cpu_kv_cache_gb > 0, "sampler.cpu_kv_cache_gb", self.cpu_kv_cache_gb, "must be above 0")
        for key, seconds in (("start_timeout", self.start_timeout), ("timeout", self.timeout)):
            require(seconds > 0, f"sampler.{key}", seconds, "is a number of seconds: must be above 0")
        require(
            0 < self.gpu_memory_utilization <= 1,
            "sampler.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "is a share of the GPU's memory: must lie in (0, 1]",
        )
        self._check_devices()
        self._check_urls()
        require(
            self.weight_transfer != "ipc" or self.shares_devices,
            "sampler.weight_transfer",
            self.weight_transfer,
            "needs an engine on the trainer's GPUs, and sampler.devices gives it others: use nccl or auto",
        )
        require(
            self.weight_transfer != "nccl" or not self.shares_devices,
            "sampler.weight_transfer",
            self.weight_transfer,
            "needs an engine with GPUs of its own: name them in sampler.devices, or use ipc or auto",
        )

    def _check_urls(self) -> None:
        if self.urls is None:
            return
        require(self.separate, "sampler.urls", self.urls, "needs sampler=vllm")
        for url in self.urls:
            scheme, _, host = url.partition("://")
            require(
                (scheme in ("http", "https") and bool(host)) or url.startswith("unix:/"),
                "sampler.urls",
                url,
                "is no address of a server: write it as http://host:port, or unix:/path of a socket",
            )
        require(
            len({url.rstrip("/") for url in self.urls}) == len(self.urls) > 0,
            "sampler.urls",
            self.urls,
            "must name at least one server, and none twice",
        )
        for key, value, default in (
            ("devices", self.devices, None),
            ("data_parallel", self.data_parallel, 1),
        ):
            require(
                value == default,
                f"sampler.{key}",
                value,
                f"is of engines that a run starts itself; with sampler.urls leave it at {default}",
            )

    def _check_devices(self) -> None:
        if self.devices is None:
            require(
                self.data_parallel == 1 or self.separate,
                "sampler.data_parallel",
                self.data_parallel,
                "needs sampler=vllm; the embedded sampler already uses every rank",
            )
            return
        need = self.tensor_parallel * self.data_parallel
        require(
            self.separate,
            "sampler.devices",
            self.devices,
            "needs sampler=vllm; embedded uses the trainer's own",
        )
        require(
            len(set(self.devices)) == len(self.devices) == need,
            "sampler.devices",
            self.devices,
            f"must name {need} different GPUs (tensor_parallel={self.tensor_parallel} x "
            f"data_parallel={self.data_parallel})",
        )

    @property
    def shares_devices(self) -> bool:
        """Whether the engine runs on the trainer's own GPUs and therefore must free its memory while the
        trainer trains."""
        return self.devices is None and self.urls is None
