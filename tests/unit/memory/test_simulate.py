"""The simulated step takes what a real one takes, by the count of torch's allocator, and a few layers say
what many take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from common.worker_process import WorkerError, WorkerProcess
from data.balance import row_tokens
from memory.bound import bound
from memory.fit import with_settings
from memory.simulate import MemoryNeed, MemoryRequest
from memory.tracker import WORKSPACE, StorageTracker
from models.simulated import simulated_gpu
from tests.memory_questions import NF4, WAYS, question, whole, with_many_layers
from tests.real_memory import real_peaks

CASES = [  # each way, shape and loss that holds something of its own; checkpointed LoRA is on ranks
    ("deep", "full", "dpo", ()),
    ("deep", "checkpointed", "kto", ()),
    ("deep", "selective", "ppo", ()),
    ("deep", "LoRA", "grpo", ()),
    ("deep", "full", "dpo", ("model.dtype=bfloat16", "model.packing=false")),
    ("deep", "full", "dpo", ("model.microbatches=1", "model.microbatch_tokens=300", "model.packing=false")),
    ("wide", "LoRA", "dpo", ("model.share_prompts=true",)),
    ("wide", "full", "grpo", ("model.share_prompts=true",)),
    ("many words", "checkpointed", "dpo", ("sync_mode=ema", "sync_alpha=0.5", "humanline=false")),
]


@pytest.fixture(scope="module")
def worker(quick_python: None) -> Iterator[WorkerProcess]:
    made = WorkerProcess("memory.plan", log=None, env={"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


def answered(worker: WorkerProcess, asked: MemoryRequest) -> MemoryNeed:
    found: MemoryNeed = worker.call("answer", asked, timeout=300)
    return found


def peak(found: MemoryNeed) -> int:
    return max(sum(parts.values()) for parts in found.peaks.values())


def test_a_step_takes_what_was_planned(worker: WorkerProcess) -> None:
    asked = [question(shape, *WAYS[way], *more, loss=loss) for shape, way, loss, more in CASES]
    real = real_peaks(asked)
    planned = [peak(answered(worker, one)) for one in asked]
    assert {i: f"{p} not {r}" for i, (p, r) in enumerate(zip(planned, real, strict=True)) if off(p, r)} == {}
    assert [i for i, (one, r) in enumerate(zip(asked, real, strict=True)) if layers_bound(one) < r] == []


def off(planned: int, taken: int) -> bool:
    return abs(planned / taken - 1) > 0.05


def layers_bound(asked: MemoryRequest) -> float:
    """Bytes of weights and layers at most by the shapes, for a step without its head and its evaluation."""
    one = with_settings(asked, eval_batch_size=1)
    assert one.hf_config is not None
    found = bound(one.config, one.hf_config, max(map(row_tokens, one.batch)), 1, None)
    assert found is not None
    return 2.0**30 * (found[0].parts["weights, gradients and optimizer"] + found[0].parts["activations"])


def test_a_few_layers_say_what_many_take(worker: WorkerProcess) -> None:
    asked = with_many_layers(question("deep", *WAYS["checkpointed"], gpu=True, ranks=8))
    few, every = answered(worker, asked), answered(worker, whole(asked))
    assert few.parameters == every.parameters and few.tokens == every.tokens
    assert peak(few) == pytest.approx(peak(every), rel=1e-3)
    assert len(few.peaks) < len(every.peaks)


@pytest.mark.parametrize("vocabulary", [50_000, 80_000])
def test_a_few_layers_say_it_where_scoring_takes_most_in_them(worker: WorkerProcess, vocabulary: int) -> None:
    """In 4 layers, and at the larger vocabulary in 5, the scores of the reference that has moved, which hold
    gradients, take more than the loss, which holds activations; in 10 layers the loss does."""
    asked = with_many_layers(question("many words", "model.dtype=bfloat16", "model.microbatches=1"))
    assert asked.hf_config is not None
    asked.hf_config.vocab_size = vocabulary
    assert peak(answered(worker, asked)) == pytest.approx(peak(answered(worker, whole(asked))), rel=1e-3)


@pytest.fixture(scope="module")
def of_four_ranks(worker: WorkerProcess) -> MemoryNeed:
    return answered(worker, question("deep", ranks=4, gpu=True))


def test_ranks_share_what_is_sharded(worker: WorkerProcess, of_four_ranks: MemoryNeed) -> None:
    """States fall as ranks are more; gathered blocks, and the activations of as many tokens, stay."""
    found = (of_four_ranks, answered(worker, question("deep", ranks=16, gpu=True)))
    few, many = (max(each.peaks.values(), key=lambda parts: sum(parts.values())) for each in found)
    for part in ("weights", "optimizer"):
        assert few[part] == pytest.approx(4 * many[part], rel=0.05)
    assert few["gathered blocks"] == pytest.approx(many["gathered blocks"], rel=0.05)


def test_blocks_that_stay_gathered_are_all_there_at_once(
    worker: WorkerProcess, of_four_ranks: MemoryNeed
) -> None:
    """At the moment when most is gathered: four layers where it is one, in the dtype of the computation."""
    stays = answered(worker, question("deep", "model.reshard_after_forward=false", ranks=4, gpu=True))
    one, four = (
        max(parts.get("gathered blocks", 0) for parts in each.peaks.values())
        for each in (of_four_ranks, stays)
    )
    assert four - one == 3 * 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64)


def test_a_gpu_has_its_own_ways(worker: WorkerProcess) -> None:
    """There the head's slices are eight times as large, and attention keeps no rows apart by hand."""
    cpu, gpu = (
        answered(worker, question("many words", "model.dtype=bfloat16", gpu=gpu)) for gpu in (False, True)
    )
    heads = [max(parts.get("head", 0) for parts in found.peaks.values()) for found in (cpu, gpu)]
    assert heads[0] != heads[1]


