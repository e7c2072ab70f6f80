"""Check whether this machine, with these settings, is fit for a long run. Each finding comes with its remedy.

    python -m launch.doctor loss=dpo humanline=true model=llama3-8b-instruct     # the settings that the run will have

The doctor checks settings, packages and GPUs, the folder of runs, Slurm's commands, and models and data (a dry
run). Exit codes: 0 fit; 1 something would stop the run; 2 the settings are not valid.
"""  # noqa: E501

from __future__ import annotations

if not __package__:  # started by its path, where nothing beside its folder is found
    raise SystemExit("error: type python -m launch.doctor")

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.options import options_of
from common.progress import phase, pulse
from config.cli import answered, compose
from config.schema import Config
from launch.slurm import ROOT
from launch.state import last_words

OK, NOTE, BAD = "ok", "note", "BAD"
IMPORT_SECONDS, DRY_SECONDS = 180, 900
GPUS = "import torch, transformers; print(torch.cuda.device_count())"


class Finding(NamedTuple):
    what: str
    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.what:<10} {self.text}"
        return f"{line}\n{'':<17}-> {self.remedy}" if self.remedy else line


def examine(config: Config, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yield every finding as it is made, the quick checks first."""
    about = f"{config.variant} {config.loss['name']}, {config.model.name} on {config.data.name}"
    yield Finding("settings", OK, about)
    yield runs_folder(config)
    there = [name for name in ("sbatch", "squeue", "scontrol") if shutil.which(name)]
    yield Finding("Slurm", OK if there else NOTE, f"{', '.join(there) or 'none of its commands'} here")
    yield packages()
    code, out = run("dry run", [sys.executable, "train.py", *overrides, "dry_run=true"], DRY_SECONDS)
    if code:
        yield Finding("dry run", BAD, out, "python train.py … dry_run=true shows all of it")
    else:
        yield Finding("dry run", OK, "models and data are there")


def packages() -> Finding:
    """Import torch and transformers, in a process of its own that a broken driver may end, and count GPUs."""
    code, out = run("packages", [sys.executable, "-c", GPUS], IMPORT_SECONDS)
    if code:
        return Finding("packages", BAD, f"torch cannot be asked: {out}", "reinstall it: make venv")
    if gpus := int(out):
        return Finding("GPU", OK, f"torch sees {gpus}")
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", NOTE, "none is seen by torch", "a run will use the CPU")
    remedy = (
        "nvidia-smi is here: torch's CUDA build does not fit the driver. vLLM 0.32 brings CUDA 13, "
        "which needs driver 580 or newer; nvidia-smi shows this one's"
    )
    return Finding("GPU", BAD, "none is seen by torch", remedy)


def runs_folder(config: Config) -> Finding:
    folder = ROOT / config.runs_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding("disk", BAD, f"{folder} is no folder that can be written to", "runs_dir=… elsewhere")
    return Finding("disk", OK, f"{shutil.disk_usage(folder).free / 1e9:,.0f} GB free at {folder}")


def run(what: str, words: Sequence[str], seconds: int) -> tuple[int, str]:
    """Run a process and return (exit code, the line of its output that says why it ended). ``what`` is shown
    to be under way."""
    try:
        with phase(what):
            done = subprocess.run(words, cwd=ROOT, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return 124, f"no end after {seconds} seconds"
    said = done.stdout + (done.stderr if done.returncode else "")  # a warning is no result
    return done.returncode, last_words(said.splitlines()) or "no output"


def main(words: Sequence[str] | None = None) -> int:
    about = options_of("python -m launch.doctor", __doc__)
    about.add_argument("overrides", nargs="*", help="the settings of the run, as for train.py")
    options = about.parse_intermixed_args(words)

    def work() -> int:
        config, _ = compose(*options.overrides)
        bad = 0
        for finding in examine(config, options.overrides):
            print(finding, flush=True)
            bad += finding.level == BAD
        print(f"\n{bad} thing{'s' * (bad != 1)} would stop this run" if bad else "\nfit for this run")
        return 1 if bad else 0

    return answered(work)


if __name__ == "__main__":
    pulse()
    sys.exit(main())
