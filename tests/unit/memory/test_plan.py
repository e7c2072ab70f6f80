"""What a run decides by the estimate of its memory and says of it: the shipped recipes fit on the cards that
they name, a batch is cut where it must be, and what cannot fit is refused with what would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, StoppedError
from config.schema import Config
from jobs import memory
from jobs.memory import Batches, Card, RankMemory, make_plan, short_of_memory, to_use
from launch.grid import read_sweep
from launch.slurm import make_job
from launch.state import Composer
from models.shapes import architecture, count_weights, without_weights
from tests.programs import start
from tests.tiny import make_config
from tests.unit.memory.test_recorded import longest_batch, plan_settings
from train import train
from trainers.assembly import trainer_class

ROOT = Path(__file__).resolve().parents[3]


# -- recipes ---------------------------------------------------------------------------------------


def recipes() -> dict[tuple[str, int, str], Config]:
    """Model, ranks and card of the shipped sweeps on GPUs -> the settings that hold most: of a run that
    samples, if there is one, scores for a sync, and has the most rows in a microbatch."""
    found: dict[tuple[str, int, str], Config] = {}
    composer = Composer()
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        sweep = read_sweep(path, {})
        job = make_job(sweep.slurm)
        assert not job.gpus_per_node or job.card is not None, f"{path.name} names no card"
        runs = [run for run in sweep.runs() if job.gpus_per_node and run.seed == 1]
        for config in map(composer.config, runs):
            key = (config.model.name, job.world_size, str(job.card))
            found[key] = max(found.get(key, config), config, key=rank)
    return found


def rank(config: Config) -> tuple[bool, bool, float]:
    rows = config.model.batch_size * trainer_class(config).rows_per_example
    return config.online, config.syncing != "never", rows / config.model.microbatches


def test_every_shipped_recipe_fits_on_the_card_that_it_names() -> None:
    shipped = recipes()
    assert len(shipped) >= 2
    for (name, ranks, card), config in shipped.items():
        plan = plan_settings(config, ranks, card)
        assert plan.refusal is None and "  fits: " in plan.text, f"{name}: {plan.text}"


PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B-Instruct": 8.03,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "google/gemma-2-27b-it": 27.2,
    "EleutherAI/pythia-1.4b": 1.41,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
}
"""Billions of parameters, on the hub's pages."""


def test_known_shapes_have_the_published_sizes() -> None:
    for name, billions in PUBLISHED.items():
        found = architecture(make_config("model=hub", f"model.name_or_path={name}").model)
        tied = found.vocab_size * found.hidden_size if found.tie_word_embeddings else 0
        assert (count_weights(without_weights(found)) - tied) / 1e9 == pytest.approx(billions, rel=0.01)


# -- what is decided -------------------------------------------------------------------------------

QWEN = make_config("model=qwen2.5-1.5b-instruct", "loss=dpo", "model.batch_size=64")


@settings(max_examples=12, deadline=None)
@given(room=st.floats(30, 140), ranks=st.sampled_from([1, 2, 8]), auto=st.booleans())
def test_a_cut_fits_and_a_wider_one_would_not(room: float, ranks: int, auto: bool) -> None:
    """Whatever the card, the batch stays whole, or its microbatches are the widest in thousands that fit."""
    ways = {"activation_checkpointing": "auto"} if auto else {}
    config = replace(QWEN, model=replace(QWEN.model, **ways))
    estimate = replace(SHAPED, config=config, ranks=ranks, card=Card("a card", room))
    batches = Batches(estimate)
    batch = longest_batch(config, config.model.batch_size)
    plan = make_plan(batches, batch, batch[0], [])
    way = plan.decided.get("activation_checkpointing", config.model.activation_checkpointing)
    chosen = estimate.with_model(activation_checkpointing=way)
    whole = batches.trained(batch, None)
    tokens = plan.decided.get("microbatch_tokens")
    if tokens is None:
        assert chosen.fits(whole) or plan.load == whole
        return
    least = whole.cut(plan.least)
    assert not chosen.fits(whole) and tokens >= plan.least
    assert chosen.fits(whole.cut(tokens)) or tokens == plan.least
    assert not chosen.fits(whole.cut(tokens + 1001)) or tokens + 1001 >= whole.tokens
    assert (plan.refusal is not None) == (chosen.step_total(least) > room)
    if auto and way is not False:
        assert not estimate.with_model(activation_checkpointing=False).fits(whole)


SHAPED = RankMemory.of(QWEN, 1, Card("a card", 80.0))


