"""What an evaluation says of held-out pairs, the same however it is cut into batches; and what the policy
keeps of the initial weights: KL against two whole models."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from data.batches import Segment, collate
from data.types import Example, Group, Prompt, Turn
from data.views import mismatched
from jobs.evaluation import Evaluator, InitialKL
from models.distributed import Ranks
from models.heads import ValuePolicy
from models.policy import Policy
from rollouts.samplers import Sample
from tests.engine import engine_config, make_trainer
from tests.tiny import random_groups, tiny_llama, tiny_policy

CPU = torch.device("cpu")
SIZES = (1, 4, 64)


def evaluated(folder, loss: str, groups, eval_batch_size: int = 4) -> dict[str, float | None]:
    """The evaluation of other weights than the initial ones."""
    config = engine_config(folder, loss, f"model.eval_batch_size={eval_batch_size}")
    policy = ValuePolicy(tiny_llama()) if loss == "ppo" else tiny_policy()
    if isinstance(policy, ValuePolicy):
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(config, policy)
    held_out = Segment(groups, eval_batch_size, sum(map(len, groups)), seed=0)
    evaluator = Evaluator(trainer, held_out, None, torch.float32)
    evaluator.prepare({"weights": "initial"})
    first = evaluator.evaluate()
    assert first["eval_reward_accuracy"] in (0.5, None)  # every reward is 0: a tie
    if loss != "ppo":  # whose values only a forward gives
        policy.forward = None  # what is known of the initial weights is not computed again
    assert evaluator.evaluate(initial=True) == first
    vars(policy).pop("forward", None)
    move(policy)
    return evaluator.evaluate()


def move(policy: Policy) -> None:
    """Other weights, each by itself, so that a shard moves like the whole: smaller ones, to which random
    tokens are likelier (z0 > 0)."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "value_head" not in name:
                parameter.mul_(0.7).add_(torch.sin(parameter * 1000), alpha=0.05)


def sums(groups) -> dict[str, float]:
    """Row key -> s, nats, of every row and mismatched row alone, by two whole models."""
    initial, now = tiny_policy(), tiny_policy()
    move(now)
    examples = [e for group in groups for e in group]
    rows = [row for e in examples for row in (*e.rows, *([e.mismatched] if e.mismatched else []))]
    with torch.no_grad():
        one = [collate([row], CPU) for row in rows]
        return {row.key: float((now(c) - initial(c)).sum()) for row, c in zip(rows, one, strict=True)}


@pytest.mark.parametrize(("loss", "kind"), [("dpo", "pairs"), ("kto", "labelled"), ("grpo", "weighted")])
def test_accuracy_and_margin_are_over_pairs_where_a_prompt_has_several(tmp_path, loss, kind):
    """Thirteen pairs of three prompts, told apart by the prompt's name alone."""
    groups = tuple(
        tuple(replace(e, prompt_id=f"p{g % 3}") for e in group)
        for g, group in enumerate(random_groups(13, seed=3, kind=kind))
    )
    found, s, scale = evaluated(tmp_path, loss, groups), sums(groups), {"dpo": 0.1, "kto": 0.25, "grpo": 1.0}
    pairs = [[row for e in group for row in e.rows] for group in groups]
    want = [scale[loss] * (s[chosen.key] - s[rejected.key]) for chosen, rejected in pairs]
    share = fmean(margin > 0 for margin in want)
    assert 0 < share < 1  # of thirteen; by prompt it could only be thirds
    assert found["eval_reward_accuracy"] == share
    assert found["eval_reward_margin"] == pytest.approx(fmean(want), abs=1e-5)


def test_examples_that_stand_alone_are_compared_within_their_prompt(tmp_path):
    """Desirable and undesirable rows that no pair joins: by prompt; a prompt with one kind alone has no
    margin."""
    halves = [e for group in random_groups(4, seed=5, kind="labelled") for e in group]
    groups = tuple((e,) for e in halves[:-1])
    s, both = sums(groups), zip(halves[:-2:2], halves[1:-2:2], strict=True)
    want = [0.25 * (s[a.rows[0].key] - s[b.rows[0].key]) for a, b in both]
    found = evaluated(tmp_path, "kto", groups)
    assert found["eval_reward_accuracy"] == fmean(margin > 0 for margin in want)
    assert found["eval_reward_margin"] == pytest.approx(fmean(want), abs=1e-5)


