"""A layer over packed rows as a GPU computes it: torch.compile makes one graph of it, whatever the lengths of
the rows, and it gives what the layer gives uncompiled. The GPU's kernel has a stand-in here, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.nn.attention.varlen
from torch import Tensor

from benchmarks.steps import drawn_pairs, llama, random_policy
from data.batches import microbatch
from data.types import Example
from models import attention
from models.policy import decoder_blocks
from tests.gpu.test_paths import spread

CPU = torch.device("cpu")
SMALL = llama(500, 64, 2, 4, 2, 128)


def rows(query: Tensor, key: Tensor, limits: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, slice, Tensor]]:
    """(its tokens, the keys that it reads, where it may not look) of each row."""
    firsts, keys = (x.tolist() for x in limits)
    for i in range(len(firsts) - 1):
        n, m = firsts[i + 1] - firsts[i], keys[i + 1] - keys[i]
        hidden = ~torch.ones(n, m, dtype=torch.bool).tril(m - n)
        yield slice(firsts[i], firsts[i + 1]), slice(keys[i], keys[i + 1]), hidden


def attends(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[heads, own, keys], the shares of one row's attention."""
    logits = query.transpose(0, 1) @ key.permute(1, 2, 0) * scale
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def forward(query, key, value, first, keys, max_q, max_k, is_causal=False, scale=None, *others):
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    out = torch.empty_like(query)
    for own, read, hidden in rows(query, key, (first, keys)):
        k, v = (x[read].float().repeat_interleave(groups, 1) for x in (key, value))
        shares = attends(query[own].float(), k, hidden, scale)
        out[own] = (shares @ v.transpose(0, 1)).transpose(0, 1).to(out.dtype)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad, query, key, value, out, lse, first, keys, max_q, max_k, is_causal, rng, scale=None, *others
):
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for own, read, hidden in rows(query, key, (first, keys)):
        q, slope = (x[own].float().transpose(0, 1) for x in (query, grad))
        k, v = (x[read].float().repeat_interleave(groups, 1).transpose(0, 1) for x in (key, value))
        shares = attends(q.transpose(0, 1), k.transpose(0, 1), hidden, scale)
        moved = slope @ v.transpose(1, 2)
        logits = shares * (moved - (moved * shares).sum(-1, keepdim=True)) * scale
        found[0][own] = (logits @ k).transpose(0, 1)
        for to, part in ((found[1], logits.transpose(1, 2) @ q), (found[2], shares.transpose(1, 2) @ slope)):
            to[read] += part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(x.to(query.dtype) for x in found)


@pytest.fixture(scope="module")
def kernel() -> None:
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")(forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")(backward)


def trained(compiled: bool, share: bool) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, gradient) of four batches, each with more rows than the one before."""
    policy = spread(random_policy(SMALL, CPU)).bfloat16()
    policy.use_packed_attention()
    for block in decoder_blocks(policy) if compiled else ():
        block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True, backend="aot_eager")
    found = []
    for more in range(4):
        pairs = drawn_pairs(2 + more, SMALL.vocab_size, 30, 20, 120, seed=more)
        micro = microbatch([Example(f"p{i}", pair) for i, pair in enumerate(pairs)], CPU, True, share)
        values = policy(micro.sequences)
        gradients = torch.autograd.grad(values.square().sum(), list(policy.parameters()))
        found.append((values.detach(), torch.cat([g.flatten() for g in gradients])))
    return found


@pytest.mark.parametrize("share", [False, True])
def test_a_layer_over_packed_rows_is_one_graph(
    kernel: None, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    by_rows = trained(False, share)
    monkeypatch.setattr(attention, "on_gpu", lambda tensor: True)
    plain = trained(False, share)
    for (one, _), (other, _) in zip(plain, by_rows, strict=True):
        assert torch.allclose(one, other, atol=0.1)  # the stand-in computes what the rows give
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = trained(True, share)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 1 and not counted["graph_break"]
    for one, other in zip(plain, compiled, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
