"""``tools/humanline_trl.py``, the file that users of TRL copy, against this project: TRL's trainers with it
and ours take ten steps on the same token ids, and end with the same weights."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from config.schema import Config
from data.batches import Segment
from data.types import Example
from data.views import mismatched
from tests.engine import engine_config, make_segment, make_trainer, run, weights
from tests.integration.test_two_models import make_policy
from tests.tiny import ROOT, tiny_llama

STEPS, BOUNDS = 10, (-0.05, 0.08)
UNITS = {"dpo": 4, "kto": 8, "grpo": 8}
QUIET = {"logging_steps": 1, "report_to": "none", "save_strategy": "no"}
QUIET |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
NUMBERS = {
    "dpo": ["beta"],
    "kto": ["beta", "desirable_weight", "undesirable_weight"],
    "grpo": ["beta", "epsilon"],
}
"""The loss's settings that have the same name in TRL"""


def settings(cache: Path, loss: str, k: int, bounds: tuple[float, float]) -> Config:
    low, high = bounds
    humanline = ("humanline=true", f"sync_freq={k}", f"log_epsilon_P={low}", f"log_epsilon_R={high}")
    numbers = ("weight_decay=0", "eps=1e-3", "beta2=0.999", "loss.beta=0.1")
    return engine_config(cache, loss, *humanline, *numbers, f"model.batch_size={UNITS[loss]}")


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[Any]:
    """TRL, imported when its tests run: its import silences the vLLM of all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
        yield pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed: pip install trl==1.16.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder that TRL loads."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    for file in (ROOT / "assets" / "adder" / "model").glob("*token*"):
        shutil.copy(file, path)
    return path


def rows_of(loss: str, examples: list[Example]) -> list[dict[str, Any]]:
    """Return the examples of ``dpo`` or ``kto`` as rows with TRL's columns of token ids. KTO's mismatched
    row is there where the example has one."""
    rows = []
    for example in examples:
        first = example.rows[0]
        row: dict[str, Any] = {"prompt_ids": first.prompt_ids.tolist()}
        if loss == "dpo":
            row |= {"chosen_ids": first.completion_ids.tolist()}
            row |= {"rejected_ids": example.rows[1].completion_ids.tolist()}
        else:
            row |= {"completion_ids": first.completion_ids.tolist(), "label": example.label > 0}
        if example.mismatched is not None:
            row["KL_completion_ids"] = example.mismatched.completion_ids.tolist()
        rows.append(row)
    return rows


def generated(batch: list[Example]) -> dict[str, Tensor]:
    """Return a batch as GRPOTrainer gets it from its sampling: prompts padded on the left, answers on the
    right, with our advantages."""
    prompts = [torch.tensor(e.rows[0].prompt_ids).long() for e in batch]
    answers = [torch.tensor(e.rows[0].completion_ids).long() for e in batch]
    tensors = {"advantages": torch.tensor([e.label for e in batch])}
    for name, parts, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
        seen = [torch.ones_like(part) for part in parts]
        tensors[f"{name}_ids"] = pad_sequence(parts, batch_first=True, padding_side=side)
        tensors[f"{name}_mask"] = pad_sequence(seen, batch_first=True, padding_side=side)
    return tensors | {"num_items_in_batch": tensors["completion_mask"].sum()}


def with_trl(
    loss: str, config: Config, segment: Segment, folder: Path, model: Any, accumulation: int = 1
) -> Any:
    """TRL's trainer after ten steps on the segment's batches."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    from tools import humanline_trl

    batches = [segment.batch(t) for t in range(STEPS)]
    base = getattr(humanline_trl, f"Humanline{loss.upper()}Trainer")

    class Fed(base):
        """Takes rows that are tokenised, and for GRPO sampled, already."""

        def _prepare_dataset(self, dataset, *_, **__):
            return dataset

        def _generate_and_score_completions(self, inputs):
            return generated(batches[self._step // accumulation])

    arguments = getattr(trl, f"{loss.upper()}Config")(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=UNITS[loss] // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta2=0.999,
        adam_epsilon=config.eps,
        max_grad_norm=config.model.max_grad_norm,
        train_sampling_strategy="sequential",
        disable_dropout=True,
        **QUIET,
        **{name: config.loss[name] for name in NUMBERS[loss]},
        **({"num_generations": 2, "use_bias_correction_kl": False} if loss == "grpo" else {}),
    )
    examples = [example for batch in batches for example in batch]
    if loss == "kto":
        examples = [e for batch in batches for e in mismatched(batch, config.model.max_length)]
    rows = rows_of(loss, examples)
    if loss == "grpo":
        rows = [{"prompt": f"{i}+1="} for i in range(len(rows))]
    trainer = Fed(
        model,
        **({"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if loss == "grpo" else {}),
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(rows),
        log_epsilon_P=config.log_epsilon_P,
        log_epsilon_R=config.log_epsilon_R,
        sync_freq=config.sync_freq,
    )
    trainer.train()
    return trainer


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).detach().square().sum() for name in one) ** 0.5)


CASES = [("dpo", 3, True, 2), ("kto", 3, False, 1), ("grpo", 1, False, 2)]


@pytest.mark.parametrize(("loss", "k", "lora", "accumulation"), CASES)
def test_ten_steps_of_trl_are_ten_of_ours(
    tmp_path: Path, folder: Path, loss: str, k: int, lora: bool, accumulation: int
) -> None:
    start = make_policy(lora)
    config = settings(tmp_path, loss, k, BOUNDS)
    segment = make_segment(config, pairs=4 * STEPS)
    assert segment.steps == STEPS
    ours, lines = run(config, segment, make_trainer(config, copy.deepcopy(start)))
    model = copy.deepcopy(start.model) if lora else str(folder)
    theirs = with_trl(loss, config, segment, folder, model, accumulation)
    begun = {name: p for name, p in start.named_parameters() if p.requires_grad}
    trained = dict(theirs.model.named_parameters())
    moved = distance(begun, weights(ours))
    apart = distance({name: trained[name.removeprefix("model.")] for name in begun}, weights(ours))
    assert moved > 0.1 and apart < 1e-5 * moved
    said = theirs.state.log_history[:STEPS]
    assert [line["loss"] for line in said] == pytest.approx([line["loss"] for line in lines], abs=1e-5)
    for side in ("clipped_low", "clipped_high"):
        shares = [line[side] for line in lines]
        assert max(shares) > 0.1
        if accumulation == 1:  # TRL logs the mean over microbatches
            assert [line[f"humanline/{side}"] for line in said] == pytest.approx(shares, abs=1e-6)


def test_grpo_samples_and_trains_by_itself_without_a_kl_term(tmp_path: Path, folder: Path, trl: Any) -> None:
    """TRL's own sampling, its default beta of 0, and a batch that several steps use."""
    from datasets import Dataset

    from tools.humanline_trl import HumanlineGRPOTrainer

    numbers = {"max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 4, "num_iterations": 2}
    numbers |= {"max_completion_length": 6, "learning_rate": 0.01}
    args = trl.GRPOConfig(output_dir=str(tmp_path), **numbers, **QUIET)

    def reward(completion_ids, **_):
        return [float(ids[0]) for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": f"{i}+1="} for i in range(10)])
    trainer = HumanlineGRPOTrainer(
        str(folder), reward, args, rows, log_epsilon_P=BOUNDS[0], log_epsilon_R=BOUNDS[1], sync_freq=2
    )
    assert trainer.beta == trainer.args.beta == 0.0
    trainer.train()
    said = [line for line in trainer.state.log_history if "humanline/clipped_low" in line]
    assert len(said) == 4 and said[0]["humanline/clipped_low"] == 0 and "kl" not in said[0]
    assert any(line["humanline/clipped_low"] + line["humanline/clipped_high"] > 0 for line in said[1:])


def test_settings_that_would_ask_another_reference_are_refused(
    tmp_path: Path, folder: Path, trl: Any
) -> None:
    from datasets import Dataset

    from tools.humanline_trl import HumanlineDPOTrainer

    rows = Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    common = {"output_dir": str(tmp_path)} | QUIET
    for setting, remedy in (
        ({"sync_ref_model": True}, "sync_ref_model=True.*set it to False"),
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True.*set it to False"),
        ({"loss_type": ["aot"]}, "aot"),
    ):
        with pytest.raises(ValueError, match=remedy):
            HumanlineDPOTrainer(str(folder), args=trl.DPOConfig(**common, **setting), train_dataset=rows)
    with pytest.raises(ValueError, match=r"log_epsilon_P=0\.5"):
        HumanlineDPOTrainer(str(folder), log_epsilon_P=0.5)
