"""A training job: the parts of a run put together in the order in which they can be checked, and what is left when it is done."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config.schema import Config, ConfigError
from data.chat import make_renderer
from data.quality import DataReport
from data.types import Sequence
from models.distributed import World, barrier, from_main, gather_objects, shard
from models.export import export, full_state
from models.policy import check_model, decoder_blocks, load_policy, load_tokenizer
from models.reference import Reference, weights_fingerprint
from trainers.evaluation import Evaluator
from trainers.initial import initial_scores
from trainers.modelcard import write_model_card
from trainers.report import final_table, write_report
from trainers.run import Run, Signals
from trainers.setup import Offline, check_ranks, make_loss, make_plan, run_folder, trainer_class
from trainers.tracking import NullTracker, Tracker


class Job:
    """Builds and runs. Everything a user can get wrong is found in ``__init__``, before weights are loaded."""

    def __init__(self, config: Config, name: str, world: World) -> None:
        self.config, self.name, self.world = config, name, world
        self.say(f"{name}: {config.variant} {config.loss['name']} on {config.data.name}, {world.size} x {world.device.type}")
        check_ranks(config, world.size)
        self.loss, self.trainer_class = make_loss(config), trainer_class(config)
        check_model(config.model)
        self.tokenizer = load_tokenizer(config.model)
        self.renderer = make_renderer(self.tokenizer, config.model, config.data)
        self.plan = make_plan(config, self.trainer_class, self.renderer)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)
