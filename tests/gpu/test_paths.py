"""Every path of the code that only a GPU takes, against its slow twin: the same formula in float64, or the
same step on the CPU. What a CPU can compute too is compared there as well, so that the comparisons are known
to hold.

    python -m pytest -m gpu tests/gpu --noconftest      # on a machine with a GPU

Beside torch, transformers and pytest this imports accelerate, hydra-core, omegaconf, pydantic, psutil and
pyarrow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.steps import (
    Settings,
    Stepper,
    drawn_pairs,
    llama,
    make_trainer,
    random_policy,
    score_all,
    segment_of,
)
from config.schema_model import SELECTIVE
from data.batches import microbatch
from data.types import Example, Sequence
from models.attention import flash_fails, heads_of
from models.fingerprint import weights_fingerprint
from models.logprobs import chunked_logprobs
from models.policy import Policy, decoder_blocks, set_up_layers
from models.quantization import NF4Linear, unpack
from trainers.optimizer import make_optimizer, update

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch sees"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
on_each = pytest.mark.parametrize("device", DEVICES)
CPU = torch.device("cpu")
SMALL = llama(4096, 256, 4, 4, 2, 512)
"""Architecture of the comparisons of whole models: heads of 64 numbers, two queries for each key."""


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in GPU:
        test = mark(test)
    return test


def computed_in(device: str) -> str:
    """The dtype in which models compute here: a CPU may multiply bfloat16 a hundred times slower."""
    return "bfloat16" if device == "cuda" else "float32"


def relative(actual: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of ``wanted``; 0 where both are 0 or empty."""
    actual, wanted = actual.detach().double().cpu(), wanted.detach().double().cpu()
    off = float((actual - wanted).norm())
    return off and off / float(wanted.norm())


