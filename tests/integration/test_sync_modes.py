"""Syncing modes against a live second model, bit for bit; the trust region's contrast; the ablations of
Figure 5; resuming in each."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch

from models.checkpoint import Checkpoints
from models.distributed import start
from models.export import full_state
from models.policy import Policy
from tests.engine import Log, engine_config, make_segment, make_trainer, run, weights
from tests.tiny import tiny_policy
from trainers.assembly import Offline, make_loss
from trainers.basic import BasicTrainer
from trainers.losses.base import TokenScores

STEPS = 7


def config_of(folder, *overrides):
    return engine_config(folder, "dpo", "model.batch_size=4", "model.microbatches=2", *overrides)


def k3(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """The sum over tokens of ``exp(d) - 1 - d``, float64."""
    d = (reference - policy.detach()).double()[mask]
    return float((d.exp() - 1 - d).sum())


def live(
    trainer: BasicTrainer,
    policy: Policy,
    segment,
    k: int,
    alpha: float,
    low: float,
    high: float,
    mode: str = "trust_region",
    bound: float = math.inf,
) -> list[float]:
    """Plain training with a second model that moves after the optimizer step, or before it (ema, reset, kl).
    ``trainer`` only cuts the batches. With ``bound`` it moves when the batch's KL is above it, or k steps
    after it last did."""
    config, loss = trainer.config, make_loss(trainer.config)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    losses, moved = [], 0
    for t in range(segment.steps):
        batch, total, kl, tokens = segment.batch(t), 0.0, 0.0, 0
        for micro in trainer.dealer.microbatches(batch):
            p = policy(micro.sequences)
            with torch.no_grad():
                r = reference(micro.sequences)
            scores = TokenScores(p, r, (p - r).clamp(low, high), micro.sequences.mask)
            result = loss(*scores.split(len(micro.examples)))
            (result.total * (1 / len(batch))).backward()
            total += float(result.total.detach().double())
            kl, tokens = kl + k3(p, r, micro.sequences.mask), tokens + int(micro.sequences.mask.sum())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.model.max_grad_norm)
        before = mode != "trust_region"
        for now in (True, False):
            if not now:
                optimizer.step()
                optimizer.zero_grad()
            due = (kl / tokens > bound or t == moved + k) if mode == "kl" else (t + (not before)) % k == 0
            if now != before or not due:
                continue
            moved = t
            if mode == "reset":
                optimizer.state.clear()
            with torch.no_grad():
                for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
                    mine.lerp_(theirs, alpha)
        losses.append(total / len(batch))
    return losses


def compared(config, pairs: int, k: int, alpha: float, mode: str, bound: float = math.inf) -> list[dict]:
    """The lines of a run whose losses and last weights are those of plain training, bit for bit."""
    segment, plain = make_segment(config, pairs=pairs), tiny_policy()
    trainer, lines = run(config, segment, make_trainer(config, copy.deepcopy(plain)))
    bounds = (config.log_epsilon_P, config.log_epsilon_R) if config.humanline else (-math.inf, math.inf)
    assert [line["loss"] for line in lines] == live(trainer, plain, segment, k, alpha, *bounds, mode, bound)
    final = weights(trainer)
    assert all(torch.equal(final[name], p.detach()) for name, p in plain.named_parameters())
    return lines


on_and_off = pytest.mark.parametrize("humanline", [False, True], ids=["plain", "clipped"])
MODES = [("ema", 1, 0.2), ("ema", 2, 0.6), ("reset", 3, 1.0)]
MODES += [("trust_region", k, alpha) for k, alpha in ((1, 1.0), (3, 1.0), (1, 0.3), (2, 0.6))]


@on_and_off
@pytest.mark.parametrize(("mode", "k", "alpha"), MODES)
def test_a_mode_is_bit_identical_to_a_second_model(tmp_path, mode, k, alpha, humanline):
    words = (f"sync_mode={mode}", f"sync_freq={k}", f"sync_alpha={alpha}", f"humanline={humanline}")
    lines = compared(config_of(tmp_path, *words), 4 * STEPS, k, alpha, mode)
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
    lines = compared(config, 4 * 12, 4, 1.0, "kl", bound)
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
        found[name] = [line["loss"] for line in run(config, make_segment(config, pairs=4 * STEPS))[1]]
    assert found["kl, far"] == found["k=3"] != found["k=1"] == found["kl, near"]


@pytest.mark.parametrize("humanline", [False, True])
def test_hard_after_every_step_compares_the_policy_with_itself(tmp_path, humanline):
    """ln 2 for ever, where syncing before the step is not."""
    config = config_of(tmp_path, "sync_mode=trust_region", f"humanline={humanline}")
    _, lines = run(config, make_segment(config, pairs=4 * STEPS))
    assert [line["loss"] for line in lines] == pytest.approx([math.log(2)] * STEPS, abs=1e-6)
    assert all(line["kl"] == 0 for line in lines)
    config = config_of(tmp_path, "humanline=true")
    _, lines = run(config, make_segment(config, pairs=4 * STEPS))
    assert all(abs(line["loss"] - math.log(2)) > 1e-4 for line in lines[1:])


def test_the_ablations_of_figure_5_are_four_runs(tmp_path):
    tight = ["log_epsilon_P=-0.02", "log_epsilon_R=0.02"]
    cells = {
        "both": ["humanline=true", *tight],
        "clip only": ["humanline=true", "sync_mode=never", *tight],
        "sync only": ["humanline=true", "log_epsilon_P=-.inf", "log_epsilon_R=.inf"],
        "neither": [],
    }
    lines = {}
    for name, overrides in cells.items():
        config = config_of(tmp_path, *overrides)
        lines[name] = run(config, make_segment(config, pairs=4 * STEPS))[1]
    synced = {name: [line["reference_step"] for line in rows] for name, rows in lines.items()}
    assert (
        synced["both"] == synced["sync only"] == [0, 0, 1, 2, 3, 4, 5]
        and synced["clip only"] == synced["neither"] == [0] * STEPS
    )
    clipped = {name: sum(line["clipped_low"] for line in rows) for name, rows in lines.items()}
    assert (
        clipped["both"] > 0 and clipped["clip only"] > 0 and clipped["sync only"] == clipped["neither"] == 0
    )
    assert len({rows[-1]["loss"] for rows in lines.values()}) == 4


class StopHereError(Exception):
    """What a killed run sees."""


@pytest.mark.parametrize(
    "overrides",
    [
        ["humanline=true", "sync_freq=3"],
        ["sync_mode=trust_region", "sync_freq=3"],
        ["sync_mode=trust_region", "sync_freq=2", "sync_alpha=0.3"],
        ["humanline=true", "sync_mode=never"],
        ["humanline=true", "humanline_mode=sample"],
        ["sync_mode=kl", "sync_freq=4", "sync_kl=0.02"],
        ["sync_mode=delayed", "sync_freq=3"],
        ["sync_mode=reset", "sync_freq=3", "optimizer=torch.optim.RMSprop"],
    ],
    ids=["humanline", "hard", "soft", "never", "sample", "kl", "delayed", "RMSprop, reset"],
)
def test_resuming_changes_nothing(tmp_path, overrides):
    """Stopped before step 4, inside a horizon, and gone on with from the checkpoint by a trainer that starts
    from other weights."""
    config = config_of(tmp_path, *overrides)
    segment = make_segment(config, pairs=4 * STEPS)
    whole, lines = run(config, segment)
    stopped, kept = make_trainer(config), Checkpoints(tmp_path / "checkpoints", start(), 1)

    def save_and_stop():
        if stopped.progress.step == 4:
            kept.save(
                4,
                stopped.policy,
                stopped.optimizer,
                stopped.state_dict(),
                dict(stopped.reference.scores),
            )
            raise StopHereError

    with pytest.raises(StopHereError):
        run(config, segment, stopped, save_and_stop)
    resumed = make_trainer(config, tiny_policy(seed=9))
    state, scores = kept.load(kept.path(4), resumed.policy, resumed.optimizer)
    resumed.load_state_dict(state, scores)
    resumed.reference.use_initial(scores, {})
    rest = Log()
    resumed.train(Offline(segment), rest)
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in lines[4:]]
    assert all(torch.equal(w, weights(whole)[name]) for name, w in weights(resumed).items())


def test_a_slow_reference_is_in_the_checkpoint_and_not_in_the_model(tmp_path):
    config = config_of(tmp_path, "sync_mode=trust_region", "sync_alpha=0.3")
    trainer = make_trainer(config)
    state = full_state(trainer.policy)
    assert set(state) == set(full_state(make_trainer(config_of(tmp_path)).policy))
    assert any(name.startswith("soft_reference.") for name in trainer.policy.state_dict())


CONSTANTS = [f"humanline_sampling.{name}=5" for name in ("gamma_P", "beta_P", "gamma_R", "beta_R")]
CONSTANTS += ["humanline_sampling.M_P=2", "humanline_sampling.M_R=2"]


def test_sampling_loses_gradient_but_no_value(tmp_path):
    """The first loss is plain's, its gradient is not; the share of rejected tokens is logged."""
    sample = config_of(tmp_path, "humanline=true", "humanline_mode=sample", *CONSTANTS)
    plain = config_of(tmp_path, "humanline=true", "log_epsilon_P=-.inf", "log_epsilon_R=.inf")
    (_, some), (_, all_) = (run(c, make_segment(c, pairs=4 * STEPS)) for c in (sample, plain))
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
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4) and one["grad_norm"] == pytest.approx(
            other["grad_norm"], rel=1e-3
        )


