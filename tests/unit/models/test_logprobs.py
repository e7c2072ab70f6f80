"""Token log-probabilities and entropies from hidden states: against float64 and whole logits, at a
temperature, and in the memory that they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

import models.logprobs as module
from common.errors import ConfigError
from data.batches import collate
from models.logprobs import chunked_entropies, chunked_logprobs
from tests.integration.online import run_online
from tests.tiny import make_config, random_groups, tiny_policy

D, V = 24, 391  # V is no multiple of any slice


def case(
    m: int = 37, dtype: torch.dtype = torch.float64, spread: float = 30.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets whose logits reach about +-``spread``."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=g, dtype=torch.float64) for n in ((m, D), (V, D), (V,)))
    weight *= spread / (hidden @ weight.T).abs().max()
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), torch.randint(V, (m,), generator=g)


def whole(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in float64 and all at once."""
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return by_hand(logits / temperature, targets)


def by_hand(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("budget", [1, 64 * 37, 1 << 20])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"scale": 0.0625},
        {"softcap": 30.0},
        {"temperature": 0.7},
        {"temperature": 1.6, "scale": 1.5, "softcap": 20.0},
    ],
)
def test_values_and_gradients_equal_float64_autograd(form, with_bias, budget):
    """Whatever slices the vocabulary is walked in."""
    hidden, weight, bias, targets = case()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    grad = torch.randn(len(targets), dtype=torch.float64)

    def found(function) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        values = function(*leaves[:2], leaves[2] if with_bias else None)
        return [values, *torch.autograd.grad(values, leaves, grad)]

    ours = (
        lambda *of: chunked_logprobs(*of, targets, budget=budget, **form),
        lambda *of: chunked_entropies(*of, budget=budget, **form),
    )
    for i, function in enumerate(ours):
        wanted = found(lambda *of, i=i: whole(*of, targets, **form)[i])
        for one, other in zip(found(function), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=(1e-11, 1e-9)[i], atol=(1e-12, 1e-11)[i])


def test_bfloat16_inputs_give_logits_of_float32_precision():
    hidden, weight, bias, targets = case(512, torch.bfloat16)
    want, _ = whole(hidden, weight, bias, targets)
    got = chunked_logprobs(hidden, weight, bias, targets)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 1e-4
    rounded = (hidden @ weight.T + bias).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded - want).abs().max() > 1e-2, "the test could not tell a product rounded to bfloat16"


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = case(dtype=torch.float32, spread=3e4)
    hidden.requires_grad_()
    values = chunked_logprobs(hidden, weight, None, targets, budget=64 * len(targets))
    values.sum().backward()
    assert values.isfinite().all() and (values <= 0).all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, {"temperature": 1.6, "scale": 1.5, "softcap": 20.0}])
