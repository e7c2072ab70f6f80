"""Value head and reward head: where they read, what they leave alone, and what a stock loader finds of
them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from data.batches import microbatch
from data.types import Example, Prompt, Turn
from models.distributed import start
from models.export import export, full_state
from models.heads import ValuePolicy
from models.loading import load_sharded
from models.policy import Policy, causal_lm, decoder_blocks
from models.pretrained import load_policy, load_tokenizer
from models.sharding import shard
from rollouts.rewards.models import Place
from rollouts.rewards.models import make as classifier
from rollouts.rewards.settings import ClassifierConfig
from tests.tiny import make_config, random_groups, tiny_llama

CPU = torch.device("cpu")


def batch(pack=False):
    return microbatch([group[0] for group in random_groups(5, seed=1)], CPU, pack).sequences


@pytest.fixture(scope="module")
def reward_config():
    return make_config("loss=bradley_terry").model


@pytest.mark.parametrize("pack", [False, True], ids=["grid", "packed"])
def test_the_reward_is_what_a_stock_classifier_says_of_each_row_alone(reward_config, pack):
    policy, sequences = load_policy(reward_config, CPU), batch(pack)
    sequences.input_ids = sequences.input_ids % 19
    with torch.no_grad():
        found = policy(sequences)
        whole = [torch.tensor([[*row.prompt_ids, *row.completion_ids]]) % 19 for row in sequences.rows]
        stock = [causal_lm(policy.model)(ids).logits.item() for ids in whole]
    torch.testing.assert_close(found.sum(dim=1), torch.tensor(stock), atol=1e-5, rtol=1e-5)
    for r, row in enumerate(sequences.rows):
        assert not found[r, torch.arange(found.shape[1]) != len(row.completion_ids) - 1].any()


def test_the_exported_reward_model_is_a_stock_classifier_that_rounds_score_with(reward_config, tmp_path):
    reward_model, _ = load_sharded(reward_config, start())
    state = full_state(reward_model)
    assert "score.weight" in state and "lm_head.weight" not in state
    export(state, reward_model, load_tokenizer(reward_config), tmp_path / "model", torch.float32)
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").config
    assert stock.num_labels == 1 and stock.pad_token_id is None
    assert stock.architectures == ["LlamaForSequenceClassification"]
    sizes = {"max_length": 64, "max_prompt_length": 32, "dtype": "float32"}
    settings = ClassifierConfig(name_or_path=str(tmp_path / "model"), rendering="turn", **sizes)
    prompts = [Prompt((Turn("user", f"{a}+{b}="),)) for a, b in ((12, 34), (5, 67), (80, 9))]
    answers = ["2+4=6;1+3=4;46", "12", "0+9=9;8;89"]
    scores = classifier(settings, CPU).score(prompts, answers)
    rows = Place(settings, "reward.classifier", "turn").rows(prompts, answers)
    with torch.no_grad():
        mine = reward_model(microbatch([Example("p", (row,)) for row in rows], CPU).sequences).sum(dim=1)
    assert all(row.completion_ids[-1] == 1 for row in rows)  # the end-of-turn token is what is read
    torch.testing.assert_close(torch.tensor(scores), mine, atol=1e-5, rtol=1e-5)
    assert len(set(scores)) == 3


def test_the_value_head_leaves_the_policy_alone():
    """It is sharded and kept, and left out of the exported language model."""
    plain, valued, sequences = Policy(tiny_llama()), ValuePolicy(tiny_llama()), batch()
    logprobs, values = valued(sequences, values=True)
    assert torch.equal(plain(sequences), logprobs) and torch.equal(plain(sequences), valued(sequences))
    assert not values.any() and values.shape == sequences.mask.shape
    ((values - 1.0) * sequences.mask).square().sum().backward()
    moved = {name for name, p in valued.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"value_head.weight", "value_head.bias"}
    shard(valued, decoder_blocks(valued), start(), torch.float32)
    assert hasattr(valued.value_head.weight, "full_tensor") and moved < valued.state_dict().keys()
    assert not any("value_head" in name for name in full_state(valued))


def test_a_value_is_of_the_state_before_its_token():
    """The last completion token changes no value of its own row; the first one does from the second on."""
    policy, sequences = ValuePolicy(tiny_llama()), batch()
    torch.nn.init.normal_(policy.value_head.weight)
    with torch.no_grad():
        before = policy(sequences, values=True)[1]
        row = next(r for r, s in enumerate(sequences.rows) if len(s.completion_ids) > 2)
        p, c = len(sequences.rows[row].prompt_ids), len(sequences.rows[row].completion_ids)
        sequences.input_ids[row, p + c - 1] += 1
        assert torch.equal(policy(sequences, values=True)[1], before)
        sequences.input_ids[row, p] += 1
        after = policy(sequences, values=True)[1]
    assert torch.equal(after[row, 0], before[row, 0])
    assert not torch.allclose(after[row, 1:c], before[row, 1:c])
