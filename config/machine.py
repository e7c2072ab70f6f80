"""What lies around in the environment of a machine and would decide in silence: a launcher's variables are
refused where no launcher set them; wandb's count where their setting was not given, and are said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.errors import UserError
from config.schema import Config

ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
"""A launcher's variables, and what they say of a process that runs alone."""
COUNTED_BY = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Variables in which srun and mpirun tell each process that they start its rank and the number of ranks."""
MARK = "TORCHELASTIC_RUN_ID"
"""Set by torchrun and accelerate launch in every rank that they start."""
WANDB = {key: f"WANDB_{key.upper()}" for key in ("project", "entity", "name", "tags", "dir")}
WANDB["group"] = "WANDB_RUN_GROUP"
"""Setting of ``wandb`` -> the variable that counts where the setting was not given."""
NOT_READ = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Variables of wandb that would join runs: a run has an id of its own, with which ``resume`` goes on."""
DECIDES = {
    "WANDB_MODE": "whether wandb uploads",
    "HF_ENDPOINT": "the hub that models and data come from",
    "NVIDIA_TF32_OVERRIDE": "how a GPU rounds float32 products",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "how a GPU rounds float32 products",
}
"""Variables that libraries read and no setting has: name -> what they decide."""


def refuse_left_over(env: Mapping[str, str]) -> None:
    """Raise UserError if ``env`` says that this process is one of several, or not the first, and no launcher
    has started it: it would wait for ranks that nobody started."""
    left = {name: env[name] for name, alone in ALONE.items() if (env.get(name) or alone) != alone}
    if not left or launched(env):
        return
    variables = ", ".join(f"{name}={value}" for name, value in left.items())
    unset = " ".join(f"-u {name}" for name in (*ALONE, "MASTER_ADDR", "MASTER_PORT") if name in env)
    where = f" at {env['MASTER_ADDR']}:{env.get('MASTER_PORT', '?')}" if "MASTER_ADDR" in env else ""
    raise UserError(
        f"{variables}: the environment says that this process is one of several{where}, but no launcher has "
        f"started it, so it would hang. To run alone: env {unset} python …; on "
        f"several ranks: torchrun --nproc-per-node {env.get('WORLD_SIZE') or 'N'} …; for ranks that you "
        f"start yourself, set {MARK} to any name in each"
    )


def launched(env: Mapping[str, str]) -> bool:
    """Return whether a launcher gave this process the rank in ``env``."""
    mine = env.get("RANK"), env.get("WORLD_SIZE")
    return MARK in env or mine in [(env[rank], env.get(size)) for rank, size in COUNTED_BY if rank in env]


def speaks(env: Mapping[str, str]) -> bool:
    """Return whether this process is the one of its run's that prints messages."""
    return (env.get("RANK") or "0") == "0" or not launched(env)


def with_environment(config: Config, env: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Return the settings with wandb's variables where the settings of ``wandb`` were not given, and a
    sentence for each variable that decides something."""
    notes = [f"{name}={env[name]} decides {what}" for name, what in DECIDES.items() if env.get(name)]
    found = {
        key: env[name]
        for key, name in WANDB.items()
        if env.get(name) and not getattr(config.wandb, key) and (key != "name" or config.exp_name is None)
    }
    if env.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on") and config.wandb.enabled:
        notes.append(f"WANDB_DISABLED={env['WANDB_DISABLED']} turns wandb off")
        return replace(config, wandb=replace(config.wandb, enabled=False)), notes
    if not config.wandb.enabled:
        return config, [sentence for sentence in notes if not sentence.startswith("WANDB")]
    own = "is not read: this run has an id of its own in wandb, with which resume=true goes on"
    notes += [f"{name}={env[name]} {own}" for name in NOT_READ if env.get(name)]
    notes += [f"wandb.{key}={value}, from {WANDB[key]}" for key, value in found.items()]
    values: dict[str, Any] = {
        key: value.split(",") if key == "tags" else value for key, value in found.items()
    }
    return replace(config, wandb=replace(config.wandb, **values)), notes
