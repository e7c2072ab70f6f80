"""What the memory plan decides of a run on GPUs where no setting does: how batches are cut into microbatches,
and whether layers stay gathered until their backward."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from config.schema import Config
from config.schema_model import ModelConfig
from data.batches import Segment
from jobs.memory_plan import cut_in_words, gathered_in_words, gpu_here, heaviest_evaluated, planned
from models.attention import packs_rows, shares_prompts
from models.distributed import World, keep_gathered, on_main
from models.policy import Policy, decoder_blocks
from models.shapes import architecture
from trainers.basic import BasicTrainer


def decided_by_plan(model: ModelConfig, ranks: int) -> bool:
    """Return whether the plan decides anything of a run on so many GPUs."""
    return model.cut_by_plan or (ranks > 1 and model.reshard_after_forward is None)


def joined_as_here(config: Config) -> Config:
    """Return the settings with what this machine's GPU decides: whether rows are packed, and share prompts.
    The plan is made without a GPU, where no kernel can be tried."""
    found = architecture(config.model)
    packing, _ = packs_rows(config.model, found)
    shared = shares_prompts(config.model, found, packing)
    return replace(config, model=replace(config.model, packing=packing, share_prompts=shared))


class PlannedSettings:
    """Settings that the memory plan decides on rank 0 while the weights load.

    It does so on GPUs alone. Batches are cut where the heaviest does not fit in one pass, and neither
    ``model.microbatch_tokens`` nor ``model.gradient_accumulation_steps`` says how. With
    ``model.reshard_after_forward=null``, layers stay gathered until their backward where there is room.
    """

    def __init__(
        self,
        config: Config,
        train: Segment,
        held_out: list[Segment],
        trainer: type[BasicTrainer],
        world: World,
    ) -> None:
        """Begin to plan. ``train`` and ``held_out``: what the run trains on and evaluates."""
        self._config = config
        self._plan: Future[dict[str, Any]] | None = None
        if world.is_main and decided_by_plan(config.model, world.size) and (card := gpu_here()) is not None:
            # A batch is cut for the training step alone; layers may stay gathered if evaluations fit too.
            undecided = world.size > 1 and config.model.reshard_after_forward is None
            held = heaviest_evaluated(held_out) if undecided else []
            pool = ThreadPoolExecutor(1)
            asked = joined_as_here(config)
            self._plan = pool.submit(planned, asked, train, held, trainer, world.size, card)
            pool.shutdown(wait=False)

    def apply(self, policy: Policy, say: Callable[[str], None]) -> Config:
        """Wait for the plan, set up the policy's layers, and return the settings with what was decided. A
        collective: every rank calls it. The run's config.yaml keeps what the user gave."""
        plan = on_main(lambda: None if self._plan is None else self._plan.result())
        if plan is None:
            return self._config
        if plan["over"] is None:  # there is no plan, and the sentence says why
            say(plan["text"])
        decided: dict[str, Any] = {}
        if (tokens := plan["microbatch_tokens"]) is not None:
            say(f"{cut_in_words(tokens)}: by the memory plan, one pass would not fit")
            decided["microbatch_tokens"] = tokens
        if plan["stays_gathered"]:
            say(f"{gathered_in_words()}: by the memory plan, there is room")
            decided["reshard_after_forward"] = False
            keep_gathered(decoder_blocks(policy))
        return replace(self._config, model=replace(self._config.model, **decided))
