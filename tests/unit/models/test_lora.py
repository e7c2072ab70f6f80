"""LoRA: what is trained, that the start is the base model, and that the export is the merged model."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from common.errors import ConfigError
from config.schema_model import ModelConfig, PeftConfig
from models.distributed import start
from models.export import export, full_state
from models.policy import Policy, decoder_blocks
from models.pretrained import check_model, check_weights, load_policy
from models.sharding import shard
from tests.tiny import tiny_llama, tiny_policy
from tests.unit.models.test_policy import CPU, batch, settings, tokenizer


def model_of(folder, dtype="float32", tied=True, **peft) -> ModelConfig:
    tiny_llama(tied=tied).save_pretrained(folder)
    return settings(folder, dtype=dtype, use_peft=True, peft=PeftConfig(lora_r=4, lora_alpha=12, **peft))


def load(folder, dtype="float32", tied=True, **peft) -> Policy:
    return load_policy(model_of(folder, dtype, tied, **peft), CPU)


def perturb(policy: Policy) -> None:
    """Adapters start as no change at all (B = 0)."""
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_float32_and_alone_trained_and_the_base_is_frozen_in_the_models_dtype(tmp_path, dtype):
    for name, parameter in load(tmp_path, dtype).named_parameters():
        adapter = "lora_" in name
        assert parameter.requires_grad == adapter
        assert parameter.dtype == (torch.float32 if adapter else getattr(torch, dtype))
        assert not (adapter and ("lm_head" in name or "embed" in name))


def test_it_starts_alike_on_every_rank_as_the_base_model_and_every_adapter_learns(tmp_path):
    policy, other = load(tmp_path), load(tmp_path)
    assert all(map(torch.equal, policy.parameters(), other.parameters()))
    assert torch.equal(policy(batch()), tiny_policy()(batch())) and len(decoder_blocks(policy)) == 2
    perturb(policy)
    policy(batch()).sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.any() for p in trained)


@pytest.mark.parametrize(
    ("tied", "more"), [(True, {}), (False, {}), (False, {"target_modules": ["q_proj", "embed_tokens"]})]
)
def test_the_export_is_the_merged_model(tmp_path, tied, more):
    """Against peft's own merge; sharded, as it is when a run ends."""
    policy = load(tmp_path / "base", tied=tied, **more)
    perturb(policy)
    before = policy(batch()).detach()
    want = copy.deepcopy(policy.model).merge_and_unload().state_dict()
    shard(policy, decoder_blocks(policy), start(), torch.float32)
    state = full_state(policy)
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-6, atol=1e-6)
    for _ in range(2):  # what is there already is replaced
        export(state, policy, tokenizer(), tmp_path / "out", torch.float32)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and loaded.dtype == torch.float32
    assert "packed" not in (tmp_path / "out" / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer().chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"base", "out"}, "nothing is left beside it"
    torch.testing.assert_close(Policy(loaded)(batch()), before, rtol=1e-4, atol=1e-4)


def test_layers_that_store_their_weight_transposed_are_merged_too(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = load_policy(settings(tmp_path, use_peft=True, peft=PeftConfig(lora_r=4)), CPU)
    perturb(policy)
    state, want = full_state(policy), copy.deepcopy(policy.model).merge_and_unload().state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-5)


def test_unknown_targets_and_adapters_on_the_head_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model.peft.target_modules=\['zap'\]: .*all-linear"):
        load(tmp_path, target_modules=["zap"])
    for tied, target, why in (
        (False, "lm_head", "puts adapters on the output head"),
        (True, "embed_tokens", "puts adapters on the embedding, whose matrix is this model's output head"),
    ):
        config = model_of(tmp_path, tied=tied, target_modules=[target, "q_proj"])
        with pytest.raises(ConfigError, match=rf"model.peft.target_modules=\['{target}', .*{why}"):
            check_weights(config, check_model(config))
