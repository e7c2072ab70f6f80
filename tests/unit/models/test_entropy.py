"""The policy's entropy: against float64 softmax of whole logits, whatever slices the vocabulary is walked
in."""

from __future__ import annotations

import pytest
import torch

from data.batches import collate
from models.logprobs import chunked_entropies
from tests.tiny import random_groups, tiny_policy


def by_hand(logits: torch.Tensor) -> torch.Tensor:
    shares = logits.double().softmax(-1)
    return -(shares * shares.clamp(min=1e-300).log()).sum(-1)


@pytest.mark.parametrize("budget", [1, 64 * 7, 10**6])
@pytest.mark.parametrize(
    ("scale", "softcap", "temperature", "spread"),
    [(1.0, None, 1.0, 1.0), (1.0, 5.0, 1.0, 8.0), (1.0, None, 1.0, 40.0), (0.25, 5.0, 0.6, 8.0)],
)
def test_it_and_its_gradient_are_those_of_the_whole_softmax(budget, scale, softcap, temperature, spread):
    torch.manual_seed(0)
    given = [torch.randn(7, 16), torch.randn(333, 16) * spread / 4, torch.randn(333)]
    leaves = [x.double().requires_grad_() for x in given]
    logits = scale * (leaves[0] @ leaves[1].T + leaves[2])
    wanted = by_hand((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature)
    form = {"scale": scale, "softcap": softcap, "temperature": temperature, "budget": budget}
    found = chunked_entropies(*given, **form)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=2e-6 * (1 + spread))
    weight = torch.randn(7).double()
    gradients = torch.autograd.grad(weight @ chunked_entropies(*leaves, **form), leaves)
    for one, other in zip(gradients, torch.autograd.grad(weight @ wanted, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("pack", "temperature"), [(False, 1.0), (False, 0.6), (True, 0.6)])
def test_the_policy_gives_it_where_each_completion_token_is_drawn(pack, temperature):
    policy, plain = tiny_policy(), tiny_policy().model.double()
    policy.temperature = temperature
    if pack:
        policy.use_packed_attention()
    rows = [row for group in random_groups(4) for row in group[0].rows]
    sequences = collate(rows, torch.device("cpu"), pack)
    found = policy(sequences, entropy=True)[1]
    assert found.shape == sequences.mask.shape
    assert not found[~sequences.mask].any()
    for r, row in enumerate(rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        wanted = by_hand(plain(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / temperature)
        values = found[r, : len(row.completion_ids)].double()
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
