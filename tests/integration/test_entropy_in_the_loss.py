"""The entropy bonus and the share of uncertain tokens against whole softmaxes in float64, however a batch is
cut."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from common.errors import ConfigError
from tests.engine import engine_config, make_segment, make_trainer, run
from tests.tiny import make_config, tiny_policy
from trainers.assembly import trainer_class


def config_of(folder, *words: str, cut: int = 2):
    return engine_config(folder, "grpo", "model.batch_size=8", f"model.microbatches={cut}", *words)


def by_hand(batch, bonus: float, share: float) -> tuple[float, float, float]:
    """(loss, norm of its gradient, mean entropy) of the first step, at which every ratio is 1: the mean over
    tokens of -A r, of those with the highest entropies alone, less the bonus times every token's entropy."""
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
    least = entropy.detach().sort(descending=True).values[math.ceil(share * len(entropy)) - 1]
    loss = torch.where(entropy.detach() >= least - 1e-3, term, 0.0).mean() - bonus * entropy.mean()
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    return float(loss.detach()), norm, float(entropy.detach().mean())


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(("bonus", "share"), [(0.02, 1.0), (0.0, 0.2), (0.3, 0.35)])
def test_the_first_step_is_that_of_whole_softmaxes(tmp_path, bonus, share, packing):
    words = (
        "loss.beta=0",
        f"loss.entropy_bonus={bonus}",
        f"loss.entropy_share={share}",
        f"model.packing={packing}",
    )
    plain = run(config_of(tmp_path, "loss.beta=0"), make_segment(config_of(tmp_path), pairs=8))[1][0]
    for cut in (1, 4):
        config = config_of(tmp_path, *words, cut=cut)
        segment = make_segment(config, pairs=8)
        loss, norm, entropy = by_hand(segment.batch(0), bonus, share)
        line = run(config, segment)[1][0]
        assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["grad_norm"] != plain["grad_norm"]
        assert bonus == 0 or line["entropy"] == pytest.approx(entropy, rel=1e-5)


def test_a_bonus_of_0_and_a_share_of_1_change_nothing(tmp_path):
    found = []
    for words in ((), ("loss.entropy_bonus=0.0", "loss.entropy_share=1.0")):
        config = config_of(tmp_path, *words)
        trainer, lines = run(
            config, make_segment(config, pairs=16), make_trainer(config, copy.deepcopy(tiny_policy()))
        )
        found.append((lines, trainer.policy.state_dict()))
    assert [line["loss"] for line in found[0][0]] == [line["loss"] for line in found[1][0]]
    assert all(torch.equal(found[0][1][name], w) for name, w in found[1][1].items())


@pytest.mark.parametrize("share", ["0", "1.5", "true", "all"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match=r"loss\.entropy_share"):
        trainer_class(make_config("loss=grpo", f"loss.entropy_share={share}"))
