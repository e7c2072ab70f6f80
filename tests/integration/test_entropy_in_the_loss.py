"""The entropy bonus against whole softmaxes in float64, however a batch is cut."""

from __future__ import annotations

import pytest
import torch

from tests.engine import engine_config, make_segment, run
from tests.tiny import tiny_policy


def config_of(folder, *words: str, cut: int = 2):
    return engine_config(folder, "grpo", "model.batch_size=8", f"model.microbatches={cut}", *words)


def by_hand(batch, bonus: float) -> tuple[float, float, float]:
    """(loss, norm of its gradient, mean entropy) of the first step, at which every ratio is 1: the mean over
    tokens of -A r, less the bonus times the token's entropy."""
    model = tiny_policy().model.double()
    terms, entropies = [], []
    for example in batch:
        (row,) = example.rows
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        log_p = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(1, torch.tensor(row.completion_ids).long()[:, None])[:, 0]
        terms.append(-example.label * (chosen - chosen.detach()).exp())
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    term, entropy = torch.cat(terms), torch.cat(entropies)
    loss = term.mean() - bonus * entropy.mean()
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    return float(loss.detach()), norm, float(entropy.detach().mean())


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("bonus", [0.02, 0.3])
def test_the_first_step_is_that_of_whole_softmaxes(tmp_path, bonus, packing):
    words = ("loss.beta=0", f"loss.entropy_bonus={bonus}", f"model.packing={packing}")
    plain = run(config_of(tmp_path, "loss.beta=0"), make_segment(config_of(tmp_path), pairs=8))[1][0]
    for cut in (1, 4):
        config = config_of(tmp_path, *words, cut=cut)
        segment = make_segment(config, pairs=8)
        loss, norm, entropy = by_hand(segment.batch(0), bonus)
        line = run(config, segment)[1][0]
        assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["grad_norm"] != plain["grad_norm"]
        assert line["entropy"] == pytest.approx(entropy, rel=1e-5)
