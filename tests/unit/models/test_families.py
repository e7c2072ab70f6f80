"""Every architecture that a shipped model file names, and those with features between hidden state and logit: a tiny random model
of each, against its own logits."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import collate
from data.types import Sequence
from models.attention import MODEL_TYPES
from models.policy import Policy, decoder_blocks
from models.pretrained import check_model
from tests.tiny import ROOT, VOCABULARY, random_row

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
"""Attention with fewer key heads than query heads."""
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, **GROUPED, tie_word_embeddings=True),
    "gemma2": Gemma2Config(
        **SIZES,
        **GROUPED,
        head_dim=8,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=1.0,
        sliding_window=4,
        attn_implementation="eager",
    ),
    "mistral": MistralConfig(**SIZES, **GROUPED, sliding_window=None),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "cohere": CohereConfig(**SIZES, **GROUPED, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, **GROUPED, logits_scaling=3.0),
}
SHIPPED = {
    "llama3-8b-instruct": "llama",
    "gemma2-27b-instruct": "gemma2",
    "qwen2.5-1.5b-instruct": "qwen2",
    "mistral-7b-instruct": "mistral",
    "pythia-1.4b": "gpt_neox",
    "adder": "llama tied",
}
NAMELESS = {"base", "hub"}


def tiny(family: str) -> Policy:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])  # a model keeps its config, and its attention kernel in it
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation or "sdpa"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(
            "bias"
        ):  # ones and zeros would hide a norm or a bias that is left out
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return Policy(model)


def rows(n: int = 4, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [
        random_row(rng, rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)) for _ in range(n)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_log_softmax_of_the_models_own_logits(family):
    """Each row alone, unpadded, through the model's own forward: also what padding and positions must not change."""
    policy = tiny(family)
    batch = rows()
    sequences = collate(batch, CPU)
    got = policy(sequences)
    assert got.shape == sequences.mask.shape
    assert not got[~sequences.mask].any()
    for r, row in enumerate(batch):
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
        own = policy.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        first, n = len(row.prompt_ids) - 1, len(row.completion_ids)
        want = own[first : first + n].gather(1, ids[0, first + 1 :, None])[:, 0]
        assert want.std() > 0 or n == 1
        torch.testing.assert_close(got[r, :n].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_through_the_models_own_logits(family):
    policy, sequences = tiny(family), collate(rows(), CPU)
    weights = torch.rand(sequences.mask.shape)
    parameters = list(policy.parameters())
    got = torch.autograd.grad((policy(sequences) * weights).sum(), parameters)
    logits = policy.model(sequences.input_ids, use_cache=False).logits.flatten(0, 1)
    own = logits.log_softmax(-1)[sequences.predict, sequences.targets]
    want = torch.autograd.grad((own * weights.flatten()[sequences.cells]).sum(), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_padded_ones(family):
    """By transformers' mask, and by this project's kernel where it takes the model; gradients too."""
    policy, batch = tiny(family), rows(6)
    padded, packed = collate(batch, CPU), collate(batch, CPU, pack=True)
    parameters, weights = list(policy.parameters()), torch.rand(padded.mask.shape)
    want = policy(padded)
    want_grads = torch.autograd.grad((want * weights).sum(), parameters)
    torch.testing.assert_close(policy(packed), want, rtol=1e-5, atol=1e-5)
    policy.use_packed_attention()
    assert policy.packs == (policy.model.config.model_type in MODEL_TYPES)
    torch.testing.assert_close(policy(padded), want, rtol=1e-5, atol=1e-5)
    got = policy(packed)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad((got * weights).sum(), parameters), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_packed_row_does_not_see_its_neighbours(family):
    """To the bit: another row's tokens do not enter at all."""
    policy, batch = tiny(family), rows(3)
    policy.use_packed_attention()
    other = [
        Sequence(batch[0].prompt_ids[::-1] % 50 + 4, np.full_like(batch[0].completion_ids, 7)),
        *batch[1:],
    ]
    before, after = (policy(collate(these, CPU, pack=True)) for these in (batch, other))
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_packed_rows_on_a_gpu(family):
    """The flash kernel for uneven lengths, in bfloat16: close to padded rows in float32, and blind to the neighbours to the bit."""
    gpu, policy, batch = torch.device("cuda"), tiny(family).cuda(), rows(3)
    want = policy(collate(batch, gpu))
    policy.bfloat16().use_packed_attention()
    got = policy(collate(batch, gpu, pack=True))
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.3)
    other = [
        Sequence(batch[0].prompt_ids[::-1] % 50 + 4, np.full_like(batch[0].completion_ids, 7)),
        *batch[1:],
    ]
    assert torch.equal(policy(collate(other, gpu, pack=True))[1:], got[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found(family):
    blocks = decoder_blocks(tiny(family))
    assert len(blocks) == 2
    assert all(type(block).__name__.endswith("Layer") for block in blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_checked_and_a_feature_that_is_not_known_is_refused(family):
    policy = tiny(family)
    policy.check_head()
    policy.scale *= 1.01
    with pytest.raises(ConfigError, match="something to its logits"):
        policy.check_head()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_kernel_that_drops_the_attention_softcap_is_refused(tmp_path, kernel):
    FAMILIES["gemma2"].save_pretrained(tmp_path)
    config = ModelConfig(
        name="g", name_or_path=str(tmp_path), attn_implementation=kernel, max_length=64, max_prompt_length=32
    )
    if kernel == "eager":
        check_model(config)
        return
    with pytest.raises(ConfigError, match=r"model.attn_implementation=sdpa: would drop .*use eager"):
        check_model(config)


def test_every_shipped_model_has_a_tiny_one_here():
    files = {path.stem for path in (ROOT / "config" / "model").glob("*.yaml")} - NAMELESS
    assert {name for name in files if not name.startswith("adder")} <= set(SHIPPED)
    assert set(SHIPPED.values()) <= set(FAMILIES)
