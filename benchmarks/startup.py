"""How long before the first step: imports, data preparation in pairs a second, and from the command to the
first line of metrics.

python -m benchmarks.startup                     # 60,000 pairs made of the preference data
python -m benchmarks.startup --pairs 6000 --no-command
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import ROOT, Sample, machine, table, timed
from benchmarks.parts import SHARED, real_rows, trained_tokenizer
from data.chat import DEFAULT_TEMPLATE, Renderer
from data.examples import Examples, make_examples
from data.token_cache import TokenCache
from data.types import Completion, Group, Prompt, Turn
from data.views import pairs

OVERRIDES = (
    "loss=dpo",
    "wandb.enabled=false",
    "n_examples=64",
    "n_eval_examples=32",
    "overwrite=true",
    "exp_name=startup",
    "model.batch_size=8",
)
"""The embedded model and data: what a newcomer types, shortened."""


def groups(path: Path, format_: str, count: int) -> list[Group]:
    """``count`` pairs, each prompt another: the file's, again and again, with a number behind the last
    turn."""
    rows = (
        real_rows(path, format_)
        if path.exists()
        else [(Prompt((Turn("user", "how " * 80),)), Completion("so " * 60), Completion("thus " * 40))]
    )
    made = []
    for i in range(count):
        prompt, *both = rows[i % len(rows)]
        last = prompt.turns[-1]
        made.append(
            Group(
                Prompt((*prompt.turns[:-1], Turn(last.role, f"{last.content} {i}"))), tuple(both), (1.0, -1.0)
            )
        )
    return made


def preparation(count: int, path: Path, format_: str) -> tuple[Sample, Sample, int]:
    """(time of the first start, of the second, pairs made) of rendering and tokenising ``count`` pairs by the
    default template. The first start writes the token ids to disk (data/token_cache.py), the second reads
    them."""
    wanted = groups(path, format_, count)
    tokenizer = trained_tokenizer([c.text or "" for group in wanted[:3000] for c in group.completions], 8192)
    made: list[Examples] = []

    def start(folder: str) -> None:
        renderer = Renderer(
            tokenizer, max_length=512, max_prompt_length=256, template=DEFAULT_TEMPLATE.read_text()
        )
        made.append(make_examples(wanted, pairs, renderer, TokenCache(Path(folder))))

    with tempfile.TemporaryDirectory() as folder:
        first, second = (timed(lambda: start(folder)) for _ in range(2))
    return first, second, made[1].count


def first_steps(starts: int = 2) -> list[float]:
    """Seconds from the command to its first line of metrics (which is written when the second step is under
    way), for one start after the other with the same cache_dir."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "train.py",
            *OVERRIDES,
            f"runs_dir={folder}/runs",
            f"cache_dir={folder}/cache",
        ]
        line = Path(folder) / "runs" / "startup" / "metrics.jsonl"
        for _ in range(starts):
            line.unlink(missing_ok=True)
            began = time.perf_counter()
            run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                while not (line.exists() and line.stat().st_size) and run.poll() is None:
                    time.sleep(0.05)
                took.append(time.perf_counter() - began)
            finally:
                run.terminate()
                run.wait()
            if not line.exists():
                raise RuntimeError(f"{' '.join(command)} ended without a line of metrics")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60_000)
    parser.add_argument("--path", type=Path, default=SHARED / "hh_harmless_test.jsonl.gz")
    parser.add_argument("--format", default="hh")
    parser.add_argument("--no-command", action="store_true", help="leave out the run of train.py")
    args = parser.parse_args()
    code = "import time, sys; t = time.process_time(); import jobs.job; print(time.process_time() - t)"
    imports = float(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
    *samples, made = preparation(args.pairs, args.path, args.format)
    first, second = (
        [f"{s.wall:.1f} ({s.cpu:.1f})", f"{made / s.wall:,.0f} ({made / s.cpu:,.0f})"] for s in samples
    )
    rows = [
        ["imports, CPU s", f"{imports:.1f}", f"{imports:.1f}"],
        [f"preparing {made:,} pairs, wall s (CPU s)", first[0], second[0]],
        ["pairs a second of wall (of CPU)", first[1], second[1]],
    ]
    if not args.no_command:
        rows.append(["command to first line of metrics, wall s", *(f"{took:.1f}" for took in first_steps())])
    print(f"{machine()}\n\n{table(['', 'first start', 'second start'], rows)}")


if __name__ == "__main__":
    main()
