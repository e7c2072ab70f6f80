"""Syncing modes against a live second model, bit for bit; the trust region's contrast; the ablations of
Figure 5; resuming in each."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from config.schema import Config
from data.types import Sequences
from models.checkpoint import Checkpoints
from models.distributed import start
from models.policy import Policy
from tests.engine import Log, engine_config, make_segment, make_trainer, run, weights
from tests.second_model import INFINITE, Bounds, Rounds, Synced, assert_identical, train_rounds
from tests.tiny import tiny_policy
from trainers.assembly import Offline
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

STEPS = 7


def config_of(folder, *overrides):
    return engine_config(folder, "dpo", "model.batch_size=4", "model.microbatches=2", *overrides)


def lines_of(config: Config) -> list[dict]:
    return run(config, make_segment(config, pairs=4 * STEPS))[1]


class Moving(Synced):
    """Its reference moves in the way of ``mode``: after the update (trust_region) or before it; every k
    steps, or for ``kl`` when the batch's KL is above ``bound`` or k steps after it last did."""

    def __init__(
        self, trainer: BasicTrainer, policy: Policy, mode: str, k: int, alpha: float, bound: float = math.inf
    ) -> None:
        config = trainer.config
        bounds = (config.log_epsilon_P, config.log_epsilon_R) if config.humanline else INFINITE
        super().__init__(trainer, policy, bounds, k, alpha, late=mode == "trust_region")
        self.mode, self.bound, self.moved = mode, bound, 0
        self.seen: list[torch.Tensor] = []

    def scores(self, sequences: Sequences, bounds: Bounds) -> TokenScores:
        found = super().scores(sequences, bounds)
        self.seen.append((found.reference - found.policy.detach()).double()[found.mask])
        return found

    def due(self, t: int) -> bool:
        """Of each token's KL the estimate ``exp(d) - 1 - d``."""
        if self.mode != "kl":
            return super().due(t)
        kl = [float((d.exp() - 1 - d).sum()) for d in self.seen]
        return sum(kl) / sum(map(len, self.seen)) > self.bound or t == self.moved + self.k

    def move(self, t: int, updated: bool) -> None:
        super().move(t, updated)
        if updated is self.late and self.due(t):
            self.moved = t
            if self.mode == "reset":
                self.optimizer.state.clear()
        if updated:
            self.seen.clear()


def compared(config: Config, pairs: int, *mode: Any) -> list[dict]:
    """The lines of a run whose losses and last weights are those of plain training, bit for bit."""
    segment, plain = make_segment(config, pairs=pairs), tiny_policy()
    trainer, lines = run(config, segment, make_trainer(config, copy.deepcopy(plain)))
    assert_identical(trainer, lines, Moving(trainer, plain, *mode), segment)
    return lines


on_and_off = pytest.mark.parametrize("humanline", [False, True], ids=["plain", "clipped"])
MODES = [("ema", 1, 0.2), ("ema", 2, 0.6), ("reset", 3, 1.0)]
MODES += [("trust_region", k, alpha) for k, alpha in ((1, 1.0), (3, 1.0), (1, 0.3), (2, 0.6))]


