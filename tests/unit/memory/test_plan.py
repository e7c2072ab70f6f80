"""What a dry run says of memory: parts, the card, what would fit; and that every shipped recipe fits on the
card that it names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.worker_process import WorkerProcess
from config.schema import Config
from data.balance import row_tokens
from data.batches import Segment
from data.types import Example, Sequence
from launch.grid import read_sweep
from launch.slurm import make_job
from launch.state import Composer
from memory.decisions import describe_memory, heaviest_batch, why_cut
from memory.fit import PROBE, with_settings
from memory.parts import Card, neighbours, on_host, own_answers, reward_models
from memory.plan import all_situations, make_plan, of_shapes
from memory.simulate import Layers, MemoryNeed, MemoryRequest, with_layers
from models.shapes import architecture, known_shapes, parameters_of
from tests.full_disk import full_disk
from tests.memory_questions import SHAPES, question
from tests.tiny import make_config
from trainers.assembly import longest_batch, trainer_class
from trainers.paired import PairedPreferenceTrainer

GIB = 2**30
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def worker(quick_python: None) -> Iterator[WorkerProcess]:
    made = WorkerProcess("memory.plan", log=None, env={"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


# -- recipes ---------------------------------------------------------------------------------------


def recipes() -> list[tuple[Config, int, str]]:
    """Settings, ranks and card of the shipped sweeps' runs on GPUs, one for all whose microbatches have as
    many rows of the same model: that which samples, if there is one, and scores for a sync. It holds whatever
    the others hold, and more."""
    found: dict[Any, tuple[Config, int, str]] = {}
    composer = Composer()
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        sweep = read_sweep(path, {})
        job = make_job(sweep.slurm)
        if not job.gpus_per_node:
            continue
        assert job.card is not None, f"{path.name} names no card"
        for config in map(composer.config, sweep.runs()):
            model = config.model
            rows = model.batch_size * trainer_class(config).rows_per_example
            size = (model.microbatches, model.microbatch_tokens, rows, model.max_length)
            key = (model.name, size, job.world_size, job.card)
            if key not in found or rank(config) > rank(found[key][0]):
                found[key] = config, job.world_size, job.card
    return list(found.values())


def cut_to_one(config: Config) -> Config:
    longest = row_tokens(longest_batch(config, trainer_class(config), 1)[0])
    cut = {"microbatch_tokens": longest, "microbatches": 1, "reshard_after_forward": True}
    cut |= {"activation_checkpointing": True} if config.model.activation_checkpointing == "auto" else {}
    return replace(config, model=replace(config.model, **cut))


def rank(config: Config) -> tuple[bool, bool]:
    return config.online, config.syncing != "never"


def test_every_shipped_recipe_fits_on_the_card_that_it_names(worker: WorkerProcess) -> None:
    """In microbatches of one example, which a plan falls back to: one that fits so is found a cut."""
    said = {
        f"{config.model.name} {config.loss['name']}": worker.call(
            "of_settings", cut_to_one(config), ranks, card, timeout=300
        )
        for config, ranks, card in recipes()
    }
    assert len(said) >= 2
    assert {name: plan["text"] for name, plan in said.items() if plan["over"]} == {}
    assert all("fits:" in plan["text"] for plan in said.values())


def test_flash_attention_is_planned_without_a_gpu(worker: WorkerProcess) -> None:
    """It is installed on GPUs alone. Gemma 2's softcap is eager's or flash attention's."""
    words = ("model=gemma2-27b-instruct", "model.batch_size=8", "model.max_prompt_length=512")
    words += ("model.dtype=bfloat16", "model.microbatch_tokens=8192", "model.reshard_after_forward=true")
    words += ("model.activation_checkpointing=true",)
    totals = {}
    for kernel in ("flash_attention_2", "eager"):
        config = make_config(*words, f"model.attn_implementation={kernel}")
        plan = worker.call("of_settings", config, 8, "H100", timeout=300)
        assert plan["over"] is not None, plan["text"]
        totals[kernel] = float(re.search(r"training step: ([0-9.]+) GiB", plan["text"])[1])
    assert 20 < totals["flash_attention_2"] < totals["eager"]


