"""Whole runs of the embedded task on this machine's devices: a run that is killed and goes on, and rounds
sampled by vLLM.

    python -m benchmarks.gpu_runs
    python -m benchmarks.gpu_runs --device cpu --ranks 2
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.checks import FAILED, NOT_HERE, NOTE, OK, Check, attempted, written
from benchmarks.measure import ROOT
from benchmarks.processes import end
from common.options import options_of
from launch.doctor import last

SECONDS = 1800.0
"""Time that one run may take."""
LINES = 30
"""Lines of a failed run's output that are kept."""
SMALL = (
    *("n_eval_examples=16", "n_eval_prompts=16", "eval_every=0"),
    *("report=false", "wandb.enabled=false", "resume=true"),
)
STEPS, SAVES = 64, 8
"""Steps of the run that is killed, and steps from one of its checkpoints to the next."""
BATCH = 32
OFFLINE = ("loss=dpo", "humanline=true")
ONLINE = (
    *("loss=grpo", "humanline=true", "online=true", "sampler=vllm"),
    *("rounds.contexts=32", "rounds.contexts_per_round=16"),
)
ROUNDING = 1e-4
"""Largest difference of a weight between a killed run and one that was not, where its kernels add in orders
of their own."""


class Runs:
    """Starts runs of ``train.py`` on ``ranks`` devices, in a folder of their own."""

    def __init__(self, folder: Path, ranks: int, device: str) -> None:
        self.folder = folder
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self._environment = os.environ | {"WANDB_MODE": "offline"} | hidden
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self._words = [sys.executable, *(launcher if ranks > 1 else []), "train.py"]

    def start(self, name: str, *settings: str) -> subprocess.Popen[str]:
        """Start the run ``name``. It is the leader of a process group of its own."""
        own = (f"exp_name={name}", f"runs_dir={self.folder}/runs", f"cache_dir={self.folder}/cache")
        return subprocess.Popen(
            [*self._words, *settings, *SMALL, *own],
            cwd=ROOT,
            env=self._environment,
            stdout=(self.folder / f"{name}.log").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, name: str, *settings: str) -> Path:
        """Run ``name`` to its end and return its folder. Raises RuntimeError with the end of its output if it
        fails."""
        process = self.start(name, *settings)
        try:
            code = process.wait(SECONDS)
        finally:
            end(process)
        if code:
            raise RuntimeError(f"exit code {code}: {self.said(name)}")
        return self.folder / "runs" / name

    def said(self, name: str) -> str:
        """Return the most telling line of the run's output, and below it its last lines."""
        text = (self.folder / f"{name}.log").read_text()
        return "\n".join([last(text), *text.splitlines()[-LINES:]])

    def kill_after(self, name: str, lines: int, *settings: str) -> None:
        """Start ``name`` and kill every process of it once its metrics have as many lines. Raises
        RuntimeError if it ends before."""
        process, metrics = self.start(name, *settings), self.folder / "runs" / name / "metrics.jsonl"
        ends = time.monotonic() + SECONDS
        try:
            while not (metrics.exists() and metrics.read_text().count("\n") >= lines):
                if process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"it did not come to step {lines}: {self.said(name)}")
                time.sleep(0.02)
        finally:
            end(process)
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError("it ended before it could be killed")


def checks(runs: Runs) -> Iterator[Check]:
    """Yield the checks of whole runs."""
    works: dict[str, Callable[[Runs], Check]] = {
        "a killed run goes on": killed,
        "rounds by vLLM": rounds,
    }
    for name, work in works.items():
        yield attempted(name, partial(work, runs))


def killed(runs: Runs) -> Check:
    """A run that is killed after its first checkpoint and continued ends with the weights of one that was
    not."""
    name = "a killed run goes on"
    sizes = f"model.batch_size={BATCH}", f"n_examples={STEPS * BATCH}", f"save_every={SAVES * BATCH}"
    whole = runs.finish("whole", *OFFLINE, *sizes)
    runs.kill_after("killed", STEPS // 2, *OFFLINE, *sizes)
    again = runs.finish("killed", *OFFLINE, *sizes)
    resumed = re.search(r"resumed before step (\d+)", (runs.folder / "killed.log").read_text())
    if resumed is None or not 0 < int(resumed[1]) < STEPS:
        return Check(name, FAILED, "it began anew" if resumed is None else f"it was {resumed[0]}")
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, again))
    if all(torch.equal(one[key], other[key]) for key in one):
        return Check(name, OK, "killed with SIGKILL, it ends with the same bits")
    off = float(torch.stack([(one[key].float() - other[key].float()).abs().max() for key in one]).max())
    said = f"killed with SIGKILL, it ends with weights that differ by {off:.1e} at most"
    return Check(name, NOTE if off <= ROUNDING else FAILED, said, {"largest_difference": off})


def rounds(runs: Runs) -> Check:
    """Two rounds whose samples come from vLLM: the way of the weights, its seconds, and how far engine and
    trainer are apart on the probe."""
    name = "rounds by vLLM"
    if find_spec("vllm") is None:
        return Check(name, NOT_HERE, "vLLM is not installed")
    run = runs.finish("rounds", *ONLINE)
    records = [json.loads(path.read_text()) for path in sorted(run.glob("rounds/*/round.json"))]
    ways = {record["weight_transfer"] for record in records}
    last = records[-1]
    numbers = {key: last[key] for key in ("publish_seconds", "probe_mean", "probe_largest") if key in last}
    said = (
        f"{len(records)} rounds, weights by {' and '.join(sorted(ways))} in {last['publish_seconds']:.2f} s, "
        f"probe {last['probe_mean']:.1e} nats in the mean, {last['probe_largest']:.1e} at most"
    )
    return Check(name, NOTE if "disk" in ways else OK, said, numbers | {"ways": sorted(ways)})


def main() -> None:
    parser = options_of("python -m benchmarks.gpu_runs", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default GPUs if there are any")
    parser.add_argument("--ranks", type=int, help="by default one for each GPU, or one")
    parser.add_argument("--out", type=Path, help="also append every check to this file, as JSON lines")
    args = parser.parse_args()
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), args.ranks or max(1, gpus), "cuda" if gpus else "cpu")
        for check in written(checks(runs), args.out):
            print(check, flush=True)


if __name__ == "__main__":
    main()
