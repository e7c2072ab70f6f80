"""The optimizer that the config names, its learning rate at each step, and its update."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.imports import import_function
from config.schema import Config


def optimizer_class(path: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer that the setting ``optimizer`` names: AdamW, or an import path. Raises ConfigError
    for what is no optimizer of torch's kind, or takes no lr or weight_decay."""
    if path == "AdamW":
        return torch.optim.AdamW
    named = import_function("optimizer", path)
    is_one = inspect.isclass(named) and issubclass(named, torch.optim.Optimizer)
    if not is_one:
        raise ConfigError("optimizer", path, "is no subclass of torch.optim.Optimizer")
    lacks = {"lr", "weight_decay"} - set(inspect.signature(named).parameters)
    if lacks:
        raise ConfigError("optimizer", path, f"does not take {' and '.join(sorted(lacks))}")
    return named  # type: ignore[no-any-return]


def make_optimizer(policy: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable weights. They must be float32, because an update of 5e-6 is
    rounded away in bfloat16. Raises ConfigError for an optimizer that does not take these weights."""
    params = [p for p in policy.parameters() if p.requires_grad]
    narrow = {p.dtype for p in params} - {torch.float32}
    assert not narrow, f"master weights must be float32, found {narrow}"
    cls: Any = optimizer_class(config.optimizer)
    numbers = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    takes = inspect.signature(cls).parameters
    options = {"fused": True} if config.optimizer == "AdamW" else {}
    try:
        optimizer: torch.optim.Optimizer = cls(
            params, **{k: n for k, n in numbers.items() if k in takes}, **options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError("optimizer", config.optimizer, f"cannot be built: {error}") from error
    return optimizer


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
    """Make one optimizer step at ``lr``. Make none where ``skip`` ([] float32 on the device) is 1: weights,
    moments and step count stay as they are.

    With AdamW's fused kernel the device decides, which reads the flag as ``found_inf``, the name that
    mixed-precision training gives it; so the host does not wait. With another optimizer it does.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
    elif not skip:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
