"""What lies around in the environment of a machine and would decide in silence: a launcher's variables are
refused where no launcher set them; others are said."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import UserError

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
DECIDES = {
    "WANDB_MODE": "whether wandb uploads",
    "WANDB_DISABLED": "whether wandb is on",
    **dict.fromkeys(("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"), "where wandb keeps the run"),
    **dict.fromkeys(("WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS"), "how wandb lists the run"),
    "HF_ENDPOINT": "the hub that models and data come from",
    "NVIDIA_TF32_OVERRIDE": "how a GPU rounds float32 products",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "how a GPU rounds float32 products",
}
"""Variables that libraries read where no setting was given: name -> what they decide."""
NOT_READ = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Variables of wandb that would join runs."""


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


def decided(env: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable in ``env`` that decides something, or is meant to and does not."""
    unused = "is not read: a run has an id of its own in wandb, with which resume=true goes on"
    unread = [f"{name}={env[name]} {unused}" for name in NOT_READ if env.get(name)]
    return [f"{name}={env[name]} decides {what}" for name, what in DECIDES.items() if env.get(name)] + unread