class Rounds:
    """Segments one after another, as a source of rounds gives them; and as one for a plain loop."""

    def __init__(self, *segments):
        self.segments = segments
        self.batches = [s.batch(i) for s in segments for i in range(s.steps)]
        self.steps = len(self.batches)

    def segment(self, index):
        return self.segments[index] if index < len(self.segments) else None

    def batch(self, step):
        return self.batches[step]


@pytest.mark.parametrize(
    ("words", "k", "clipped"),
    [
        (("humanline=false",), 10**6, False),
        (("humanline=true", "sync_mode=never"), 10**6, True),
        (("humanline=true", "sync_freq=3"), 3, True),
        (("humanline=true", "sync_freq=5"), 5, True),
    ],
    ids=["fixed", "fixed and clipped", "k = 3", "k = 5, over the end of a round"],
)
def test_a_reference_that_outlives_rounds_is_bit_identical_to_a_second_model(tmp_path, words, k, clipped):
    online = ("online=true", "reward=adder", "rounds.contexts_per_round=8")
    config = config_of(tmp_path, *online, "rounds.reset_reference=false", *words)
    segments = [make_segment(config, pairs=4 * 4, seed=seed) for seed in (3, 4, 5)]
    rounds, plain = Rounds(*segments), tiny_policy()
    trainer, log = make_trainer(config, copy.deepcopy(plain)), Log()
    trainer.train(rounds, log)
    bounds = (config.log_epsilon_P, config.log_epsilon_R) if clipped else (-math.inf, math.inf)
    assert [line["loss"] for line in log.lines] == live(trainer, plain, rounds, k, 1.0, *bounds, "ema")
    final = weights(trainer)
    assert all(torch.equal(final[name], p.detach()) for name, p in plain.named_parameters())
    steps = [line["reference_step"] for line in log.lines]
    assert steps == [max(0, (t - 1) // k * k) for t in range(12)]
    reset = make_trainer(config_of(tmp_path, *online, *words), tiny_policy())
    other = Log()
    reset.train(Rounds(*segments), other)
    assert [line["loss"] for line in other.lines][:4] == [line["loss"] for line in log.lines][:4]
    assert other.lines[4]["loss"] != log.lines[4]["loss"]
    assert [line["reference_step"] for line in other.lines][4::4] == [4, 8]


@pytest.mark.parametrize("words", [("sync_mode=ema",), ("sync_mode=trust_region", "sync_freq=2")])
def test_each_round_begins_with_the_policy_as_its_reference_however_slowly_it_follows(tmp_path, words):
    config = config_of(tmp_path, "online=true", "reward=adder", "sync_alpha=0.3", *words)
    log = Log()
    make_trainer(config).train(Rounds(*(make_segment(config, pairs=16, seed=seed) for seed in (3, 4))), log)
    at_ln_2 = [line["loss"] == pytest.approx(math.log(2), abs=1e-6) for line in log.lines]
    assert at_ln_2 == [True, False, False, False] * 2
