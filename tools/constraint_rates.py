"""Measure how often a model meets each kind of constraint, from its samples:

    python sample.py model=smollm2-135m-instruct data=constraints sampler=vllm sampler.top_p=1 rounds.samples=8 out=samples.jsonl
    python -m tools.constraint_rates samples.jsonl

A kind is of use in the band of 20 to 80 %: outside it most prompts have samples that score alike.
"""  # noqa: E501

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from common.options import options_of
from data.constraints import KINDS, met
from rollouts.files import read_samples
from rollouts.rewards.constraints import repetition, share_of_words

BAND, TRIES = (0.2, 0.8), 200


def rates(files: list[Path]) -> tuple[dict[str, list[bool]], dict[str, float]]:
    """Return (kind -> whether each try met it, means over all answers by name)."""
    tries: dict[str, list[bool]] = defaultdict(list)
    groups = [group for file in files for group in read_samples(file)]
    answers = []
    for group in groups:
        wanted = {k: v for k, v in json.loads(group.prompt.reference_answer or "{}").items() if k in KINDS}
        for completion in group.completions:
            verdicts = met(completion.text or "", wanted)
            answers.append(completion.text or "")
            for kind, is_met in verdicts.items():
                tries[kind].append(is_met)
    return tries, {
        "three-word sequences that are repeated": fmean(map(repetition, answers)),
        "words that are known": fmean(map(share_of_words, answers)),
    }


def main() -> None:
    parser = options_of("python -m tools.constraint_rates", __doc__)
    parser.add_argument("samples", nargs="+", type=Path, help="files of sample.py")
    tries, means = rates(parser.parse_args().samples)
    low, high = BAND
    print("| kind | asks | tries | met | |\n|---|---|---|---|---|")
    for kind, outcomes in sorted(tries.items(), key=lambda item: -fmean(item[1])):
        rate, words = fmean(outcomes), KINDS[kind].words.format("…")
        said = "" if low <= rate <= high else "out of the band"
        said += " too few tries" if len(outcomes) < TRIES else ""
        print(f"| `{kind}` | {words} | {len(outcomes)} | {rate:.0%} | {said} |")
    print()
    for name, mean in means.items():
        print(f"- {name}: {mean:.1%}")


if __name__ == "__main__":
    main()
