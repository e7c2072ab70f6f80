"""Tokens that are not the policy's: they are read, and have no part in loss, gradient, divisor or metric."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.batches import Segment, collate
from data.examples import with_tokens
from data.formats import RowError
from data.groups import from_dict, to_dict
from data.types import Completion, Example, Sequence
from tests.engine import engine_config, make_trainer, run
from tests.tiny import KINDS, random_groups, tiny_policy


def with_masks(row: Sequence, rng: np.random.Generator) -> Sequence:
    """A row of which about half the tokens count, at least one, each with a log mu."""
    n = len(row.completion_ids)
    mask = rng.random(n) < 0.5
    mask[rng.integers(n)] = True
    mu = rng.normal(size=n).astype(np.float32)
    return replace(row, loss_mask=mask, behavior_logprobs=-abs(mu))


def masked_segment(config, pairs: int = 16) -> Segment:
    rng = np.random.default_rng(3)
    groups = tuple(
        tuple(replace(e, rows=tuple(with_masks(row, rng) for row in e.rows)) for e in group)
        for group in random_groups(pairs, 1, KINDS[config.loss["name"]])
    )
    return Segment(groups, config.model.batch_size, sum(map(len, groups)), config.seed)


@pytest.mark.parametrize("pack", [False, True])
def test_the_grid_has_the_tokens_that_count_and_no_other(pack):
    """And their log mu, which is unknown for a row that has none."""
    rng = np.random.default_rng(0)
    first, *rows = (with_masks(row, rng) for (e,) in random_groups(4) for row in e.rows)
    rows.append(replace(first, behavior_logprobs=None))
    made = collate(rows, torch.device("cpu"), pack)
    policy, plain = tiny_policy(), [replace(r, loss_mask=None, behavior_logprobs=None) for r in rows]
    whole = collate(plain, torch.device("cpu"), pack)
    assert whole.behavior_logprobs is None
    with torch.no_grad():
        masked, values = policy(made), policy(whole)
    for r, row in enumerate(rows):
        at, n = np.flatnonzero(row.loss_mask), int(row.loss_mask.sum())
        assert made.mask[r].tolist() == [True] * n + [False] * (made.mask.shape[1] - n)
        torch.testing.assert_close(masked[r, :n], values[r, at], rtol=1e-5, atol=1e-5)
        mu = np.full(n, np.nan) if row.behavior_logprobs is None else row.behavior_logprobs[at]
        np.testing.assert_equal(made.behavior_logprobs[r, :n].numpy(), mu)
        assert made.behavior_logprobs[r, n:].isnan().all()
    assert first.key == rows[-1].key != plain[-1].key


def by_hand(model, example: Example, loss: str) -> torch.Tensor:
    """What one example adds to the first step's loss, in float64, over the tokens that count."""
    parts = []
    for row in example.rows:
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        values = logits.gather(1, torch.tensor(row.completion_ids).long()[:, None])[:, 0]
        parts.append([values[i] for i in range(len(ids) - len(row.prompt_ids)) if row.loss_mask[i]])
    if loss == "sft":
        return -sum(parts[0])
    if loss == "dpo":
        gains = [sum(value - value.detach() for value in part) for part in parts]
        return -torch.nn.functional.logsigmoid(0.1 * (gains[0] - gains[1]))
    if loss == "ipo":
        gains = [sum(value - value.detach() for value in part) / len(part) for part in parts]
        return (gains[0] - gains[1] - 1 / (2 * 0.1)) ** 2
    return -sum(example.label * (v - v.detach()).exp() for v in parts[0])


SETTINGS = {"sft": "seed=1", "dpo": "loss.beta=0.1", "ipo": "loss.tau=0.1", "grpo": "loss.beta=0"}
KINDS |= {"ipo": "pairs"}


