"""Every path of the code that only a GPU takes, against its slow twin.

    python -m benchmarks.gpu_paths
    python -m benchmarks.gpu_paths --device cpu     # the same comparisons where there is no GPU

The twin is the same formula in float64, or the same step on the CPU. ``benchmarks.gpu_check`` runs this with
the checks of whole steps and runs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.checks import FAILED, NOT_HERE, NOTE, OK, Check, attempted, within, written
from benchmarks.measure import Work
from benchmarks.parts import (
    LOSSES,
    Settings,
    Stepper,
    drawn_pairs,
    llama,
    make_trainer,
    random_policy,
    score_all,
    segment,
)
from common.errors import ConfigError
from common.options import options_of
from config.schema_model import SELECTIVE
from data.batches import microbatch
from data.types import Example, Sequence
from models import flash_kernel
from models.attention import flash_fails, heads_of, why_not_faster
from models.distributed import local, start
from models.fingerprint import weights_fingerprint
from models.logprobs import chunked_logprobs
from models.policy import Policy, decoder_blocks, set_up_layers
from models.quantization import NF4Linear
from optimizers.build import make_optimizer, update

CPU = torch.device("cpu")
SMALL = llama(4096, 256, 4, 4, 2, 512)
"""Architecture of the comparisons of whole models: heads of 64 numbers, two queries for each key."""
TORCHAO = ("optimizer, AdamW8bit", "weights in 4 bits")
"""Checks that need torchao. Where it is not installed, they raise ConfigError."""


def computed_in(device: torch.device) -> str:
    """Return the dtype in which models compute here: a CPU may multiply bfloat16 a hundred times slower."""
    return "bfloat16" if device.type == "cuda" else "float32"


def checks(device: torch.device) -> Iterator[Check]:
    """Yield every comparison on ``device``."""
    works: dict[str, Callable[[], Check]] = {
        "head": partial(head, device, 512),
        "head without tokens": partial(head, device, 0),
    }
    for shared in (False, True):
        for compiled in (False, True):
            name = f"attention, prompt {'shared' if shared else 'own'}{', compiled' * compiled}"
            works[name] = partial(attention, device, name, shared, compiled)
    works |= {f"model, {way}": partial(model, device, way) for way in WAYS}
    works |= {f"optimizer, {name}": partial(optimizer, device, name) for name in OPTIMIZERS}
    works |= {
        "weights in 4 bits": partial(four_bits, device),
        "fingerprint of weights": partial(fingerprint, device),
        "a step waits for the device": partial(waits, device),
        "the same bits twice": partial(same_bits, device),
    }
    for name, work in works.items():
        yield (check := attempted(name, work, ConfigError if name in TORCHAO else None))
        if check.verdict == FAILED and not answers(device):
            yield Check("device", FAILED, f"does not answer any more after {name}; the rest is left out")
            return


def answers(device: torch.device) -> bool:
    """Return whether the device still computes. After some errors no later result on it is worth anything."""
    try:
        return bool((torch.ones(8, device=device).sum() == 8).item())
    except RuntimeError:
        return False


def relative(actual: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of ``wanted``; 0 where both are 0 or empty."""
    actual, wanted = actual.detach().double().cpu(), wanted.detach().double().cpu()
    off = float((actual - wanted).norm())
    return off and off / float(wanted.norm())


