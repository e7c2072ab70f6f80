"""The training program: compose the settings, check them, build the parts, train.

    python train.py loss=dpo humanline=true
    torchrun --nproc-per-node 8 train.py model=llama3-8b-instruct data=ultrafeedback-armorm loss=kto humanline=true
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from config.schema import Config, ConfigError, load, run_name
from data.types import DataError


@hydra.main(version_base="1.3", config_path="config", config_name="config")
def main(cfg: DictConfig) -> None:
    config = load(cfg)
    train(config, run_name(config, list(HydraConfig.get().overrides.task)))


def train(config: Config, name: str) -> dict[str, Any]:
    """One run, from settings to an exported model; returns its summary."""
    from models.distributed import start, stop
    from trainers.job import Job

    world = start()
    try:
        job = Job(config, name, world)
        return job.describe() if config.dry_run else job.run()
    finally:
        stop()


def cli() -> int:
    """0: done; 2: a setting or the data cannot be used; 75: interrupted and saved, start again with resume=true."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach this function, which says them in one message
    try:
        main()
    except (ConfigError, DataError) as error:
        return complain(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return complain(" ".join(str(part) for part in (error, error.__cause__) if part is not None))
    return 0


def complain(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(cli())
