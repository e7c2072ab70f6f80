"""Rows that have ended leave a batch; those that stay are continued as they would have been, in every family
of models, and fewer rows are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Phi3ForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models.attention import decode
from models.distributed import start
from models.policy import Policy
from rollouts.decoding import FEWEST, Decoder, GrowingLayer, selectable_cache
from rollouts.embedded import uniforms
from tests.unit.models.test_families import SWITCH, phi3, tiny

CPU = torch.device("cpu")
STOPS = (5, 9, 11, 20, 33, 34, 35)
LONGEST = 30


@pytest.fixture(scope="module", autouse=True)
def process_group():
    start()


def batch(rows: int) -> tuple[list[np.ndarray], list[int], list[np.ndarray]]:
    """Prompts of 2 to 6 tokens, limits of 1 to ``LONGEST`` tokens of which most are the highest, and random
    numbers."""
    rng = np.random.default_rng(rows)
    prompts = [rng.integers(3, 40, rng.integers(2, 7)).astype(np.int32) for _ in range(rows)]
    limits = [int(rng.integers(1, LONGEST)) if row % 5 == 3 else LONGEST for row in range(rows)]
    return prompts, limits, [uniforms(7, f"{row}", 0, LONGEST) for row in range(rows)]


def ends(tokens: np.ndarray, limits: list[int], stops: tuple[int, ...] = STOPS) -> list[int]:
    """Return each row's length."""
    rows = zip(np.isin(tokens, stops), limits, strict=True)
    return [min(limit, *(np.flatnonzero(row) + 1).tolist(), LONGEST) for row, limit in rows]


def is_continued_as_alone(decoder, found, prompts, limits, draws, stops, rows) -> list[int]:
    """Check those of ``rows``, and return the lengths of all."""
    tokens, logprobs = found
    lengths = ends(tokens, limits, stops)
    for row in rows:
        one = ([prompts[row]], [limits[row]], [draws[row][: limits[row]]])
        ids, values = decoder.decode(*one, 0.9, 0.95, stops)
        own = slice(0, lengths[row])
        assert ends(ids, [limits[row]], stops) == [lengths[row]]
        assert np.array_equal(tokens[row, own], ids[0, own]), row
        np.testing.assert_allclose(logprobs[row, own], values[0, own], atol=2e-5)
    return lengths


def test_a_layer_with_room_holds_what_one_without_holds():
    generator, rows = torch.Generator().manual_seed(1), 7
    roomy, plain = GrowingLayer(), DynamicLayer()
    for step in range(60):
        new = torch.randn(2, rows, 2, 5 if step in (0, 30) else 1, 3, generator=generator)
        assert all(map(torch.equal, roomy.update(*new), plain.update(*new)))
        assert roomy.get_seq_length() == plain.get_seq_length()
        if step in (12, 13, 40):
            kept = torch.arange(rows)[torch.rand(rows, generator=generator) < 0.8]
            roomy.batch_select_indices(kept)
            plain.batch_select_indices(kept)
            rows = len(kept)


DECODED = ("llama tied", "gemma2", "gpt_neox", "granite", "qwen3_moe", "gpt_oss", "opt", "mamba2")
"""Families of each kind of cache and of position, scaled attention and experts among them."""


@pytest.mark.parametrize("family", DECODED)
def test_a_row_is_continued_as_it_is_alone(family):
    """Those that have ended leave it, unless ranks are in step; a prompt of several rows is computed once."""
    policy, computed = tiny(family), []
    prompts, limits, draws = batch(2 * FEWEST)
    prompts = [prompts[row // 4] for row in range(len(prompts))]
    longest, rows = max(map(len, prompts)), len(prompts)
    policy.model.register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].shape), with_kwargs=True
    )
    for synced in (True, False):
        computed.clear()
        decoder = Decoder(policy, CPU, synced)
        found = decoder.decode(prompts, limits, draws, 0.9, 0.95, STOPS)
        assert (selectable_cache(policy) is None) == (family == "mamba2")
        first = [(rows, longest)] if family == "mamba2" else [(rows // 4, longest - 1), (rows, 1)]
        assert computed[: len(first)] == first
        assert (computed[-1][0] < rows) == (not synced and family != "mamba2")
        lengths = is_continued_as_alone(decoder, found, prompts, limits, draws, STOPS, range(0, rows, 3))
        assert len(set(lengths)) > 5


@pytest.mark.parametrize(("queries", "keys"), [(6, 2), (4, 4)])
@pytest.mark.parametrize(("new", "hidden"), [(1, True), (1, False), (3, True)])
def test_attention_of_new_tokens_is_transformers_own(queries, keys, new, hidden):
    generator = torch.Generator().manual_seed(3)
    module = torch.nn.Module()
    module.num_key_value_groups = queries // keys  # type: ignore[assignment]
    q = torch.randn(5, queries, new, 8, generator=generator)
    k, v = torch.randn(2, 5, keys, 11, 8, generator=generator)
    mask = torch.arange(11) >= torch.tensor([0, 4, 7, 1, 0])[:, None, None, None]
    mask = mask.expand(5, 1, new, 11).tril(11 - new) if hidden else None
    found, wanted = (f(module, q, k, v, mask, scaling=0.3)[0] for f in (decode, sdpa_attention_forward))
    assert found.shape == wanted.shape == (5, new, queries, 8)
    torch.testing.assert_close(found, wanted)


def test_no_row_is_computed_beyond_the_models_positions():
    """As in the later parts of answers, where a long row has little room and a short one much."""
    torch.manual_seed(0)
    policy, end = Policy(Phi3ForCausalLM(phi3())).eval(), SWITCH
    rng = np.random.default_rng(3)
    sizes = [end - 2, end - 7, 5, end // 2, 3]
    prompts = [rng.integers(3, 40, size).astype(np.int32) for size in sizes]
    limits = [min(end - size, 30) for size in sizes]
    draws = [uniforms(7, f"{row}", 0, max(limits)) for row in range(len(sizes))]
    for decoder in (Decoder(policy, CPU, synced) for synced in (False, True)):
        found = decoder.decode(prompts, limits, draws, 0.9, 0.95, (58,))
        lengths = is_continued_as_alone(decoder, found, prompts, limits, draws, (58,), range(len(sizes)))
        assert lengths[2] > 8, "the short rows went on"