def largest(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference, each relative to its number where that is above 1."""
    actual, wanted = actual.detach().double().cpu(), wanted.detach().double().cpu()
    return float(((actual - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) if wanted.numel() else 0.0


def within(numbers: dict[str, float], limits: dict[str, float]) -> None:
    off = [name for name, limit in limits.items() if not numbers[name] <= limit]
    assert not off, f"{numbers}, where the limits are {limits}"


# -- the head --------------------------------------------------------------------------------------


@on_each
@pytest.mark.parametrize("tokens", [512, 0])
def test_the_head_gives_what_float64_gives(device: str, tokens: int) -> None:
    """Log-probabilities and gradients in the vocabulary of Qwen2.5 (a small one on a CPU), from operands in
    bfloat16."""
    width, vocabulary = (1536, 151936) if device == "cuda" else (96, 3000)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=device)

    hidden, weight = drawn(tokens).bfloat16(), (drawn(vocabulary) * 8 / width**0.5).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    slopes = torch.randn(tokens, generator=generator, device=device)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    values = chunked_logprobs(leaves[0], leaves[1], None, targets)
    gradients = torch.autograd.grad((values * slopes).sum(), leaves)
    twins = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = (twins[0] @ twins[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((exact * slopes.double()).sum(), twins)
    numbers = {
        "log-probabilities": largest(values, exact),
        "gradient of states": relative(gradients[0], wanted[0]),
        "gradient of weights": relative(gradients[1], wanted[1]),
    }
    within(numbers, {"log-probabilities": 1e-4, "gradient of states": 0.01, "gradient of weights": 0.01})


# -- attention and whole models --------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_kernel_for_rows_of_different_lengths_gives_what_each_row_gives(
    shared: bool, compiled: bool
) -> None:
    """As a run tries it before its first step, with prompts of their own or shared."""
    assert flash_fails(heads_of(SMALL), shared, compiled) is None


WAYS = ("padded", "packed", "prompts shared", "checkpointed", "checkpointed selectively")
"""How a model's rows may be computed."""
COMPILED = ("padded, compiled", "packed, compiled", "compiled, checkpointed")
COMPILED += ("compiled, checkpointed selectively",)


@pytest.mark.parametrize(
    ("device", "way"),
    [
        *(("cpu", way) for way in WAYS),
        *(pytest.param("cuda", way, marks=GPU) for way in (*WAYS, *COMPILED)),
    ],
)
def test_a_model_gives_what_float64_gives(device: str, way: str) -> None:
    """Log-probabilities and gradients of a small model, against the same weights in float64 on the CPU with
    every row padded."""
    dtype, there = computed_in(device), torch.device(device)
    exact, wanted = exactly(dtype)
    fast = as_computed(small_model(dtype).to(there), way)
    packed, shared = not way.startswith("padded"), way == "prompts shared"
    if "compiled" in way:  # what was compiled for other rows has to serve
        fast(microbatch(some_rows()[:3], there, packed, shared).sequences)
    values, gradient = rows_and_gradient(fast, there, packed, shared)
    off = (values.double().cpu() - exact).abs()
    numbers = {
        "mean gap, nats": float(off.sum() / (exact != 0).sum()),
        "largest gap, nats": float(off.max()),
        "gradient": relative(gradient, wanted),
    }
    within(numbers, {"mean gap, nats": 0.03, "largest gap, nats": 0.3, "gradient": 0.05})


@cache
def exactly(dtype: str) -> tuple[Tensor, Tensor]:
    """What every way is held against, which takes longer than a way on a GPU."""
    return rows_and_gradient(small_model(dtype).double(), CPU, packed=False, shared=False)


def rows_and_gradient(
    policy: Policy, where: torch.device, packed: bool, shared: bool
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of ``some_rows``, [rows, completion tokens], and a gradient of their sum."""
    rows = some_rows()
    values = policy(microbatch(rows, where, packed, shared).sequences)
    shape = torch.linspace(-1, 1, values.shape[0], device=where)[:, None]
    gradients = torch.autograd.grad((values * shape).sum(), list(policy.parameters()))
    width = max(len(row.completion_ids) for example in rows for row in example.rows)
    counted = nn.functional.pad(values.detach(), (0, width - values.shape[1]))
    return counted, torch.cat([g.double().flatten().cpu() for g in gradients])


def small_model(dtype: str) -> Policy:
    return spread(random_policy(SMALL, CPU)).to(getattr(torch, dtype))


def some_rows() -> list[Example]:
    """Pairs of rows of different lengths, one of two tokens among them."""
    pairs = drawn_pairs(6, SMALL.vocab_size, prompt=40, completion=30, longest=160)
    pairs.append((Sequence(pairs[0][0].prompt_ids[:1], pairs[0][0].completion_ids[:1]), pairs[0][1]))
    return [Example(f"p{i}", pair) for i, pair in enumerate(pairs)]


def spread(policy: Policy) -> Policy:
    """The policy with larger weights. Initial ones give every word the same probability and every key the
    same attention, which hides most errors."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(5 if "head" in name else 3)
    return policy


def as_computed(policy: Policy, way: str) -> Policy:
    """The policy, set up to be computed in this way."""
    policy.use_packed_attention()
    if "checkpointed" in way:
        set_up_layers(policy, SELECTIVE if way.endswith("selectively") else True, "compiled" in way)
    elif "compiled" in way:
        for block in decoder_blocks(policy):
            block.forward = torch.compile(block.forward, dynamic=True, fullgraph=way.startswith("packed"))
    return policy


# -- the update ------------------------------------------------------------------------------------


@on_gpu
def test_an_update_is_the_cpus() -> None:
    """Two updates, with one between them that is skipped."""
    given = random_policy(llama(512, 64, 2, 4, 2, 128), CPU)
    moved = [
        torch.cat([(p - q).flatten() for p, q in zip(updated(given, where), given.parameters(), strict=True)])
        for where in ("cpu", "cuda")
    ]
    assert relative(moved[1], moved[0]) <= 1e-5


@on_each
def test_a_skipped_update_changes_nothing(device: str) -> None:
    given = random_policy(llama(512, 64, 2, 4, 2, 128), CPU)
    twice, once_more = updated(given, device), updated(given, device, skips=())
    assert all(torch.equal(a, b) for a, b in zip(twice, once_more, strict=True))


def updated(given: Policy, where: str, skips: tuple[int, ...] = (1,)) -> list[Tensor]:
    """The weights, on the CPU, after two updates by drawn gradients; those of ``skips`` come after another,
    which is skipped."""
    policy = copy.deepcopy(given).to(where)
    made = make_optimizer(policy, Settings().config())
    for i in range(2):
        if i in skips:
            for p in policy.parameters():
                p.grad = torch.full_like(p, torch.nan)
            update(made, 1e-3, torch.tensor(1.0, device=where))
        generator = torch.Generator().manual_seed(i)
        for p in policy.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(where)
        update(made, 1e-3, torch.tensor(0.0, device=where))
    return [p.detach().cpu() for p in policy.parameters()]


@on_each
def test_weights_in_4_bits_give_what_float64_gives(device: str) -> None:
    """The weights that 4 bits stand for, near those given; and the product with them and its gradient."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False).to(device)
    layer = NF4Linear(copy.deepcopy(linear)).to(device)
    x = torch.randn(9, 256, device=device).requires_grad_()
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    weights = unpack(layer.packed, layer.table, 256)
    kept, exact = weights.double(), x.detach().double().requires_grad_()
    wanted = exact @ kept.T
    numbers = {
        "weights": relative(weights, linear.weight),
        "product": relative(out, wanted),
        "gradient": relative(gradient, torch.autograd.grad(wanted.square().sum(), exact)[0]),
    }
    within(numbers, {"weights": 0.15, "product": 1e-3, "gradient": 1e-3})


@on_gpu
def test_the_fingerprint_of_weights_is_the_cpus() -> None:
    policy = random_policy(SMALL, CPU)
    here, there = (weights_fingerprint(policy.to(where).named_parameters()) for where in ("cpu", "cuda"))
    assert here == there


# -- steps -----------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_step_never_waits_for_the_device(loss: str) -> None:
    """Of a humanline run, k = 1. Otherwise the device would be idle. The traceback of a failure has the call
    that waits."""
    units = 16 if loss == "dpo" else 32
    settings = Settings(loss, units, units // 2, humanline=True, dtype="bfloat16", max_length=160)
    plan = segment_of(settings, drawn_pairs(16 * 4, SMALL.vocab_size, 40, 30, 160), 4)
    trainer = make_trainer(settings, random_policy(SMALL, torch.device("cuda")))
    score_all(trainer, plan)
    step = Stepper(trainer, plan)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(trainer.dealer.dealt(step.segment, trainer.progress.position))
    finally:
        torch.cuda.set_sync_debug_mode("default")
