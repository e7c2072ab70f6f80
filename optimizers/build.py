"""The optimizer that the config names, its learning rate at each step, and its update."""

from __future__ import annotations

import math
from types import ModuleType
from typing import cast

import torch
from torch import Tensor, nn

from common.errors import require
from common.small_gpus import import_with_torchao
from config.schema import Config
from models.policy import Policy, decoder_blocks
from optimizers.muon import MuonWithAdamW, matrices


def check_optimizer(config: Config) -> None:
    """Raise ConfigError where the optimizer's package is not installed."""
    if config.optimizer == "AdamW8bit":
        eight_bits()


def eight_bits() -> ModuleType:
    """Import and return the module of AdamW8bit. Raises ConfigError where torchao is not installed."""
    return import_with_torchao("optimizers.adamw8bit", "optimizer", "AdamW8bit", "use another optimizer")


def make_optimizer(policy: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable weights. They must be float32, because an update of 5e-6 is
    rounded away in bfloat16. Raises ConfigError for ``optimizer=Muon`` where no linear map is trained."""
    params = [p for p in policy.parameters() if p.requires_grad]
    narrow = {p.dtype for p in params} - {torch.float32}
    assert not narrow, f"master weights must be float32, found {narrow}"
    if config.optimizer == "Muon":
        return make_muon(policy, params, config)
    if config.optimizer == "AdamW8bit":
        return make_adamw8bit(params, config)
    return make_adamw(params, config)


def make_adamw(params: list[nn.Parameter], config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def make_adamw8bit(params: list[nn.Parameter], config: Config) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = eight_bits().AdamW8bit(
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    return made


def make_muon(policy: nn.Module, params: list[nn.Parameter], config: Config) -> MuonWithAdamW:
    muon, muon_params = config.muon, matrices(decoder_blocks(cast(Policy, policy)))
    require(
        bool(muon_params),
        "optimizer",
        "Muon",
        "is for the matrices of a model's layers, and none of these is a linear map that is trained: use "
        "optimizer=AdamW",
    )
    theirs = {id(p) for p in muon_params}
    rest = [p for p in params if id(p) not in theirs]
    return MuonWithAdamW(
        muon_params,
        make_adamw(rest, config) if rest else None,
        lr_ratio=1.0 if muon.lr is None else muon.lr / config.lr,
        weight_decay=config.weight_decay,
        momentum=muon.momentum,
        adjust_lr=muon.adjust_lr,
    )


def lr_factor(begin: float, end: float, config: Config) -> float:
    """Return the learning-rate multiplier of a step, in (0, 1].

    ``begin``, ``end``: the fractions of training completed before and after the step, in [0, 1]. Over the
    first ``warmup`` of the plan it rises linearly with ``end``. Then it is constant, or it falls with
    ``begin`` to ``min_lr_ratio``, as in transformers' get_linear_schedule_with_warmup and
    get_cosine_with_min_lr_schedule_with_warmup. So no step that is made has a learning rate of 0.
    """
    if end < config.warmup:
        return end / config.warmup
    if config.scheduler == "constant" or begin <= config.warmup:
        return 1.0
    done = (begin - config.warmup) / (1 - config.warmup)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.scheduler == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def update(optimizer: torch.optim.Optimizer, lr: float, skip: Tensor) -> None:
    """Make one optimizer step at ``lr``, or at ``lr`` times the "lr_ratio" of a group that has one. Make none
    where ``skip`` ([] float32 on the device) is 1: weights, moments and step count stay as they are.

    The device decides, so the host does not wait. Every optimizer here reads the flag as ``found_inf``, the
    name that mixed-precision training gives it in AdamW's fused kernel.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
