"""Architectures that shipped model files name, and those with features between hidden state and logit: a tiny
random model of each, against its own logits."""

import copy
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import collate
from data.types import Sequence
from models.attention import KEPT_APART, MODEL_TYPES, packable, packs_rows
from models.checks import reach
from models.distributed import start
from models.export import export, full_state
from models.policy import Policy, decoder_blocks
from models.pretrained import check_model
from models.reference import score
from models.sharding import local, shard
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.tiny import VOCABULARY, random_row
from tests.unit.models.test_policy import settings, tokenizer

CPU = torch.device("cpu")
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **ENDS}
SIZES |= {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64}
SIZES["initializer_range"] = 0.3
GROUPED = {"num_key_value_heads": 2}
"""Attention with fewer key heads than query heads."""
WINDOW = {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}
EXPERTS = {**SIZES, **GROUPED, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
QWEN = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}
MIXTURES = {
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=40),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, head_dim=8),
    "gpt_oss": GptOssConfig(
        **(EXPERTS | WINDOW | {"num_local_experts": 4}),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, **GROUPED, tie_word_embeddings=True),
    "gemma2": Gemma2Config(
        **(SIZES | GROUPED | WINDOW), final_logit_softcapping=2.0, attn_logit_softcapping=1.0
    ),
    "mistral": MistralConfig(**SIZES, **GROUPED, sliding_window=None),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "cohere": CohereConfig(**SIZES, **GROUPED, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, **GROUPED, logits_scaling=3.0),
    **MIXTURES,
    "opt": OPTConfig(**(SIZES | {"word_embed_proj_dim": 16, "ffn_dim": 48, "init_std": 0.3})),
    "mamba2": Mamba2Config(
        **(SIZES | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8}),
        attn_implementation="eager",
    ),
}


def tiny(family: str) -> Policy:
    """A random model of one of ``FAMILIES``, or of any architecture that transformers has under this name."""
    torch.manual_seed(0)
    if family not in FAMILIES:
        kernel = "sdpa" if family in MODEL_TYPES else "eager"
        return Policy(AutoModelForCausalLM.from_config(config_of(family), attn_implementation=kernel))
    config = copy.deepcopy(FAMILIES[family])  # a model keeps its config, and its attention kernel in it
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation or "sdpa"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is left out
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return Policy(model)


def config_of(model_type: str) -> PretrainedConfig:
    """An architecture by the settings that most of them share."""
    old = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    by_name = {"bloom": old | {"hidden_size": 32}}
    by_name |= dict.fromkeys(("gpt2", "gpt_bigcode"), old | {"n_embd": 32, "n_positions": 64})
    widths = SIZES | GROUPED | {"num_experts_per_tok": 2}
    widths |= {} if model_type == "falcon" else {"head_dim": 8}
    widths |= {"sliding_window": None} if model_type in MODEL_TYPES else {}
    return CONFIG_MAPPING[model_type](**by_name.get(model_type, widths))


def rows(n: int = 4, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [
        random_row(rng, rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)) for _ in range(n)
    ]


