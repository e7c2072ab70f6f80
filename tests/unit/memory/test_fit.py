"""The cut that the memory plan chooses fits, is nearly the widest that fits, and is asked for only where one
pass does not fit; a run on a GPU takes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.balance import TOKENS, row_tokens, share_tokens
from data.batches import deal, size_of, widest
from data.types import Example, Sequence
from memory import decisions
from memory.fit import PROBE, filled, fitting_tokens, how_rows_are_joined
from memory.parts import Card
from memory.plan import make_plan
from memory.simulate import MemoryNeed, MemoryRequest
from models.shapes import architecture
from tests.memory_questions import question
from tests.tiny import make_config
from train import train

GIB = 2**30


class Machine:
    """A step whose memory grows with its microbatch, and what was simulated of it."""

    def __init__(self, whole: int, fixed: float, per_token: float, bend: float = 0.0) -> None:
        self.whole, self.fixed, self.per_token, self.bend = whole, fixed, per_token, bend
        self.simulated: list[int] = []

    def size(self, tokens: int) -> float:
        """GiB"""
        return self.fixed + self.per_token * tokens * (1 + self.bend * tokens / self.whole)

    def __call__(self, asked: MemoryRequest) -> MemoryNeed:
        tokens = min(asked.config.model.microbatch_tokens or self.whole, self.whole)
        self.simulated.append(tokens)
        return MemoryNeed(1, tokens, {("backward", 0): {"activations": round(self.size(tokens) * GIB)}}, {})


def one_pass(**changes: Any) -> MemoryRequest:
    return replace(question("deep", "model.microbatches=1"), gpu=True, **changes)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 60), st.integers(2, 60)), min_size=2, max_size=30),
    share=st.floats(0.1, 0.95),
    ranks=st.sampled_from([1, 2, 8]),
    shared=st.booleans(),
)
def test_a_cut_is_simulated_with_microbatches_as_wide_as_it_allows(lengths, share, ranks, shared):
    """However the question's batch is cut: a lighter one of the data may go in one pass. Seen on a GPU: a
    batch of 49,000 tokens in two microbatches, 95 GiB, and one of 36,000 in one, 126 GiB."""
    asked, hf_config = one_pass(ranks=ranks), architecture(one_pass().config.model)
    rows = [tuple(Sequence(np.full(4, i), np.arange(n)) for n in pair) for i, pair in enumerate(lengths)]
    batch = [Example(f"p{i}", pair) for i, pair in enumerate(rows * ranks)]
    most = max(max(map(row_tokens, batch)), int(share * sum(map(row_tokens, batch)) / ranks))
    model = replace(asked.config.model, microbatch_tokens=most, share_prompts=shared, dtype="bfloat16")
    asked = replace(asked, batch=batch, config=replace(asked.config, model=model))
    made = filled(asked, hf_config)
    joined = how_rows_are_joined(asked.config, hf_config, gpu=True)
    assert joined == (True, shared)
    if made is asked:
        assert share_tokens(batch, *joined) <= most * ranks or len(set(map(row_tokens, batch))) == 1
        return
    part = made.batch[: len(made.batch) // (2 * ranks)]
    found = widest(made.batch, ranks, size_of(model, ranks), 2, *joined, TOKENS)
    wanted = share_tokens(part, *joined)
    assert found == wanted <= most or (shared and ranks > 1 and found < wanted)  # prompts may be dealt apart
    taken = {example.prompt_id.split()[0] for example in part}
    left = [example for example in batch if example.prompt_id not in taken]
    assert all(share_tokens([*part, example], *joined) > most for example in left)


@settings(max_examples=300)
@given(
    whole=st.integers(200, 2_000_000),
    share=st.floats(0.001, 1.0),
    room=st.floats(-0.2, 3.0),
    fixed=st.floats(0.0, 2.0),
    bend=st.floats(0.0, 0.3),
)
def test_what_is_chosen_fits_and_is_nearly_the_widest(whole, share, room, fixed, bend):
    """``room``: of what one pass takes beside ``fixed``."""
    longest = max(1, int(whole * share))
    machine = Machine(whole, fixed, 10.0 / whole, bend)
    room_in_gib = fixed + room * 10.0
    chosen = fitting_tokens(one_pass(), longest, whole, room_in_gib, machine)
    assert len(machine.simulated) <= 8
    if chosen is None:
        fits = machine.size(whole) <= room_in_gib * 1.0001
        beyond_help = machine.size(max(longest, 1)) > room_in_gib * 0.9999 or longest >= whole
        nearly = room >= 1 and bend > 0  # a straight line through a bent one promises a little too much
        assert fits or beyond_help or nearly
        return
    assert longest <= chosen < whole
    assert machine.size(chosen) <= room_in_gib * 1.0001
    if bend == 0 and chosen < 0.85 * whole and chosen > longest:
        assert machine.size(int(chosen * 1.3) + 1000) > room_in_gib


def test_a_batch_that_fits_by_far_is_not_simulated_whole():
    machine = Machine(whole=500_000, fixed=5.0, per_token=1e-5)
    assert fitting_tokens(one_pass(), 2_000, 500_000, 60.0, machine) is None
    assert machine.simulated == [PROBE, 2 * PROBE]


def test_a_batch_that_fits_barely_is_simulated_whole():
    machine = Machine(whole=100_000, fixed=0.0, per_token=1e-4)
    assert fitting_tokens(one_pass(), 2_000, 100_000, 10.5, machine) is None
    assert machine.simulated == [PROBE, 2 * PROBE, 100_000]


def test_where_not_even_the_longest_example_fits_nothing_is_cut():
    machine = Machine(whole=100_000, fixed=1.0, per_token=1e-3)
    assert fitting_tokens(one_pass(), 20_000, 100_000, 10.0, machine) is None


# -- in the plan -----------------------------------------------------------------------------------


def plan_for(room: float, *overrides: str) -> Any:
    asked = replace(question("deep", *overrides), gpu=True)
    whole = sum(map(row_tokens, asked.batch))
    machine = Machine(whole=whole, fixed=0.0, per_token=20.0 / whole)
    assert asked.hf_config is not None
    return make_plan(asked, asked.hf_config, Card("a card", room / 0.95), machine)


def test_the_plan_of_a_run_without_a_cut_has_one_that_fits():
    plan = plan_for(11.0, "model.microbatches=1")  # 1 of them CUDA's
    assert plan.microbatch_tokens is not None and not plan.over
    assert plan.lines()[-1].strip() == (
        f"microbatches of {plan.microbatch_tokens:,} tokens at most (model.microbatch_tokens=auto): "
        "one pass would not fit"
    )


@pytest.mark.parametrize(
    "said", ["model.microbatches=2", "model.microbatch_tokens=19999"], ids=["passes", "tokens"]
)
def test_a_cut_that_the_settings_name_is_left_as_it_is(said):
    settings = [said] if "microbatches=" in said else ["model.microbatches=1", said]
    plan = plan_for(11.5, *settings)
    assert plan.microbatch_tokens is None and plan.over


# -- in a run --------------------------------------------------------------------------------------

SMALL = (
    "loss=dpo",
    "humanline=true",
    "n_examples=24",
    "model.batch_size=12",
    "n_eval_examples=4",
    "n_eval_prompts=1",
    "wandb.enabled=false",
    "diagnostics=false",
    "report=false",
)


def test_a_run_takes_the_cut_of_a_small_card(tmp_path, monkeypatch, capsys, quick_python):
    """Simulated for a card on which twelve pairs at once are too many; trained on the CPU."""

    def go(name: str) -> list[dict[str, Any]]:
        train(make_config(*SMALL, f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache"), name)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    passes: list[int] = []

    def counted(*arguments: Any) -> list[list[list[Example]]]:
        slots = deal(*arguments)
        passes.append(len(slots))
        return slots

    monkeypatch.setattr("trainers.dealing.deal", counted)
    plain = go("one_pass")
    assert (
        "(a bound from the shapes); 12 examples a step and rank in one microbatch: "
        in capsys.readouterr().out
    )
    assert set(passes) == {1}
    train(make_config(*SMALL, f"runs_dir={tmp_path}", "dry_run=true", "plan.card=2"), "planned")
    step, outside = re.search(
        r"training step: (\S+) GiB.* CUDA context (\S+)", capsys.readouterr().out
    ).groups()
    card = (float(outside) + 0.7 * (float(step) - float(outside))) / 0.95
    monkeypatch.setattr(decisions, "gpu_here", lambda: Card("a small card", card))
    passes.clear()
    cut = go("cut")
    assert max(passes) > 1
    said = capsys.readouterr().out
    assert "tokens at most (model.microbatch_tokens=auto): by the memory plan, one pass would not fit" in said
    assert "microbatch_tokens: null" in (tmp_path / "cut" / "config.yaml").read_text()
    *_, memory = json.loads((tmp_path / "cut" / "run.json").read_text())["memory"]
    assert memory["cut"] in said and 0 < memory["predicted_gib"] < card and memory["measured_gib"] > 0
    assert "| Memory of a rank | " in (tmp_path / "cut" / "model" / "README.md").read_text()
    for a, b in zip(plain, cut, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_gpus_peak_is_said_beside_what_was_predicted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(decisions, "gather_objects", lambda own: [own, 3.0])
    found = decisions.measured(SimpleNamespace(device=torch.device("cuda")), 4.0)
    assert found["measured"] == "3.00 GiB (tensors on the GPU, 75% of what was predicted)"
    assert "predicted" not in decisions.measured(SimpleNamespace(device=torch.device("cpu")), 4.0)["measured"]
