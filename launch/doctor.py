"""Check whether this machine, with these settings, is fit for a long run. Each finding comes with its remedy.

    python -m launch.doctor loss=dpo humanline=true model=llama3-8b-instruct     # the settings that the run will have

The doctor checks settings, GPUs, the connection between ranks, models and data (a dry run), and disk space for
the checkpoints to come, and takes two steps. Exit codes: 0 fit; 1 something would stop the run; 2 the
settings are not valid.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.options import options_of
from common.progress import phase, pulse
from config.cli import answered, compose
from config.schema import Config
from launch.slurm import ROOT

OK, NOTE, BAD = "ok", "note", "BAD"
PARAMETER_BYTES = 12
"""Bytes of a checkpoint per parameter: float32 weights and AdamW's two moments."""
PROBE_SECONDS, DRY_SECONDS, RUN_SECONDS = 180, 900, 1800
_PARAMETERS = re.compile(r"([\d,.]+) M parameters")

RANKS = """
import torch
from models.distributed import start, stop, sum_over_ranks
world = start()
total = float(sum_over_ranks(torch.tensor(world.rank + 1.0, device=world.device)))
assert total == world.size * (world.size + 1) / 2, total
stop()
"""
"""What ranks do in processes of their own, so that a hanging collective does not end the doctor."""


@dataclass(frozen=True)
class Finding:
    what: str
    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what:<10} {self.text}" + (
            f"\n{'':<17}-> {self.remedy}" if self.remedy else ""
        )


def examine(config: Config, overrides: Sequence[str], steps: bool = True) -> Iterator[Finding]:
    """Yield every finding as it is made, the quick checks first."""
    yield Finding(
        "settings", OK, f"{config.variant} {config.loss['name']}, {config.model.name} on {config.data.name}"
    )
    gpus, finding = look()
    yield finding
    yield talk(max(2, gpus), "NCCL" if gpus else "gloo")
    finding, parameters = data(overrides)
    yield finding
    if parameters is not None:
        yield disk(config, parameters)
    if steps and finding.level != BAD:
        yield two_steps(config, overrides, gpus or 1)


def look() -> tuple[int, Finding]:
    """Return how many GPUs torch sees, asked in a process of its own that a broken driver may end, and the
    finding about them."""
    count = "import torch; print(torch.cuda.device_count())"
    code, out = run("devices", [sys.executable, "-c", count], PROBE_SECONDS)
    if code:
        return 0, Finding("GPU", BAD, f"torch cannot be asked: {last(out)}", "reinstall it: make venv")
    if gpus := int(out.splitlines()[-1]):
        return gpus, Finding("GPU", OK, f"torch sees {gpus}")
    if shutil.which("nvidia-smi") is None:
        return 0, Finding("GPU", NOTE, "none is seen by torch", "a run will use the CPU")
    remedy = (
        "nvidia-smi is here: torch's CUDA build does not fit the driver. vLLM 0.32 brings CUDA 13, "
        "which needs driver 580 or newer; nvidia-smi shows this one's"
    )
    return 0, Finding("GPU", BAD, "none is seen by torch", remedy)


def talk(ranks: int, backend: str) -> Finding:
    """Check whether ranks on this machine reach each other."""
    words = [*torchrun(ranks), "--no-python", sys.executable, "-c", RANKS]
    code, out = run("ranks", words, PROBE_SECONDS)
    if code:
        return Finding(
            "ranks",
            BAD,
            f"{ranks} ranks do not reach each other ({backend}): {last(out)}",
            "NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME chooses the network",
        )
    return Finding("ranks", OK, f"{ranks} ranks reach each other ({backend})")