def assert_gradients(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    """They are equal but for rounding."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_models_own_logits(family):
    """Each row alone, unpadded, through the model's own forward: also what padding and positions must not
    change. What fills a row up does not leak into it, to the bit but for mixtures, whose experts take more or
    fewer tokens at once. Shards change nothing. A feature of the head that is not known is refused."""
    policy, batch, world = tiny(family), rows(), start()
    sequences = collate(batch, CPU)
    got, total = policy(sequences), 0.0
    weights = torch.rand(got.shape)
    assert got.shape == sequences.mask.shape and not got[~sequences.mask].any()
    for r, row in enumerate(batch):
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
        own = policy.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        first, n = len(row.prompt_ids) - 1, len(row.completion_ids)
        want = own[first : first + n].gather(1, ids[0, first + 1 :, None])[:, 0]
        assert want.std() > 0 or n == 1
        torch.testing.assert_close(got[r, :n].double(), want, rtol=1e-5, atol=1e-5)
        total += (want * weights[r, :n]).sum()
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad((got * weights).sum(), parameters)
    assert_gradients(gradients, torch.autograd.grad(total, parameters))
    sharded = tiny(family).to(world.device)
    shard(sharded, blocks := decoder_blocks(sharded), world, torch.float32)
    (sharded(collate(batch, world.device)) * weights.to(world.device)).sum().backward()
    assert len(blocks) == 2
    assert_gradients((local(p.grad).cpu() for p in sharded.parameters()), gradients)
    padding = torch.arange(sequences.input_ids.shape[1]) >= torch.tensor(list(map(len, batch)))[:, None]
    assert padding.any()
    sequences.input_ids[padding] = 7
    near = 1e-5 if family in MIXTURES else 0.0
    torch.testing.assert_close(policy(sequences), got, rtol=near, atol=near)
    policy.check_head()
    policy.scale *= 1.01
    with pytest.raises(ConfigError, match="something to its logits"):
        policy.check_head()


PACKED = [
    *(family for family, config in FAMILIES.items() if config.model_type in KEPT_APART),
    *(model_type for model_type in KEPT_APART if model_type not in FAMILIES),
]
WHOLE_BATCH = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe")
"""Mixtures: an expert multiplies the tokens of all rows at once, and rounds by how many they are."""


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_padded_ones(family):
    """By transformers' mask, and by this project's kernel where it takes the model; gradients too."""
    policy, batch = tiny(family), rows(6)
    padded, packed = collate(batch, CPU), collate(batch, CPU, pack=True)
    parameters, weights = list(policy.parameters()), torch.rand(padded.mask.shape)
    want = policy(padded)
    want_grads = torch.autograd.grad((want * weights).sum(), parameters)
    torch.testing.assert_close(policy(packed), want, rtol=1e-5, atol=1e-5)
    policy.use_packed_attention()
    assert policy.packs == packable(policy.model.config, "sdpa")
    assert policy.packs == (policy.model.config.model_type in MODEL_TYPES), "all but those with windows"
    torch.testing.assert_close(policy(padded), want, rtol=1e-5, atol=1e-5)
    got = policy(packed)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_gradients(torch.autograd.grad((got * weights).sum(), parameters), want_grads)


@pytest.mark.parametrize("model_type", ["gpt_oss", "opt", "mamba2", "falcon", "bloom"])
def test_packing_is_refused_where_a_row_would_read_its_neighbours(model_type):
    policy, batch = tiny(model_type), rows(6)
    packed, padded = (policy(collate(batch, CPU, pack)) for pack in (True, False))
    assert (packed - padded).abs().max() > 0.1
    found, config = policy.model.config, ModelConfig(name="m", name_or_path="m", attn_implementation="eager")
    assert packs_rows(config, found)[0] is False
    said = rf"model.packing=true: .*\({model_type}\) would .* use auto or false"
    with pytest.raises(ConfigError, match=said):
        packs_rows(ModelConfig(name="m", name_or_path="m", packing=True), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_with_a_cache_takes_the_likeliest_token_each_time(family):
    """Prompts padded on the left, past a sliding window; each row as it is without padding and cache. Nothing
    changes that packed rows see."""
    policy, plain = tiny(family), tiny(family).model
    policy.use_packed_attention()
    before = policy(collate(rows(), CPU, policy.packs))
    ids = torch.tensor([[0, 0, 0, 5, 6], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    for row, real in zip(policy.generate(ids, mask, greedy), mask, strict=True):
        want = row[:5][real.bool()][None]
        for _ in range(6):
            logits = plain(want, use_cache=False).logits[:, -1]
            want = torch.cat([want, logits.argmax(-1, keepdim=True)], dim=1)
        assert row[5:].tolist() == want[0, -6:].tolist()
    assert torch.equal(policy(collate(rows(), CPU, policy.packs)), before)


@pytest.mark.parametrize("family", [*MIXTURES, "opt", "mamba2"])
def test_it_trains_and_what_is_written_is_what_was_trained(family, tmp_path):
    """A few sharded steps with syncing, whose step 0 finds policy and reference equal to the bit; then the
    exported files."""
    kernel = f"model.attn_implementation={FAMILIES[family]._attn_implementation or 'sdpa'}"
    config = engine_config(
        tmp_path, "dpo", "humanline=true", "model.batch_size=4", "n_epochs=3", "lr=0.001", kernel
    )
    policy = tiny(family).to(start().device)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    trainer, lines = run(config, make_segment(config, 12), make_trainer(config, policy))
    assert lines[0]["kl"] == 0.0 and lines[-1]["kl"] != 0.0
    assert not any(line["skipped"] for line in lines)
    after = weights(trainer)
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
    state = full_state(policy)
    export(state, policy, tokenizer(), tmp_path / "model", torch.float32)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def group(n: int = 3, seed: int = 0) -> list[Sequence]:
    """Two prompts with ``n`` answers each, of different lengths, in turn."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCABULARY, size).astype(np.int32) for size in (7, 4)]
    return [random_row(rng, prompts[i % 2]) for i in range(2 * n)]


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_rows_that_share_their_prompt_equal_rows_that_do_not_and_none_reads_another_answer(family):
    """Values and gradients, of weights and of the prompt's tokens that several rows read. To the bit, but for
    mixtures, a row reads no row before it, and no answer of the row that has its prompt."""
    policy, batch = tiny(family), group()
    policy.use_packed_attention()
    packed, shared = (collate(batch, CPU, pack=True, share=share) for share in (False, True))
    assert shared.input_ids.shape[1] < packed.input_ids.shape[1]
    parameters, weights = list(policy.parameters()), torch.rand(packed.mask.shape)
    want, got = policy(packed), policy(shared)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    want_grads, grads = (torch.autograd.grad((x * weights).sum(), parameters) for x in (want, got))
    assert_gradients(grads, want_grads)
    near = 1e-5 if family in WHOLE_BATCH else 0.0
    other = [replace(row, completion_ids=row.completion_ids[::-1] % 50 + 4) for row in batch[:2]] + batch[2:]
    for share, before in ((True, got), (False, want)):
        after = policy(collate(other, CPU, pack=True, share=share))
        assert not torch.equal(before[0], after[0])
        torch.testing.assert_close(before[2:], after[2:], rtol=near, atol=near)
        other[0] = replace(other[0], prompt_ids=other[0].prompt_ids[::-1] % 50 + 4)


def test_a_mask_that_knows_of_no_shared_prompt_is_not_used_for_one():
    policy = tiny("llama")  # transformers' own way
    with pytest.raises(AssertionError, match="no shared prompt"):
        policy(collate(group(), CPU, pack=True, share=True))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma2", "would drop .*use eager"),
        ("gpt_oss", "a gpt_oss has no such attention; use eager or flex_attention"),
    ],
)
def test_a_kernel_that_an_architecture_does_not_have_is_refused_before_weights(tmp_path, family, said):
    FAMILIES[family].save_pretrained(tmp_path)
    config = ModelConfig(name="m", name_or_path=str(tmp_path), max_length=64, max_prompt_length=32)
    with pytest.raises(ConfigError, match=rf"model.attn_implementation=sdpa: {said}"):
        check_model(config)
    check_model(replace(config, attn_implementation="eager"))


