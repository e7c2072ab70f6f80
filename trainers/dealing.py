"""The batches of a run, dealt to its ranks in microbatches (``data.batches`` says how), and how far the run
has come in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from config.schema_model import ModelConfig
from data.balance import Work, share_tokens, token_balance
from data.batches import Segment, Size, deal, dealing, microbatch, size_of, token_count
from data.types import Example, Microbatch
from models.attention import all_pack_rows, shares_prompts
from models.distributed import World, gather_objects


@dataclass(frozen=True)
class DealtBatch:
    """The global batch of a step, dealt to the ranks."""

    segment: Segment
    position: int
    """Index of the segment's batch."""
    examples: list[Example]
    microbatches: list[Microbatch]
    """Those of this rank, on the device."""
    done: tuple[float, float]
    """The share of the whole plan before and after the step, in [0, 1]."""
    tokens: int
    balance: float
    """How evenly the tokens lie on the ranks: 1 where no rank waits."""
    widest: int
    """Tokens of the widest microbatch on any rank."""


@dataclass
class Progress:
    """Position of a run in its plan: everything that the loop itself must remember."""

    step: int = 0
    """Index of the next optimizer step."""
    segment: int = 0
    position: int = 0
    """Index of the segment's next batch."""
    examples: int = 0
    tokens: int = 0
    skipped: int = 0
    """Number of steps in a row whose update was skipped for a non-finite gradient."""
    skipped_steps: int = 0
    """Number of all steps whose update was skipped."""
    silent_steps: int = 0
    """Number of the other steps that had no signal (``BasicTrainer.has_signal``) or no gradient."""

    def advance(self, batch: DealtBatch) -> None:
        """Count a step on this batch."""
        self.step += 1
        self.position += 1
        self.examples += len(batch.examples)
        self.tokens += batch.tokens

    def count(self, skipped: bool, silent: bool) -> int:
        """Record whether a step's update was skipped, or had no signal, once that is known; return how many
        in a row were skipped."""
        self.skipped = self.skipped + 1 if skipped else 0
        self.skipped_steps += skipped
        self.silent_steps += silent and not skipped
        return self.skipped


class Dealer:
    """Deals global batches to the ranks. Every rank has one and makes the same calls."""

    def __init__(
        self,
        model: ModelConfig,
        architecture: PretrainedConfig,
        world: World,
        arrange: Callable[[list[Example]], list[Example]],
        rows_per_example: int,
        work: Work,
    ) -> None:
        """``arrange``: the trainer's, which a batch goes through first. ``work``: what a row costs."""
        self.world, self.arrange, self.rows_per_example, self.work = world, arrange, rows_per_example, work
        # All ranks must deal rows alike.
        self.packing = all_pack_rows(model, architecture, gather_objects)
        self.shares_prompts = all(gather_objects(shares_prompts(model, architecture, self.packing)))
        self.size = size_of(model, world.size)  # of a training microbatch, at most
        self._ahead: DealtBatch | None = None

    @property
    def dealing(self) -> str:
        """How rows are dealt, in words: what one rank has of a run can be found again only so."""
        return dealing(self.packing, self.shares_prompts, self.work)

    def dealt(self, segment: Segment, position: int) -> DealtBatch:
        """Return the segment's batch ``position``, dealt to the ranks. The batch that a sync has scored for
        the next step is not dealt again."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.segment is segment and ahead.position == position:
            return ahead
        batch = segment.batch(position)
        slots = self.deal(self.arrange(batch), self.size)
        return DealtBatch(
            segment,
            position,
            batch,
            self.mine(slots),
            (segment.done(position), segment.done(position + 1)),
            token_count(batch),
            token_balance(slots, self.packing, self.shares_prompts),
            max(share_tokens(part, self.packing, self.shares_prompts) for slot in slots for part in slot),
        )

    def upcoming(
        self, segment: Segment, position: int, step: int, last: float
    ) -> Iterator[tuple[int, list[Microbatch]]]:
        """Yield (step, microbatches) of the segment's batches from ``position`` on, that of ``step``, up to
        step ``last`` or the segment's end."""
        following: DealtBatch | None = None
        while position < segment.steps and step <= last:
            batch = self.dealt(segment, position)
            self._ahead = following = following or batch
            yield step, batch.microbatches
            position += 1
            step += 1

    def microbatches(self, batch: list[Example], size: Size | None = None) -> list[Microbatch]:
        """Return this rank's share of a global batch in microbatches, on the device."""
        return self.share(self.arrange(batch), size or self.size)

    def share(self, arranged: list[Example], size: Size) -> list[Microbatch]:
        """Return this rank's microbatches, each of at most ``size``, of an arranged batch, on the device."""
        return self.mine(self.deal(arranged, size))

    def deal(self, arranged: list[Example], size: Size) -> list[list[list[Example]]]:
        """Deal ``arranged``, the output of ``arrange``, to the ranks: [slot][rank] lists of examples."""
        joined = self.packing, self.shares_prompts
        return deal(arranged, self.world.size, size, self.rows_per_example, *joined, self.work)

    def mine(self, slots: list[list[list[Example]]]) -> list[Microbatch]:
        """Return this rank's microbatches of the dealt ``slots``, on the device."""
        rank, device = self.world.rank, self.world.device
        return [microbatch(slot[rank], device, self.packing, self.shares_prompts) for slot in slots]
