"""Every architecture that a shipped model file names, and those with features between hidden state and logit:
a tiny random model of each, against its own logits."""

import copy
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
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Phi3ForCausalLM,
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
from tests.tiny import ROOT, VOCABULARY, random_row
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
SHIPPED = {
    "llama3-8b-instruct": "llama",
    "gemma2-27b-instruct": "gemma2",
    "qwen2.5-1.5b-instruct": "qwen2",
    "mistral-7b-instruct": "mistral",
    "pythia-1.4b": "gpt_neox",
    "adder": "llama tied",
}
NAMELESS = {"base", "hub", "smollm2-135m-instruct"}


def tiny(family: str) -> Policy:
    if family not in FAMILIES:
        return of_type(family, "sdpa")
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])  # a model keeps its config, and its attention kernel in it
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation or "sdpa"
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is left out
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return Policy(model)


def rows(n: int = 4, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [
        random_row(rng, rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)) for _ in range(n)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_log_softmax_of_the_models_own_logits(family):
    """Each row alone, unpadded, through the model's own forward: also what padding and positions must not
    change. What fills a row up does not leak into it, to the bit but for mixtures, whose experts take more or
    fewer tokens at once."""
    policy, batch = tiny(family), rows()
    sequences = collate(batch, CPU)
    got = policy(sequences)
    assert got.shape == sequences.mask.shape and not got[~sequences.mask].any()
    for r, row in enumerate(batch):
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
        own = policy.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        first, n = len(row.prompt_ids) - 1, len(row.completion_ids)
        want = own[first : first + n].gather(1, ids[0, first + 1 :, None])[:, 0]
        assert want.std() > 0 or n == 1
        torch.testing.assert_close(got[r, :n].double(), want, rtol=1e-5, atol=1e-5)
    padding = torch.arange(sequences.input_ids.shape[1]) >= torch.tensor(list(map(len, batch)))[:, None]
    assert padding.any()
    sequences.input_ids[padding] = 7
    near = 1e-5 if family in MIXTURES else 0.0
    torch.testing.assert_close(policy(sequences), got, rtol=near, atol=near)


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


PACKED = [
    *(family for family, config in FAMILIES.items() if config.model_type in KEPT_APART),
    *(model_type for model_type in MODEL_TYPES if model_type not in FAMILIES),
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
    assert policy.packs or family in ("gemma2",), "the kernel takes all but those with windows"
    torch.testing.assert_close(policy(padded), want, rtol=1e-5, atol=1e-5)
    got = policy(packed)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad((got * weights).sum(), parameters), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


def of_type(model_type: str, kernel: str = "eager") -> Policy:
    """A tiny random model of any architecture that transformers has under this name, by the settings that
    most of them share."""
    torch.manual_seed(0)
    widths = (
        SIZES | GROUPED | {"num_experts_per_tok": 2} | ({} if model_type == "falcon" else {"head_dim": 8})
    )
    old = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    by_name = {"bloom": old | {"hidden_size": 32}}
    old |= {"n_embd": 32, "n_positions": 64}
    by_name |= dict.fromkeys(("gpt2", "gpt_bigcode"), old)
    window = {"sliding_window": None} if kernel == "sdpa" and model_type not in by_name else {}
    config = CONFIG_MAPPING[model_type](**by_name.get(model_type, widths) | window)
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=kernel))


