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

from common.options import options_of
from common.progress import phase, pulse
from config.cli import answered, compose
from config.schema import Config
from launch.slurm import ROOT
from launch.state import last_words

OK, NOTE, BAD = "ok", "note", "BAD"
IMPORT_SECONDS, DRY_SECONDS = 180, 900
GPUS = "import torch, transformers; print(torch.cuda.device_count())"


Finding = tuple[str, str]
"""(OK, NOTE or BAD; what was found, with its remedy)"""


def examine(config: Config, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yield every finding as it is made, the quick checks first."""
    yield OK, f"{config.variant} {config.loss['name']}, {config.model.name} on {config.data.name}"
    yield runs_folder(config)
    there = shutil.which("sbatch") is not None
    yield OK if there else NOTE, f"Slurm's sbatch is {'' if there else 'not '}here"
    yield packages()
    code, out = run("dry run", [sys.executable, "train.py", *overrides, "dry_run=true"], DRY_SECONDS)
    bad = f"the dry run fails: {out}; python train.py … dry_run=true shows all of it"
    yield (BAD, bad) if code else (OK, "models and data are there")


def packages() -> Finding:
    """Import torch and transformers, in a process of its own that a broken driver may end, and count GPUs."""
    code, out = run("packages", [sys.executable, "-c", GPUS], IMPORT_SECONDS)
    if code:
        return BAD, f"torch cannot be asked: {out}; reinstall it: make venv"
    if gpus := int(out):
        return OK, f"torch sees {gpus} GPUs"
    if shutil.which("nvidia-smi") is None:
        return NOTE, "torch sees no GPU: a run will use the CPU"
    why = "its CUDA build does not fit the driver. vLLM 0.32 brings CUDA 13, which needs driver 580 or newer"
    return BAD, f"torch sees no GPU, and nvidia-smi is here: {why}"


def runs_folder(config: Config) -> Finding:
    folder = ROOT / config.runs_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return BAD, f"{folder} is no folder that can be written to: runs_dir=… elsewhere"
    return OK, f"{shutil.disk_usage(folder).free / 1e9:,.0f} GB free at {folder}"


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
        for level, text in examine(config, options.overrides):
            print(f"{level:<5} {text}", flush=True)
            bad += level == BAD
        print(f"\n{bad} thing{'s' * (bad != 1)} would stop this run" if bad else "\nfit for this run")
        return 1 if bad else 0

    return answered(work)


if __name__ == "__main__":
    pulse()
    sys.exit(main())