@pytest.mark.parametrize(("m", "threads"), [(1, 1), (37, 2)])
def test_kept_logits_give_the_same_bits(monkeypatch, m, threads, form, dtype):
    """As computed again, and as without gradient; in one slice and in several, in blocks of rows of any
    number. A second backward, which finds no logits, gives the same too."""
    before, found = torch.get_num_threads(), []
    *given, targets = case(m, dtype)
    grad = torch.randn(m, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(threads)
    try:
        for budget in (1 << 20, 64 * 2 * m):
            results = []
            for kept, block in ((0, 1), (100, 1), (100, 5 * V), (100, 1 << 18)):
                monkeypatch.setattr(module, "KEPT", kept)
                monkeypatch.setattr(module, "BLOCK", block)
                leaves = [x.clone().requires_grad_() for x in given]
                values = chunked_logprobs(*leaves, targets, budget=budget, **form)
                grads = torch.autograd.grad(values, leaves, grad, retain_graph=True)
                again = torch.autograd.grad(values, leaves, grad)
                with torch.no_grad():
                    scored = chunked_logprobs(*given, targets, budget=budget, **form)
                assert torch.equal(values, scored) and all(map(torch.equal, grads, again))
                results.append([values.detach(), *grads])
            found.append(results)
    finally:
        torch.set_num_threads(before)
    for first, *others in found:
        assert all(all(map(torch.equal, one, first)) for one in others)


# -- the policy's ----------------------------------------------------------------------------------


def sequences(pack: bool = False):
    rows = [row for group in random_groups(4) for row in group[0].rows]
    return collate(rows, torch.device("cpu"), pack)


def tempered(temperature: float):
    """A policy with ``model.logit_temperature``."""
    policy = tiny_policy()
    policy.temperature = temperature
    return policy


@pytest.mark.parametrize(("pack", "temperature"), [(False, 1.0), (False, 0.6), (True, 0.6)])
def test_both_are_those_of_the_models_own_divided_logits(pack, temperature):
    """With the gradients, at each completion token, and 0 elsewhere."""
    policy, plain, given = tempered(temperature).double(), tiny_policy().double(), sequences(pack)
    values, entropies = policy(given, entropy=True)
    assert values.shape == given.mask.shape and not (
        values[~given.mask].any() or entropies[~given.mask].any()
    )
    (values.sum() + entropies.sum()).backward()
    for r, row in enumerate(given.rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = plain.model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
        wanted, theirs = by_hand(logits, torch.tensor(row.completion_ids).long())
        torch.testing.assert_close(values[r, : len(wanted)], wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(entropies[r, : len(wanted)], theirs, rtol=1e-9, atol=1e-10)
        (wanted.sum() + theirs.sum()).backward()
    for (name, mine), other in zip(policy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("loss=bradley_terry model.logit_temperature=2", "a reward model has none"),
        (
            "loss=grpo online=true correction=masked sampler.temperature=1 sampler.top_p=1 "
            "model.logit_temperature=0.7",
            "sampler.temperature=1 and sampler.top_p=1; set sampler.temperature=0.7 sampler.top_p=1, or",
        ),
    ],
)
def test_a_temperature_that_means_nothing_is_refused(words, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*words.split())
    assert said in str(caught.value)


def test_an_online_run_records_its_temperature_and_trains_at_it(tmp_path):
    """On the command line: what the sampler noted is what the trainer finds before the first update."""
    words = ["online=true", "loss=grpo", "rounds.feedback=group", "correction=truncated", "humanline=true"]
    words += ["model.logit_temperature=0.7", "sampler.temperature=0.7", "sampler.top_p=1"]
    words += ["rounds.contexts=8", "rounds.contexts_per_round=8", "rounds.zero_variance=keep", "seed=2"]
    folder = run_online(tmp_path, "r", *words)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["kl"] == 0.0 and first["behavior_kl"] < 1e-6
    assert first["correction_weight"] == pytest.approx(1, abs=1e-3)
    line = json.loads((folder / "rounds" / "000" / "samples.jsonl").read_text().splitlines()[0])
    assert line["completions"][0]["behavior_temperature"] == 0.7
    offline = ["data=local", f"data.path={folder}/rounds/000/groups.jsonl", "data.eval_fraction=0"]
    with pytest.raises(ConfigError, match=r"row 1: its behavior_logprobs are at temperature 0\.7, and"):
        run_online(tmp_path, "s", "loss=grpo", "correction=truncated", *offline)


# -- memory ----------------------------------------------------------------------------------------


def peak(vocabulary: int, logprobs: Callable[..., Tensor], frozen: bool = False) -> int:
    """The most bytes that a forward and a backward take at once, beside what they are given."""
    hidden, targets = torch.randn(256, 8, requires_grad=True), torch.randint(vocabulary, (256,))
    weight = torch.randn(vocabulary, 8, requires_grad=not frozen)
    with MemTracker() as tracker:
        logprobs(hidden, weight, None, targets).sum().backward()
    return tracker.get_tracker_snapshot("peak")[hidden.device]["Total"]


def test_memory_is_flat_in_the_vocabulary():
    """Only the weight's gradient may grow, which a frozen head (LoRA) does not have."""
    sliced = partial(chunked_logprobs, budget=1 << 16)
    small, large, plain = peak(4096, sliced), peak(8192, sliced), peak(4096, lambda *of: whole(*of)[0])
    logits, gradient = 256 * 4096 * 4, 4096 * 8 * 4
    assert plain > 2 * logits, "the measure sees no logits"
    assert small < 0.75 * logits
    assert large - small < 2.1 * gradient, "which autograd copies once"
    assert peak(4096, sliced, frozen=True) < small - 0.9 * gradient