def largest(actual: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, each relative to its number where that is above 1."""
    actual, wanted = actual.detach().double().cpu(), wanted.detach().double().cpu()
    return float(((actual - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) if wanted.numel() else 0.0


# -- the head --------------------------------------------------------------------------------------


def head(device: torch.device, tokens: int) -> Check:
    """Log-probabilities and gradients of ``tokens`` tokens, in the vocabulary of Qwen2.5 (a small one on a
    CPU), from operands in bfloat16."""
    width, vocabulary = (1536, 151936) if device.type == "cuda" else (96, 3000)
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
    name = "head" if tokens else "head without tokens"
    limits = {"log-probabilities": 1e-4, "gradient of states": 0.01, "gradient of weights": 0.01}
    return within(name, f"{tokens} tokens, {vocabulary:,} words, against float64", numbers, limits)


# -- attention and whole models --------------------------------------------------------------------


def attention(device: torch.device, name: str, shared: bool, compiled: bool) -> Check:
    """The kernel for rows of different lengths, as a run tries it before its first step."""
    if device.type != "cuda":
        return Check(name, NOT_HERE, "a CPU computes attention row by row")
    heads = heads_of(SMALL)
    why = flash_fails(heads, shared, compiled)
    said = why or f"{flash_kernel.in_use()} gives what attention row by row gives"
    if why is None and (declined := why_not_faster(heads, compiled)) is not None:
        return Check(name, NOTE, f"{said}; {declined}")
    return Check(name, OK if why is None else FAILED, said)


WAYS = (
    *("padded", "packed", "prompts shared", "checkpointed", "checkpointed selectively"),
    *("padded, compiled", "packed, compiled", "compiled, checkpointed", "compiled, checkpointed selectively"),
)
"""How a model's rows may be computed."""


def model(device: torch.device, way: str) -> Check:
    """Log-probabilities and gradients of a small model, against the same weights in float64 on the CPU with
    every row padded."""
    if "compiled" in way and device.type != "cuda":
        return Check(f"model, {way}", NOT_HERE, "a CPU has other compiled code")
    dtype = computed_in(device)
    exact, wanted = exactly(dtype)
    fast = as_computed(small_model(dtype).to(device), way)
    packed = way not in ("padded", "padded, compiled")
    if "compiled" in way:  # what was compiled for other rows has to serve
        fast(microbatch(some_rows()[:3], device, packed, way == "prompts shared").sequences)
    logprobs, gradient = rows_and_gradient(fast, device, packed, way == "prompts shared")
    off = (logprobs.double().cpu() - exact).abs()
    numbers = {
        "mean gap, nats": float(off.sum() / (exact != 0).sum()),
        "largest gap, nats": float(off.max()),
        "gradient": relative(gradient, wanted),
    }
    limits = {"mean gap, nats": 0.03, "largest gap, nats": 0.3, "gradient": 0.05}
    return within(f"model, {way}", f"{dtype} against float64", numbers, limits)


@cache
def exactly(dtype: str) -> tuple[Tensor, Tensor]:
    """Return what every way is held against, which takes longer than a way on a GPU."""
    return rows_and_gradient(small_model(dtype).double(), CPU, packed=False, shared=False)


def rows_and_gradient(
    policy: Policy, where: torch.device, packed: bool, shared: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of ``some_rows`` and the gradient of a sum of them."""
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
    """Return pairs of rows of different lengths, one of two tokens among them."""
    pairs = drawn_pairs(6, SMALL.vocab_size, prompt=40, completion=30, longest=160)
    pairs.append((Sequence(pairs[0][0].prompt_ids[:1], pairs[0][0].completion_ids[:1]), pairs[0][1]))
    return [Example(f"p{i}", pair) for i, pair in enumerate(pairs)]


def spread(policy: Policy) -> Policy:
    """Return the policy with larger weights. Initial ones give every word the same probability and every key
    the same attention, which hides most errors."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(5 if "head" in name else 3)
    return policy


def as_computed(policy: Policy, way: str) -> Policy:
    """Return the policy, set up to be computed in this way."""
    policy.use_packed_attention()
    if "checkpointed" in way:
        set_up_layers(policy, SELECTIVE if way.endswith("selectively") else True, "compiled" in way)
    elif "compiled" in way:
        for block in decoder_blocks(policy):
            block.forward = torch.compile(block.forward, dynamic=True, fullgraph=way.startswith("packed"))
    return policy


# -- the update ------------------------------------------------------------------------------------

OptimizerName = Literal["AdamW", "Muon", "AdamW8bit"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("AdamW", "Muon", "AdamW8bit")


def optimizer(device: torch.device, name: OptimizerName) -> Check:
    """Three updates, the second of which is skipped, against the same on the CPU; the skipped one changes
    nothing."""
    given = random_policy(llama(512, 64, 2, 4, 2, 128), CPU)
    config = replace(Settings().config(), optimizer=name, lr=1e-3)
    results, kept = [], True
    for where in (CPU, device):
        policy = copy.deepcopy(given).to(where)
        made = make_optimizer(policy, config)
        for i, skip in enumerate((0.0, 1.0, 0.0)):
            before = [p.detach().clone() for p in policy.parameters()]
            generator = torch.Generator().manual_seed(i)
            for p in policy.parameters():
                drawn = torch.randn(p.shape, generator=generator).to(where)
                p.grad = torch.full_like(drawn, torch.nan) if skip else drawn
            update(made, 1e-3, torch.tensor(skip, device=where))
            after = list(policy.parameters())
            kept &= not skip or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        moved = [(p.detach().cpu() - q).flatten() for p, q in zip(after, given.parameters(), strict=True)]
        results.append(torch.cat(moved))
    if not kept:
        return Check(f"optimizer, {name}", FAILED, "a skipped update changed weights")
    numbers = {"update": relative(results[1], results[0])}
    # Muon's iteration is in bfloat16; a moment in 8 bits may be rounded to the next of 256 levels.
    limits = {"update": {"AdamW": 1e-5, "Muon": 0.05, "AdamW8bit": 0.02}[name]}
    return within(f"optimizer, {name}", "two updates and a skipped one, against the CPU", numbers, limits)


def four_bits(device: torch.device) -> Check:
    """The weights that 4 bits stand for, near those given; and the product with them and its gradient,
    against float64."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False).to(device)
    layer = NF4Linear(copy.deepcopy(linear)).to(device)
    x = torch.randn(9, 256, device=device).requires_grad_()
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    kept, exact = layer.weight.detach().double(), x.detach().double().requires_grad_()
    wanted = exact @ kept.T
    numbers = {
        "weights": relative(layer.weight, linear.weight),
        "product": relative(out, wanted),
        "gradient": relative(gradient, torch.autograd.grad(wanted.square().sum(), exact)[0]),
    }
    limits = {"weights": 0.15, "product": 1e-3, "gradient": 1e-3}
    return within("weights in 4 bits", "a layer of 128 by 256", numbers, limits)


def fingerprint(device: torch.device) -> Check:
    """The digest of the same weights here and on the CPU."""
    policy = random_policy(SMALL, CPU)
    digests = [weights_fingerprint(policy.to(where).named_parameters()) for where in (CPU, device)]
    same = digests[0] == digests[1]
    return Check("fingerprint of weights", OK if same else FAILED, "the CPU's" if same else "not the CPU's")


# -- steps -----------------------------------------------------------------------------------------


def stepper(loss: str, device: torch.device, steps: int) -> Stepper:
    """Return a humanline run of a small model, k = 1, that is ready for its first step."""
    pairs = 16 if device.type == "cuda" else 4
    units = pairs if loss == "dpo" else 2 * pairs
    settings = Settings(loss, units, units // 2, humanline=True, dtype=computed_in(device), max_length=160)
    plan = segment(settings, drawn_pairs(pairs * steps, SMALL.vocab_size, 40, 30, 160), steps)
    trainer = make_trainer(settings, random_policy(SMALL, device), start())
    score_all(trainer, plan)
    return Stepper(trainer, plan)


def syncs(step: Work) -> str:
    """Return ``none``, or the call that made the host wait for the device within a step; the trainer cannot
    be used afterwards."""
    if not torch.cuda.is_available():
        return "no device"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchron" not in str(error):
            raise
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = (
            ""
            if frame is None
            else f" at {frame.tb_frame.f_code.co_filename.rsplit('/', 2)[-1]}:{frame.tb_lineno}"
        )
        return str(error).splitlines()[0] + where
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def waits(device: torch.device) -> Check:
    """Whether the host waits for the device within a step, which would leave the device idle."""
    name = "a step waits for the device"
    if device.type != "cuda":
        return Check(name, NOT_HERE, "there is no device beside the host")
    sync_calls = {}
    for loss in LOSSES:
        step = stepper(loss, device, 4)
        step()
        sync_calls[loss] = syncs(partial(step.trainer.step, step.segment))
    waiting = {loss: where for loss, where in sync_calls.items() if where != "none"}
    return Check(name, FAILED if waiting else OK, str(waiting or "never"), sync_calls)


ROUNDING = 1e-4
"""Largest distance between two runs of the same steps, relative to the norm of the weights."""


def same_bits(device: torch.device) -> Check:
    """Whether two runs of the same three steps end at the same bits, without which a resumed run cannot
    either."""
    name, weights = "the same bits twice", []
    for _ in range(2):
        step = stepper("dpo", device, 3)
        for _ in range(3):
            step()
        weights.append(torch.cat([local(p.detach()).flatten() for p in step.trainer.policy.parameters()]))
    if torch.equal(weights[0], weights[1]):
        return Check(name, OK, "two runs of three steps end at the same weights")
    off = relative(weights[0], weights[1])
    said = f"two runs of three steps end {off:.1e} apart: a kernel adds in an order of its own"
    return Check(name, NOTE if off <= ROUNDING else FAILED, said, {"apart": off})


def main() -> None:
    parser = options_of("python -m benchmarks.gpu_paths", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default a GPU if there is one")
    parser.add_argument("--out", type=Path, help="also append every check to this file, as JSON lines")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = start().device
    if args.device == "cuda" and device.type != "cuda":
        parser.error("--device cuda: there is no GPU that torch sees")
    for check in written(checks(device), args.out):
        print(check, flush=True)


if __name__ == "__main__":
    main()
