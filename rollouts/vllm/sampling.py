"""The sampler ``sampler=vllm``, whose engines run in separate processes beside rank 0."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.errors import require
from common.versions import warning
from config.schema import Config
from config.schema_sampler import SamplerConfig
from data.chat import Renderer
from data.types import Prompt
from models.distributed import Ranks, World
from models.policy import Policy
from rollouts.samplers import SamplingSettings
from rollouts.sampling import refuse_options
from rollouts.stop_strings import stop_strings_of
from rollouts.vllm.engine import VllmEngine, probe_rows
from rollouts.vllm.options import with_engines
from rollouts.vllm.sampler import VllmSampler, require_installed, says_logprobs
from rollouts.weights import model_folder

PARTS, IN_FLIGHT, ON_A_CPU = 20, 512, 64
"""vLLM is asked in ``PARTS`` parts, so that there is progress to show and to keep, but for at least
``IN_FLIGHT`` samples at once, or ``ON_A_CPU``, which those keep busy. They are drawn and end together."""


class VllmSampling:
    """The kind of sampler in which vLLM samples."""

    @classmethod
    def check(cls) -> None:
        require_installed()

    def __init__(self, config: Config, renderer: Renderer, world: World, log_dir: Path) -> None:
        refuse_options(config)
        check_logprobs(config)
        if world.is_main and (untested := warning("vllm")) is not None:
            print(f"warning: {untested}; the probe compares what it computes", flush=True)
        self.config, self.renderer, self.world, self.log_dir = config, renderer, world, log_dir
        self._with_engines(trains=world.size > 1)  # a single process may have no trainer
        self.stops = stop_strings_of(config, renderer)

    def _with_engines(self, trains: bool) -> SamplerConfig:
        """Return the sampler's settings with the number of its engines. ``trains``: whether ranks of this
        machine train beside them. Raises ConfigError."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or self.world.size)
        return with_engines(self.config.sampler, torch.cuda.device_count(), ranks if trains else None)

    def sampler(self, trains: bool = True) -> VllmSampler:
        """Return the sampler, with its engines not started yet."""
        model = self.config.model
        return VllmSampler(
            self._with_engines(trains),
            self.renderer,
            max_length=model.max_length,
            dtype=model.dtype,
            log_dir=self.log_dir,
            temperature=model.logit_temperature,
            stops=self.stops,
        )

    def engine(self, policy: Policy, prompts: list[Prompt]) -> VllmEngine:
        probe = probe_rows(prompts, self.renderer)
        dtype = self.config.model.dtype
        sampler = self.sampler()
        if self.world.is_main and self.world.device.type == "cuda" and sampler.config.shares_devices:
            said = f"{sampler.engine_workers} of {self.world.size} GPUs sample"
            far = self.world.size > int(os.environ.get("LOCAL_WORLD_SIZE") or self.world.size)
            more = ": engines start on the first node" * far
            print(f"{said}, by {sampler.engines} engine(s){more}", flush=True)
        return VllmEngine(sampler, policy, self.renderer, self.world, probe, dtype)

    @contextmanager
    def opened(self) -> Iterator[OneProcess]:
        require(
            self.world.size == 1,
            "sampler",
            self.config.sampler.name,
            "has processes of its own (sampler.data_parallel): start it without a launcher",
        )
        refuse_other_weights(self.config)
        with self.sampler(trains=False) as vllm:
            vllm.load(model_folder(self.config), 0)
            yield OneProcess(vllm, self.world)

    def part(self, prompts: int, n: int) -> int:
        at_once = ON_A_CPU if self.world.device.type == "cpu" else IN_FLIGHT
        return max(math.ceil(prompts / PARTS), math.ceil(at_once / n))


def refuse_other_weights(config: Config) -> None:
    """Raise ConfigError for a model whose weights are not those in its files, which are what vLLM loads."""
    model = config.model
    for key, value, what in (
        ("model.from_config", model.from_config, "draws the weights at random"),
        ("model.quantization", model.quantization, "rounds the weights to 4 bits"),
    ):
        require(
            not value,
            key,
            value,
            f"{what}, and sampler={config.sampler.name} would sample from those in the files of "
            f"{model.name_or_path}: use sampler=embedded",
        )


def check_logprobs(config: Config) -> None:
    """Raise ConfigError where log-probabilities are needed which vLLM would not report."""
    sampler, wanted = config.sampler, config.model.logit_temperature
    settings = SamplingSettings(sampler.temperature, sampler.top_p, config.max_tokens)
    require(
        not (config.online and config.reads_behavior) or says_logprobs(settings, wanted),
        "correction.mismatch",
        config.correction.mismatch,
        f"vLLM says log-probabilities at temperature 1, or at the one that it samples at, with top-p 1; for "
        f"those at model.logit_temperature={wanted:g} set sampler.temperature={wanted:g} sampler.top_p=1, or "
        "use sampler=embedded",
    )


class OneProcess:
    """vLLM outside rounds. It has its own processes, and no other rank helps."""

    def __init__(self, sampler: VllmSampler, world: World) -> None:
        self.sample, self.ranks = sampler.sample, Ranks()
