"""Check on this machine's GPUs everything that only a GPU can tell, and keep the result as one JSON file to
attach to a report.

    python -m benchmarks.gpu_check                     # every GPU of this machine
    python -m benchmarks.gpu_check --shape llama-3-8b --only step
    python -m benchmarks.gpu_check --device cpu        # the same program where there is no GPU

Three programs run one after another, each of which may be run alone: ``benchmarks.gpu_paths`` compares every
path that only a GPU takes with its slow twin; ``benchmarks.gpu_step`` trains at the limit of the memory and
compares the peak with the plan; ``benchmarks.gpu_runs`` kills a run and continues it, and samples rounds with
vLLM. Several nodes: ``torchrun --nnodes … -m benchmarks.gpu_step``. Exit codes: 0 nothing failed; 1 something
did.
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
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks import FAILED, Check, read_checks
from benchmarks.measure import ROOT, machine
from benchmarks.parts import SHAPE_NAMES
from benchmarks.processes import end
from common.files import write_whole
from common.output import guard_output

PARTS = ("paths", "step", "runs")
SECONDS = 9000.0
"""Time after which a part that hangs is ended: more than its own limits and the 30 minutes after which NCCL
says which collective hung."""
PACKAGES = ("torch", "transformers", "vllm", "torchao", "flash-attn", "flash-attn-3")


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 1)
    print(f"{machine()}; {ranks} rank(s) on {args.device}\n", flush=True)
    found: list[Check] = []
    commands = {part: command(part, args, ranks) for part in args.only}
    for part, own in commands.items():
        found += checked(part, own)
    counts = Counter(check.verdict for check in found)
    write_whole(args.out, json.dumps(report(found, commands), indent=1) + "\n")
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


def checked(part: str, words: list[str]) -> list[Check]:
    """Run a part, which prints its checks, and return them. A part that ends early is itself a check that
    failed; a part that hangs is ended with everything that it started."""
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder) / "checks", time.monotonic()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*words, "--out", str(out)], cwd=ROOT, env=environment, text=True)
        try:
            code: int | str = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"no end after {SECONDS:.0f} seconds"
        finally:
            end(process)
        found = read_checks(out)
    if code:
        found.append(Check(f"benchmarks.gpu_{part}", FAILED, f"ended early: {code}"))
        print(found[-1], flush=True)
    print(f"{part}: {time.monotonic() - began:.0f} s\n", flush=True)
    return found


def report(checks: list[Check], commands: dict[str, list[str]]) -> dict[str, Any]:
    """Return what the JSON file holds: the machine, versions, commands and every check."""
    return {
        "machine": machine(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {name: found for name in PACKAGES if (found := installed(name)) is not None},
        "commit": commit(),
        "commands": {part: " ".join(words) for part, words in commands.items()},
        "checks": [asdict(check) for check in checks],
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of this code; None outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default GPUs if there are any")
    parser.add_argument("--ranks", type=int, help="by default one for each GPU, or one")
    parser.add_argument(
        "--shape", default="qwen2.5-1.5b", choices=SHAPE_NAMES, help="architecture of the steps"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU that torch sees")
    if args.ranks is not None and args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give 1 or more")
    try:  # before minutes of work whose result has to go there
        write_whole(args.out, "{}\n")
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be written ({error.strerror}); give a file in another folder")
    return args


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
