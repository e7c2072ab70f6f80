"""Seconds until a round's weights have reached a vLLM engine and are verified there, from a folder on disk
against memory that trainer and engine share, in turn, with the same engine.

    python -m benchmarks.hand_over                       # 45 M float32 weights
    python -m benchmarks.hand_over --layers 8 --width 1024 --rounds 10

The benchmark times ``VllmEngine.publish`` as a round calls it: the transfer of the weights (including files
written for it), and the probe, which trainer and engine score. Every hand-over brings other weights than the
one before.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.measure import Spread, Work, alternate, machine, table
from benchmarks.parts import policy_of_size, size_parser
from config.schema_sampler import SamplerConfig
from config.typed import with_defaults
from data.chat import Renderer
from data.types import Prompt, Turn
from models.distributed import start
from rollouts.engines import Facts
from rollouts.vllm.engine import VllmEngine, probe_rows
from rollouts.vllm.sampler import VllmSampler
from tests.tiny_tokenizers import tiny_tokenizer

WAYS = ("disk", "shared_memory")


def main() -> None:
    parser = size_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    logging.disable_progress_bar()
    world = start()
    policy = policy_of_size(args, world.device)
    weights = sum(parameter.numel() for parameter in policy.parameters())
    print(f"{machine()}\n{weights / 1e6:.0f} M weights, float32\n")
    tokenizer = tiny_tokenizer("llama3")
    renderer = Renderer(tokenizer, max_length=320, max_prompt_length=256, template=tokenizer.chat_template)
    probe = probe_rows([Prompt((Turn("user", f"What is {i} + {i}?"),)) for i in range(16)], renderer)
    with tempfile.TemporaryDirectory() as folder:
        sampler = VllmSampler(
            with_defaults(SamplerConfig, name="vllm", separate=True),
            renderer,
            max_length=320,
            dtype="float32",
            log_dir=Path(folder),
        )
        engine = VllmEngine(sampler, policy, renderer, world, probe, "float32")
        engine.publish(Path(folder) / "weights", 0, False)  # starts the engine, able to take either
        versions = iter(range(1, 10_000))
        facts: dict[str, list[Facts]] = {way: [] for way in WAYS}

        def publish(way: str) -> list[Work]:
            return [partial(published, way)]

        def published(way: str) -> None:
            engine.backend = way
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.01)
            version = next(versions)
            facts[way].append(engine.publish(Path(folder) / f"weights-{version}", version, False))

        alternate({way: partial(publish, way) for way in WAYS}, args.rounds)
        engine.close()
    print(table(["", "weights, s", "probe, s"], [row(way, facts[way][1:]) for way in WAYS]))


def row(way: str, facts: list[Facts]) -> list[str]:
    """Return a way's row of the table, without its first hand-over."""
    weights = Spread.of(one["write_seconds"] + one["load_seconds"] for one in facts)
    return [way, str(weights), str(Spread.of(one["probe_seconds"] for one in facts))]


if __name__ == "__main__":
    main()
