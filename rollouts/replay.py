"""The choice of contexts from earlier rounds that a round trains on again (``rounds.replay``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollouts.rounds import derived_seed


def replayed(earlier: Sequence[Sequence[str]], count: int, index: int, seed: int) -> list[list[str]]:
    """Return, for each earlier round, the prompt ids that round ``index`` trains on again. ``earlier`` has
    the prompt ids that each earlier round sampled and kept.

    ``count`` of these are drawn without replacement, each as likely as any other however old it is. If there
    are no more than ``count``, all are taken.
    """
    places = [(r, prompt_id) for r, prompts in enumerate(earlier) for prompt_id in prompts]
    rng = np.random.default_rng(derived_seed(seed, f"replay {index}"))
    chosen = sorted(rng.permutation(len(places))[:count].tolist())
    out: list[list[str]] = [[] for _ in earlier]
    for place in chosen:
        r, prompt_id = places[place]
        out[r].append(prompt_id)
    return out