def test_every_model_that_a_recipe_names_has_a_known_shape() -> None:
    named = {
        re.search(r"name_or_path: (\S+/\S+)", path.read_text())
        for folder in ("model", "reward")
        for path in (ROOT / "config" / folder).glob("*.yaml")
    }
    hub = {found[1] for found in named if found and not found[1].startswith("assets/")}
    assert hub == set(known_shapes())


# Counted on the hub's pages, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8.03),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.25),
        ("google/gemma-2-27b-it", 27.2),
        ("EleutherAI/pythia-1.4b", 1.41),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.54),
    ],
)
def test_known_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    found = architecture(make_config("model=hub", f"model.name_or_path={name}").model)
    tied = found.vocab_size * found.hidden_size if found.tie_word_embeddings else 0
    assert (parameters_of(found) - tied) / 1e9 == pytest.approx(billions, rel=0.01)


# -- what is said ----------------------------------------------------------------------------------


def given(tokens: int = 1000, activations: float = 10.0) -> MemoryNeed:
    """A step of 5 GiB that does not depend on tokens, and of activations that do."""
    step = {"weights": 2 * GIB, "optimizer": 3 * GIB, "activations": round(activations * GIB)}
    return MemoryNeed(1_000_000, tokens, {("backward", 0): step}, {"weights": 2 * GIB, "optimizer": 3 * GIB})


def planned(room: float, **changes: Any) -> tuple[list[str], list[MemoryRequest]]:
    """The lines for a card of so much room, and what was simulated."""
    asked = replace(question("deep"), gpu=True, **changes)
    simulated: list[MemoryRequest] = []

    def ask(one: MemoryRequest) -> MemoryNeed:
        simulated.append(one)
        most = one.config.model.microbatch_tokens
        return given() if most is None else given(most, most / 100)

    assert asked.hf_config is not None
    return make_plan(asked, asked.hf_config, Card("a card", room / 0.95), ask).lines(), simulated


def test_what_fits_is_said_to_fit() -> None:
    lines, simulated = planned(room=16.01)
    assert "training step: 16.00 GiB = weights 2.00 + optimizer 3.00 + activations 10.00" in lines[1]
    assert any("fits: 16.0 GiB" in line for line in lines) and len(simulated) == 1