@pytest.mark.parametrize("model_type", [t for t in KEPT_APART if t not in FAMILIES])
def test_transformers_keeps_packed_rows_apart_where_packing_is_taken(model_type):
    policy, batch = of_type(model_type), rows(6)
    policy.check_head()
    torch.testing.assert_close(
        policy(collate(batch, CPU, pack=True)), policy(collate(batch, CPU)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("model_type", ["gpt_oss", "opt", "mamba2", "falcon", "bloom"])
def test_packing_is_refused_where_a_row_would_read_its_neighbours(model_type):
    policy, batch = tiny(model_type) if model_type in FAMILIES else of_type(model_type), rows(6)
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
def test_sharded_gradients_are_those_of_the_whole_model(family):
    world = start()
    plain, sharded = (tiny(family).to(world.device) for _ in range(2))
    shard(sharded, decoder_blocks(sharded), world, torch.float32)
    sequences = collate(rows(), world.device)
    for policy in (plain, sharded):
        policy(sequences).sum().backward()
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(local(a.grad), b.grad, rtol=1e-5, atol=1e-6)


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
def test_rows_that_share_their_prompt_equal_rows_that_do_not(family):
    """Values and gradients, of weights and of the prompt's tokens that several rows read."""
    policy, batch = tiny(family), group()
    policy.use_packed_attention()
    packed, shared = (collate(batch, CPU, pack=True, share=share) for share in (False, True))
    assert shared.input_ids.shape[1] < packed.input_ids.shape[1]
    parameters, weights = list(policy.parameters()), torch.rand(packed.mask.shape)
    want, got = policy(packed), policy(shared)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    want_grads, grads = (torch.autograd.grad((x * weights).sum(), parameters) for x in (want, got))
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_packed_row_reads_no_other_answer(family, share):
    """To the bit, but for mixtures: not those before it, and not that of the row that has its prompt."""
    policy, batch = tiny(family), group()
    policy.use_packed_attention()
    other = [replace(row, completion_ids=row.completion_ids[::-1] % 50 + 4) for row in batch[:2]] + batch[2:]
    if not share:
        other[0] = replace(other[0], prompt_ids=other[0].prompt_ids[::-1] % 50 + 4)
    before, after = (policy(collate(these, CPU, pack=True, share=share)) for these in (batch, other))
    assert not torch.equal(before[0], after[0])
    near = 1e-5 if family in WHOLE_BATCH else 0.0
    torch.testing.assert_close(before[2:], after[2:], rtol=near, atol=near)


def test_a_mask_that_knows_of_no_shared_prompt_is_not_used_for_one():
    policy = tiny("llama")  # transformers' own way
    with pytest.raises(AssertionError, match="no shared prompt"):
        policy(collate(group(), CPU, pack=True, share=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_and_a_head_with_an_unknown_feature_is_refused(family):
    policy = tiny(family)
    blocks = decoder_blocks(policy)
    assert len(blocks) == 2 and all(type(b).__name__.endswith(("Layer", "Block")) for b in blocks)
    policy.check_head()
    policy.scale *= 1.01
    with pytest.raises(ConfigError, match="something to its logits"):
        policy.check_head()


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma2", "would drop .*use eager"),
        ("gpt_oss", "a gpt_oss has no such attention; use eager or flex_attention"),
        ("mamba2", "a mamba2 has no such attention; use eager"),
    ],
)
def test_a_kernel_that_an_architecture_does_not_have_is_refused_before_weights(tmp_path, family, said):
    FAMILIES[family].save_pretrained(tmp_path)
    config = ModelConfig(name="m", name_or_path=str(tmp_path), max_length=64, max_prompt_length=32)
    with pytest.raises(ConfigError, match=rf"model.attn_implementation=sdpa: {said}"):
        check_model(config)
    check_model(replace(config, attn_implementation="eager"))


def test_every_shipped_model_has_a_tiny_one_here():
    files = {path.stem for path in (ROOT / "config" / "model").glob("*.yaml")} - NAMELESS
    assert {name for name in files if not name.endswith("-init")} <= set(SHIPPED)
    assert set(SHIPPED.values()) <= set(FAMILIES)


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


SCALED = {"max_position_embeddings": 48, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
DYNAMIC = SCALED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "reached"),
    [
        (GPT2Config(n_positions=48), 48),
        (LlamaConfig(max_position_embeddings=48), None),
        (LlamaConfig(**SCALED), None),
        (LlamaConfig(**DYNAMIC), 48),
        (phi3(), SWITCH),
        (MambaConfig(), None),
    ],
)
def test_how_far_a_row_may_go_on_with_others(config, reached):
    assert reach(config) == reached
