"""diagnostics.jsonl of whole runs: it agrees with metrics.jsonl, and is the same after a restart, on two
ranks and packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reports.tracking import Tracker
from tests import programs
from tests.tiny import ROOT, make_config
from train import train

RUN = ("model.batch_size=4", "n_eval_examples=8", "wandb.enabled=false", "lr=1e-3", "data.verifier=null")
RUN += ("retention.kl=false", "humanline=true", "log_epsilon_P=-0.1", "log_epsilon_R=0.1")
RUN += ("model.packing=false",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("diagnostics")


def overrides(folder: Path, *more: str) -> list[str]:
    return [f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", *RUN, *more]


def lines(run: Path, name: str = "diagnostics") -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def sides(line: dict) -> list[dict]:
    return [line[side] for side in ("chosen", "rejected", "neutral") if side in line]


def check(run: Path) -> None:
    """The intervals cover the run once, and their sums are those of the steps' metrics."""
    first, *intervals = lines(run)
    steps = lines(run, "metrics")
    assert first["step"] == -1
    assert 0 < first["entropy"] < 10 and all(0 < line["entropy"] < 10 for line in intervals)
    starts = [0, *(line["step"] + 1 for line in intervals)]
    assert [line["first_step"] for line in intervals] == starts[:-1] and starts[-1] == len(steps)
    for line in intervals:
        assert all(sum(side["histogram"]) == side["tokens"] for side in sides(line))
    tokens = sum(side["tokens"] for line in intervals for side in sides(line))
    clipped = sum(side["below"] + side["above"] for line in intervals for side in sides(line))
    for line in intervals:  # of a run as short as this, each has one step
        assert line["step"] == line["first_step"]
        step, n = steps[line["step"]], sum(side["tokens"] for side in sides(line))
        for key, name in (("below", "clipped_low"), ("above", "clipped_high")):
            assert sum(side[key] for side in sides(line)) == pytest.approx(step[name] * n, abs=1e-3)
        for key, name in (("log_ratio", "kl"), ("drift", "drift")):
            mean = sum(side[key] * side["tokens"] for side in sides(line)) / n
            assert mean == pytest.approx(step[name], rel=1e-4, abs=1e-6)
    assert tokens > 1000 and clipped > 20
    assert (
        intervals[0]["chosen"]["spread"] == 0.0
    )  # step 0: policy and reference are the same weights, scored in the same shapes


@pytest.fixture
def told(monkeypatch) -> list[tuple[int, str]]:
    """(step, method) of every call of the tracker from now on."""
    calls: list[tuple[int, str]] = []
    for name, step_of in (
        ("log", lambda args: args[0]["step"]),
        ("diagnostics", lambda args: args[0]["step"]),
        ("table", lambda args: args[3]),
    ):
        real = getattr(Tracker, name)

        def tell(self, *args, name=name, step_of=step_of, real=real):
            calls.append((step_of(args), name))
            return real(self, *args)

        monkeypatch.setattr(Tracker, name, tell)
    return calls


@pytest.mark.parametrize("loss", ["kto", "grpo"])
def test_the_file_agrees_with_the_metrics_and_trackers_are_told_in_the_order_of_steps(folder, told, loss):
    """wandb drops what comes with an earlier step than the last."""
    run, sizes = folder / loss, (f"loss={loss}", "n_examples=96", "model.batch_size=8", "eval_every=48")
    answered = ("data.verifier=data.adder.accuracy", "n_eval_prompts=2") * (loss == "kto")
    train(make_config(*overrides(folder, *sizes, *answered)), loss)
    check(run)
    assert all(0 < line["rejected"]["rows"] == line["chosen"]["rows"] for line in lines(run)[1:])
    assert "Spread of the log-ratios" in (run / "report.html").read_text()
    assert (steps := [step for step, _ in told]) == sorted(steps)
    for name, wanted in (("log", range(12)), ("table", (0, 6, 12)), ("diagnostics", range(-1, 12))):
        if name != "table" or loss == "kto":  # whose prompts are answered
            assert [step for step, called in told if called == name] == list(wanted)


def test_two_ranks_change_neither_it_nor_the_groups_of_a_range(folder):
    pairs = (ROOT / "assets" / "adder" / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(pairs[:64]))
    half = ("data=adder", f"data.path={folder}/pairs.jsonl", "data.logprob_range=[0.25,0.75]")
    words = overrides(folder, "lr=1e-4", *half)
    programs.finished(programs.ranks(2, "train.py", *words, "exp_name=two", f"cache_dir={folder}/other"))
    train(make_config(*words), "short")
    kept = [json.loads((folder / name / "selection.json").read_text()) for name in ("short", "two")]
    assert kept[0]["selection"]["kept"] == kept[1]["selection"]["kept"]
    one, other = lines(folder / "short"), lines(folder / "two")
    assert [line["step"] for line in one] == [line["step"] for line in other] == list(range(-1, 8))
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-4)
        for mine, theirs in zip(sides(a), sides(b), strict=True):
            assert all(mine[key] == theirs[key] for key in ("rows", "tokens", "length"))
            assert mine["spread"] == pytest.approx(theirs["spread"], rel=1e-2, abs=1e-5)
            assert mine["drift"] == pytest.approx(theirs["drift"], abs=1e-4)
