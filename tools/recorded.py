"""Run the command lines of tools/recorded.yaml and write down what came out, so that two versions of the code
can be compared to the bit: losses and other metrics, weights, the files left behind, and the messages of
refused commands.

    python -m tools.recorded OUT.json [NAME ...]
    python -m tools.recorded --compare OLD.json NEW.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.options import options_of

ROOT = Path(__file__).parent.parent
TIMES = re.compile(r"second|_at$|^time")
"""Keys of numbers that differ from run to run."""
VARIES = ("wandb/", "logs/", "run.lock", "run.json", "summary.json", "checkpoints/")
"""Files whose names or contents depend on the moment."""


def main(words: Sequence[str]) -> int:
    about = options_of("python -m tools.recorded", __doc__)
    about.add_argument("out", nargs="?", metavar="OUT.json", type=Path, help="the record to write")
    about.add_argument("names", nargs="*", metavar="NAME", help="its runs, and wrong; default: all")
    about.add_argument("--compare", nargs=2, type=Path, metavar=("OLD.json", "NEW.json"))
    given = about.parse_args(words)
    if given.compare is not None:
        try:
            lines = list(differences(*(json.loads(path.read_text()) for path in given.compare)))
        except (OSError, ValueError) as error:
            about.error(f"--compare takes two records: {error}")
        print("\n".join(lines) or "no difference")
        return int(bool(lines))
    if given.out is None:
        about.error("name the record to write, OUT.json, or --compare two")
    out, names = given.out, given.names
    asked = yaml.safe_load((ROOT / "tools" / "recorded.yaml").read_text())
    if unknown := sorted(set(names) - {*asked["runs"], "wrong"}):
        about.error(f"{', '.join(unknown)}: is no run; there are {', '.join(asked['runs'])}, and wrong")
    small = asked["small"].split()
    record: dict[str, Any] = {"runs": {}, "wrong": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in asked["runs"].items():
            if not names or name in names:
                record["runs"][name] = recorded_run(name, spec, small, Path(folder))
                print(f"{name}: exit {record['runs'][name]['exit']}", flush=True)
        for line in asked["wrong"] if not names or "wrong" in names else ():
            record["wrong"][line] = refused(line.split(), Path(folder))
    out.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return 0


def recorded_run(name: str, spec: Any, small: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one command line, and return its exit code and ``left`` of its folder."""
    spec = {"words": spec} if isinstance(spec, str) else spec
    own = [f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", f"exp_name={name}"]
    words = [*spec["words"].split(), *small, *own]
    ranks = spec.get("torchrun")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *start, "train.py", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if "stop_after" in spec:
        stop_after(command, folder / name / "metrics.jsonl", spec["stop_after"], env)
        command.append("resume=true")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    outcome = {"exit": done.returncode, **left(folder / name)}
    shutil.rmtree(folder / name, ignore_errors=True)
    return outcome


def stop_after(command: Sequence[str], metrics: Path, steps: int, env: Mapping[str, str]) -> None:
    """Start the command, and end it with SIGTERM once it has done ``steps`` steps."""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        while run.poll() is None and (not metrics.is_file() or len(metrics.read_text().splitlines()) < steps):
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)


def left(folder: Path) -> dict[str, Any]:
    """Return what a run left: the numbers of every step, digests of its weights and rounds, its files."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    kept = [name for name in files if name.endswith((".safetensors", "groups.jsonl", "samples.jsonl"))]
    return {
        "metrics": [{k: v for k, v in line.items() if not TIMES.search(k)} for line in lines],
        "digests": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
            for name in kept
            if not name.startswith(VARIES)
        },
        "files": [name for name in files if not name.startswith(VARIES)],
    }


def refused(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the exit code and the last words of a command line that is refused; ``dry_run`` ends one that is
    not."""
    own = [f"runs_dir={folder}", f"cache_dir={folder / 'cache'}", "dry_run=true", "wandb.enabled=false"]
    done = subprocess.run(
        [sys.executable, "train.py", *words, *own], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    said = done.stderr.replace(str(folder), "FOLDER").strip().splitlines()
    return {"exit": done.returncode, "said": said[-1] if said and done.returncode else ""}


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return a line for each place where two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for k in keys for line in differences(old.get(k), new.get(k), f"{where}/{k}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for line in differences(a, b, f"{where}[{i}]")
        ]
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