# -- rotary embeddings whose factors depend on the longest row of a batch ----------------------------

SWITCH = 32


def phi3(**more) -> Phi3Config:
    """A tiny Phi-3 whose LongRoPE switches to its long factors beyond ``SWITCH`` tokens."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 9.0, 16.0, 25.0]}
    reach = {"max_position_embeddings": 128, "original_max_position_embeddings": SWITCH}
    return Phi3Config(**(SIZES | GROUPED | reach | {"rope_parameters": longrope} | more))


def long_row(seed: int, length: int) -> Sequence:
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)
    return Sequence(ids[:2], ids[2:])


def test_longrope_is_refused_beyond_its_switch_and_taken_up_to_it(tmp_path):
    """Beyond it a row's score depends on who is scored with it."""
    torch.manual_seed(0)
    policy, short = Policy(Phi3ForCausalLM(phi3())).eval(), long_row(0, 12)
    alone, within, beyond = (
        score(policy, collate([short, *others], CPU))[0, :10]
        for others in ([], [long_row(1, SWITCH)], [long_row(1, SWITCH + 1)])
    )
    assert torch.allclose(alone, within, atol=1e-5) and not torch.allclose(alone, beyond, atol=1e-2)
    phi3().save_pretrained(tmp_path)
    config = settings(tmp_path, max_length=SWITCH, max_prompt_length=8)
    assert check_model(config).model_type == "phi3"
    with pytest.raises(ConfigError, match=rf"model\.max_length=33: .*LongRoPE.* up to {SWITCH} tokens"):
        check_model(replace(config, max_length=SWITCH + 1))
    phi3(rope_parameters=None).save_pretrained(tmp_path)
    assert check_model(replace(config, max_length=128)).model_type == "phi3"


def test_how_far_a_row_may_go_on_with_others():
    """With learned positions and LongRoPE: tests/unit/rollouts/test_decoding.py."""
    assert reach(LlamaConfig(max_position_embeddings=48)) is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert reach(LlamaConfig(max_position_embeddings=48, rope_parameters=dynamic)) == 48