@pytest.mark.parametrize(
    ("room", "ranks", "setting", "stays"),
    [
        (17.1, 4, None, True),
        (16.9, 4, None, False),  # there is room without, and not with
        (16.4, 4, None, False),  # nor without
        (17.1, 1, None, False),  # a single rank gathers nothing
        (99.0, 4, True, False),
        (99.0, 4, False, False),  # said by the user: nothing is left to decide
    ],
)
def test_layers_stay_gathered_where_the_plan_has_room(
    room: float, ranks: int, setting: bool | None, stays: bool
) -> None:
    """They take half a GiB here."""
    asked = with_settings(
        replace(question("deep", "model.microbatches=2"), gpu=True, ranks=ranks),
        reshard_after_forward=setting,
    )
    simulated: list[bool | None] = []

    def ask(one: MemoryRequest) -> MemoryNeed:
        setting = one.config.model.reshard_after_forward
        simulated.append(setting)
        answer = given()
        more = {} if setting is not False else {"gathered blocks": GIB // 2}
        return replace(answer, peaks={moment: parts | more for moment, parts in answer.peaks.items()})

    assert asked.hf_config is not None
    plan = make_plan(asked, asked.hf_config, Card("a card", room / 0.95), ask)
    assert plan.stays_gathered == stays
    assert any("layers stay gathered" in line for line in plan.lines()) == stays
    assert plan.situations[0].parts.get("gathered blocks", 0) == (0.5 if stays or setting is False else 0)
    asks_both = setting is None and ranks > 1 and room > 16.5
    assert (False in simulated) == (asks_both or setting is False)


def test_a_step_that_its_settings_make_too_large_is_told_so() -> None:
    lines, simulated = planned(room=12.0)
    assert any("too much: 16.0 GiB" in line for line in lines) and len(simulated) == 1
    assert "model.microbatches=2 cuts the batch; leave it out" in lines[-1]


def test_where_no_microbatch_fits_other_remedies_are_named() -> None:
    one_pass = make_config("model.microbatches=1", "model.batch_size=4")
    lines, _ = planned(room=4.0, config=one_pass)
    assert "not even one example of" in lines[-1]
    assert "model.activation_checkpointing=true" in lines[-1]


def test_a_sampler_on_the_same_gpus_is_counted() -> None:
    online = make_config(
        "experiment=dpo-online", "model.name_or_path=x", "sampler.gpu_memory_utilization=0.5", "reward=adder"
    )
    lines, _ = planned(room=19.0, config=online)
    (line,) = [line for line in lines if "sampling: " in line]
    assert (
        "weights 2.00 + optimizer 3.00 + CUDA context 1.00 + sampler 10.00 + weights' hand-over 1.0" in line
    )
    assert "sampler asleep 1.50 + its CUDA graphs 1.50" in lines[1]
    eager = replace(online, sampler=replace(online.sampler, enforce_eager=True))
    assert "graphs" not in planned(room=19.0, config=eager)[0][1]
    apart = replace(online, sampler=replace(online.sampler, devices=[1]))
    assert not any("sampling" in line for line in planned(room=19.0, config=apart)[0])


@pytest.mark.parametrize(("ranks", "nccl"), [(1, 0), (8, 0.5), (16, 1.0)])
def test_ranks_have_the_buffers_of_their_groups(ranks: int, nccl: float) -> None:
    config, card = make_config("loss=dpo"), Card("H100", 79.1)
    assert neighbours(config, ranks, card, []).outside.get("NCCL", 0) == nccl
    hsdp = neighbours(replace(config, replicas=2), ranks, card, [])
    assert hsdp.outside["NCCL"] == nccl + 1
    assert neighbours(config, ranks, None, []).outside == {}


@pytest.mark.parametrize(("billions", "ranks"), [(8.03, 8), (70.6, 64)])
def test_the_hosts_memory_of_rank_0_is_said(billions: float, ranks: int) -> None:
    """It has all weights while it reads or exports them, and a copy of its share while it saves."""
    count = int(billions * 1e9)
    share = {part: n * count // ranks for part, n in (("weights", 4), ("optimizer", 8), ("reference", 4))}
    answer = MemoryNeed(count, 1000, {}, share | {"work": GIB})
    beside = neighbours(make_config("experiment=dpo-online"), ranks, Card("H100", 79.1), [])
    reward = sum(beside.models.values())
    loads, saves = on_host(make_config("async_save=true"), answer, beside)
    assert loads.total == pytest.approx(4 * count / GIB + 1.5 + reward) and "all weights" in str(loads)
    assert saves.total == pytest.approx(16 * count / ranks / GIB + 1.5 + reward)
    assert "copy of reference" in str(saves)
    assert on_host(make_config("async_save=false"), answer, beside) == [loads]


def test_one_rank_that_answers_itself_holds_no_gradient_of_its_steps() -> None:
    """Where it runs several microbatches, whole gradients are counted as gathered blocks of a step."""
    asked = question("deep", "online=true", "sampler=embedded")
    step = MemoryNeed(1000, 9, {("backward", 0): {"gathered blocks": 99 * GIB}}, {"weights": GIB})
    assert asked.hf_config is not None
    beside = neighbours(asked.config, 1, None, [])
    named = {each.name: each for each in all_situations(asked, asked.hf_config, step, beside)}
    assert named["training step"].total == 99 and named["own answers"].total < 2


@pytest.mark.parametrize(
    ("room", "way", "tokens"),
    [(60, False, None), (22, "selective", None), (13, "selective", PROBE), (6, True, PROBE)],
)
def test_no_more_is_computed_twice_than_must_be(room: float, way: bool | str, tokens: int | None) -> None:
    """A step takes 1 GiB, and for 32,000 tokens 40, 20 or 10 GiB, by what of its layers is kept."""
    batch = [Example(f"p{i}", (Sequence(np.zeros(999, np.int32), np.zeros(1, np.int32)),)) for i in range(32)]
    words = (
        "model.activation_checkpointing=auto",
        "model.microbatches=1",
        "model.batch_size=32",
    )
    asked = replace(question("deep", *words, loss="kto"), gpu=True, batch=batch)

    def ask(one: MemoryRequest) -> MemoryNeed:
        model, sizes = one.config.model, {False: 40, "selective": 20, True: 10}
        took = min(model.microbatch_tokens or 32_000, 32_000)
        size = 1 + sizes[model.activation_checkpointing] * took / 32_000
        return MemoryNeed(1000, took, {("backward", 0): {"activations": round(size * GIB)}}, {})

    assert asked.hf_config is not None
    plan = make_plan(asked, asked.hf_config, Card("a card", (room + 1) / 0.95), ask)
    assert plan.checkpointing == way and (plan.microbatch_tokens is None) == (tokens is None)
    assert not plan.over and (plan.microbatch_tokens or PROBE) >= (tokens or 0)
    assert any("model.activation_checkpointing=auto" in line for line in plan.lines())


def test_a_reward_model_is_counted_by_its_weights() -> None:
    config = make_config("experiment=dpo-online")
    ((name, size),) = reward_models(config).items()
    assert name == "reward model RLHFlow/ArmoRM-Llama3-8B-v0.1" and 15 < size < 20
    assert reward_models(make_config("experiment=math-grpo-online")) == {}
    parts = "{a:{reward:armorm,weight:1},b:{reward:armorm,weight:1,dtype:float32},adder:{weight:1}}"
    summed = make_config("experiment=dpo-online", "reward=weighted", f"reward.weighted.parts={parts}")
    assert reward_models(summed) == {"reward model of a": size, "reward model of b": pytest.approx(2 * size)}


def test_own_answers_grow_with_their_rows() -> None:
    found = SHAPES["deep"]
    few, many = (
        own_answers(make_config("online=true", f"sampler.batch_size={rows}"), found, 1, False)
        for rows in (8, 64)
    )
    assert many == pytest.approx(8 * few)
    assert own_answers(make_config("online=false"), found, 1, False) == 0


def test_own_answers_count_the_prompts_forward_and_what_drawing_takes() -> None:
    """Of a model of 1.5 billion weights, 64 prompts of 1,024 tokens at once are 3.5 GiB of one layer's
    tensors, and a token's logits, shares and sums 24 bytes a word."""
    found = architecture(make_config("model=qwen2.5-1.5b-instruct").model)
    words = ("online=true", "sampler.batch_size=64", "model=qwen2.5-1.5b-instruct", "model.max_length=2048")
    long, short = (
        own_answers(
            make_config(*words, f"model.max_prompt_length={n}", "sampler.max_tokens=64"), found, 1, False
        )
        for n in (1024, 512)
    )
    cached = 2 * found.num_key_value_heads * 128 * found.num_hidden_layers
    work = 2 * found.hidden_size + 3 * found.intermediate_size
    assert long - short == pytest.approx(64 * 512 * 2 * (cached + work) / GIB)
    drawn = short - 64 * 2 * (512 * work + (512 + 64) * cached) / GIB
    assert drawn == pytest.approx(64 * 24 * found.vocab_size / GIB) and 0.2 < drawn < 0.3


def test_the_dry_run_says_why_there_is_no_plan(quick_python: None) -> None:
    config = make_config(
        "loss=ipo", "loss._target_=tests.unit.memory.reading_loss.ipo", "model.batch_size=4", "plan.card=2"
    )
    row = Sequence(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
    segment = Segment(tuple((Example(f"p{i}", (row, row)),) for i in range(4)), 4, 4, seed=0)
    said = describe_memory(config, segment, [], PairedPreferenceTrainer, 1)
    assert said.startswith("The memory could not be planned: ") and "\n" not in said
    assert "DataDependentOutput" in said


def test_a_full_disk_leaves_no_plan_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the worker's output can be written, so that Python finds no folder for it. Where the shapes
    say that there is room, no worker is needed."""
    config = make_config("loss=dpo", "model.batch_size=4", "plan.card=2")
    row = Sequence(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
    segment = Segment(tuple((Example(f"p{i}", (row, row)),) for i in range(4)), 4, 4, seed=0)
    monkeypatch.setattr(tempfile, "tempdir", None)  # as in a new process
    with full_disk(0):
        said = describe_memory(config, segment, [], PairedPreferenceTrainer, 1)
        large = replace(config, plan=replace(config.plan, card="H100"))
        bounded = describe_memory(large, segment, [], PairedPreferenceTrainer, 1)
    assert "bound from the shapes" in bounded and "fits: 75.1 GiB are left" in bounded
    assert said.startswith("The memory could not be planned: ") and "No usable temporary directory" in said


def test_where_nothing_is_planned_the_setting_that_cuts_a_batch_is_named(monkeypatch) -> None:
    """On a CPU, of which the bound alone says that its memory may not suffice."""
    config = make_config("loss=dpo", "model.batch_size=4")
    for room, rest in ((2**40, "there is room"), (2**28, "model.microbatch_tokens cuts them")):
        monkeypatch.setattr("memory.plan.memory_here", lambda room=room: room)
        said = why_cut(config, 1, of_shapes(config, 40, 1, None))
        assert said == f"4 examples a step and rank in one microbatch: {rest}"


def test_the_bound_counts_what_one_pass_takes_where_microbatches_are_cut() -> None:
    """A batch of 64 pairs in passes of four rows is bounded as a batch of two pairs, and a cut that no batch
    reaches changes nothing."""
    of = ("loss=dpo", "model.packing=false", "model.eval_batch_size=1")
    small, whole = (make_config(*of, f"model.batch_size={size}") for size in (2, 64))
    cut = make_config(*of, "model.batch_size=64", "model.microbatch_tokens=160")
    idle = make_config(*of, "model.batch_size=64", "model.microbatch_tokens=99999")
    two, many, passes, same = (of_shapes(one, 40, 1, None)["predicted"] for one in (small, whole, cut, idle))
    assert two == passes < many == same


# -- what is asked ---------------------------------------------------------------------------------


def test_the_batch_with_the_widest_microbatch_is_simulated() -> None:
    config = make_config("model.batch_size=4", "model.packing=true")
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, 40)
    lengths[17] = 500

    def pair(n: int) -> tuple[Sequence, Sequence]:
        return (Sequence(np.zeros(n, np.int32), np.zeros(3, np.int32)),) * 2

    segment = Segment(tuple((Example(f"p{i}", pair(n)),) for i, n in enumerate(lengths)), 4, 40, seed=0)
    found = heaviest_batch(config, segment, PairedPreferenceTrainer, 2, gpu=False)
    assert "p17" in {example.prompt_id for example in found}


@pytest.mark.parametrize("card", ["H1000", "-3", "nan", "0"])
def test_a_card_that_is_none_is_refused(card: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.card"):
        make_config(f"plan.card={card}")


def test_layers_that_alternate_are_counted_in_their_period() -> None:
    gemma = Layers(count=46, period=2)
    assert gemma.few == (4, 6)
    assert Layers(count=32, period=1).few == (4, 5)
    assert Layers(count=8, period=1).few is None
    fewer = with_layers(architecture(make_config("model=gemma2-27b-instruct").model), 4)
    assert fewer.num_hidden_layers == len(fewer.layer_types) == 4
