"""The answers that an evaluation draws to its prompts, where each rank draws a share. Answers of the initial
weights are drawn once for all runs that start from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.types import Prompt
from models.distributed import World, gather_objects, on_main
from rollouts.answer_cache import AnswerCache
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings


class Answers:
    """``n`` answers to each of ``prompts``, always with the same seed. Every rank has an instance and makes
    the same calls."""

    def __init__(
        self,
        sampler: EmbeddedSampler,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        world: World,
        seed: int = 0,
    ) -> None:
        self.sampler, self.prompts, self.n = sampler, prompts, n
        self.settings, self.world, self.seed = settings, world, seed
        self.kept: AnswerCache | None = None

    @property
    def share(self) -> list[Prompt]:
        """This rank's prompts."""
        return self.prompts[self.world.rank :: self.world.size]

    def use_cache(self, cache_dir: Path, parts: Mapping[str, Any]) -> None:
        """Make calls with ``initial`` read the initial weights' answers from ``cache_dir`` and store them
        there. ``parts``: what answers depend on besides the sampling."""
        drawn = {"settings": asdict(self.settings), "n": self.n, "seed": self.seed}
        self.kept = AnswerCache(cache_dir, {**parts, **drawn})

    def mine(self, initial: bool) -> list[list[Sample]]:
        """Return the answers to this rank's share. ``initial``: whether the policy has its initial
        weights."""
        kept = self.kept if initial else None
        if kept is None:
            return self._drawn()
        known = self._known(kept)
        return [known[prompt.id] for prompt in self.share]

    def everywhere(self, initial: bool) -> dict[str, list[Sample]]:
        """Return prompt id -> answers for all prompts, on every rank."""
        if initial and self.kept is not None:
            return self._known(self.kept)
        return self._gathered()

    def _known(self, kept: AnswerCache) -> dict[str, list[Sample]]:
        """Return the cached answers, after drawing them if any is missing."""
        known: dict[str, list[Sample]] = on_main(kept.read)
        if not all(prompt.id in known for prompt in self.prompts):
            known |= self._gathered()
            on_main(lambda: kept.add(known))
        return known

    def _gathered(self) -> dict[str, list[Sample]]:
        parts = gather_objects({p.id: samples for p, samples in zip(self.share, self._drawn(), strict=True)})
        return {name: samples for part in parts for name, samples in part.items()}

    def _drawn(self) -> list[list[Sample]]:
        return self.sampler.sample(self.share, self.n, self.settings, self.seed)
