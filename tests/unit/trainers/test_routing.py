"""The auxiliary loss of a mixture's routers: that of the global batch, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from data.batches import FILL, collate
from models.attention import KEPT_APART
from models.distributed import start
from models.policy import checkpoint_activations, decoder_blocks
from models.pretrained import check_model
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.unit.models.test_families import CPU, FAMILIES, MIXTURES, rows, tiny
from tests.unit.models.test_policy import settings
from trainers.routing import RouterBalance

CUTS = {"whole": [7], "uneven": [1, 4, 2]}


def whole(policy, batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """transformers' own auxiliary loss of these rows, and its gradient."""
    padded = collate(batch, CPU)
    mask = torch.arange(padded.input_ids.shape[1]) < torch.tensor([len(row) for row in batch])[:, None]
    loss = policy.model(padded.input_ids, attention_mask=mask.long(), output_router_logits=True).aux_loss
    return loss.detach(), torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", MIXTURES)
def test_however_the_batch_is_cut_it_is_transformers_loss_of_the_whole(family, cut):
    start()
    policy, batch = tiny(family), rows(7)
    want, want_grads = whole(policy, batch)
    assert sum(grad is not None and bool(grad.any()) for grad in want_grads) > 4
    packs = (False, True) if MIXTURES[family].model_type in KEPT_APART else (False,)
    for pack in packs:
        parts = np.split(np.arange(7), np.cumsum(CUTS[cut])[:-1])
        sequences = [collate([batch[i] for i in part], CPU, pack) for part in parts]
        sequences.append(collate([FILL.rows[0]], CPU, pack))  # what another rank runs that got nothing
        if cut == "whole":
            sequences.pop()
        balance, policy = RouterBalance(policy, 1.0, 1), policy.requires_grad_()
        policy.zero_grad()
        total = torch.zeros(())
        microbatches = [SimpleNamespace(sequences=each) for each in sequences]
        with balance.over(microbatches, lambda _: None) as add_share:
            for each in sequences:
                policy(each)
                part = add_share(torch.zeros(()), each)
                part.backward()
                total += part.detach()
        torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)
        for parameter, grad in zip(policy.parameters(), want_grads, strict=True):
            if grad is not None:
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5)


def trained(folder, accumulation: int, coefficient: float | None, recompute: bool = False):
    words = ["humanline=true", "model.batch_size=4", f"model.microbatches={accumulation}"]
    words.append(f"model.router_aux_loss_coef={coefficient or 'null'}")
    config, policy = engine_config(folder, "dpo", *words), tiny("mixtral")
    if recompute:
        checkpoint_activations(decoder_blocks(policy))
    trainer, lines = run(config, make_segment(config, 12), make_trainer(config, policy))
    return lines, torch.cat([w.flatten() for w in weights(trainer).values()])


def test_a_run_with_it_is_the_same_however_a_step_is_done(tmp_path):
    """In one microbatch or two, activations kept or recomputed; and it is another run than one without."""
    (one, first), (without, plain) = trained(tmp_path, 1, 0.5), trained(tmp_path, 1, None)
    for accumulation, recompute in ((2, False), (1, True)):
        other, second = trained(tmp_path, accumulation, 0.5, recompute)
        for key in ("loss", "grad_norm", "router_aux_loss"):
            found, wanted = ([line[key] for line in lines] for lines in (other, one))
            assert found == pytest.approx(wanted, rel=1e-2, abs=1e-3)
        assert one[0]["router_aux_loss"] == pytest.approx(other[0]["router_aux_loss"], rel=1e-5)
        assert (second - first).norm() < 0.02 * (plain - first).norm()
    assert "router_aux_loss" not in without[0] and without[0]["loss"] == one[0]["loss"]
    assert without[0]["grad_norm"] != one[0]["grad_norm"]


def test_a_balance_that_cannot_be_is_refused(tmp_path):
    MIXTURES["qwen3_moe"].save_pretrained(tmp_path / "mixture")
    FAMILIES["llama"].save_pretrained(tmp_path / "dense")
    sizes = {"max_length": 64, "max_prompt_length": 32}
    plain, dense = (settings(tmp_path / name, **sizes) for name in ("mixture", "dense"))
    for config, coefficient, more, said in (
        (dense, 0.1, {}, "a llama has no router"),
        (plain, 0.1, {"compile": True}, "needs model.compile=false"),
        (plain, 0.0, {}, "must be above 0"),
    ):
        with pytest.raises(ConfigError, match=rf"model.router_aux_loss_coef={coefficient}: {said}"):
            check_model(replace(config, router_aux_loss_coef=coefficient, **more))
