"""A run that is killed, or asked to stop, and gone on with is the run that nothing disturbed: to the bit in
its weights, its metrics, its answers and its rounds. What such runs are is looked at in the undisturbed
ones."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from common.errors import REQUEUE, ConfigError, Requeue
from tests import programs
from tests.integration.online import SHORT, cut_off, function, lines, rounds, scored_again
from tests.tiny import ROOT, make_config
from train import train
from trainers.basic import BasicTrainer

BARE = ("n_eval_examples=8", "wandb.enabled=false", "lr=1e-3", "retention.kl=false", "report=false")
SMALL = (*BARE, "n_examples=48", "model.batch_size=4", "data.verifier=null", "diagnostics=false")
KTO = ("loss=kto", "humanline=true", "sync_freq=4", "model.use_peft=true", "model.peft.lora_r=4")
KTO += ("optimizer=torch.optim.RMSprop", "eval_every=16", "save_every=12")
"""Evaluations and checkpoints at different steps."""
HELD_OUT = ROOT / "assets" / "adder" / "eval_pairs.jsonl"
ALL_FILES = (*BARE, "n_examples=80", "model.batch_size=4", "n_eval_prompts=2", "eval_every=16")
ALL_FILES += ("save_every=20", "loss=dpo", "humanline=true")
ALL_FILES += (f"+evaluations.other.path={HELD_OUT}", "keep_best=eval_other_loss")
ONLINE = (*SHORT[4:], "online=true", "loss=dpo", "humanline=true", "model.batch_size=4")
ROUNDS = (*ONLINE, "rounds.contexts=48", "rounds.contexts_per_round=12", "rounds.samples=4", "save_every=8")
PAIRS = 64
SELECTED = (*BARE, "loss=dpo", "data=adder", "data.path={folder}/pairs.jsonl", "model.batch_size=8")
SELECTED += ("save_every=8", "data.verifier=null", "diagnostics=false")
ENDS = ("save_every=1000", "keep_checkpoints=9")
"""Checkpoints at the ends of a run alone."""
When = int | tuple[int, int]
"""A step, or (a round, so many steps after its first)."""
KILLS: dict[str, tuple[tuple[str, ...], tuple[When, ...]]] = {
    # 13 steps, the last of them short
    "quarters": ((*SMALL, "loss=dpo", "n_examples=50", "eval_every=null"), (9,)),
    "kto": ((*SMALL, *KTO), (8,)),
    "selected": ((*SELECTED, "data.logprob_range=[0.25,0.75]"), (3,)),
    # Asked to stop (-) where an evaluation is due, killed when lines of diagnostics are written again
    "all-files": ((*ALL_FILES, "sync_freq=3"), (-12, 14)),
    "lag-2": ((*ROUNDS, *ENDS, "rounds.contexts=60", "rounds.lag=2"), ((3, 1),)),
    "kept": ((*ROUNDS, "rounds.contexts=36", "rounds.compress=true", "rounds.keep_weights=true"), ((1, 1),)),
    "replay": ((*ROUNDS, "rounds.replay=0.4", "rounds.feedback=random", "rounds.contexts=33"), ((3, 1),)),
    "passes": (
        (*ROUNDS, "rounds.passes=2", "rounds.contexts=36", "rounds.reset_reference=false", "sync_mode=never"),
        ((1, 2), (2, 0)),
    ),
}
NUMBERS = ("step", "round", "reference_step", "loss", "grad_norm", "kl", "clipped_low", "clipped_high", "lr")
NUMBERS += ("examples", "tokens", "staleness", "drift")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    pairs = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)
    (made / "pairs.jsonl").write_text("".join(pairs[:PAIRS]))
    return made


Whole = Callable[[str], tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    """The folder of a run that nothing disturbs, and the examples of its every step."""

    @functools.cache
    def run(kind: str) -> tuple[Path, list[Any]]:
        batches: list[Any] = []
        with cut_off(None, batches):
            go(folder, kind, f"{kind}-whole")
        return folder / f"{kind}-whole", batches

    return run


def go(folder: Path, kind: str, name: str, *more: str) -> dict[str, Any]:
    words = [word.replace("{folder}", str(folder)) for word in (*KILLS[kind][0], *more)]
    return train(make_config(*words, f"runs_dir={folder}", f"cache_dir={folder}/cache"), name)


def step_of(when: When, run: Path) -> int:
    if isinstance(when, int):
        return when
    return min(line["step"] for line in lines(run) if line["round"] == when[0]) + when[1]


@contextmanager
def asked_to_stop(at: int) -> Iterator[None]:
    """A run within is asked to stop in step ``at``."""
    step = BasicTrainer.step

    def asked(self: BasicTrainer[Any], *of: Any) -> Any:
        if self.progress.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BasicTrainer, "step", asked)
        with pytest.raises(Requeue):
            yield


def numbers(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics: all but times; of rounds, whose work is timed in many ways, what is computed."""
    if (run / "rounds").exists():
        return [{key: line.get(key) for key in NUMBERS} for line in lines(run)]
    timed = ("seconds", "tokens_per_second", "tokens_per_second_per_rank")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines(run)]