def data(overrides: Sequence[str]) -> tuple[Finding, float | None]:
    """Make a dry run, which checks models, data and the combination of settings; return its finding and
    the number of parameters, None if it printed none."""
    code, out = run("dry run", [sys.executable, "train.py", *overrides, "dry_run=true"], DRY_SECONDS)
    if code:
        return Finding("dry run", BAD, last(out), "python train.py … dry_run=true shows all of it"), None
    match = _PARAMETERS.search(out)
    counted = [line for line in out.splitlines() if " steps of " in line]
    return Finding("dry run", OK, counted[0] if counted else "done"), float(
        match[1].replace(",", "")
    ) * 1e6 if match else None


def disk(config: Config, parameters: float) -> Finding:
    """Check that there is room for the checkpoints that stay, one more while it is written, and the exported
    model."""
    need = parameters * (PARAMETER_BYTES * (config.keep_checkpoints + 1) + 4)
    folder = ROOT / config.runs_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding("disk", BAD, f"{folder} is no folder that can be written to", "runs_dir=… elsewhere")
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:,.0f} GB free at {folder}, a run needs about {need / 1e9:,.1f}"
    return Finding(
        "disk",
        OK if free > need else BAD,
        text,
        "" if free > need else "runs_dir=… elsewhere, or keep_checkpoints=1",
    )


def two_steps(config: Config, overrides: Sequence[str], ranks: int) -> Finding:
    """Run the training itself for two steps (online: one small round)."""
    if config.online:
        contexts = max(2, config.model.batch_size // config.rounds.samples)
        short = [f"rounds.contexts={contexts}", f"rounds.contexts_per_round={contexts}"]
    else:
        short = [f"n_examples={2 * config.model.batch_size}"]
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        own = [
            "n_eval_examples=8",
            f"runs_dir={folder}",
            "exp_name=doctor",
            "resume=false",
            "overwrite=false",
            "wandb.enabled=false",
            "idle_settings=note",
        ]
        launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
        code, out = run("two steps", [*launcher, "train.py", *overrides, *short, *own], RUN_SECONDS)
        # 2 with its results written: two steps taught it nothing, which many steps may
        if code not in (0, 2) or not (Path(folder) / "doctor" / "summary.json").exists():
            return Finding(
                "two steps",
                BAD,
                f"exit code {code}: {last(out)}",
                "the same command in full says more; less memory: "
                "model.microbatches, model.activation_checkpointing=true",
            )
        speed = json.loads((Path(folder) / "doctor" / "summary.json").read_text())["tokens_per_second"]
    return Finding("two steps", OK, f"done and exported, {speed:,.0f} tokens/s on {ranks} rank(s)")


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run(what: str, words: Sequence[str], seconds: int) -> tuple[int, str]:
    """Run a process and return (exit code, all its output); (124, a message) if it took too long. ``what`` is
    shown to be under way."""
    given = os.environ.get("PYTHONPATH")
    try:
        with phase(what):
            done = subprocess.run(
                words,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), given)))},
            )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {seconds} seconds"
    return done.returncode, done.stdout


def last(out: str) -> str:
    """Return the most telling line: the first error (later ones follow from it), else the last line that has
    words."""
    errors = re.findall(r"^(?:\[\w+\]:? ?)?(error: .*|[\w.]+(?:Error|Exception)\b.*)", out, re.MULTILINE)
    lines = [line.strip() for line in out.splitlines() if re.search(r"\w", line)]
    return errors[0] if errors else (lines or ["no output"])[-1]


def main(words: Sequence[str] | None = None) -> int:
    about = options_of("python -m launch.doctor", __doc__)
    about.add_argument("overrides", nargs="*", help="the settings of the run, as for train.py")
    about.add_argument("--no-steps", action="store_true", help="leave out the two steps")
    options = about.parse_intermixed_args(words)

    def work() -> int:
        config, _ = compose(*options.overrides)
        bad = 0
        for finding in examine(config, options.overrides, steps=not options.no_steps):
            print(finding, flush=True)
            bad += finding.level == BAD
        print(f"\n{bad} thing{'s' * (bad != 1)} would stop this run" if bad else "\nfit for this run")
        return 1 if bad else 0

    return answered(work)


if __name__ == "__main__":
    pulse()
    sys.exit(main())
