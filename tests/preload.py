"""What the process that programs are forked from (tests.programs) imports beforehand; nothing here may start
a thread."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import contextlib
import gc
import importlib
import multiprocessing

MAIN_PROCESS = multiprocessing.current_process()

MODULES = (
    "pytest",  # the main module of the tests themselves
    "hydra.core.plugins",
    "hydra.utils",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "peft",
    "wandb",
    "train",
    "sample",
    "label",
    "eval",
    "jobs.job",
    "tests.tiny",
    "tests.engine",
)
for name in MODULES:
    with contextlib.suppress(ImportError):  # not all are installed everywhere
        importlib.import_module(name)

from tests.blank_charts import blank_charts  # noqa: E402

blank_charts()
gc.collect()
atexit.register(gc.unfreeze)
gc.freeze()  # no collection of garbage need look at what is here, nor copy its pages
