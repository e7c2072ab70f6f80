"""What waits for other processes: it ends with the first failure, with ``close``, and when a run is asked to
stop."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.errors import Requeue
from common.progress import stops_if
from common.worker_process import replies_of
from config.files import section
from config.schema_rewards import FunctionConfig
from data.types import Prompt, Turn
from rollouts.rewards.base import results
from rollouts.rewards.function import FunctionReward


def test_a_failure_is_not_waited_for_behind_slower_tasks():
    held, pool = threading.Event(), ThreadPoolExecutor(2)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        results([pool.submit(lambda task=task: held.wait(20) if task == 0 else 1 / 0) for task in (0, 1, 2)])
    assert time.monotonic() - begun < 5
    held.set()


def test_a_pool_that_is_closed_at_work_leaves_no_process():
    settings = dict(section("reward/function.yaml:function")) | {
        "path": "tests.unit.rollouts.reward_functions.by_word",
        "batch_size": 1,
        "workers": 2,
        "timeout": 60.0,
    }
    scorer = FunctionReward(FunctionConfig(**settings))
    asked = [Prompt((Turn("user", "a question"),), "1")]
    threading.Thread(target=scorer.score, args=(asked, ["hang"]), daemon=True).start()
    pool = scorer._pool
    while not pool._busy:
        time.sleep(0.05)
    (worker,) = pool._busy
    begun = time.monotonic()
    scorer.close()
    assert time.monotonic() - begun < 10
    assert worker._process.wait(10) is not None


class Silent:
    """An engine that does not answer."""

    def ready(self, seconds, part) -> bool:
        time.sleep(seconds)
        return False


@pytest.mark.parametrize(
    "wait_for_it",
    [
        lambda: results([Future()]),  # a judge that does not answer
        lambda: replies_of([Silent()], 600.0),
    ],
)
def test_a_run_that_is_asked_to_stop_does_not_wait_for_what_does_not_answer(wait_for_it):
    stops_if(lambda: True)
    try:
        with pytest.raises(Requeue):
            wait_for_it()
    finally:
        stops_if(None)
