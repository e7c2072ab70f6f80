"""Loading, refusing, generating, and what the forward promises beyond its values."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from common.errors import ConfigError
from config.schema_model import ModelConfig
from data.batches import FILL, collate
from models.pretrained import export_dtype, load_policy, load_tokenizer
from models.sharding import rounded
from tests.tiny import VOCABULARY, random_row, tiny_llama, tiny_policy

CPU = torch.device("cpu")
logging.disable_progress_bar()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a model in it, written in bfloat16."""
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<s>")), **({"eos_token": "</s>"} | special)
    )
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def settings(path: Path | str, **more) -> ModelConfig:
    sizes = {"max_length": 128, "max_prompt_length": 64, "dtype": "float32"}
    return ModelConfig(**({"name": "m", "name_or_path": str(path)} | sizes | more))


def batch(n: int = 3, pack: bool = False):
    rng = np.random.default_rng(0)
    return collate(
        [random_row(rng, rng.integers(3, VOCABULARY, 5).astype(np.int32)) for _ in range(n)], CPU, pack
    )


# -- the forward -----------------------------------------------------------------------------------


def test_rows_that_fill_a_batch_up_give_zeros_and_a_zero_gradient_to_every_weight():
    policy = tiny_policy(tied=False)
    values = policy(collate([FILL.rows[0]] * 2, CPU))
    assert not values.any()
    values.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


LAYERS = 10  # dynamo gives a function up after 8 variants of it


def test_compiled_layers_agree_with_plain_ones_and_are_used_in_training_alone(tmp_path, monkeypatch):
    """For rows of any number and length, whatever the policy did before. Graphs are run as they are."""
    calls: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        return lambda *inputs: calls.append(graph) or graph.forward(*inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    torch._dynamo.reset()
    tiny_llama(layers=LAYERS).save_pretrained(tmp_path)
    plain, policy = (
        load_policy(settings(tmp_path, activation_checkpointing="selective", compile=on), CPU)
        for on in (False, True)
    )
    assert list(plain.state_dict()) == list(policy.state_dict())
    greedy = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompts, answers = torch.randint(3, VOCABULARY, (3, 7)), []
    for n in (3, 5):  # another shape needs no other answer
        calls.clear()
        answers.append(policy.generate(prompts, torch.ones_like(prompts), greedy))
        assert answers[-1].shape == (3, 12) and not calls
        values, wanted = (each(batch(n)) for each in (policy, plain))
        assert len(calls) == LAYERS
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        gradients = (
            torch.autograd.grad(v.sum(), list(each.parameters()))
            for v, each in ((values, policy), (wanted, plain))
        )
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert torch.equal(*answers)


@pytest.mark.parametrize("pack", [False, True])
def test_what_is_recomputed_is_what_was_computed(run, pack):
    """Scores and gradients to the bit; of the products a part is done again."""

    def stepped(how: bool | str) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        policy = load_policy(settings(run, activation_checkpointing=how), CPU)
        if pack:
            policy.use_packed_attention()
        with FlopCounterMode(display=False) as counter:
            scores = policy(batch(pack=pack))
            scores.square().sum().backward()
        return scores, {n: p.grad for n, p in policy.named_parameters()}, counter.get_total_flops()

    (scores, gradients, least), *others = (stepped(how) for how in (False, "selective", True))
    for found, again, _ in others:
        assert torch.equal(found, scores) and list(again) == list(gradients)
        assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    (_, _, some), (_, _, most) = others
    assert least < some < most


# -- loading ---------------------------------------------------------------------------------------


def test_masters_are_float32_whatever_the_file_and_the_computation_are(run):
    policy = load_policy(settings(run, dtype="bfloat16"), CPU)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in policy.parameters())
    assert torch.equal(policy.model.lm_head.weight, tiny_llama().lm_head.weight.bfloat16().float())
    assert export_dtype(settings(run)) == torch.bfloat16
    assert export_dtype(settings(run, export_dtype="float16")) == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_within_and_as_they_were_behind_whatever_happens(dtype):
    policy = tiny_policy()
    before = [p.detach().clone() for p in policy.parameters()]
    with contextlib.suppress(KeyError), rounded(policy, dtype):
        for p, master in zip(policy.parameters(), before, strict=True):
            assert torch.equal(p, master.to(dtype).float())
        raise KeyError
    assert all(torch.equal(p, master) for p, master in zip(policy.parameters(), before, strict=True))


def test_random_weights_of_an_architecture_are_the_same_on_every_rank(run):
    """And not those of the file."""
    policies = [load_policy(settings(run, from_config=True), CPU, seed) for seed in (0, 0, 1)]
    one, two, other = (policy.model.lm_head.weight for policy in policies)
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert not torch.equal(one, tiny_llama().lm_head.weight.bfloat16().float())


def test_wrong_models_are_refused_with_key_value_and_remedy(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in (
        ("other", '{"model_type": "t5"}'),
        ("bare", (run / "model/config.json").read_text()),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    flash = {"attn_implementation": "flash_attention_2", "dtype": "float32"}
    for path, more, said in (
        ("/no/such/folder", {}, r"name_or_path=/no/such/folder: is not the folder of a model"),
        ("no-such-org/no-such-model", {}, r"name_or_path=no-such-org/no-such-model: was not found: .* hub"),
        (run, {"attn_implementation": "magic"}, r"attn_implementation=magic: use one of sdpa, eager"),
        (run, flash, r"flash_attention_2: computes in bfloat16 .* use model.dtype=bf"),
        (run, {"max_length": 129}, r"max_length=129: the model has 128 positions"),
        (tmp_path / "other", {}, r"is a t5, not a causal language model"),
        (tmp_path / "bare", {}, r"bare: .*bare has no model.safetensors and no model.safetensors.index"),
    ):
        with pytest.raises(ConfigError, match=rf"model\..*{said}"):
            load_policy(settings(path, **more), CPU)


def test_weights_that_are_no_numbers_are_refused_with_tensor_and_file(tmp_path):
    """Of several files; in the precision that they are written in."""
    model = tiny_llama().bfloat16()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("-inf")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    name = "model.layers.1.mlp.down_proj.weight"
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 1
    with pytest.raises(ConfigError, match=rf"not finite .*: {name} in {tmp_path}/{files[name]}; fetch"):
        load_policy(settings(tmp_path), CPU)


def test_the_tokenizer(run, tmp_path):
    loaded, template = load_tokenizer(settings(run)), tmp_path / "other.jinja"
    assert (loaded.eos_token_id, loaded.pad_token_id) == (1, 1)
    template.write_text("{{ messages[0].content }}!")
    loaded = load_tokenizer(settings(run, chat_template=str(template)))
    assert loaded.chat_template == "{{ messages[0].content }}!"
    with pytest.raises(ConfigError, match=r"model.chat_template=/no.jinja: no such file"):
        load_tokenizer(settings(run, chat_template="/no.jinja"))
    tokenizer(pad_token="<s>").save_pretrained(tmp_path / "padded")
    assert load_tokenizer(settings(run, tokenizer_name_or_path=str(tmp_path / "padded"))).pad_token_id == 0
    tokenizer(eos_token=None).save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match=r"tokenizer_name_or_path=.*endless: has no end-of-sequence token"):
        load_tokenizer(settings(run, tokenizer_name_or_path=str(tmp_path / "endless")))
