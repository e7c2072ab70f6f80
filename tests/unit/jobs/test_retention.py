"""What the policy keeps of the initial weights: KL against two whole models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from data.batches import collate
from data.types import Group, Prompt, Turn
from jobs.retention import InitialKL
from models.distributed import Ranks
from rollouts.samplers import Sample
from tests.engine import engine_config, make_trainer
from tests.tiny import tiny_policy
from tests.unit.jobs.test_evaluation import move

CPU = torch.device("cpu")


class Spelling:
    """Renders a prompt as the numbers of its characters; the answer to a prompt is the numbers behind it."""

    calls = 0
    tokenizer = SimpleNamespace(unk_token_id=None)

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


def measured(folder, eval_batch_size: int, spelling: Spelling) -> list[float | None]:
    """KL at the start, and after the weights have moved."""
    policy = tiny_policy()
    trainer = make_trainer(engine_config(folder, "dpo", f"model.eval_batch_size={eval_batch_size}"), policy)
    kl = InitialKL(trainer, spelling, GROUPS, spelling, (64, 40))
    kl.prepare({"weights": "initial"})
    before = kl()
    move(policy)
    return [before, kl()]


def test_it_is_the_k3_estimate_over_the_initial_weights_answers(tmp_path):
    initial, now, spelling = tiny_policy(), tiny_policy(), Spelling()
    move(now)
    total = tokens = 0.0
    before, after = measured(tmp_path, 4, spelling)
    trainer = make_trainer(engine_config(tmp_path, "dpo"), initial)
    kl = InitialKL(trainer, spelling, GROUPS, spelling, (64, 40))
    kl.prepare({"weights": "initial"})
    with torch.no_grad():
        for row in kl.rows:
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
