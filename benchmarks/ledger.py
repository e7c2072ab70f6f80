"""Seconds and bytes that a round's files take to be written, and to be read again for training.

    python -m benchmarks.ledger                  # 1,024 prompts with 8 samples of 400 tokens each
    python -m benchmarks.ledger --prompts 256 --repeats 5
    python -m benchmarks.ledger --levels         # the same files, compressed at each of gzip's levels

The benchmark times all of ``RoundBuilder.build`` and the reading of its groups; samples and scores are
available at once. The samples are random: meaningful text compresses better.
"""

from __future__ import annotations

import gzip
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.measure import Spread, Work, alternate, machine, ratio, table
from common.options import options_of
from data.chat import make_renderer
from data.types import Prompt, Turn
from models.pretrained import load_tokenizer
from rollouts.ledger import RoundFolder
from rollouts.round_builder import RoundBuilder, samples_table
from rollouts.rounds import PromptSchedule
from rollouts.samplers import Answered, Sample
from tests.tiny import make_config

SAMPLES = 8
WEIGHTS = "of a benchmark"
STAGES = ("samples", "scores", "groups")


class Ready:
    """A sampler and a reward whose answers are made in advance."""

    gives_tokens = False

    def __init__(self, tokens: int) -> None:
        self.metrics: dict[str, float] = {}
        self.sampled = 0.0
        """CPU seconds of this process when the last answer was there"""
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
        self.sampled = time.process_time()
        return made

    def score(self, prompts: list[Prompt], answers: list[str]) -> list[float | None]:
        return [(i * 7 % 11) / 10 for i in range(len(answers))]

    def arrivals(self, count: int) -> None: ...

    def release(self) -> None: ...

    def sleep(self) -> None: ...


def ready_builder(prompts: int, tokens: int) -> RoundBuilder:
    """Return what builds a round of so many prompts, with ``SAMPLES`` samples of so many tokens each."""
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


def main() -> None:
    parser = options_of("python -m benchmarks.ledger", __doc__)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--levels", action="store_true", help="compare levels of compression instead")
    given = parser.parse_args()
    builder = ready_builder(given.prompts, given.tokens)
    print(f"{machine()}\n{given.prompts * SAMPLES:,} samples of {given.tokens} tokens\n")
    if given.levels:
        with tempfile.TemporaryDirectory() as path:
            folder = RoundFolder(Path(path))
            builder.build(folder, 0, given.prompts, WEIGHTS)
            print(levels([folder.file(stage).read_bytes() for stage in STAGES], given.repeats))
        return
    sizes: dict[str, int] = {}
    after: dict[str, list[float]] = {"False": [], "True": []}

    def variant(compress: bool) -> list[Work]:
        def work() -> None:
            with tempfile.TemporaryDirectory() as path:
                folder = RoundFolder(Path(path), compress)
                builder.build(folder, 0, given.prompts, WEIGHTS)
                assert len(builder.groups(folder)) == given.prompts
                samples_table(folder)
                after[str(compress)].append(time.process_time() - cast(Any, builder.engine).sampled)
                sizes[str(compress)] = sum(file.stat().st_size for file in Path(path).iterdir())

        return [work]

    taken = alternate({str(on): partial(variant, on) for on in (False, True)}, given.repeats)
    rows = [
        [
            name.lower(),
            str(Spread.of(one.cpu for one in samples)),
            str(Spread.of(after[name])),
            f"{sizes[name] / 1e6:.1f}",
        ]
        for name, samples in taken.items()
    ]
    print(table(["rounds.compress", "CPU s", "CPU s after the last answer", "MB on disk"], rows))


def levels(files: list[bytes], repeats: int) -> str:
    """Return a table of the files' size at each level and the time to compress them."""
    sizes = {str(level): [0] * len(files) for level in range(1, 10)}

    def variant(level: str) -> list[Work]:
        def work(i: int) -> None:
            sizes[level][i] = len(gzip.compress(files[i], int(level), mtime=0))

        return [partial(work, i) for i in range(len(files))]

    taken = alternate({level: partial(variant, level) for level in sizes}, repeats)
    whole, smallest = sum(map(len, files)), sum(sizes["9"])
    rows = [
        [
            level,
            str(Spread.of(one.cpu for one in samples)),
            f"{sum(sizes[level]) / whole:.3f}",
            f"{sum(sizes[level]) / smallest:.3f}",
            str(ratio(samples, taken["9"])),
        ]
        for level, samples in taken.items()
    ]
    return table(["level", "CPU s", "size / text", "size / level 9", "CPU s / level 9"], rows)


if __name__ == "__main__":
    main()
