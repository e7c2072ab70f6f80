"""Rounds whose samples and scores are made in advance."""

from __future__ import annotations

import random
from typing import Any, cast

from data.chat import make_renderer
from data.types import Prompt, Turn
from models.pretrained import load_tokenizer
from rollouts.round_builder import RoundBuilder
from rollouts.rounds import PromptSchedule
from rollouts.samplers import Answered, Sample
from tests.tiny import make_config

SAMPLES = 8


class Ready:
    """A sampler and a reward whose answers are made in advance."""

    def __init__(self, tokens: int) -> None:
        self.metrics: dict[str, float] = {}
        rng = random.Random(0)
        # as many digits as float32 has, as samplers report them
        self.answers = [
            Sample(
                tuple(rng.randrange(3, 14) for _ in range(tokens)),
                True,
                tuple(round(-rng.random() * 3, 8) for _ in range(tokens)),
            )
            for _ in range(64)
        ]

    def sample(
        self, prompts: list[Prompt], n: int, _: Any, seed: int, answered: Answered
    ) -> list[list[Sample]]:
        made = [[self.answers[(i * n + k) % 64] for k in range(n)] for i in range(len(prompts))]
        for which, samples in enumerate(made):
            answered(which, samples)  # as vLLM does while it draws the next ones
        return made

    def score(self, prompts: list[Prompt], answers: list[str]) -> list[float | None]:
        return [(i * 7 % 11) / 10 for i in range(len(answers))]

    def release(self) -> None: ...

    def layout(self) -> dict[str, Any]:
        return {}

    dealt = layout

    def sleep(self) -> None: ...


def ready_builder(prompts: int, tokens: int) -> RoundBuilder:
    """What builds a round of so many prompts, with ``SAMPLES`` samples of so many tokens each."""
    config = make_config(
        "loss=grpo",
        "online=true",
        "reward=adder",
        "rounds.feedback=group",
        f"rounds.samples={SAMPLES}",
        f"rounds.contexts={prompts}",
        f"rounds.contexts_per_round={prompts}",
    )
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    asked = [Prompt((Turn("user", f"{i // 100:02d}+{i % 100:02d}="),)) for i in range(prompts)]
    ready = cast(Any, Ready(tokens))
    return RoundBuilder(config, PromptSchedule(asked, prompts, 0), renderer, ready, ready, lambda: None)