@on_and_off
@pytest.mark.parametrize(("mode", "k", "alpha"), MODES)
def test_a_mode_is_bit_identical_to_a_second_model(tmp_path, mode, k, alpha, humanline):
    words = (f"sync_mode={mode}", f"sync_freq={k}", f"sync_alpha={alpha}", f"humanline={humanline}")
    lines = compared(config_of(tmp_path, *words), 4 * STEPS, mode, k, alpha)
    if mode == "trust_region":
        assert [line["reference_step"] for line in lines] == [t // k * k for t in range(STEPS)]


@on_and_off
@pytest.mark.parametrize("bound", [0.01, 0.05])
def test_a_reference_that_moves_by_its_distance_is_bit_identical_to_a_second_model(
    tmp_path, bound, humanline
):
    """Of its distance, not of the clipped one: the narrow range would keep that below either bound."""
    words = ("sync_mode=kl", "sync_freq=4", f"sync_kl={bound}", f"humanline={humanline}")
    config = config_of(tmp_path, *words, "log_epsilon_P=-0.1", "log_epsilon_R=0.1")
    lines = compared(config, 4 * 12, "kl", 4, 1.0, bound)
    steps = [line["reference_step"] for line in lines]
    moves = [b > a for a, b in pairwise(steps)]
    far = [line["reference_kl"] > bound for line in lines[:-1]]
    assert moves == [far[t] or t == steps[t] + 4 for t in range(len(moves))]
    assert any(far) and not all(moves)


def test_its_limits_are_humanlines(tmp_path):
    """A bound that is never reached: every k-th step. One that every step exceeds: every step."""
    found = {}
    for name, words in {
        "kl, far": ("sync_mode=kl", "sync_freq=3", "sync_kl=1e9"),
        "k=3": ("sync_freq=3",),
        "kl, near": ("sync_mode=kl", "sync_freq=3", "sync_kl=1e-30"),
        "k=1": ("sync_freq=1",),
    }.items():
        config = config_of(tmp_path, "humanline=true", *words)
        found[name] = [line["loss"] for line in lines_of(config)]
    assert found["kl, far"] == found["k=3"] != found["k=1"] == found["kl, near"]


@pytest.mark.parametrize("humanline", [False, True])
def test_hard_after_every_step_compares_the_policy_with_itself(tmp_path, humanline):
    """ln 2 for ever, where syncing before the step is not."""
    lines = lines_of(config_of(tmp_path, "sync_mode=trust_region", f"humanline={humanline}"))
    assert [line["loss"] for line in lines] == pytest.approx([math.log(2)] * STEPS, abs=1e-6)
    assert all(line["kl"] == 0 for line in lines)
    lines = lines_of(config_of(tmp_path, "humanline=true"))
    assert all(abs(line["loss"] - math.log(2)) > 1e-4 for line in lines[1:])


def test_the_ablations_of_figure_5_are_four_runs(tmp_path):
    tight = ["log_epsilon_P=-0.02", "log_epsilon_R=0.02"]
    cells = {
        "both": ["humanline=true", *tight],
        "clip only": ["humanline=true", "sync_mode=never", *tight],
        "sync only": ["humanline=true", "log_epsilon_P=-.inf", "log_epsilon_R=.inf"],
        "neither": [],
    }
    lines = {name: lines_of(config_of(tmp_path, *words)) for name, words in cells.items()}
    synced = {name: [line["reference_step"] for line in rows] for name, rows in lines.items()}
    assert synced["both"] == synced["sync only"] == [0, 0, 1, 2, 3, 4, 5]
    assert synced["clip only"] == synced["neither"] == [0] * STEPS
    clipped = {name: sum(line["clipped_low"] for line in rows) for name, rows in lines.items()}
    assert min(clipped["both"], clipped["clip only"]) > 0 == clipped["sync only"] == clipped["neither"]
    assert len({rows[-1]["loss"] for rows in lines.values()}) == 4


@pytest.mark.parametrize(
    "words",
    [
        "humanline=true sync_freq=3",
        "sync_mode=trust_region sync_freq=3",
        "sync_mode=trust_region sync_freq=2 sync_alpha=0.3",
        "humanline=true sync_mode=never",
        "humanline=true humanline_mode=sample",
        "sync_mode=kl sync_freq=4 sync_kl=0.02",
        "sync_mode=delayed sync_freq=3",
        "sync_mode=reset sync_freq=3 optimizer=torch.optim.RMSprop",
    ],
)
def test_resuming_changes_nothing(tmp_path, words):
    """From the checkpoint before step 4, inside a horizon, by a trainer that starts from other weights."""
    config = config_of(tmp_path, *words.split())
    segment, kept = make_segment(config, pairs=4 * STEPS), Checkpoints(tmp_path / "checkpoints", start(), 1)
    whole = make_trainer(config)

    def save() -> None:
        if whole.progress.step == 4:
            kept.save(4, whole.policy, whole.optimizer, whole.state_dict(), dict(whole.reference.scores))

    _, lines = run(config, segment, whole, save)
    resumed = make_trainer(config, tiny_policy(seed=9))
    state, scores = kept.load(kept.path(4), resumed.policy, resumed.optimizer)
    resumed.load_state_dict(state, scores)
    resumed.reference.use_initial(scores, {})
    rest = Log()
    resumed.train(Offline(segment), rest)
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in lines[4:]]
    assert all(torch.equal(w, weights(whole)[name]) for name, w in weights(resumed).items())