@pytest.mark.parametrize("loss", SETTINGS)
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_first_step_is_that_of_the_other_tokens_alone(tmp_path, loss, packing):
    """Loss and gradient, against whole logits in float64, token by token; however the batch is cut."""
    model, lines = tiny_policy().model.double(), []
    for cut in (1, 4):
        words = (
            f"model.packing={packing}",
            "model.batch_size=8",
            f"model.microbatches={cut}",
            SETTINGS[loss],
        )
        config = engine_config(tmp_path, loss, *words)
        segment = masked_segment(config, pairs=8)
        lines.append(run(config, segment, make_trainer(config))[1])
    batch = segment.batch(0)
    units = len(batch) if loss in ("dpo", "ipo") else sum(int(e.rows[0].loss_mask.sum()) for e in batch)
    total = sum(by_hand(model, example, loss) for example in batch) / units
    total.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert lines[0][0]["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert lines[0][0]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("loss", ["kto", "grpo"])
def test_with_humanline_it_does_not_depend_on_the_cut_either(tmp_path, loss):
    """The reference's scores, KTO's mismatched rows and corrections are of the tokens that count."""
    found, words = [], ["model.batch_size=8", "humanline=true", "sync_freq=2"]
    words += ["correction=sequence_masked"] if loss == "grpo" else []
    for cut in (1, 4):
        config = engine_config(tmp_path, loss, f"model.microbatches={cut}", *words)
        found.append(run(config, masked_segment(config))[1])
    for one, other in zip(*found, strict=True):
        for key in ("loss", "grad_norm", "kl", "behavior_kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-2, abs=1e-5), key
    assert found[0][-1]["loss"] != found[0][0]["loss"]


LINE = {
    "prompt": "1+1=",
    "completions": [
        {"text": "2", "token_ids": [4, 5, 1], "loss_mask": [1, 0, 1]},
        {"text": "3", "token_ids": [4, 6, 1]},
    ],
    "rewards": [1, 0],
}


def test_a_groups_file_keeps_it():
    line = json.loads(json.dumps(LINE))
    line["completions"][0]["behavior_logprobs"] = [-0.25, None, -1.5]
    group = from_dict(line)
    first, second = group.completions
    assert first.loss_mask == (True, False, True) and second.loss_mask is second.behavior_logprobs is None
    np.testing.assert_equal(first.behavior_logprobs, (-0.25, math.nan, -1.5))
    again = json.loads(json.dumps(to_dict(group)))["completions"]
    assert [again[0][key] for key in ("loss_mask", "behavior_logprobs")] == [[1, 0, 1], [-0.25, None, -1.5]]
    assert not {"loss_mask", "behavior_logprobs"} & again[1].keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_mask": [1, 0]}, "2 loss_mask and 3 token_ids: they belong to other tokens"),
        ({"loss_mask": [1, 0, 2]}, "'loss_mask' is not a list of 0 and 1"),
        ({"token_ids": None}, "a completion has 3 loss_mask and no token_ids to go with"),
        ({"behavior_logprobs": [-0.1]}, "1 behavior_logprobs and 3 token_ids"),
        ({"behavior_logprobs": [-0.1, -0.2, 0.5]}, "numbers up to 0"),
    ],
)
def test_those_of_other_tokens_are_refused(change, said):
    line = json.loads(json.dumps(LINE))
    line["completions"][0] |= change
    with pytest.raises(RowError) as caught:
        from_dict(line)
    assert said in str(caught.value)


def test_an_added_end_token_counts_and_one_that_is_cut_off_does_not():
    row = Sequence(np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32))

    def made(ids: int, **beside) -> Sequence | str:
        return with_tokens(row, Completion(None, (0, 1, 2, 0, 0)[:ids], **beside))

    assert made(2, loss_mask=(True, False)).loss_mask.tolist() == [True, False, True]
    drawn = made(2, behavior_logprobs=(-0.5, 0.0)).behavior_logprobs
    assert np.isnan(drawn).tolist() == [False, False, True], "nobody drew it"
    assert made(5, loss_mask=(True, False, True, False, True)).counted.tolist() == [0, 2]
    assert made(5, loss_mask=(False,) * 4 + (True,)) == "its loss_mask leaves no token to train on"
    assert made(3, loss_mask=(True,) * 3).key == row.key
