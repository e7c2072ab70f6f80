"""Evaluate a run, one of its checkpoints, any model folder, or a model of the hub.

    python eval.py run=runs/mine                                      # greedy accuracy and pass@k on the run's held-out prompts
    python eval.py run=runs/mine-s* data=math accuracy.k=[1,8,64] accuracy.samples=64 sampler=vllm
    python eval.py run=runs/mine kind=compare against=runs/other reward=armorm data=alpacaeval data.path=prompts.json
    python eval.py model=hub model.name_or_path=org/name data=gsm8k out=evaluations/name

Results go to runs/mine/evals/<name>.json, every answer to <name>.jsonl beside it; python -m launch.results
shows them. The keys of this program are those of config/eval.yaml: python eval.py --cfg job
"""  # noqa: E501

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from common.errors import require
from common.imports import importing
from config.cli import cli, guarded
from config.load import split_settings
from config.schema_stages import EvalStage


def evaluate(cfg: DictConfig, overridden: list[str]) -> None:
    """Evaluate everything that ``run`` names with the evaluation ``kind``.

    ``overridden``: the dotted keys that the command line sets. Raises ConfigError, DataError,
    StoppedError."""
    stage, rest = split_settings(cfg, EvalStage)
    settings: Any = OmegaConf.to_container(rest, resolve=True)

    from evals.running import check_early
    from evals.running import evaluate as measure
    from evals.targets import expanded, refuse_unread, run_of, targets_of

    refuse_unread(overridden, [item.name for item in fields(EvalStage)], bool(stage.run), settings)
    checkpoints = [
        checkpoint for path in expanded(stage.run) if (checkpoint := run_of(path, stage.step))[1] is not None
    ]
    with ExitStack() as stack:
        exported = {}
        for run, step in checkpoints:
            require(
                os.environ.get("WORLD_SIZE", "1") == "1",
                "step",
                step,
                f"is read by one process: start it without a launcher, or python export.py {quote(str(run))} "
                f"--step {step} --to DIR first",
            )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eval-")))
            from export import export_run

            exported[run] = export_run(run, step, folder / "model")
        targets = targets_of(stage, settings, overridden, exported)
        check_early(targets, stage)
        with importing("torch"):
            from transformers.utils.logging import disable_progress_bar

            from models.distributed import started

        disable_progress_bar()  # transformers draws a bar for every file; sampling has its own bar
        with started() as world:
            measure(targets, stage, world)


@hydra.main(version_base="1.3", config_path="config", config_name="eval")
def main(cfg: DictConfig) -> None:
    overridden = [word.lstrip("+~").partition("=")[0] for word in HydraConfig.get().overrides.task]
    guarded(lambda: evaluate(cfg, overridden))


if __name__ == "__main__":
    cli(main)
