"""Trackers that write a run's numbers to ``metrics.jsonl`` and show them to Weights & Biases. The file is the
record, wandb mirrors it.

Every rank holds a ``Tracker``, and the trainer calls all alike. wandb may fail, be slow or be absent without
affecting the run: the first failure prints a warning, and wandb is then not called again.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.secrets import scrub, scrub_words
from config.schema import WandbConfig
from reports.metrics import DIAGNOSTICS, METRICS, LineFile, Record, plain
from reports.provenance import variant
from reports.trackers import Fused, in_a_line, open_trackers, warn

PROJECT = "humanline"
"""The wandb project where neither a setting nor the environment names one."""
INIT_SECONDS = 10.0
"""Seconds that an unreachable wandb server may delay the start; after that the run is tracked offline."""
FINISH_SECONDS = 60.0
"""Seconds that uploading may delay the end; the rest stays on disk for ``wandb sync``."""

Histograms = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""name -> (counts [bins], edges between the bins [bins - 1]); the two outer bins are open."""


class Tracker:
    """The tracker of a run: on rank 0 with the run's folder, on every other rank without, where it ignores
    every call.

    ``resumed``: the run continues the lines that its files have (reports.metrics.restore has cut them);
    otherwise the tracker discards what a killed process left. ``wandb_id``: the id that this run had before
    it was resumed, or None. The attribute of that name is the id in use, which the caller keeps in its
    checkpoints; None when wandb is off.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        config: Record | None = None,
        wandb: WandbConfig | None = None,
        resumed: bool = False,
        wandb_id: str | None = None,
    ) -> None:
        self._run_dir, self._fresh = run_dir, not resumed
        self._files: dict[str, LineFile] = {}
        self._wandb = Wandb(wandb_id)
        self._shown: list[Fused] = []
        if run_dir is not None and config is not None and wandb is not None:
            self._file(METRICS)
            first = Fused("wandb", lambda: self._wandb.start(run_dir, config, wandb))
            self._shown = [first, *open_trackers(run_dir, config)]

    @property
    def wandb_id(self) -> str | None:
        return self._wandb.id

    def log(self, record: Record) -> None:
        """Append one line to metrics.jsonl and show it to wandb. ``record["step"]`` is an int above that of
        the line before."""
        record = plain(record)
        self._append(METRICS, record)
        self._tell("log", record, record["step"])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Show a table of samples to wandb; ``step`` is that of the last line or of the next one."""
        self._tell("table", name, columns, rows, step)

    def diagnostics(self, record: Record, histograms: Histograms) -> None:
        """Append one line to diagnostics.jsonl, and show ``histograms`` to wandb at ``record["step"]``, the
        step of the last line of metrics."""
        self._append(DIAGNOSTICS, plain(record))
        for name, (counts, edges) in histograms.items():
            self._tell("histogram", name, counts, edges, record["step"])

    def summary(self, values: Record) -> None:
        """Show the numbers that summarize the whole run in wandb's list of runs."""
        self._tell("summary", plain(values))

    def settle(self) -> None:
        """Write every line that waits for room. Raises OSError."""
        for file in self._files.values():
            file.settle()

    def copy_to(self, folder: Path) -> None:
        """Copy the files, as they are, into a checkpoint's ``folder``. Raises OSError."""
        for file in self._files.values():
            file.copy_to(folder)

    def close(self) -> None:
        """Close the files and let wandb finish, for at most FINISH_SECONDS."""
        for file in self._files.values():
            file.close()
        self._tell("finish")

    def _append(self, name: str, record: Record) -> None:
        if self._run_dir is not None:
            self._file(name).append(record)

    def _file(self, name: str) -> LineFile:
        if name not in self._files:
            assert self._run_dir is not None
            self._files[name] = LineFile(self._run_dir / name, self._fresh)
        return self._files[name]

    def _tell(self, method: str, *arguments: Any) -> None:
        for tracker in self._shown:
            tracker.tell(method, *arguments)


@contextmanager
def clean_arguments() -> Iterator[None]:
    """Let no secret be among the program's arguments, which wandb records."""
    original = sys.argv
    sys.argv = scrub_words(original)
    try:
        yield
    finally:
        sys.argv = original