def same(run: Path, other: Path) -> None:
    """They have left the same."""
    for name in ("model/model.safetensors", "diagnostics.jsonl", "answers.jsonl"):
        assert (run / name).exists() == (other / name).exists()
        assert not (run / name).exists() or (run / name).read_bytes() == (other / name).read_bytes(), name
    assert numbers(run) == numbers(other)
    assert [line["step"] for line in lines(run)] == list(range(len(lines(run))))
    mine, theirs = (json.loads((one / "summary.json").read_text()) for one in (run, other))
    assert mine["before"] == theirs["before"] and mine["after"] == theirs["after"]
    if (run / "selection.json").exists():
        kept = [json.loads((one / "selection.json").read_text())["selection"]["kept"] for one in (run, other)]
        assert kept[0] == kept[1]
    for a, b in zip(rounds(run), rounds(other), strict=True):
        for stage in ("samples", "scores", "groups"):
            assert a.file(stage).read_bytes() == b.file(stage).read_bytes()
        assert a.weights.exists() == b.weights.exists()
    assert not list((run / "checkpoints").glob("*.part"))


@pytest.mark.parametrize("kind", KILLS)
def test_a_killed_run_ends_as_the_undisturbed_one(folder: Path, whole: Whole, kind: str) -> None:
    run, (other, _) = folder / kind, whole(kind)
    for when in KILLS[kind][1]:
        at = step_of(when, other)
        with cut_off(at) if at >= 0 else asked_to_stop(-at):
            go(folder, kind, kind, "resume=true")
    made = {path: path.stat().st_mtime_ns for path in run.glob("rounds/*/samples.jsonl*")}
    if kind == "selected":
        shutil.rmtree(folder / "cache")
    go(folder, kind, kind, "resume=true")
    same(run, other)
    assert {path: path.stat().st_mtime_ns for path in made} == made, "what was on disk was sampled again"


# -- the programs ----------------------------------------------------------------------------------


def test_a_process_that_is_asked_to_stop_says_so_by_its_code_and_goes_on(folder: Path, whole: Whole) -> None:
    """The real program, started again with the same command. While it runs, no other may."""
    words = (*KILLS["kto"][0], f"runs_dir={folder}", f"cache_dir={folder}/cache", "resume=true")
    command = ["train.py", *words, "exp_name=process"]
    process, metrics = programs.start(*command), folder / "process" / "metrics.jsonl"
    programs.until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3)
    )
    assert process.poll() is None, process.said()
    process.send_signal(signal.SIGSTOP)  # it cannot end while another start tries the same run
    try:
        with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "):
            train(make_config(*words), "process")
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    assert process.wait() == REQUEUE, process.said()
    done = programs.run(*command)
    assert done.returncode == 0 and "resumed before step" in done.stdout, done.stdout + done.stderr
    same(folder / "process", whole("kto")[0])


def test_rounds_killed_in_every_stage(tmp_path: Path) -> None:
    """While sampling, while scoring and while training, by signal 9 to the program and its workers."""

    def start(name: str, slow: int = 0) -> programs.Program:
        words = ("online=true", "humanline=true", "sync_freq=2", "loss=kto", "rounds.contexts_per_round=16")
        places = (f"runs_dir={tmp_path}", f"cache_dir={tmp_path}/cache", "resume=true", f"exp_name={name}")
        env = {"SLOW_REWARD": str(slow)}
        return programs.start("train.py", *SHORT, *words, *places, *function("slow"), env=env)

    def kill_when(reached: Callable[[], bool], slow: int = 0) -> None:
        process = start("killed", slow)
        while not reached():
            assert process.poll() is None, process.said()[-2000:]
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    programs.finished([start("whole")])
    run = tmp_path / "killed"
    second = run / "rounds" / "001"
    kill_when((second / "round.json").exists)
    assert not (second / "samples.jsonl").exists(), "killed too late to be sampling"
    kill_when((second / "samples.jsonl").exists, slow=60)
    assert not (second / "scores.jsonl").exists()
    sampled = (second / "samples.jsonl").stat().st_mtime_ns
    kill_when(lambda: any(line["round"] == 1 for line in lines(run)))
    assert not (run / "rounds" / "002" / "groups.jsonl").exists(), "killed too late to be training on round 1"
    programs.finished([start("killed")])
    assert (second / "samples.jsonl").stat().st_mtime_ns == sampled, "what was on disk was sampled again"
    same(run, tmp_path / "whole")


