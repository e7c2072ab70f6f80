"""What real steps take on CPU ranks, counted by torch's own allocator: the truth that the memory plan is held
against. ``python -m tests.real_memory`` is one rank."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)

from common.ports import free_port
from common.worker_process import WorkerProcess, serve
from data.batches import Segment
from memory.simulate import MemoryRequest, as_folder, deal_heaviest
from models.distributed import World, start, stop
from models.loading import load_sharded
from models.policy import decoder_blocks
from models.sharding import keep_gathered, local_part
from trainers.assembly import make_loss, trainer_class

STEPS = 12
"""Steps of several ranks that are watched, all after the first. Of each rank the least of their peaks counts:
gloo's own threads may keep a gathered block for a moment after it was waited for, which no step needs. A
single rank gathers nothing, and its steps are alike."""


def real_peaks(questions: Seq[MemoryRequest]) -> list[int]:
    """Bytes that the fullest rank had most at any time of a step that nothing disturbed, for questions of as
    many ranks."""
    size = questions[0].ranks
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "memory",
        "WORLD_SIZE": str(size),
    }
    ranks = [
        WorkerProcess("tests.real_memory", log=None, env=where | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(size)
    ]
    try:
        for rank in ranks:
            rank.send("peaks_of", list(questions))
        return [max(peaks) for peaks in zip(*(rank.receive(300) for rank in ranks), strict=True)]
    finally:
        for rank in ranks:
            rank.close()


def peaks_of(questions: list[MemoryRequest]) -> list[int]:
    """This rank's peaks."""
    world = start()
    try:
        return [peak_of(question, world) for question in questions]
    finally:
        stop()


def peak_of(question: MemoryRequest, world: World) -> int:
    assert question.hf_config is not None and not question.gpu
    with as_folder(question, question.hf_config) as asked:
        config = replace(asked.config, model=replace(asked.config.model, from_config=True))
        policy, _ = load_sharded(config.model, world, seed=0)
        if config.model.reshard_after_forward is None:  # as where the plan of a run finds room
            keep_gathered(decoder_blocks(policy))
        trainer = trainer_class(config)(config, policy, make_loss(config), world)
        deal_heaviest(trainer)
        batch = question.batch
        segment = Segment((tuple(batch),), len(batch), len(batch) * (STEPS + 1), seed=0)
        if config.has_reference:
            trainer.reference.refresh(policy, 0, trainer.reference.upcoming(segment, 0, 0))
        trainer.step(trainer.dealer.dealt(segment, trainer.progress.position))
        states = [*policy.parameters(), *policy.buffers()]
        states += [value for state in trainer.optimizer.state.values() for value in state.values()]
        storages = {s.data_ptr(): s.nbytes() for s in (local_part(t).untyped_storage() for t in states)}
        steps = STEPS if world.size > 1 else 1
        peaks = [
            most_allocated(lambda: trainer.step(trainer.dealer.dealt(segment, trainer.progress.position)))
            for _ in range(steps)
        ]
    return sum(storages.values()) + min(peaks)


def most_allocated(work: Callable[[], Any]) -> int:
    """The most bytes that the allocator had given out during ``work`` and not taken back, over what it had at
    the beginning. This is torch.profiler's record of memory without that of operations, which takes fifteen
    times as long: nothing here has the one scope that is recorded."""
    with_memory = ProfilerConfig(
        ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), ""
    )
    _prepare_profiler(with_memory, {ProfilerActivity.CPU})
    _enable_profiler(with_memory, {ProfilerActivity.CPU}, {RecordScope.STATIC_RUNTIME_OP})
    work()
    events = [event for event in _disable_profiler().events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


if __name__ == "__main__":
    serve({"peaks_of": peaks_of})
