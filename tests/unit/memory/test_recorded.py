"""The memory plan still says what recorded.yaml has, of a few of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from common.worker_process import WorkerProcess
from config.schema import card_memory
from memory.parts import ASSUMED, Card
from memory.plan import make_plan
from memory.simulate import MemoryNeed, MemoryRequest
from tests.tiny import compose_config
from trainers.assembly import longest_batch, trainer_class

RECORDED = yaml.safe_load(Path(__file__).with_name("recorded.yaml").read_text())
AGAIN = [row for row in RECORDED["small"] if row.get("again")]


@pytest.fixture(scope="module")
def worker(quick_python: None) -> Iterator[WorkerProcess]:
    made = WorkerProcess("memory.plan", log=None, env={"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


@pytest.mark.parametrize("row", AGAIN, ids=lambda row: row["typed"])
def test_a_recorded_row_is_planned_again(worker: WorkerProcess, row: dict[str, Any]) -> None:
    config = compose_config([*RECORDED["common"].split(), *row["typed"].split()])
    sizes = config.model.batch_size, config.model.eval_batch_size
    batch, held_out = (longest_batch(config, trainer_class(config), size) for size in sizes)
    card = Card(row["card"], card_memory("card", row["card"]))
    hf_config = AutoConfig.for_model(**RECORDED["shapes"][row["shape"]])

    def ask(question: MemoryRequest) -> MemoryNeed:
        found: MemoryNeed = worker.call("answer", question, timeout=300)
        return found

    plan = make_plan(
        MemoryRequest(config, batch, held_out, row["ranks"], True, hf_config), hf_config, card, ask
    )
    assert (plan.answer.tokens, plan.answer.parameters) == (row["plan"]["widest"], row["plan"]["parameters"])
    for situation in plan.situations:
        mib = {part: 1024 * size for part, size in situation.parts.items() if part not in ASSUMED}
        assert mib == pytest.approx({part: row[situation.name].get(part, 0.0) for part in mib}, abs=0.001)


def test_every_row_has_a_step_and_says_whether_it_fits() -> None:
    for row in (*RECORDED["plans"], *RECORDED["small"]):
        assert row["training step"] and row["plan"]["fits"] in (True, False), row["typed"]
