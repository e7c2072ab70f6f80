"""Token log-probabilities from hidden states, against float64."""

import pytest
import torch
from torch import Tensor

import models.logprobs as module
from models.logprobs import chunked_logprobs

D, V = 24, 391  # V is no multiple of any slice


def case(
    m: int = 37, dtype: torch.dtype = torch.float64, spread: float = 30.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets whose logits reach about +-``spread``."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=g, dtype=torch.float64) for n in ((m, D), (V, D), (V,)))
    weight *= spread / (hidden @ weight.T).abs().max()
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), torch.randint(V, (m,), generator=g)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The same in float64 and all at once."""
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


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
def test_values_and_gradients_equal_float64_autograd(form, with_bias):
    hidden, weight, bias, targets = case()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    grad = torch.randn(len(targets), dtype=torch.float64)
    results = []
    for function, more in ((plain, {}), (chunked_logprobs, {"budget": 64 * len(targets)})):
        leaves = [x.clone().requires_grad_() for x in inputs]
        values = function(*leaves[:2], leaves[2] if with_bias else None, targets, **form, **more)
        results.append((values, torch.autograd.grad(values, leaves, grad)))
    (want, want_grads), (got, got_grads) = results
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_bfloat16_inputs_give_logits_of_float32_precision():
    hidden, weight, bias, targets = case(512, torch.bfloat16)
    want = plain(hidden, weight, bias, targets)
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


@pytest.mark.parametrize("kept", [True, False])
def test_a_frozen_head_gets_no_product(monkeypatch, kept):
    """LoRA: the [V, D] gradient of a frozen head would be thrown away. Logits that are kept are computed
    once."""
    monkeypatch.setattr(module, "KEPT", 2 if kept else 0)
    hidden, weight, _, targets = case(dtype=torch.float32)
    shapes = []
    product = module._product

    def counted(a, b, *bias, **to):
        shapes.append((len(a), len(b)))
        return product(a, b, *bias, **to)

    monkeypatch.setattr(module, "_product", counted)
    logits = [(37, V)] * (1 if kept else 2)
    chunked_logprobs(hidden.requires_grad_(), weight, None, targets, budget=1 << 30).sum().backward()
    assert shapes == [*logits, (37, D)]
    shapes.clear()
    chunked_logprobs(hidden, weight.requires_grad_(), None, targets, budget=1 << 30).sum().backward()
    assert shapes == [*logits, (37, D), (V, D)]


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
