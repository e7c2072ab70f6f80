"""What real steps take on CPU ranks, counted by torch's own allocator: the truth that the memory plan is held
against. ``python -m tests.real_memory`` is one rank."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch.profiler import ProfilerActivity, profile

from common.ports import free_port
from common.worker_process import WorkerProcess, serve
from data.batches import Segment
from jobs.assembly import make_loss, trainer_class
from jobs.memory_simulation import Question, as_folder, deal_heaviest
from models.distributed import World, keep_gathered, start, stop
from models.loading import load_sharded
from models.policy import decoder_blocks
from models.storage_tracker import local_part

STEPS = 6
"""Steps of several ranks that are watched, all after the first. Of each rank the least of their peaks counts:
gloo's own threads may keep a gathered block for a moment after it was waited for, which no step needs. A
single rank gathers nothing, and its steps are alike."""


def real_peaks(questions: Seq[Question]) -> list[int]:
    """Bytes that the fullest rank had most at any time of a step that nothing disturbed, for questions of as
    many ranks."""
    size = questions[0].ranks
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
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


def peaks_of(questions: list[Question]) -> list[int]:
    """This rank's peaks."""
    world = start()
    try:
        return [peak_of(question, world) for question in questions]
    finally:
        stop()


def peak_of(question: Question, world: World) -> int:
    assert question.found is not None and not question.gpu
    with as_folder(question, question.found) as asked:
        config = replace(asked.config, model=replace(asked.config.model, from_config=True))
        policy, _ = load_sharded(config.model, world, seed=0)
        if config.model.reshard_after_forward is None:  # as where the plan of a run finds room
            keep_gathered(decoder_blocks(policy))
        trainer = trainer_class(config)(config, policy, make_loss(config), world)
        deal_heaviest(trainer)
        batch = question.batch
        segment = Segment((tuple(batch),), len(batch), len(batch) * (STEPS + 1), seed=0)
        if config.has_reference:
            trainer.start_segment(segment)
        trainer.step(segment)
        states = [*policy.parameters(), *policy.buffers()]
        states += [value for state in trainer.optimizer.state.values() for value in state.values()]
        storages = {s.data_ptr(): s.nbytes() for s in (local_part(t).untyped_storage() for t in states)}
        peaks = []
        for _ in range(STEPS if world.size > 1 else 1):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                trainer.step(segment)
            peaks.append(most_allocated(watched))
    return sum(storages.values()) + min(peaks)


def most_allocated(watched: profile) -> int:
    """The most that the allocator had given out and not taken back, over what it had at the beginning."""
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = watched.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


if __name__ == "__main__":
    serve({"peaks_of": peaks_of})