# -- what the undisturbed ones are -----------------------------------------------------------------


def test_a_range_of_log_probabilities_trains_on_its_share_and_says_so(whole: Whole) -> None:
    run, _ = whole("selected")
    report = json.loads((run / "data_report.json").read_text())
    selection = report["selection"]
    assert (selection["below"], selection["kept"], selection["above"]) == (16, 32, 16)
    assert report["examples"] == lines(run)[-1]["examples"] == PAIRS // 2
    assert selection["all"]["lower_quartile"] <= selection["lowest"] + 1e-9
    assert report["logprob"]["all"]["count"] == PAIRS
    assert "32 of 64 groups" in (run / "data_report.md").read_text()


def test_a_run_evaluates_at_its_quarters_and_no_weight_is_another(folder: Path, whole: Whole) -> None:
    run, _ = whole("quarters")
    # 50 examples of 4 a step: the first with 12.5, 25 and 37.5 behind them are 4 (16), 7 (28), 10 (40).
    assert [line["step"] for line in lines(run) if "eval_loss" in line] == [0, 4, 7, 10]
    assert "step_00000010" in {path.name for path in (run / "checkpoints").iterdir()}
    go(folder, "quarters", "at-the-ends", "eval_every=0")
    one, other = (one / "model/model.safetensors" for one in (run, folder / "at-the-ends"))
    assert one.read_bytes() == other.read_bytes()


def test_a_round_comes_from_the_weights_that_two_rounds_before_began_with(whole: Whole) -> None:
    run, _ = whole("lag-2")
    records = [folder.record for folder in rounds(run)]
    begins = [step_of((i, 0), run) for i in range(5)]
    assert [record["sampled_step"] for record in records] == [0, 0, 0, begins[1], begins[2]]
    assert len({record["weights"] for record in records}) == 3
    for line in lines(run):
        assert line["staleness"] == line["step"] - records[line["round"]]["sampled_step"]
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert saved == ["step_00000000", f"step_{lines(run)[-1]['step'] + 1:08d}"]


def test_the_kept_weights_say_of_the_samples_what_the_sampler_did(whole: Whole) -> None:
    run, _ = whole("kept")
    for found, folder in zip(scored_again(run), rounds(run), strict=True):
        own = sum(len(c["token_ids"]) for line in folder.read("samples") for c in line["completions"])
        assert len(found) == own and found.max() < 1e-4
        assert folder.file("samples").name == "samples.jsonl.gz"


def test_passes_train_on_every_example_as_often_and_a_reference_may_outlive_rounds(whole: Whole) -> None:
    run, batches = whole("passes")
    for index, of_round in enumerate(rounds(run)):
        mine = [batch for line, batch in zip(lines(run), batches, strict=True) if line["round"] == index]
        here = Counter(row.key for batch in mine for example in batch for row in example.rows)
        assert set(here.values()) == {2} and here.total() == 2 * 2 * of_round.record["examples"]
    assert lines(run)[-1]["examples"] == 2 * sum(one.record["examples"] for one in rounds(run))
    assert {line["reference_step"] for line in lines(run)} == {0}


def test_replayed_contexts_are_of_earlier_rounds(whole: Whole) -> None:
    run, batches = whole("replay")
    records, per_round = [one.record for one in rounds(run)], Counter[tuple[int, bool]]()
    assert [r["contexts"] for r in records] == [[0, 12], *([12 + 7 * i, 19 + 7 * i] for i in range(3))]
    own = [{group.prompt.id for group in one.groups()} for one in rounds(run)]
    for line, batch in zip(lines(run), batches, strict=True):
        index = line["round"]
        assert line["staleness"] == pytest.approx(line["step"] - fmean(e.sampled_step for e in batch))
        for example in batch:
            of = next(i for i, record in enumerate(records) if record["sampled_step"] == example.sampled_step)
            assert of <= index and example.prompt_id in own[of]
            per_round[index, of == index] += 1
    assert per_round[0, False] == 0
    for index, record in enumerate(records[1:], 1):
        assert per_round[index, False] == record["replayed"] == min(5, sum(map(len, own[:index])))
        assert per_round[index, True] == len(own[index])