CONSTANTS = [f"humanline_sampling.{name}=5" for name in ("gamma_P", "beta_P", "gamma_R", "beta_R")]
CONSTANTS += ["humanline_sampling.M_P=2", "humanline_sampling.M_R=2"]


def test_sampling_loses_gradient_but_no_value(tmp_path):
    """The first loss is plain's, its gradient is not; the share of rejected tokens is logged."""
    sample = config_of(tmp_path, "humanline=true", "humanline_mode=sample", *CONSTANTS)
    plain = config_of(tmp_path, "humanline=true", "log_epsilon_P=-.inf", "log_epsilon_R=.inf")
    some, all_ = lines_of(sample), lines_of(plain)
    assert some[0]["loss"] == all_[0]["loss"] and some[0]["grad_norm"] != all_[0]["grad_norm"]
    assert all(0.05 < line["rejected"] < 0.95 for line in some) and "clipped_low" not in some[0]


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_draw_does_not_depend_on_how_the_batch_is_cut(tmp_path, loss):
    found = []
    for parts in (1, 4):
        cut = ("model.batch_size=8", f"model.microbatches={parts}")
        config = engine_config(tmp_path, loss, *cut, "humanline=true", "humanline_mode=sample", *CONSTANTS)
        found.append(run(config, make_segment(config, pairs=24))[1])
    for one, other in zip(*found, strict=True):
        assert one["rejected"] == pytest.approx(other["rejected"], abs=0) and one["rejected"] > 0
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


KEPT = {"humanline=false": 10**6, "humanline=true sync_mode=never": 10**6}
KEPT |= {"humanline=true sync_freq=3": 3, "humanline=true sync_freq=5": 5}
"""How the reference goes on in the next round: settings -> k; the last goes over a round's end."""


@pytest.mark.parametrize("words", KEPT)
def test_a_reference_that_outlives_rounds_is_bit_identical_to_a_second_model(tmp_path, words):
    online = ("online=true", "reward=adder", "rounds.contexts_per_round=8")
    config = config_of(tmp_path, *online, "rounds.reset_reference=false", *words.split())
    segments = [make_segment(config, pairs=4 * 4, seed=seed) for seed in (3, 4, 5)]
    trainer, lines = train_rounds(config, tiny_policy(), *segments)
    plain = Moving(trainer, tiny_policy(), "ema", k := KEPT[words], 1.0)
    assert_identical(trainer, lines, plain, Rounds(*segments))
    assert [line["reference_step"] for line in lines] == [max(0, (t - 1) // k * k) for t in range(12)]
    _, reset = train_rounds(config_of(tmp_path, *online, *words.split()), tiny_policy(), *segments)
    assert [line["loss"] for line in reset[:4]] == [line["loss"] for line in lines[:4]]
    assert reset[4]["loss"] != lines[4]["loss"]
    assert [line["reference_step"] for line in reset[4::4]] == [4, 8]


@pytest.mark.parametrize("words", [("sync_mode=ema",), ("sync_mode=trust_region", "sync_freq=2")])
def test_each_round_begins_with_the_policy_as_its_reference_however_slowly_it_follows(tmp_path, words):
    config = config_of(tmp_path, "online=true", "reward=adder", "sync_alpha=0.3", *words)
    segments = [make_segment(config, pairs=16, seed=seed) for seed in (3, 4)]
    _, lines = train_rounds(config, tiny_policy(), *segments)
    at_ln_2 = [line["loss"] == pytest.approx(math.log(2), abs=1e-6) for line in lines]
    assert at_ln_2 == [True, False, False, False] * 2
