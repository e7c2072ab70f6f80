"""When the reference moves, in every mode: whose weights each step's loss sees, and how far the scores made
at a sync last."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch

from common.errors import ConfigError
from models.reference import SoftReference
from tests.tiny import make_config, tiny_policy
from trainers.syncing import Syncing

BEFORE = {
    1: [0, 0, 1, 2, 3, 4, 5, 6, 7],
    2: [0, 0, 0, 2, 2, 4, 4, 6, 6],
    4: [0, 0, 0, 0, 0, 4, 4, 4, 4],
    None: [0] * 9,
}
"""sync_freq -> the step whose policy is the reference in the loss of steps 0, 1, 2, …: the table of paper
C.2.1's listing."""
AFTER = {
    1: [0, 1, 2, 3, 4, 5, 6, 7, 8],
    2: [0, 0, 2, 2, 4, 4, 6, 6, 8],
    4: [0, 0, 0, 0, 4, 4, 4, 4, 8],
    None: [0] * 9,
}
"""The same for syncing after the update: at 1 the policy is compared with itself."""
TABLES = [(k, after, table[k]) for after, table in ((False, BEFORE), (True, AFTER)) for k in table]


def references(syncing: Syncing, steps: int) -> list[int]:
    """The step of the weights that each step's loss is compared with."""
    reference, seen = 0, []
    for step in range(steps):
        seen.append(reference)
        if syncing.due(step):
            reference = step + syncing.after_update
    return seen


@pytest.mark.parametrize(("k", "after", "table"), TABLES)
def test_the_reference_of_every_step_and_how_long_its_scores_last(k, after, table):
    """last_step_before_sync(t) is the last step whose reference is that of step t, so scores made at a sync
    last to the next."""
    syncing, seen = Syncing(k, after), references(Syncing(k, after), 60)
    assert seen[:9] == table
    for step in range(1, 30):
        last = syncing.last_step_before_sync(step)
        if k is None:
            assert last == math.inf
            continue
        assert syncing.due(int(last))
        assert len(set(seen[step : int(last) + 1])) == 1
        assert seen[int(last) + 1] != seen[step]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("humanline=false", Syncing()),
        ("humanline=true", Syncing(1)),
        ("humanline=true sync_mode=never", Syncing()),
        ("sync_mode=trust_region sync_freq=512 sync_alpha=0.6", Syncing(512, True, 0.6)),
        ("sync_mode=kl sync_freq=8 sync_kl=0.02", Syncing(8, bound=0.02)),
    ],
)
def test_what_the_command_line_asks_for(words, expected):
    assert Syncing.from_config(make_config(*words.split())) == expected


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("sync_mode=humanline", "sync_mode"),
        ("loss=sft sync_mode=trust_region", "sync_mode"),
        ("humanline=true sync_alpha=0.5", "sync_alpha"),
        ("sync_mode=trust_region sync_alpha=0", "sync_alpha"),
        ("sync_mode=ema sync_alpha=1", "sync_alpha"),
        ("sync_mode=kl", "sync_freq"),
    ],
)
def test_contradictions_are_refused(words, key):
    with pytest.raises(ConfigError) as error:
        make_config(*words.split())
    assert error.value.key == key


def test_a_slow_reference_follows_by_alpha_and_gives_the_policy_back():
    policy, start = tiny_policy(), [p.detach().clone() for p in tiny_policy().parameters()]
    soft = SoftReference(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    moved = [p.detach().clone() for p in policy.parameters()]

    def are_in_it(wanted: list[torch.Tensor]) -> None:
        for p, value in zip(policy.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.detach(), value)

    for alpha, wanted in ((0.25, [old + 0.25 for old in start]), (1.0, moved)):
        soft.follow(policy, alpha)
        with suppress(RuntimeError), soft.in_place_of(policy):
            are_in_it(wanted)
            raise RuntimeError("stop")
        assert all(torch.equal(p.detach(), now) for p, now in zip(policy.parameters(), moved, strict=True))
