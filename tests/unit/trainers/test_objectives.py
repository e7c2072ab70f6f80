"""Objectives with a head, a state or an input of their own: from the command line to the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

from common.errors import ConfigError
from data.batches import Segment
from data.types import Completion, Example, Group, Prompt, Sequence, Turn
from data.views import centred_advantages, group_advantages
from jobs.online import view_of_rounds
from models.checkpoint import Checkpoints
from models.distributed import start
from models.heads import RewardModel, ValuePolicy
from models.sharding import local
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.tiny import KINDS, make_config, tiny_llama, tiny_policy
from trainers.assembly import make_loss, trainer_class
from trainers.losses.ppo import gae
from trainers.ppo import moments
from trainers.sft import ConditionedSFTTrainer, control_tokens

MORE = {"bradley_terry": "pairs", "ppo": "labelled", "csft": "labelled", "dr_grpo": "weighted"}
KINDS |= MORE


def policy_for(loss):
    if loss == "bradley_terry":
        config = tiny_llama().config
        config.num_labels, config.pad_token_id = 1, None
        torch.manual_seed(0)
        return RewardModel(LlamaForSequenceClassification(config).eval())
    return ValuePolicy(tiny_llama()) if loss == "ppo" else tiny_policy()


def trained(folder, loss, *overrides, pairs=24):
    config = engine_config(folder, loss, "model.batch_size=8", *overrides)
    return run(config, make_segment(config, pairs=pairs), make_trainer(config, policy_for(loss)))


@pytest.mark.parametrize("loss", MORE)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(tmp_path, loss):
    (one, lines), (other, again) = (
        trained(tmp_path, loss, f"model.microbatches={parts}") for parts in (1, 4)
    )
    for a, b in zip(lines, again, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    assert lines[0]["loss"] != lines[-1]["loss"]
    found, theirs, begin = (weights(t) for t in (one, other, make_trainer(one.config, policy_for(loss))))
    way, apart = (
        sum((w - those[n]).square().sum() for n, w in found.items()) ** 0.5 for those in (begin, theirs)
    )
    assert way > 0.05 and apart < 1e-2 * way


@pytest.mark.parametrize("loss", ["bradley_terry", "csft"])
def test_humanline_and_online_are_refused_without_a_reference(loss):
    with pytest.raises(ConfigError, match="has no reference model"):
        make_config(f"loss={loss}", "humanline=true")
    with pytest.raises(ConfigError, match="fixed data set"):
        make_config(f"loss={loss}", "online=true", "reward=adder")


@pytest.mark.parametrize("loss", ["ppo", "dr_grpo"])
def test_with_humanline_the_reference_is_one_step_behind(tmp_path, loss):
    _, lines = trained(tmp_path, loss, "humanline=true", "sync_freq=1")
    assert [line["reference_step"] for line in lines] == [0, 0, 1, 2, 3, 4][: len(lines)]


def test_what_an_objective_keeps_is_in_its_checkpoint(tmp_path):
    trainer, _ = trained(tmp_path, "ppo", pairs=8)
    kept = Checkpoints(tmp_path / "checkpoints", start(), 1)
    kept.save(6, trainer.policy, trainer.optimizer, {}, {})
    fresh = make_trainer(trainer.config, policy_for("ppo"))
    kept.load(kept.path(6), fresh.policy, fresh.optimizer)
    found, expected = (local(t.policy.state_dict()["value_head.weight"]) for t in (fresh, trainer))
    assert torch.equal(found, expected) and expected.any()


def test_moments_are_the_masked_places():
    values, mask = torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]])
    assert [float(x) for x in moments([(values, mask), (values + 4, mask)])] == [4.0, pytest.approx(5**0.5)]


def test_a_reward_model_learns_to_prefer(tmp_path):
    """The same pairs again and again: their chosen rows come to be worth more."""
    config = engine_config(tmp_path, "bradley_terry", "model.batch_size=8", "n_epochs=6")
    segment = Segment(make_segment(config, pairs=8).groups, 8, 48, 0)
    _, lines = run(config, segment, make_trainer(config, policy_for("bradley_terry")))
    assert lines[-1]["reward_accuracy"] == 1.0 and lines[-1]["loss"] < lines[0]["loss"]
    assert "kl" not in lines[0] and "drift" not in lines[0]


def test_ppo_pays_each_completion_its_own_score():
    """With pairs, whose scores are 1 and -1, nothing changes."""
    scores = (0.3, -2.0, 0.3)
    given = Group(Prompt((Turn("user", "q"),)), tuple(Completion(c) for c in "abc"), scores)
    paid = make_config("loss=ppo", "loss.rewards=scores")
    view, labels = trainer_class(paid).view_of(paid), trainer_class(paid).view_of(make_config("loss=ppo"))
    wanted = [((i,), r) for i, r in enumerate(scores)]
    assert [(want.completions, want.label) for want in view(given)] == wanted
    one, pair = (replace(given, completions=given.completions[:n], rewards=(1.0, -1.0)[:n]) for n in (1, 2))
    assert [want.label for want in view(one)] == [1.0]
    assert view(pair) == labels(pair) and labels(given) != view(given)
    online = ("loss=ppo", "loss.rewards=scores", "online=true", "reward=adder", "rounds.feedback=group")
    config = make_config(*online)
    assert view_of_rounds(config, trainer_class(config).view_of(config))(given) == view(given)


def test_ppo_pays_at_the_last_token_and_normalises_over_the_batch(tmp_path):
    config = engine_config(tmp_path, "ppo", "model.batch_size=8", "model.microbatches=4")
    trainer, segment = make_trainer(config, policy_for("ppo")), make_segment(config, pairs=4)
    micros = trainer.dealer.microbatches(segment.batch(0))
    targets = trainer.prepare([(0, micro) for micro in micros], trainer.scorer)
    found = list(zip(micros, targets, strict=True))
    scaled = torch.cat([t.advantages[m.sequences.mask] for m, t in found]).double()
    spread = (float(scaled.mean()), float(scaled.std(correction=0)))
    assert spread == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))
    raw = []
    for m in micros:
        for label, row in zip(m.labels.tolist(), m.sequences.rows, strict=True):
            n = len(row.completion_ids)  # no value yet: the advantage is the discounted reward
            raw += [label * (0.99 * 0.95) ** (n - 1 - t) for t in range(n)]
    raw = np.array(raw)
    np.testing.assert_allclose(scaled.numpy(), (raw - raw.mean()) / raw.std(), atol=1e-5)
    for m, t in found:
        mask = m.sequences.mask
        assert torch.equal(t.returns, gae(torch.zeros(mask.shape), m.labels, mask, gamma=0.99, lam=0.95)[1])


def test_control_tokens_stand_between_prompt_and_completion_and_are_not_learned():
    config = make_config("loss=csft", "model.max_length=12", "model.max_prompt_length=8")
    good, bad = control_tokens(config)
    assert good.tolist() == [16] and bad.tolist() == [18]
    trainer = make_trainer(config)
    prompt, answer = np.arange(6, 10, dtype=np.int32), np.array([7, 7, 1], np.int32)
    batch = [Example("p", (Sequence(prompt, answer),), 1.0), Example("p", (Sequence(prompt, answer),), -1.0)]
    rows = [e.rows[0] for e in trainer.arrange(batch)]
    assert [r.prompt_ids.tolist() for r in rows] == [[*prompt, 16], [*prompt, 18]]
    assert all(r.completion_ids.tolist() == [7, 7, 1] for r in rows) and trainer.loss_denominator(batch) == 6
    long = Sequence(np.arange(8, dtype=np.int32), np.full(4, 7, np.int32))
    (cut,) = trainer.arrange([Example("p", (long,), 1.0)])
    assert len(cut.rows[0]) == 12 and cut.rows[0].prompt_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 16]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("loss=csft loss.control_tokens={chosen:x,rejected:x}", "loss.control_tokens"),
        ("loss=dpo loss.beta=[0.1,0.2]", "loss.beta"),
        ("loss=grpo loss.shape=dppo loss.divergence_bound=-1", "loss.divergence_bound"),
        ("loss=grpo loss.importance=tokn", "loss.importance"),
        ("loss=grpo loss.normalization=constant loss.max_tokens=2.5", "loss.max_tokens"),
        ("loss=ppo loss.lam=1.5", "loss.lam"),
        ("loss=ppo loss.rewards=score", "loss.rewards"),
        ("loss=ppo online=true reward=adder rounds.feedback=group", "rounds.feedback"),
    ],
)
def test_settings_of_an_objective_are_checked(words, key):
    with pytest.raises(ConfigError) as error:
        make_loss(make_config(*words.split()))
    assert error.value.key == key


def test_control_tokens_that_the_tokenizer_does_not_know_are_refused():
    config = make_config("loss=csft", "loss.control_tokens={chosen: good, rejected: bad}")
    with pytest.raises(ConfigError, match="no tokens for it"):
        ConditionedSFTTrainer.check(config, make_segment(config, pairs=1))


def test_dr_grpo_keeps_the_size_of_a_reward():
    texts = tuple(Completion(str(i)) for i in range(4))
    group = Group(Prompt((Turn("user", "x"),)), texts, (1.0, 0.0, 0.0, 0.5))
    found, plain = centred_advantages(group), group_advantages(group)
    assert [w.label for w in found] == [0.625, -0.375, -0.375, 0.125]
    assert [w.completions for w in found] == [w.completions for w in plain]
    equal = replace(group, rewards=(0.5,) * 4)
    assert centred_advantages(equal) == []
    assert [w.label for w in centred_advantages(equal, keep_zero_variance=True)] == [0.0] * 4
