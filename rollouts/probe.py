"""A test of whether an engine samples from the trainer's weights, which compares their log-probabilities of
the same rows.

Hashes cannot tell, because engines fuse, cast and shard weights. Log-probabilities can: wrong weights show as
differences of nats (3 and more for an old output head), right ones as rounding. There are two checks, because
wrong weights can pass either one alone:

- The difference lies within the dtype's noise (``NOISE``). This catches a load that went wrong.
- The engine moved when the trainer moved. A round at a small learning rate can move log-probabilities by less
  than bfloat16's noise, so an engine that skipped the load passes the first check. But its values for the
  same rows stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.worker_process import WorkerError

NOISE = {"float32": (1e-3, 1e-4), "bfloat16": (2.0, 0.3), "float16": (0.2, 0.01)}
"""dtype -> (largest, mean) absolute difference of token log-probabilities that rounding explains, nats.

float32: about 1e-6 on a CPU; TF32 would show as 1e-3, and is not wanted. bfloat16 keeps 8 bits: a logit of 20
is rounded by up to 0.06, and the log-probability of an unlikely token by more, so the mean is the criterion
and the largest difference only catches gross errors. Training makes the noise grow: two right computations of
SmolLM2-135M are 0.06 nats apart in the mean and 0.3 at most, after 10 to 20 steps at a rate of 1e-4 up to
0.13 and 1.3; its weights of before these steps are 2.5 to 3.0 and 11 to 12 apart. float16 keeps 11 bits.
"""

_MOVED = 1e-5
_STALE_SHARE = 0.1


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of the same rows by the engine and by the trainer, flattened, nats."""

    engine: np.ndarray
    """[tokens] float64"""
    trainer: np.ndarray
    """[tokens] float64"""

    @property
    def largest(self) -> float:
        """Largest absolute difference, nats."""
        return float(np.abs(self.engine - self.trainer).max())

    @property
    def mean(self) -> float:
        """Mean absolute difference, nats."""
        return float(np.abs(self.engine - self.trainer).mean())


def check_probe(
    engine: list[list[float]], trainer: list[list[float]], dtype: str, previous: Probe | None = None
) -> Probe:
    """Compare the engine's and the trainer's log-probabilities (nats), one row for each sequence.
    ``previous`` is the probe of the same rows before the last load.

    Returns the probe, to be passed as ``previous`` next time. Raises WorkerError with the measured difference
    if it is above the noise of ``dtype`` (the coarser of the engine's and the trainer's) or not finite, or if
    the engine stood still while the trainer moved.
    """
    if [len(row) for row in engine] != [len(row) for row in trainer] or not any(engine):
        raise WorkerError("the probe's rows differ in length between engine and trainer, or have no token")
    now = Probe(
        np.concatenate([np.asarray(row, np.float64) for row in engine]),
        np.concatenate([np.asarray(row, np.float64) for row in trainer]),
    )
    largest, mean = NOISE[dtype]
    if not (now.largest <= largest and now.mean <= mean):  # also true for nan
        raise WorkerError(
            "the engine does not have the trainer's weights: token log-probabilities differ by "
            f"{now.largest:.3g} "
            f"nats at most and {now.mean:.3g} in the mean, where {dtype} explains {largest:g} and {mean:g}"
        )
    if previous is not None and len(previous.engine) == len(now.engine):
        moved, followed = (
            float(np.abs(now.trainer - previous.trainer).mean()),
            float(np.abs(now.engine - previous.engine).mean()),
        )
        if moved > _MOVED and followed < _STALE_SHARE * moved:
            raise WorkerError(
                "the engine still has older weights: since the last load the trainer's log-probabilities "
                "moved by "
                f"{moved:.3g} nats in the mean, the engine's by {followed:.3g}"
            )
    return now
