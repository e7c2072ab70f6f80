"""A tracker that writes a run's numbers as TensorBoard's event files: ``trackers=[tensorboard]``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import markdown
from common.errors import ConfigError
from reports.metrics import Record

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    raise ConfigError(
        "trackers",
        "tensorboard",
        f"its package is not installed ({missing}): pip install -r requirements/trackers.txt",
    ) from missing


class TensorBoard:
    """Writes to ``run_dir/folder``. The first line of a resumed run hides later entries of the earlier start,
    as TensorBoard's ``purge_step`` does."""

    def __init__(self, run_dir: Path, config: Record, *, folder: str = "tensorboard") -> None:
        self._folder, self._config = run_dir / folder, config
        self._writer: SummaryWriter | None = None

    def log(self, record: Record, step: int) -> None:
        writer = self._opened(step)
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                writer.add_scalar(key, value, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self._opened(step).add_text(name, markdown.table(columns, rows), step)

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        inner = np.asarray(edges, dtype=np.float64)
        limits = np.append(inner, inner[-1] + 1)  # the last bin is open, and TensorBoard needs its end
        middles = np.concatenate([inner[:1], (inner[1:] + inner[:-1]) / 2, inner[-1:]])
        bin_counts = np.asarray(counts, dtype=np.float64)
        self._opened(step).add_histogram_raw(
            name,
            min=float(limits[0]),
            max=float(limits[-1]),
            num=int(bin_counts.sum()),
            sum=float((middles * bin_counts).sum()),
            sum_squares=float((middles**2 * bin_counts).sum()),
            bucket_limits=limits.tolist(),
            bucket_counts=bin_counts.tolist(),
            global_step=step,
        )

    def summary(self, values: Record) -> None:
        text = json.dumps(values, indent=2, sort_keys=True, default=str)
        self._opened(None).add_text("summary", _fenced(text))

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int | None) -> SummaryWriter:
        """Return the writer. When it is first opened, it hides the lines of an earlier start from ``step``
        on; ``step`` is None if no line was written since, and then all lines stay."""
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            text = json.dumps(self._config, indent=2, sort_keys=True, default=str)
            self._writer.add_text("config", _fenced(text), step)
        return self._writer


def _fenced(text: str) -> str:
    return f"```json\n{text}\n```"
