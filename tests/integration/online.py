"""Short online runs, and what they leave: shared by the tests of rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from config.load import load_run
from data.chat import make_renderer
from models.pretrained import load_tokenizer
from rollouts.ledger import RoundFolder, sampled_of
from tests.tiny import make_config
from train import train
from trainers.basic import BasicTrainer

SHORT = (
    "rounds.contexts=48",
    "rounds.contexts_per_round=24",
    "rounds.samples=4",
    "model.batch_size=8",
    "data.verifier=null",
    "n_eval_examples=4",
    "wandb.enabled=false",
    "warmup=0",
    "lr=3e-4",
    "log_drift=false",
    "retention.kl=false",
    "diagnostics=false",
    "report=false",
)


def run_online(folder: Path, name: str, *overrides: str) -> Path:
    """A run in this process; returns its folder."""
    config = make_config(*SHORT, f"runs_dir={folder}", f"cache_dir={folder}/cache", *overrides)
    train(config, name)
    return folder / name


def lines(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    text = (run / f"{name}.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1]  # not what is being written
    return [json.loads(line) for line in whole.splitlines()]


def rounds(run: Path) -> list[RoundFolder]:
    return [RoundFolder(path) for path in sorted((run / "rounds").glob("*"))]


def scored_again(run: Path) -> list[np.ndarray]:
    """For each round: the log-probabilities that the sampler gave its tokens minus those of the round's kept
    weights, loaded and run by transformers alone, nats."""
    config = load_run(run, trust_remote_code=False)
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    differences = []
    for folder in rounds(run):
        model = AutoModelForCausalLM.from_pretrained(folder.weights).eval()
        parts = [np.zeros(0)]
        for sampled in map(sampled_of, folder.read("samples")):
            prompt = renderer.prompt_ids(sampled.prompt).tolist()
            for one in sampled.completions:
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, len(prompt) - 1 : -1]
                own = (logits.float() / one.behavior_temperature).log_softmax(-1)
                picked = own.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0].numpy()
                parts.append(np.array(one.behavior_logprobs) - picked)
        differences.append(np.abs(np.concatenate(parts)))
    return differences


class CutOffError(Exception):
    """Where a run is cut off."""


@contextmanager
def cut_off(at: int | None, batches: list[Any] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """A run within ends before step ``at``, as a killed one does: nothing is saved, nothing is closed. None:
    it goes on to its end. ``batches`` gets the examples of every step. More may be patched for as long."""
    step = BasicTrainer.step

    def until(self: BasicTrainer[Any], batch: Any, observe: Any = None) -> Any:
        if self.progress.step == at:
            raise CutOffError
        if batches is not None:
            batches.append(batch.examples)
        return step(self, batch, observe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BasicTrainer, "step", until)
        if at is None:
            yield patch
            return
        with pytest.raises(CutOffError):
            yield patch


def assert_same(run: Path, whole: Path) -> None:
    """The weights, and the loss of every step."""
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]


def function(name: str) -> tuple[str, ...]:
    return (
        "reward=function",
        f"reward.function.path=tests.integration.rewarding.{name}",
        "reward.function.conversational=false",
        "reward.function.batch_size=1024",
    )
