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
    _, mean = NOISE[dtype]
    probe = check_probe(shifted(TRAINER, 0.9 * mean), TRAINER, dtype)
    assert probe.mean == pytest.approx(0.9 * mean)
    assert probe.largest == pytest.approx(0.9 * mean)
    with pytest.raises(WorkerError, match=rf"differ by {1.1 * mean:.3g} nats"):
        check_probe(shifted(TRAINER, 1.1 * mean), TRAINER, dtype)


@pytest.mark.parametrize("dtype", NOISE)
def test_one_token_far_off_does_not_pass(dtype):
    engine = [list(row) for row in TRAINER]
    engine[1][5] += 1.1 * NOISE[dtype][0]
    with pytest.raises(WorkerError, match="at most"):
        check_probe(engine, TRAINER, dtype)


def test_other_rows_than_asked_for_and_no_numbers_do_not_pass():
    with pytest.raises(WorkerError, match="length"):
        check_probe(TRAINER[:2], TRAINER, "float32")
    with pytest.raises(WorkerError, match="no token"):
        check_probe([[], []], [[], []], "float32")
    with pytest.raises(WorkerError, match="nan"):
        check_probe([[np.nan, *TRAINER[0][1:]], *TRAINER[1:]], TRAINER, "bfloat16")


def test_an_engine_that_stood_still_is_caught_even_when_the_move_is_within_the_noise():
    """One round at a small learning rate: the trainer moved by 0.01 nats a token, a fifth of what bfloat16's
    noise allows."""
    noisy = shifted(TRAINER, 0.005, seed=1)
    before = check_probe(noisy, TRAINER, "bfloat16")
    after = shifted(TRAINER, 0.01, seed=2)
    check_probe(noisy, after, "bfloat16")  # by the difference alone it passes
    with pytest.raises(WorkerError, match="older weights"):
        check_probe(noisy, after, "bfloat16", before)


def test_an_engine_that_moved_along_passes_and_so_does_one_with_nothing_to_follow():
    before = check_probe(shifted(TRAINER, 0.005, seed=1), TRAINER, "bfloat16")
    after = shifted(TRAINER, 0.01, seed=2)
    now = check_probe(shifted(after, 0.005, seed=3), after, "bfloat16", before)
    assert (
        check_probe(shifted(after, 0.005, seed=3), after, "bfloat16", now).mean == now.mean
    )  # a round without a step
