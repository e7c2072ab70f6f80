"""Scores that are begun while others are still sampled: nothing is scored twice, or with other neighbours,
and the rounds are the same."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Requeue
from common.progress import stops_if
from common.worker_process import replies_of
from config.files import section
from config.schema_rewards import FunctionConfig, VerifierConfig
from data.chat import make_renderer
from data.types import Prompt, Turn
from models.pretrained import load_tokenizer
from rollouts.engines import Prefetch
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import Arrivals, Reward, Tasks, parts_that_begin
from rollouts.rewards.function import FunctionReward, batches_of
from rollouts.rewards.verifier import VerifierReward
from rollouts.round_builder import RoundBuilder
from rollouts.rounds import PromptSchedule
from rollouts.vllm import sampler as vllm_sampler
from rollouts.vllm.engine import VllmEngine
from rollouts.vllm.sampler import VllmSampler
from tests.tiny import make_config


def prompts_of(n: int) -> list[Prompt]:
    return [Prompt((Turn("user", f"question {i}"),), str(i)) for i in range(n)]


class Counting:
    """Begins nothing, and says what it was asked to."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.begun = chunk, []

    def begin(self, prompts, completions) -> None:
        self.begun.append((list(prompts), list(completions)))


@given(
    st.integers(1, 7), st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.randoms()
)
def test_a_chunk_begins_once_it_is_whole_with_what_it_would_have_had(prompts, n, sizes, rng):
    asked = [(prompt, f"{i}/{k}") for i, prompt in enumerate(prompts_of(prompts)) for k in range(n)]
    scorers = [Counting(size) for size in sizes]
    arrivals = Arrivals(scorers, len(asked))
    order = list(range(prompts))
    rng.shuffle(order)
    put: set[int] = set()
    for which in [*order, order[0]]:  # the first once more, as by an engine that was started again
        arrivals.put(which * n, asked[which * n : (which + 1) * n])
        put |= set(range(which * n, (which + 1) * n))
        for scorer in scorers:
            chunks = [
                range(at, min(at + scorer.chunk, len(asked))) for at in range(0, len(asked), scorer.chunk)
            ]
            assert len(scorer.begun) == sum(set(chunk) <= put for chunk in chunks)
    for scorer in scorers:
        wanted = batches_of([p for p, _ in asked], [t for _, t in asked], scorer.chunk, False)
        found = [texts for _, texts in scorer.begun]
        assert sorted(found) == sorted(batch["completions"] for batch in wanted)


def in_threads(run, threads: int) -> Tasks:
    pool = ThreadPoolExecutor(threads)
    return Tasks(lambda task: pool.submit(run, task))


def test_a_task_that_was_begun_is_not_run_again():
    ran: list[int] = []
    tasks = in_threads(lambda task: ran.append(task) or task * 10, 2)
    for task in (3, 1, 3):
        tasks.begin(task)
    assert tasks.map([1, 2, 3, 3, 3]) == [10, 20, 30, 30, 30]
    assert sorted(ran) == [1, 2, 3, 3, 3]
    assert tasks.map([1]) == [10] and ran.count(1) == 2, "a result is taken once"


def test_what_a_begun_task_raises_is_raised_when_it_is_asked_for():
    def run(task: int) -> int:
        time.sleep(0.05)
        if task == 1:
            raise ValueError("one")
        ran.append(task)
        return task

    ran: list[int] = []
    tasks = in_threads(run, 1)
    tasks.begin(1)
    with pytest.raises(ValueError, match="one"):
        tasks.map([1, *range(2, 60)])
    assert len(ran) < 50, "what had not begun then is not run"
    with pytest.raises(ValueError, match="one"):
        tasks.begin(2)


def test_a_failure_is_not_waited_for_behind_slower_tasks():
    held = threading.Event()
    tasks = in_threads(lambda task: held.wait(20) if task == 0 else 1 / 0, 2)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        tasks.map([0, 1, 2])
    assert time.monotonic() - begun < 5
    held.set()


def notes(path, monkeypatch) -> None:
    monkeypatch.setenv("TIMES_FILE", str(path))


FUNCTION = "tests.unit.rollouts.reward_functions.noted"


