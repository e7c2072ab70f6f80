"""A tracker that shows a run's numbers in trackio: ``trackers=[trackio]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.files import write_whole
from reports.metrics import Record
from reports.provenance import variant

try:
    import trackio
except ImportError as missing:
    raise ConfigError(
        "trackers",
        "trackio",
        f"its package is not installed ({missing}): pip install -r requirements/trackers.txt",
    ) from missing

STARTED = ".trackio"
"""File in the run's folder that says that trackio already has this run, so a resumed run continues it."""


class Trackio:
    """A trackio run with the name of this run. Steps that a killed run repeats appear there twice, with the
    same numbers."""

    def __init__(
        self,
        run_dir: Path,
        config: Record,
        *,
        project: str = "humanline",
        space_id: str | None = None,
        server_url: str | None = None,
    ) -> None:
        known = (run_dir / STARTED).exists()
        self._run = trackio.init(
            project=project,
            name=run_dir.name,
            group=f"{config.get('loss', {}).get('name', '')}-{variant(config)}",
            space_id=space_id,
            server_url=server_url,
            config=config,
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        write_whole(run_dir / STARTED, f"{project}\n")

    def log(self, record: Record, step: int) -> None:
        known = {key: value for key, value in record.items() if value is not None and key != "step"}
        self._run.log(known, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        shown = trackio.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({name: shown}, step=step)

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        closed = np.array([2 * edges[0], *edges, 2 * edges[-1]])  # trackio accepts no open bins
        self._run.log({name: trackio.Histogram(np_histogram=(np.array(counts), closed))}, step=step)

    def summary(self, values: Record) -> None:
        numbers = {f"summary/{key}": v for key, v in values.items() if isinstance(v, int | float)}
        self._run.log(numbers)

    def finish(self) -> None:
        trackio.finish()
