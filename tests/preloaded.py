"""What the process that programs are forked from has imported: see programs.py."""

from __future__ import annotations

import importlib
import threading

from tests.quick_start import compose_quickly

HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "hydra.core.plugins",
    "datasets",
    "peft",
    "wandb",
    "math_verify",
    "scipy.stats",
    "matplotlib.backends.backend_svg",
    "reports.report",
    "jobs.job",
    "jobs.stages",
    "evals.running",
    "evals.accuracy",
    "evals.compare",
)
for name in HEAVY:
    importlib.import_module(name)
# Its own lock is shared by all forks: a program that is killed while it holds it would stop later ones.
importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
compose_quickly()
