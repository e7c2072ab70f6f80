"""GRPO's trainer: the advantages and the masks that are of the whole global batch, and the numbers that are
refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data import views
from models.reference import Reference
from tests.engine import engine_config, first_gradient, make_segment, make_trainer
from tests.tiny import make_config, tiny_policy
from trainers.assembly import make_loss, trainer_class
from trainers.losses.shapes import SHAPES

BOUNDS = {"dppo": {"divergence_bound": 0.02}}
"""Those that mask some of the tokens of two random models."""


def settings(cache, parts=1, humanline=False, **loss):
    """GRPO on batches of 8 in ``parts`` microbatches."""
    config = engine_config(cache, "grpo", "model.batch_size=8", "loss.advantage=batch")
    model = replace(config.model, microbatches=parts)
    return replace(config, model=model, humanline=humanline, loss=config.loss | loss)


def begun(config):
    """(trainer, the first batch, its microbatches, scores of them by other weights)"""
    trainer, segment = make_trainer(config), make_segment(config, pairs=5, longest=20)
    other, batch = Reference(), segment.batch(0)
    other.refresh(tiny_policy(seed=3), 0, trainer.reference.upcoming(segment, 0, 0))
    return trainer, batch, trainer.dealer.microbatches(batch), other


@pytest.mark.parametrize(("humanline", "normalization"), [(False, "token"), (True, "sequence")])
@pytest.mark.parametrize("shape", SHAPES)
def test_neither_shape_nor_advantage_depends_on_how_the_batch_is_cut(
    tmp_path, shape, humanline, normalization
):
    loss = {"shape": shape, "normalization": normalization} | BOUNDS.get(shape, {})
    cuts = (settings(tmp_path, parts, humanline, **loss) for parts in (1, 4))
    begins = [begun(config) for config in cuts]
    (whole, _, metrics), (cut, _, other) = (first_gradient(*begin) for begin in begins)
    trainer, batch, *_ = begins[0]
    tokens = sum(len(example.rows[0].completion_ids) for example in batch)
    assert trainer.loss_denominator(batch) == {"token": tokens, "sequence": len(batch)}[normalization]
    assert whole.norm() > 1e-3 and (cut - whole).norm() / whole.norm() < 1e-5
    assert metrics == pytest.approx(other, rel=1e-4)
    shares = [value for name, value in metrics.items() if name.endswith(("ratio_clipped", "tokens_masked"))]
    assert len(shares) == (shape not in ("reinforce", "sapo")) and all(0 < share < 1 for share in shares)
    assert ("dual_clipped" in metrics) == (shape == "dual")


OWN = "loss=grpo trainer._target_=trainers.grpo.CentredGRPOTrainer"


@pytest.mark.parametrize(
    ("words", "view"),
    [
        *((f"loss=grpo loss.advantage={name}", view) for name, view in views.ADVANTAGES.items()),
        ("loss=dr_grpo loss.advantage=rloo", views.ADVANTAGES["rloo"]),
        ("loss=grpo", views.group_advantages),
        ("loss=ppo_group", views.group_advantages),
        ("loss=dr_grpo", views.centred_advantages),
        (OWN, views.centred_advantages),
        ("loss=dpo", views.pairs),
    ],
)
def test_the_view_is_the_one_that_the_setting_names_or_the_trainers_own(words, view):
    config = make_config(*words.split())
    make_loss(config)
    assert trainer_class(config).view_of(config) is view


def test_the_batchs_advantages_are_normalised_before_it_is_cut(tmp_path):
    _, _, micros, _ = begun(settings(tmp_path, 4))
    of_tokens = [torch.repeat_interleave(m.labels.double(), m.sequences.mask.sum(dim=1)) for m in micros]
    tokens = torch.cat(of_tokens)
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert all(abs(float(part.mean())) > 0.01 for part in of_tokens)
