"""What is checked of AdamW8bit where torchao is: a worker process for the tests in test_adamw8bit.py."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchao.optim.adam as torchao_adam
from torch import nn

from common.worker_process import serve
from data.batches import Segment
from models.checkpoint import CheckpointError, Checkpoints
from models.distributed import start
from optimizers import adamw8bit
from optimizers.build import update
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.integration.test_sync_modes import test_resuming_changes_nothing
from tests.tiny import random_groups, tiny_policy
from tests.unit.trainers import test_host_waits

NUMBERS = {"betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1}
EIGHT = ("optimizer=AdamW8bit", "weight_decay=0.1")
NO, YES = torch.tensor(0.0), torch.tensor(1.0)


def values(signed: bool) -> np.ndarray:
    """The 256 numbers that a code may stand for, by their definition (arXiv 2110.02861, section 1.3):
    after so many zeros in decimal the middles of equal parts of [0.1, 1], twice as many for each zero less;
    and 0 and 1."""
    found = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        edges = np.linspace(0.1, 1, parts + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(found))


def decoded(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> np.ndarray:
    rows = values(signed)[codes.numpy()].reshape(*scale.shape, -1) * scale.double().numpy()[..., None]
    return rows.reshape(codes.shape)


def the_moments_are_the_formulas() -> None:
    """Each of four steps from the state before it, in float64: weights, scales, and codes of the nearest
    numbers (half-way between two, rounding may choose either)."""
    torch.manual_seed(0)
    for shape, block in (((16, 512), 256), ((40, 300), 150), ((600, 8), 8)):
        p = nn.Parameter(torch.randn(shape))
        optimizer = adamw8bit.AdamW8bit([p], lr=0.01, **NUMBERS)
        (beta1, beta2), eps, decay = NUMBERS.values()
        m = v = np.zeros(shape)
        for t in range(1, 5):
            p.grad = torch.randn(shape)
            g, w, lr = p.grad.double().numpy(), p.detach().double().numpy(), 0.01 * t
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            w = w - lr * decay * w
            w = w - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            update(optimizer, lr, NO)
            np.testing.assert_allclose(p.detach().double().numpy(), w, atol=2e-6)
            state = optimizer.state[p]
            assert float(state["step"]) == t
            for name, exact, signed in (("exp_avg", m, True), ("exp_avg_sq", v, False)):
                codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
                blocks = exact.reshape(-1, block)
                np.testing.assert_allclose(scale.numpy().ravel(), np.abs(blocks).max(1), rtol=1e-5)
                of_one = (blocks / np.abs(blocks).max(1, keepdims=True)).reshape(shape)
                away = np.abs(of_one[..., None] - values(signed)[None])
                taken = np.take_along_axis(away, codes.numpy()[..., None].astype(int), -1)[..., 0]
                assert (taken <= away.min(-1) + 1e-6).all()
            m, v = (
                decoded(state[f"{name}_codes"], state[f"{name}_scale"], signed)
                for name, signed in adamw8bit.MOMENTS.items()
            )


def rows_that_256_divides_are_as_torchaos_own_class_has_them() -> None:
    """To the bit, as are tensors whose moments are float32. Its step is not compiled here."""
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        for shape in ((16, 256), (9, 1024), (3, 8, 512), (5000,), (3, 5)):
            begin, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
            ours, theirs = nn.Parameter(begin.clone()), nn.Parameter(begin.clone())
            optimizer = adamw8bit.AdamW8bit([ours], lr=0.0, **NUMBERS)
            other = torchao_adam.AdamW8bit([theirs], lr=torch.tensor(0.01), **NUMBERS)
            for gradient in gradients:
                ours.grad, theirs.grad = gradient.clone(), gradient.clone()
                update(optimizer, 0.01, NO)
                other.step()
            assert torch.equal(ours, theirs), shape
            eight = isinstance(other.state[theirs]["exp_avg"], adamw8bit.OptimState8bit)
            assert eight == ("exp_avg_codes" in optimizer.state[ours]) == (len(shape) > 1 and shape != (3, 5))


def pieces_change_nothing() -> None:
    torch.manual_seed(2)
    begin, gradients = torch.randn(70, 300), [torch.randn(70, 300) for _ in range(3)]
    vector = torch.randn(6000)
    found = []
    for piece in (2**22, 600, 1000):
        params = [nn.Parameter(begin.clone()), nn.Parameter(vector.clone())]
        optimizer = adamw8bit.AdamW8bit(params, lr=0.0, **NUMBERS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adamw8bit, "PIECE", piece)
            for gradient in gradients:
                params[0].grad, params[1].grad = gradient.clone(), gradient.ravel()[:6000].clone()
                update(optimizer, 0.01, NO)
        found.append([*params, *(value for p in params for value in optimizer.state[p].values())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def two_moments_take_two_bytes_and_their_scales() -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape in ((512, 1024), (64, 896), (33, 9))]
    optimizer = adamw8bit.AdamW8bit(params, lr=0.0, **NUMBERS)
    for p in params:
        p.grad = torch.randn_like(p)
    update(optimizer, 0.01, NO)
    taken = [
        sum(v.untyped_storage().nbytes() for name, v in optimizer.state[p].items() if name != "step")
        / p.numel()
        for p in params
    ]
    assert taken == [2 + 8 / 256, 2 + 8 / 224, 8]


def a_skipped_step_leaves_everything() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(Path(folder), "sft", *EIGHT, "model.batch_size=2")
        trainer, _ = run(config, make_segment(config, pairs=2))
    before, state = weights(trainer), copy.deepcopy(trainer.optimizer.state_dict()["state"])
    assert any("exp_avg_codes" in of_one for of_one in state.values())
    for value in (float("nan"), 1e30):
        for p in trainer.policy.parameters():
            p.grad = torch.full_like(p, value)
        update(trainer.optimizer, 1e-2, YES)
    assert all(torch.equal(before[name], w) for name, w in weights(trainer).items())
    found = trainer.optimizer.state_dict()["state"]
    assert all(same(found[key][name], state[key][name]) for key in state for name in state[key])
    for p in trainer.policy.parameters():
        p.grad = torch.ones_like(p)
    update(trainer.optimizer, 1e-2, NO)
    assert not any(torch.equal(before[name], w) for name, w in weights(trainer).items())


def same(a: Any, b: Any) -> bool:
    a, b = (getattr(x, "_local_tensor", x) for x in (a, b))
    return bool(a.dtype == b.dtype and torch.equal(a, b))


def it_trains_as_adamw_does() -> None:
    """The loss of a tiny model in 40 steps on the same rows falls as far, to within a fiftieth."""
    ends = {}
    for name in ("AdamW", "AdamW8bit"):
        with tempfile.TemporaryDirectory() as folder:
            config = engine_config(Path(folder), "sft", f"optimizer={name}", "model.batch_size=4")
            segment = Segment(random_groups(4, kind="weighted"), 4, 160, seed=0)
            _, lines = run(config, segment, make_trainer(config, tiny_policy()))
        losses = [line["loss"] for line in lines]
        assert len(losses) == 40
        ends[name] = losses[0] - sum(losses[-5:]) / 5
    assert ends["AdamW"] > 3, ends
    assert 0 < abs(ends["AdamW8bit"] / ends["AdamW"] - 1) < 0.02, ends


def a_resumed_run_ends_where_it_would_have(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_resuming_changes_nothing(Path(folder), [*overrides, *EIGHT])


def adapters_have_8_bits_too() -> None:
    """LoRA's matrices learn, and go on from a checkpoint; the model's own weights stay and have no state."""
    with tempfile.TemporaryDirectory() as folder:
        test_host_waits.tiny_llama().save_pretrained(folder)
        lora = ("model.use_peft=true", "model.peft.lora_r=16", "model.peft.lora_alpha=16")
        (trainer, segment), (other, _) = (
            test_host_waits.prepared(folder, "dpo", *EIGHT, *lora, seed) for seed in ("seed=1", "seed=2")
        )
        before, kept = weights(trainer), Checkpoints(Path(folder), start(), 1)
        trainer.step(segment)
        kept.save(1, trainer.policy, trainer.optimizer, {}, {})
        kept.load(kept.path(1), other.policy, other.optimizer)
    for each in (trainer, other):
        torch.manual_seed(3)
        for p in each.policy.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        update(each.optimizer, 0.01, NO)
    adapters = [name for name, p in trainer.policy.named_parameters() if p.requires_grad]
    assert len(trainer.optimizer.state) == len(adapters) > 0
    assert all("exp_avg_codes" in state for state in trainer.optimizer.state.values())
    found = weights(other)
    for name, value in weights(trainer).items():
        assert torch.equal(before[name], value) is not ("lora_" in name), name
        assert torch.equal(found[name], value), name


def checkpoints_of_other_optimizers_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for name in ("AdamW", "Muon", "AdamW8bit"):
            config = engine_config(Path(folder), "sft", f"optimizer={name}", "model.batch_size=2")
            trainers[name], _ = run(config, make_segment(config, pairs=2))
            kept = Checkpoints(Path(folder) / name, start(), 1)
            kept.save(1, trainers[name].policy, trainers[name].optimizer, {}, {})
        for written, read, lacks in (
            ("AdamW", "AdamW8bit", "exp_avg_codes"),
            ("Muon", "AdamW8bit", "exp_avg_codes"),
            ("AdamW8bit", "AdamW", "exp_avg"),
            ("AdamW8bit", "Muon", "exp_avg"),
        ):
            kept, trainer = Checkpoints(Path(folder) / written, start(), 1), trainers[read]
            says = (
                rf"{written}/step_00000001 cannot be loaded: .*Missing key.* optimizer\.state\..*\.{lacks}\.$"
            )
            with pytest.raises(CheckpointError, match=says):
                kept.load(kept.path(1), trainer.policy, trainer.optimizer)


def a_step_waits_for_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_host_waits.tiny_llama().save_pretrained(folder)
        trainer, segment = test_host_waits.prepared(folder, "dpo", *EIGHT)
        for _ in range(2):
            with test_host_waits.watched() as found:
                trainer.step(segment)
            assert found == []


CHECKS = (
    the_moments_are_the_formulas,
    rows_that_256_divides_are_as_torchaos_own_class_has_them,
    pieces_change_nothing,
    two_moments_take_two_bytes_and_their_scales,
    a_skipped_step_leaves_everything,
    it_trains_as_adamw_does,
    a_resumed_run_ends_where_it_would_have,
    adapters_have_8_bits_too,
    checkpoints_of_other_optimizers_are_refused,
    a_step_waits_for_nothing,
)
FEWEST = adamw8bit.FEWEST


def checked(name: str, *arguments: Any) -> None:
    """One of the checks. Where a tiny model is trained its small tensors have 8 bits as well."""
    start()
    (check,) = (each for each in CHECKS if each.__name__ == name)
    adamw8bit.FEWEST = FEWEST if check in CHECKS[:4] else 256
    check(*arguments)


if __name__ == "__main__":
    serve({"checked": checked})