@pytest.mark.parametrize(
    ("way", "ranks", "card"),
    [("false", 2, "80"), ("true", 1, "A100-40GB"), ("false", 1, "L40S"), ("true", 4, "24")],
)
def test_what_cannot_fit_is_refused_with_what_would(way: str, ranks: int, card: str) -> None:
    words = ["model=llama3-8b-instruct", "loss=dpo", "model.batch_size=8"]
    words.append(f"model.activation_checkpointing={way}")
    refusal = plan_settings(make_config(*words), ranks, card).refusal
    assert refusal is not None
    remedy = str(refusal).partition(": use ")[2]
    if (more := re.match(r"torchrun --nproc-per-node (\d+)(?: with )?", remedy)) is not None:
        ranks, remedy = int(more[1]), remedy[more.end() :]
    words += remedy.split()
    assert plan_settings(make_config(*words), ranks, card).refusal is None


def test_what_is_no_card_is_refused() -> None:
    for card in ("H1000", "-3", "nan", "513"):
        with pytest.raises(ConfigError, match=r"plan\.card"):
            make_config(f"plan.card={card}")


# -- in a run --------------------------------------------------------------------------------------

SMALL = (
    *("loss=dpo", "humanline=true", "n_examples=24", "model.batch_size=12", "n_eval_examples=4"),
    *("n_eval_prompts=1", "wandb.enabled=false", "diagnostics=false", "report=false"),
)


def test_a_run_takes_what_is_said_and_the_cut_of_a_small_card(tmp_path: Path, monkeypatch, capsys) -> None:
    """A process on a CPU takes it within a factor of 1.5. Then the same run, estimated for a card on which
    twelve pairs at once are too many."""
    places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache")
    program = start("train.py", *SMALL, *places, "exp_name=plain")
    assert program.wait() == 0, program.said()
    assert "12 examples a step and rank in one microbatch: model.microbatch_tokens cuts it" in program.said()
    *_, noted = json.loads((tmp_path / "plain" / "run.json").read_text())["memory"]
    assert 1 / 1.5 < noted["measured_gib"] / noted["predicted_gib"] < 1.5
    train(make_config(*SMALL, *places, "dry_run=true", "plan.card=2"), "planned")
    found = re.search(r"training step: (\S+) GiB.* CUDA context (\S+)", capsys.readouterr().out)
    step, outside = found.groups()
    card = Card("a small card", (float(outside) + 0.7 * (float(step) - float(outside))) / 0.95)
    monkeypatch.setattr(memory, "card_of", lambda config: card)
    train(make_config(*SMALL, *places), "cut")
    printed = capsys.readouterr().out
    assert "tokens at most (model.microbatch_tokens=auto): one pass would take" in printed
    assert printed.count("memory so far: ") == 1
    assert "microbatch_tokens: null" in (tmp_path / "cut" / "config.yaml").read_text()
    *_, noted = json.loads((tmp_path / "cut" / "run.json").read_text())["memory"]
    assert noted["cut"] in printed and 0 < noted["predicted_gib"] < card.memory and noted["measured_gib"] > 0
    assert noted["decided"] == {"microbatch_tokens": noted["decided"]["microbatch_tokens"]}
    assert set(noted["parts"]["training step"]) >= {"weights", "optimizer", "activations", "CUDA context"}
    assert "| Memory of a rank | " in (tmp_path / "cut" / "model" / "README.md").read_text()
    plain, cut = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("plain", "cut"))
    losses = [json.loads(line)["loss"] for line in plain]
    assert losses == pytest.approx([json.loads(line)["loss"] for line in cut], rel=1e-5)


def test_a_run_that_cannot_fit_ends_before_its_weights_load(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "card_of", lambda config: Card("a tiny card", 1.001))
    monkeypatch.setattr("jobs.job.load_sharded", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"and a tiny card has 1\.0: use "):
        train(make_config(*SMALL, f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache"), "tiny")


# -- afterwards ------------------------------------------------------------------------------------


CUT = plan_settings(QWEN, 1, "H100")
"""The plan of microbatches of a 1.5B model."""


def test_a_free_fifth_of_a_card_has_the_number_that_would_use_it() -> None:
    number = r"model\.microbatch_tokens=(\d+) would use them"
    assert not re.search(number, to_use(CUT, CUT.predicted, CUT.load.tokens))
    assert int(re.search(number, to_use(CUT, 0.7 * CUT.predicted, CUT.load.tokens))[1]) > CUT.load.tokens


def test_out_of_memory_has_the_numbers_to_type() -> None:
    config = replace(QWEN, model=replace(QWEN.model, eval_batch_size=64), reference_batch_size=16)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ):
        found = str(short_of_memory(CUT, config, error))
        tokens = int(re.search(r"use model\.microbatch_tokens=(\d+) ", found)[1])
        assert CUT.least <= tokens < CUT.load.tokens and "more" not in found
        assert "model.eval_batch_size=32 reference_batch_size=8" in found
    for other in (RuntimeError("other"), StoppedError("rank 1 failed: can't allocate memory")):
        assert short_of_memory(CUT, config, other) is other