def test_attention_has_its_workspace_in_a_backward_on_a_gpu() -> None:
    """Of FlashAttention-2, which no tensor of torch's shows: float32 for the queries, and keys and values for
    each of eight heads where there are two."""
    for gpu, size in ((True, 300 * (8 * (64 + 1) * 4 + 2 * 8 * 64 * 2)), (False, 0)):
        tracker = StorageTracker()
        with simulated_gpu(gpu), FakeTensorMode(), tracker:
            q, k, v = (torch.empty(300, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2))
            limits = torch.empty(4, dtype=torch.int32)
            out = varlen_attn(q, k, v, limits, limits, 100, 100, window_size=(-1, 0), enable_gqa=True)
            tracker.enter(("backward", 0))
            out.sum().backward()
        assert tracker.peaks["backward", 0].get(WORKSPACE, 0) == size and WORKSPACE not in tracker.now


def test_what_needs_values_says_so(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerError, match=r"DataDependent|DynamicOutputShape"):
        answered(worker, question("deep", "loss._target_=tests.unit.memory.reading_loss.ipo", loss="ipo"))


FOUR_BITS = [question("deep", *NF4), question("wide", *NF4, "model.dtype=bfloat16")]


@pytest.fixture(scope="module")
def taken_in_4_bits() -> list[int]:
    """What the steps of FOUR_BITS took."""
    return real_peaks(FOUR_BITS)


def test_a_base_in_4_bits_takes_what_was_planned(worker: WorkerProcess, taken_in_4_bits: list[int]) -> None:
    """A frozen weight of a layer takes half a byte, a byte for each block of 64 (or 40) and 8 for each row;
    as many parameters are counted as it stands for."""
    found = [answered(worker, one) for one in FOUR_BITS]
    plain = answered(worker, question("deep", *WAYS["LoRA"]))
    shared = answered(worker, question("deep", *NF4, ranks=4))
    for answer, taken in zip(found, taken_in_4_bits, strict=True):
        assert peak(answer) == pytest.approx(taken, rel=0.05)
    assert found[0].parameters == plain.parameters
    rows_of_64, rows_of_160 = 2 * 64 + 2 * 32 + 2 * 160, 64
    packed = rows_of_64 * (32 + 1 + 8) + rows_of_160 * (80 + 4 + 8)
    weights = rows_of_64 * 64 + rows_of_160 * 160
    assert plain.resident["weights"] - found[0].resident["weights"] == 4 * (4 * weights - packed)
    assert shared.resident["weights"] == pytest.approx(found[0].resident["weights"] / 4, rel=0.02)