@pytest.mark.parametrize("loss", ["kto", "ppo", "dpo"])
def test_no_number_depends_on_the_evaluations_batch_size(tmp_path, loss):
    groups = random_groups(9, seed=4, kind="pairs" if loss == "dpo" else "labelled")
    first, *others = [evaluated(tmp_path / str(size), loss, groups, size) for size in SIZES]
    assert first["eval_loss"]
    for other in others:
        assert other == pytest.approx(first, rel=1e-4, abs=1e-5)


def test_ktos_loss_has_one_z0_of_the_whole_set(tmp_path):
    """Equation 7 by hand: mismatched by a rotation over all held-out examples, in the data's order."""
    groups, config = random_groups(9, seed=4, kind="labelled"), engine_config(tmp_path, "kto").loss
    examples: list[Example] = mismatched([e for group in groups for e in group], 2048)
    s = sums([examples])
    z0 = max(0.0, fmean(s[e.mismatched.key] for e in examples if e.mismatched is not None))
    assert z0 > 0.01
    assert (config["beta"], config["desirable_weight"], config["undesirable_weight"]) == (0.25, 1.1, 1.0)
    gains = torch.tensor([e.label * (s[e.rows[0].key] - z0) for e in examples])
    losses = torch.sigmoid(-0.25 * gains) * torch.tensor([1.1 if e.label > 0 else 1.0 for e in examples])
    found = evaluated(tmp_path, "kto", groups, 4)["eval_loss"]
    assert found == pytest.approx(float(losses.mean()), abs=1e-5)


class Spelling:
    """Renders a prompt as the numbers of its characters; the answer to a prompt is the numbers behind it."""

    calls = 0
    tokenizer = SimpleNamespace(unk_token_id=None, name_or_path="none")

    @property
    def ranks(self):
        return Ranks()

    def prompts(self, prompts):
        return [self.prompt_ids(prompt) for prompt in prompts]

    def prompt_ids(self, prompt):
        return torch.tensor([3 + ord(c) % 50 for c in prompt.turns[0].content], dtype=torch.int32).numpy()

    def sample(self, prompts, n, settings, seed, answered=None):
        self.calls += 1
        assert (n, settings.temperature, settings.top_p) == (1, 1.0, 1.0)
        rows = [self.prompt_ids(prompt) for prompt in prompts]
        return [[Sample(tuple((int(i) * 7) % 58 + 3 for i in row), True)] for row in rows]


GROUPS = [Group(Prompt((Turn("user", "abcdefgh"[: 1 + i % 8] + str(i)),))) for i in range(11)]


def kl_of(folder, size: int, policy, spelling: Spelling) -> InitialKL:
    trainer = make_trainer(engine_config(folder, "dpo", f"model.eval_batch_size={size}"), policy)
    kl = InitialKL(trainer, spelling, GROUPS, spelling, (64, 40))
    kl.prepare({"weights": "initial"})
    return kl


def measured(folder, size: int, spelling: Spelling) -> list[float | None]:
    """KL at the start, and after the weights have moved."""
    policy = tiny_policy()
    kl = kl_of(folder, size, policy, spelling)
    before = kl()
    move(policy)
    return [before, kl()]


def test_it_is_the_k3_estimate_over_the_initial_weights_answers(tmp_path):
    initial, now, spelling = tiny_policy(), tiny_policy(), Spelling()
    move(now)
    total = tokens = 0.0
    before, after = measured(tmp_path, 4, spelling)
    with torch.no_grad():
        for row in kl_of(tmp_path, 4, initial, spelling).rows:
            one, other = (m(collate([row], CPU)).double()[0] for m in (initial, now))
            ratio = (other - one).exp()
            total += float((ratio - 1 - ratio.log()).sum())
            tokens += len(row.completion_ids)
    assert before == 0.0
    assert after == pytest.approx(total / tokens, rel=1e-4) and after > 1e-3
    assert spelling.calls == 1, "the answers of the initial weights were kept"


def test_how_the_answers_are_cut_does_not_matter(tmp_path):
    (zero, whole), (also_zero, cut) = (measured(tmp_path / str(n), n, Spelling()) for n in (64, 3))
    assert zero == also_zero == 0.0
    assert cut == pytest.approx(whole, rel=1e-5)
