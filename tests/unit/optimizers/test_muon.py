"""Muon's update against its formula and against torch's, what it leaves to AdamW, skipping, going on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from models.distributed import local, start
from optimizers.build import make_optimizer, update
from optimizers.muon import MuonWithAdamW
from tests.engine import engine_config, make_segment, run, weights
from tests.tiny import make_config, tiny_policy
from tests.unit.models.test_families import tiny

SETTINGS = (
    "optimizer=Muon",
    "muon.momentum=0.7",
    "muon.lr=0.04",
    "weight_decay=0.2",
    "beta1=0.8",
    "beta2=0.97",
)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def formula(
    weights: torch.Tensor,
    gradients: list[torch.Tensor],
    lr: float,
    decay: float,
    momentum: float,
    adjust: str,
) -> torch.Tensor:
    """The weights after these gradients, in float64."""
    w, mean = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
    a, b, c = COEFFICIENTS
    rows, columns = w.shape
    for gradient in gradients:
        g = gradient.double()
        mean = momentum * mean + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * mean
        x = x / x.norm()
        x = x.T if rows > columns else x
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if rows > columns else x
        scale = (
            0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        )
        w = w * (1 - lr * decay) - lr * scale * x
    return w


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (7, 7), (1, 5)])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_the_update_is_the_formula_and_torchs_own(shape, adjust):
    start()
    torch.manual_seed(0)
    begin, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    numbers = {"weight_decay": 0.3, "momentum": 0.7}
    ours, theirs = nn.Parameter(begin.clone()), nn.Parameter(begin.clone())
    optimizer = MuonWithAdamW([ours], None, lr_ratio=2.0, adjust_lr=adjust, **numbers)
    other = torch.optim.Muon([theirs], lr=0.06, adjust_lr_fn=adjust, **numbers)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        update(optimizer, 0.03, torch.tensor(0.0))
        other.step()
    assert torch.equal(ours, theirs)
    wanted = formula(begin, gradients, 0.06, 0.3, 0.7, adjust)
    way = (wanted - begin.double()).norm()
    assert (ours.double() - wanted).norm() < 0.03 * way  # the iteration runs in bfloat16


def test_a_stack_of_matrices_is_so_many_matrices():
    start()
    torch.manual_seed(1)
    begin, gradient = torch.randn(3, 6, 10), torch.randn(3, 6, 10)
    stack, apart = nn.Parameter(begin.clone()), [nn.Parameter(each.clone()) for each in begin]
    numbers = {"lr_ratio": 1.0, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr": "original"}
    stack.grad = gradient.clone()
    for p, g in zip(apart, gradient, strict=True):
        p.grad = g.clone()
    for params in ([stack], apart):
        update(MuonWithAdamW(params, None, **numbers), 0.1, torch.tensor(0.0))
    assert torch.equal(stack, torch.stack(apart))


def test_matrices_of_the_layers_are_muons_and_the_rest_adamws(tmp_path):
    config = engine_config(tmp_path, "dpo", *SETTINGS)
    for policy in (tiny_policy(tied=False), tiny("mixtral")):
        optimizer = make_optimizer(policy, config)
        muon, rest = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
        names = {name for name, p in policy.named_parameters() if id(p) in muon}
        others = {name for name, p in policy.named_parameters() if id(p) in rest}
        assert names | others == {name for name, _ in policy.named_parameters()} and not names & others
        assert all(".layers." in name for name in names)
        theirs = ("embed_tokens", "lm_head", "norm", "gate.weight")
        assert all(any(part in name for part in theirs) for name in others), others
    group, adamw = optimizer.param_groups
    assert group["lr_ratio"] == pytest.approx(0.04 / 0.003)
    assert (group["momentum"], group["weight_decay"], group["adjust_lr"]) == (0.7, 0.2, "match_rms_adamw")
    assert (adamw["betas"], adamw["weight_decay"], adamw["fused"]) == ((0.8, 0.97), 0.2, True)


def test_the_rest_moves_as_with_adamw_alone(tmp_path):
    """A step from the same weights: embedding and norms end where AdamW brings them; matrices elsewhere."""
    found = {}
    for name in ("AdamW", "Muon"):
        config = engine_config(tmp_path, "sft", *SETTINGS[1:], f"optimizer={name}", "model.batch_size=8")
        found[name] = weights(run(config, make_segment(config, 4))[0])
    for name, value in found["AdamW"].items():
        assert torch.equal(value, found["Muon"][name]) is not ("_proj" in name), name


def test_a_non_finite_gradient_leaves_weights_and_momentum(tmp_path):
    config = engine_config(tmp_path, "sft", *SETTINGS, "model.batch_size=2")
    trainer, _ = run(config, make_segment(config, pairs=2))
    before, state = weights(trainer), copy.deepcopy(trainer.optimizer.state_dict()["state"])
    for p in trainer.policy.parameters():
        p.grad = torch.full_like(p, float("nan"))
    update(trainer.optimizer, 1e-2, torch.tensor(1.0))
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    for key, found in trainer.optimizer.state_dict()["state"].items():
        assert all(torch.equal(local(found[n]), local(state[key][n])) for n in found)


def test_settings_are_checked():
    for setting, says in (
        ("muon.momentum=1", "must lie in"),
        ("muon.lr=0", "must be above 0"),
        ("muon.adjust_lr=none", "match_rms_adamw"),
        ("optimizer=muon", "Muon"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_config("optimizer=Muon" if "muon." in setting else "loss=dpo", setting)