@pytest.mark.parametrize("size", [1, 3])
def test_a_function_is_called_once_a_batch_with_the_same_batches(tmp_path, monkeypatch, size):
    notes(tmp_path / "calls", monkeypatch)
    prompts = [prompt for prompt in prompts_of(4) for _ in range(2)]
    texts = [f"answer {i % 3}" for i in range(8)]
    settings = dict(section("reward/function.yaml:function")) | {
        "path": FUNCTION,
        "batch_size": size,
        "workers": 2,
        "conversational": False,
    }
    reward = Reward(FunctionReward(FunctionConfig(**settings)), 0.0)
    arrivals = reward.arrivals(8)
    assert arrivals is not None
    for which in (2, 0, 3, 1):
        rows = slice(2 * which, 2 * which + 2)
        arrivals.put(2 * which, list(zip(prompts[rows], texts[rows], strict=True)))
    scores = reward.score(prompts, texts)
    reward.close()
    called = [json.loads(line)["completions"] for line in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(called) == sorted(texts[i : i + size] for i in range(0, 8, size))
    assert scores == [float(len(text)) for text in texts]


def test_a_pool_that_is_closed_at_work_leaves_no_process(monkeypatch, tmp_path):
    settings = dict(section("reward/function.yaml:function")) | {
        "path": "tests.unit.rollouts.reward_functions.by_word",
        "batch_size": 1,
        "workers": 2,
        "timeout": 60.0,
    }
    scorer = FunctionReward(FunctionConfig(**settings))
    scorer.begin(prompts_of(1), ["hang"])
    pool = scorer._pool
    while not pool._busy:
        time.sleep(0.05)
    (worker,) = pool._busy
    begun = time.monotonic()
    scorer.close()
    assert time.monotonic() - begun < 10
    assert worker._process.wait(10) is not None


def test_the_parts_of_a_sum_begin_each_for_itself():
    class Sum:
        def __init__(self, **parts) -> None:
            self.parts = parts

    verifier = VerifierReward(VerifierConfig(**section("reward/verifier.yaml:verifier")))
    assert parts_that_begin(Sum(a=verifier, b=object(), c=Sum(d=verifier))) == [verifier, verifier]
    verifier.close()


def built(folder, monkeypatch, early: bool) -> tuple[dict, str]:
    """A round of four prompts by an engine that takes a tenth of a second a sample, and a function that
    takes as long."""
    notes(folder / "calls", monkeypatch)
    monkeypatch.setattr(vllm_sampler, "WORKER", "tests.slow_engine")
    monkeypatch.setattr(vllm_sampler, "installed", lambda: True)
    config = make_config(
        "loss=grpo",
        "online=true",
        "sampler=vllm",
        "rounds.feedback=group",
        "rounds.samples=3",
        "rounds.contexts=4",
        "rounds.contexts_per_round=4",
        "reward=function",
        f"reward.function.path={FUNCTION}",
        "reward.function.batch_size=1",
        "reward.function.conversational=false",
    )
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    prompts = [Prompt((Turn("user", f"{i}1+22="),), "33") for i in range(4)]
    reward = Reward(FunctionReward(config.reward_config.settings), 0.0)
    if not early:
        monkeypatch.setattr(Reward, "arrivals", lambda self, count: None)
    with VllmSampler(config.sampler, renderer, max_length=40, dtype="float32", log_dir=folder) as sampler:
        sampler.load(folder, 0)

        class Ready(VllmEngine):
            def __init__(self) -> None:
                self.sampler, self._restarted, self.compares = sampler, False, False

        builder = RoundBuilder(config, PromptSchedule(prompts, 4, 0), renderer, Ready(), reward, lambda: None)
        round_ = RoundFolder(folder / "round")
        builder.build(round_, 0, 4, "0")
    reward.close()
    return round_.record["stages"], (folder / "round" / "scores.jsonl").read_text()


@pytest.mark.usefixtures("quick_python")
def test_a_round_is_scored_while_it_is_sampled(tmp_path, monkeypatch):
    folders = {early: tmp_path / str(early) for early in (True, False)}
    found = {}
    for early, folder in folders.items():
        folder.mkdir()
        with monkeypatch.context() as patch:
            found[early] = built(folder, patch, early)
    (early, scores), (late, same) = found[True], found[False]
    assert scores == same and len(scores.splitlines()) == 4
    calls = [json.loads(line) for line in (folders[True] / "calls").read_text().splitlines()]
    assert len(calls) == 12, "each once"
    # Twelve samples take 1.2 seconds, and each is scored in another tenth by one of the workers.
    assert late["scores"]["seconds"] > 0.1
    assert early["scores"]["seconds"] < early["samples"]["seconds"] / 2
    sampled_at = max(call["time"] for call in calls)
    assert sum(call["time"] < sampled_at - 0.3 for call in calls) >= 6, (
        "most were scored long before the last"
    )


class Silent:
    """An engine that does not answer."""

    def ready(self, seconds, part) -> bool:
        time.sleep(seconds)
        return False


@pytest.mark.parametrize(
    "wait_for_it",
    [
        lambda: Tasks(lambda task: Future()).map(["a judge that does not answer"]),
        lambda: replies_of([Silent()], 600.0),
        lambda: Prefetch(threading.Event().wait).result(),
    ],
)
def test_a_run_that_is_asked_to_stop_does_not_wait_for_what_does_not_answer(wait_for_it):
    stops_if(lambda: True)
    try:
        with pytest.raises(Requeue):
            wait_for_it()
    finally:
        stops_if(None)