class Wandb:
    """wandb as a tracker (``reports.trackers.ExternalTracker``).

    ``id``: the id that the run had before, or None; then the id in use, also after wandb has failed."""

    def __init__(self, run_id: str | None) -> None:
        self.id = run_id
        self._run: Any = None
        self._tables: list[tuple[int, dict[str, Any]]] = []

    @clean_arguments()
    def start(self, run_dir: Path, config: Record, settings: WandbConfig) -> Wandb | None:
        """Start the wandb run and return this tracker; None where it is off."""
        disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on")
        if disabled or not settings.enabled:
            return None
        import wandb  # the import takes half a second, which a run without wandb is spared

        mode = _mode(wandb.setup().settings)
        if mode == "disabled":
            return None
        if mode == "offline" and os.environ.get("WANDB_MODE") == "online":
            warn("wandb", "WANDB_MODE=online without a key (`wandb login`, WANDB_API_KEY): it stays offline")
        config, settings = scrub(config), replace(settings, **scrub(vars(settings)))
        self.id = self.id or secrets.token_hex(4)
        if settings.dir is not None:
            Path(settings.dir).mkdir(parents=True, exist_ok=True)
        try:
            self._init(mode, run_dir, config, settings)
        except wandb.errors.Error as error:
            if mode == "offline":
                raise
            pieces = Path(settings.dir or run_dir) / "wandb" / "offline-run-*"
            warn(
                "wandb",
                f"{in_a_line(error)}; this run is tracked offline: `wandb sync {pieces}` uploads it, once "
                "key (`wandb login`, WANDB_API_KEY) and server (WANDB_BASE_URL) are right",
            )
            wandb.teardown()  # the failed attempt still holds the id
            self._init("offline", run_dir, config, settings)
        return self

    def _init(self, mode: Any, run_dir: Path, config: Record, settings: WandbConfig) -> None:
        import wandb

        loss, env = config.get("loss", {}).get("name", ""), os.environ.get
        of_environment = env("WANDB_NAME") if config.get("exp_name") is None else None
        tags = settings.tags or [tag for tag in env("WANDB_TAGS", "").split(",") if tag]
        self._run = wandb.init(
            project=settings.project or env("WANDB_PROJECT") or PROJECT,
            entity=settings.entity,
            name=settings.name or of_environment or run_dir.name,
            group=settings.group or env("WANDB_RUN_GROUP") or f"{loss}-{variant(config)}",
            tags=[*tags, loss, variant(config)],
            config=config,
            dir=settings.dir or env("WANDB_DIR") or run_dir,
            mode=mode,
            id=self.id,
            # Offline, wandb warns that resuming is not supported; the id alone joins the pieces when they are
            # synced.
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            ),
        )

    def log(self, record: Record, step: int) -> None:
        self._run.log({key: value for key, value in record.items() if value is not None}, step=step)
        self._show_tables(step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import wandb

        shown = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._tables.append((step, {name: shown}))

    def _show_tables(self, step: int | None = None) -> None:
        """Show the tables of steps up to ``step`` (None: of all). A table waits for the line of its step:
        wandb takes nothing of an earlier step afterwards."""
        due = [table for table in self._tables if step is None or table[0] <= step]
        self._tables = self._tables[len(due) :]  # steps never go back
        for at, table in due:
            self._run.log(table, step=at if step is None else step)

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        import wandb

        closed = np.array([2 * edges[0], *edges, 2 * edges[-1]])  # wandb accepts no open bins
        self._run.log({name: wandb.Histogram(np_histogram=(np.array(counts), closed))}, step=step)

    def summary(self, values: Record) -> None:
        self._run.summary.update(values)

    def finish(self) -> None:
        self._show_tables()
        self._run.finish()
        self._run = None


def _mode(settings: Any) -> str:
    """Return online, offline or disabled, as WANDB_MODE or wandb's settings file says; online only if wandb
    would not ask for a login."""
    import wandb
    from wandb.sdk.lib import wbauth

    if settings.mode in ("disabled", "offline", "dryrun"):
        return "disabled" if settings.mode == "disabled" else "offline"
    try:
        found = wbauth.authenticate_session(
            host=settings.base_url, source="humanline", prompt=False, update_session=False
        )
    except wandb.errors.Error:
        return "online"  # where wandb says what is wrong with the key
    return "online" if found else "offline"
