"""Check on this machine's GPUs everything that only a GPU can tell, and keep the result as one JSON file to
attach to a report.

    python -m benchmarks.gpu_check                     # every GPU of this machine
    python -m benchmarks.gpu_check --shape llama-3-8b --only step
    python -m benchmarks.gpu_check --seconds 570       # ends by itself, with what it has found
    python -m benchmarks.gpu_check --device cpu        # the same program where there is no GPU

Three programs run one after another, each of which may be run alone: ``benchmarks.gpu_paths`` compares every
path that only a GPU takes with its slow twin; ``benchmarks.gpu_step`` trains at the limit of the memory and
compares the peak with the plan; ``benchmarks.gpu_runs`` kills a run and continues it, and samples rounds with
vLLM. Several nodes: ``torchrun --nnodes … -m benchmarks.gpu_step``. Exit codes: 0 nothing failed; 1 something
did; 2 a word of the command is wrong, or a package is missing.

The machine needs torch, transformers and the few packages of ``NEEDED``, in folders named by PYTHONPATH if
they are not installed. The file is written anew after each check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.checks import FAILED, NOTE, SHAPE_NAMES, Check, read_checks
from common.files import write_whole
from common.options import options_of
from common.output import guard_output

ROOT = Path(__file__).parent.parent
PARTS = ("paths", "step", "runs")
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "pydantic": "pydantic",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
}
"""Module -> the package that has it: all that is imported beside what these install themselves."""
POLL = 1.0
"""Seconds between two looks for new checks."""
SECONDS = 9000.0
"""Time after which a part that hangs is ended: more than its own limits and the time after which NCCL says
which collective hung."""
PACKAGES = ("torch", "transformers", "vllm", "torchao", "flash-attn", "flash-attn-3")


def main(words: Sequence[str] | None = None) -> int:
    if lacking := missing():
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    import torch

    from benchmarks.measure import machine

    args = arguments(words)
    ends = time.monotonic() + args.seconds
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 1)
    print(f"{machine()}; {ranks} rank(s) on {args.device}\n", flush=True)
    all_checks: list[Check] = []
    commands = {part: command(part, args, ranks) for part in args.only}
    facts = about(commands)

    def keep(before: list[Check], new: list[Check]) -> None:
        checks = [asdict(check) for check in (*before, *new)]
        write_whole(args.out, json.dumps(facts | {"checks": checks}, indent=1) + "\n")

    for part, own in commands.items():
        all_checks += checked(part, own, partial(keep, list(all_checks)), ends)
        keep(all_checks, [])
    counts = Counter(check.verdict for check in all_checks)
    print(f"\n{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}; all of it: {args.out}")
    return 1 if counts[FAILED] else 0


def command(part: str, args: argparse.Namespace, ranks: int) -> list[str]:
    """Return the words of a part's command, without its ``--out``."""
    module = f"benchmarks.gpu_{part}"
    device = ["--device", args.device]
    if part == "paths":
        return [sys.executable, "-m", module, *device]
    if part == "runs":  # their batches have to be divided among the ranks
        return [sys.executable, "-m", module, *device, "--ranks", str(1 << (ranks.bit_length() - 1))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    size = ["--tiny"] if args.device == "cpu" else ["--shape", args.shape]
    return [sys.executable, *(torchrun if ranks > 1 else ["-m", module]), *device, *size]


def checked(
    part: str,
    words: list[str],
    keep: Callable[[list[Check]], None] = lambda _: None,
    ends: float = float("inf"),
) -> list[Check]:
    """Run a part, which prints its checks, and return them. ``keep`` is called with those so far after each.
    A part that ends early is itself a check that failed; a part that hangs, or is not done at ``ends`` (of
    the monotonic clock), is ended with everything that it started."""
    from benchmarks.processes import end

    with tempfile.TemporaryDirectory() as folder:
        out, began, kept = Path(folder) / "checks", time.monotonic(), 0
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [*words, "--out", str(out)], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, text=True
        )
        try:
            while process.poll() is None and time.monotonic() < min(ends, began + SECONDS):
                time.sleep(POLL)
                if len(checks := read_checks(out)) > kept:
                    keep(checks)
                    kept = len(checks)
            code = process.poll()
        finally:
            end(process)
        checks = read_checks(out)
    name, took = f"benchmarks.gpu_{part}", time.monotonic() - began
    if code is None and took < SECONDS:
        checks.append(Check(name, NOTE, f"ended after {took:.0f} s, as --seconds says: not all is checked"))
    elif code != 0:
        why = f"no end after {SECONDS:.0f} seconds" if code is None else code
        checks.append(Check(name, FAILED, f"ended early: {why}"))
    if code != 0:
        print(checks[-1], flush=True)
    print(f"{part}: {took:.0f} s\n", flush=True)
    return checks


def about(commands: dict[str, list[str]]) -> dict[str, Any]:
    """Return what the JSON file holds beside the checks: the machine, versions and commands."""
    import torch

    from benchmarks.measure import machine

    return {
        "machine": machine(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {name: release for name in PACKAGES if (release := installed(name)) is not None},
        "commit": commit(),
        "commands": {part: " ".join(words) for part, words in commands.items()},
    }


def missing() -> str | None:
    """Return which packages are missing and how they come to a machine without a network; None if none is."""
    lacking = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if not lacking:
        return None
    lines = [
        line.partition("#")[0].strip() for line in (ROOT / "requirements/cpu.txt").read_text().split("\n")
    ]
    wanted = [next((line for line in lines if line.startswith(name)), name) for name in lacking]
    return (
        f"{', '.join(lacking)}: not installed. With a network: pip install {' '.join(wanted)}. Without one: "
        f"pip install --target FOLDER {' '.join(wanted)} elsewhere, with the same Python; bring FOLDER along "
        "and set PYTHONPATH=FOLDER"
    )


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of this code; None outside a repository and without git."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = options_of("python -m benchmarks.gpu_check", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default GPUs if there are any")
    parser.add_argument("--ranks", type=int, help="by default one for each GPU, or one")
    parser.add_argument(
        "--shape", default="qwen2.5-1.5b", choices=SHAPE_NAMES, help="architecture of the steps"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end by itself after so many, with what is found"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    args = parser.parse_args(words)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch sees")
    if args.ranks is not None and args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give 1 or more")
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds:g}: give a number above 0")
    try:  # before minutes of work whose result has to go there
        write_whole(args.out, "{}\n")
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be written ({error.strerror}); give a file in another folder")
    return args


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
