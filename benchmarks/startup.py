"""How long before the first step: imports, data preparation in pairs a second, and from the command to the first line of metrics.

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
from data.examples import make_examples
from data.types import Completion, Group, Prompt, Turn
from data.views import pairs

OVERRIDES = ("loss=dpo", "wandb.enabled=false", "n_examples=64", "n_eval_examples=32", "overwrite=true", "exp_name=startup",
             "model.batch_size=8")
"""The embedded model and data: what a newcomer types, shortened."""


def groups(path: Path, format_: str, count: int) -> list[Group]:
    """``count`` pairs, each prompt another: the file's, again and again, with a number behind the last turn."""
    rows = real_rows(path, format_) if path.exists() else [
        (Prompt((Turn("user", "how " * 80),)), Completion("so " * 60), Completion("thus " * 40))]
    made = []
    for i in range(count):
        prompt, *both = rows[i % len(rows)]
        last = prompt.turns[-1]
        made.append(Group(Prompt((*prompt.turns[:-1], Turn(last.role, f"{last.content} {i}"))), tuple(both), (1.0, -1.0)))
    return made


def preparation(count: int, path: Path, format_: str) -> tuple[Sample, int]:
    """(time, pairs made) of rendering and tokenising ``count`` pairs by the default template."""
    wanted = groups(path, format_, count)
    texts = [c.text or "" for group in wanted[:3000] for c in group.completions]
    renderer = Renderer(trained_tokenizer(texts, 8192), max_length=512, max_prompt_length=256, template=DEFAULT_TEMPLATE.read_text())
    made = []
    sample = timed(lambda: made.append(make_examples(wanted, pairs, renderer).count))
    return sample, made[0]


def first_step() -> float:
    """Seconds from the command to its first line of metrics (which is written when the second step is under way)."""
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "runs" / "startup" / "metrics.jsonl"
        began = time.perf_counter()
        run = subprocess.Popen([sys.executable, "train.py", *OVERRIDES, f"runs_dir={folder}/runs", f"cache_dir={folder}/cache"], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (line.exists() and line.stat().st_size) and run.poll() is None:
                time.sleep(0.05)
            return time.perf_counter() - began
        finally:
            run.terminate()
            run.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60_000)
    parser.add_argument("--path", type=Path, default=SHARED / "hh_harmless_test.jsonl.gz")
    parser.add_argument("--format", default="hh")
    parser.add_argument("--no-command", action="store_true", help="leave out the run of train.py")
    args = parser.parse_args()
    code = "import time, sys; t = time.process_time(); import trainers.job; print(time.process_time() - t)"
    imports = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    sample, made = preparation(args.pairs, args.path, args.format)
    rows = [["imports, CPU s", f"{imports:.1f}"],
            [f"preparing {made:,} pairs: pairs a second, wall (CPU)", f"{made / sample.wall:,.0f} ({made / sample.cpu:,.0f})"]]
    if not args.no_command:
        rows.append(["command to first line of metrics, wall s", f"{first_step():.1f}"])
    print(f"{machine()}\n\n{table(['start-up', ''], rows)}")


if __name__ == "__main__":
    main()
