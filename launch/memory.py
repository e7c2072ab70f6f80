"""The estimated memory of a sweep's runs, which tells before they are submitted whether they fit on their
cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.progress import SOON, progress
from common.worker_process import WorkerError, WorkerProcess
from config.schema import Config
from launch.slurm import Job
from launch.state import State

SECONDS = 1800.0
IDLE = (
    *("seed", "exp_name", "data", "n_epochs", "n_examples", "eval_every", "save_every", "sync_freq"),
    *("lr", "beta1", "beta2", "eps", "weight_decay", "scheduler", "warmup", "min_lr_ratio"),
    *("log_epsilon_P", "log_epsilon_R", "wandb", "trackers", "callbacks"),
)
"""Settings that do not affect a plan made without data: cells that differ only in them share a plan."""


@dataclass(frozen=True)
class CellPlan:
    """The memory plan that some runs share."""

    runs: tuple[str, ...]
    text: str
    over: tuple[str, ...]
    """Why they are refused, or nothing."""

    def __str__(self) -> str:
        others = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.runs[0]}{others}: {self.text}"


def cell_plans(states: Sequence[State], job: Job) -> list[CellPlan]:
    """Return the plans of these runs, one for all runs whose settings give the same plan; none if the job
    names no card. Rows are assumed to have the maximum length."""
    if job.card is None or not job.gpus_per_node or not states:
        return []
    alike: dict[str, list[State]] = {}
    for state in states:
        alike.setdefault(signature(state.config), []).append(state)
    worker = WorkerProcess("jobs.memory", log=None, env={"CUDA_VISIBLE_DEVICES": ""})
    try:
        return [
            CellPlan(tuple(state.run.name for state in same), *planned(worker, same[0].config, job))
            for same in progress(
                list(alike.values()), "plan the memory (slurm.card)", unit="cell", delay=SOON
            )
        ]
    finally:
        worker.close()


def planned(worker: WorkerProcess, config: Config, job: Job) -> tuple[str, tuple[str, ...]]:
    """Return (the plan in words, why the run is refused)."""
    try:
        said: Mapping[str, Any] = worker.call(
            "of_settings", config, job.world_size, job.card, timeout=SECONDS
        )
    except WorkerError as error:
        return f"the memory could not be planned: {str(error).strip().splitlines()[-1]}", ()
    return said["text"], tuple(said["over"] or ())


def signature(config: Config) -> str:
    """Return a key that is equal for runs with the same plan."""
    tree = asdict(config)
    return repr({key: value for key, value in tree.items() if key not in IDLE})
