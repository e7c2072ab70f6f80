"""model.compile=true: the decoder's layers stay compiled in training, whatever the policy did before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import GenerationConfig

from benchmarks.steps import drawn_pairs, llama
from config.schema_model import ModelConfig
from config.sections import with_defaults
from data.batches import microbatch
from data.types import Example
from models.policy import Policy
from models.pretrained import load_policy

LAYERS = 10  # dynamo gives a function up after 8 variants of it


class Counted:
    """A backend of torch.compile that runs the graph as it is and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, example: object) -> object:
        def run(*inputs: object) -> object:
            self.calls += 1
            return graph.forward(*inputs)

        return run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    backend = Counted()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    return backend


def compiled_policy(folder: Path) -> Policy:
    small = llama(100, 32, LAYERS, 2, 2, 64)
    small.save_pretrained(folder)
    config = with_defaults(
        ModelConfig, name="small", name_or_path=str(folder), from_config=True, compile=True, dtype="float32"
    )
    return load_policy(config, torch.device("cpu"), seed=1)


def compiled_calls(policy: nn.Module, backend: Counted) -> int:
    """Number of compiled layers that one forward of training runs."""
    pairs = drawn_pairs(4, 100, 12, 8, 40, seed=3)
    micro = microbatch([Example(f"p{i}", pair) for i, pair in enumerate(pairs)], torch.device("cpu"), False)
    before = backend.calls
    policy(micro.sequences).sum().backward()
    return backend.calls - before


def test_layers_are_compiled_in_training_after_answers(counted: Counted, tmp_path: Path) -> None:
    policy = compiled_policy(tmp_path)
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    prompts = torch.randint(1, 100, (3, 7))
    answers = policy.generate(prompts, torch.ones_like(prompts), settings)
    assert answers.shape == (3, 13) and counted.calls == 0
    assert compiled_calls(policy, counted) == LAYERS
    again = policy.generate(prompts, torch.ones_like(prompts), settings)
    assert torch.equal(answers, again) and compiled_calls(policy, counted) == LAYERS
