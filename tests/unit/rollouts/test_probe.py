"""The probe must catch wrong weights and let rounding pass."""

import numpy as np
import pytest

from common.worker_process import WorkerError
from rollouts.probe import NOISE, check_probe

RNG = np.random.default_rng(0)
TRAINER = [list(-RNG.exponential(2.0, n)) for n in (3, 40, 17)]


def shifted(rows: list[list[float]], by: float, seed: int = 0) -> list[list[float]]:
    """Every value moved by ``by`` times a random sign."""
    rng = np.random.default_rng(seed)
    return [[value + by * rng.choice([-1.0, 1.0]) for value in row] for row in rows]


@pytest.mark.parametrize("dtype", NOISE)
def test_rounding_passes_and_more_does_not(dtype):
    largest, mean = NOISE[dtype]
    probe = check_probe(shifted(TRAINER, 0.9 * mean), TRAINER, dtype)
    assert (probe.mean, probe.largest) == pytest.approx((0.9 * mean, 0.9 * mean))
    far = [list(row) for row in TRAINER]
    far[1][5] += 1.1 * largest
    for engine, trainer, said in (
        (shifted(TRAINER, 1.1 * mean), TRAINER, f"differ by {1.1 * mean:.3g} nats"),
        (far, TRAINER, "at most"),
        (TRAINER[:2], TRAINER, "length"),
        ([[], []], [[], []], "no token"),
        ([[np.nan, *TRAINER[0][1:]], *TRAINER[1:]], TRAINER, "nan"),
    ):
        with pytest.raises(WorkerError, match=said):
            check_probe(engine, trainer, dtype)


def test_an_engine_that_stood_still_is_caught_even_when_the_move_is_within_the_noise():
    """One round at a small learning rate: the trainer moved by 0.01 nats a token, a fifth of what bfloat16's
    noise allows. One that moved along passes, and so does one with nothing to follow."""
    noisy, after = shifted(TRAINER, 0.005, seed=1), shifted(TRAINER, 0.01, seed=2)
    before = check_probe(noisy, TRAINER, "bfloat16")
    check_probe(noisy, after, "bfloat16")  # by the difference alone it passes
    with pytest.raises(WorkerError, match="older weights"):
        check_probe(noisy, after, "bfloat16", before)
    along = shifted(after, 0.005, seed=3)
    now = check_probe(along, after, "bfloat16", before)
    assert check_probe(along, after, "bfloat16", now).mean == now.mean  # a round without a step
