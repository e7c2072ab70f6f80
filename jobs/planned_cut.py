"""How the batches of a run on GPUs are cut into microbatches where no setting says it: by the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from config.schema import Config
from data.batches import Segment
from jobs.memory_plan import cut_in_words, gpu_here, planned
from models.distributed import World, on_main
from trainers.basic import BasicTrainer


class PlannedCut:
    """The cut of a run's batches, planned on rank 0 while the weights load.

    Batches are cut on a GPU alone, where the heaviest does not fit in one pass, and neither
    ``model.microbatch_tokens`` nor ``model.gradient_accumulation_steps`` says how.
    """

    def __init__(self, config: Config, train: Segment, trainer: type[BasicTrainer], world: World) -> None:
        """Begin to plan. ``train``: what the run trains on."""
        self._config = config
        self._plan: Future[dict[str, Any]] | None = None
        if world.is_main and config.model.cut_by_plan and (card := gpu_here()) is not None:
            pool = ThreadPoolExecutor(1)
            self._plan = pool.submit(planned, config, train, [], trainer, world.size, card)
            pool.shutdown(wait=False)

    def settings(self, say: Callable[[str], None]) -> Config:
        """Wait for the plan, and return the settings with the ``model.microbatch_tokens`` that it found. A
        collective: every rank calls it. The run's config.yaml keeps what the user gave."""
        plan = on_main(lambda: None if self._plan is None else self._plan.result())
        if plan is None:
            return self._config
        if plan["over"] is None:  # there is no plan, and the sentence says why
            say(plan["text"])
        if (tokens := plan["microbatch_tokens"]) is None:
            return self._config
        say(f"{cut_in_words(tokens)}: by the memory plan, one pass would not fit")
        return replace(self._config, model=replace(self._config.model, microbatch_tokens=tokens))
