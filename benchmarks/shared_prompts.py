"""The gain of a step in which the answers of a group compute their prompt once (``model.share_prompts``).

    python -m benchmarks.shared_prompts                                # groups of 8, lengths of preferences
    python -m benchmarks.shared_prompts --answers 2 --loss dpo         # pairs
    python -m benchmarks.shared_prompts --shape qwen2.5-1.5b --dtype bfloat16 --groups 8 --device cuda

Prompts are those of the data's rows. An answer is as long as that of some row, with random tokens. Steps with
and without sharing take turns on the same groups.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.measure import Sample, Variant, Work, alternate, machine, ratio, table
from benchmarks.parts import (
    Pair,
    Settings,
    Stepper,
    benchmark_pairs,
    fresh,
    make_trainer,
    random_policy,
    score_all,
    shape,
)
from common.options import options_of
from data.balance import share_tokens
from data.batches import Segment
from data.types import Example, Sequence
from models.policy import Policy

Groups = tuple[tuple[Example, ...], ...]


@dataclass(frozen=True)
class Drawn:
    """Groups of a loss, with ``answers`` answers to each prompt; a loss on pairs has two of them in every
    example."""

    loss: str
    answers: int

    def groups(self, pairs: list[Pair], count: int, vocabulary: int, seed: int = 0) -> Groups:
        rng = np.random.default_rng(seed)
        lengths = [len(row.completion_ids) for pair in pairs for row in pair]
        return tuple(self._group(g, pairs[g % len(pairs)][0], lengths, vocabulary, rng) for g in range(count))

    def _group(
        self, g: int, asked: Sequence, lengths: list[int], vocabulary: int, rng: np.random.Generator
    ) -> tuple[Example, ...]:
        sizes = rng.choice(lengths, self.answers)
        rows = [
            Sequence(asked.prompt_ids, rng.integers(3, vocabulary, size).astype(np.int32)) for size in sizes
        ]
        if self.loss == "dpo":
            both = zip(rows[::2], rows[1::2], strict=True)
            return tuple(Example(f"p{g}", (a, b)) for a, b in both)
        return tuple(Example(f"p{g}", (row,), 1.0 - 2 * (i % 2)) for i, row in enumerate(rows))


def prepare(settings: Settings, groups: Groups, base: Policy) -> list[Work]:
    """Return the timed steps, one per piece, over all groups once. On a GPU a piece ends when the GPU has
    finished it."""
    examples = sum(map(len, groups))
    plan, trainer = (
        Segment(groups, settings.batch_size, examples, seed=1),
        make_trainer(settings, fresh(base)),
    )
    score_all(trainer, plan)
    step = Stepper(trainer, plan)

    def finished() -> object:
        losses = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return losses

    return [finished] * plan.steps


def compare(settings: Settings, groups: Groups, base: Policy, rounds: int) -> dict[str, list[Sample]]:
    """Return the samples of steps without and with shared prompts."""
    variants: dict[str, Variant] = {
        name: partial(prepare, replace(settings, share_prompts=share), groups, base)
        for name, share in (("packed", False), ("shared", True))
    }
    return alternate(variants, rounds)


def saved(groups: Groups) -> float:
    """Return the share of the tokens that sharing does not compute, if groups stay whole."""
    plain, shared = (sum(share_tokens(g, True, share) for g in groups) for share in (False, True))
    return 1 - shared / plain


def arguments() -> argparse.Namespace:
    parser = options_of("python -m benchmarks.shared_prompts", __doc__)
    parser.add_argument("--data", default="hh", help="hh, gsm8k, drawn, or PATH:FORMAT")
    parser.add_argument("--longest", type=int, default=512, help="rows are cut at so many tokens")
    parser.add_argument("--loss", default="grpo", choices=("grpo", "kto", "dpo"))
    parser.add_argument("--answers", type=int, default=8, help="of each prompt")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2, help="groups of a microbatch; a step has two")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shape", default="small", help="tiny, small, qwen2.5-1.5b, llama-3-8b")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.loss == "dpo" and args.answers % 2:
        parser.error(f"--answers {args.answers}: a loss on pairs needs an even number")
    if args.groups % (2 * args.at_once):
        parser.error(f"--groups {args.groups}: give a multiple of twice --at-once, the groups of a step")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch sees")
    return args


def main() -> None:
    args = arguments()
    if args.device == "cpu":
        torch.set_num_threads(1)
    config = shape(args.shape)
    base = random_policy(config, torch.device(args.device))
    pairs = benchmark_pairs(args.data, args.groups, config.vocab_size, args.longest)
    groups = Drawn(args.loss, args.answers).groups(pairs, args.groups, config.vocab_size)
    per_group = len(groups[0])
    settings = Settings(args.loss, 2 * args.at_once * per_group, args.at_once * per_group, dtype=args.dtype)
    samples = compare(settings, groups, base, args.rounds)
    rows = [row for group in groups for example in group for row in example.rows]
    print(
        f"{machine()}\n{args.shape}, {args.loss}, {args.answers} answers a prompt, prompts of "
        f"{np.mean([len(r.prompt_ids) for r in rows]):.0f} and answers of "
        f"{np.mean([len(r.completion_ids) for r in rows]):.0f} tokens in the mean, {args.rounds} rounds\n"
    )
    print(
        table(
            ["tokens saved", "CPU: packed / shared", "wall: packed / shared"],
            [
                [
                    f"{saved(groups):.0%}",
                    str(ratio(samples["packed"], samples["shared"])),
                    str(ratio(samples["packed"], samples["shared"], "wall")),
                ]
            ],
        )
    )


if __name__ == "__main__":
    main()
