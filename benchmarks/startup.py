"""The time before the first step, and the memory that data preparation takes.

Times are those of imports, of data preparation (pairs a second), and from the command to the first line of
metrics.

python -m benchmarks.startup                     # 60,000 pairs made of the preference data
python -m benchmarks.startup --pairs 6000 --no-command
python -m benchmarks.startup --memory            # 60,000 pairs from a file to the first batch
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import ROOT, Sample, machine, table, timed
from benchmarks.parts import SHARED, real_rows, trained_tokenizer
from common.options import options_of
from config.schema_data import DataConfig
from config.typed import with_defaults
from data.batches import Segment, token_count
from data.chat import Renderer
from data.examples import Examples, make_examples
from data.quality import DataReport
from data.sources import load_splits
from data.templates import DEFAULT_TEMPLATE
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
"""The embedded model and data, as a newcomer would run them, but shorter."""


def groups(path: Path, format_: str, count: int) -> Iterator[Group]:
    """Yield ``count`` pairs with different prompts: the file's pairs, repeated, with a number after the last
    turn."""
    rows = (
        real_rows(path, format_)
        if path.exists()
        else [(Prompt((Turn("user", "how " * 80),)), Completion("so " * 60), Completion("thus " * 40))]
    )
    for i in range(count):
        prompt, *both = rows[i % len(rows)]
        last = prompt.turns[-1]
        numbered = Prompt((*prompt.turns[:-1], Turn(last.role, f"{last.content} {i}")))
        yield Group(numbered, tuple(both), (1.0, -1.0))


def preparation(count: int, path: Path, format_: str) -> tuple[Sample, Sample, int]:
    """Return (time of the first start, of the second, pairs made) of rendering and tokenising ``count`` pairs
    by the default template. The first start writes the token ids to disk (data/token_cache.py), the second
    reads them."""
    wanted = list(groups(path, format_, count))
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


def write_pairs(path: Path, count: int, made_of: Path, format_: str) -> None:
    """Write ``count`` pairs as a .jsonl of conversations."""
    with path.open("w") as file:
        for group in groups(made_of, format_, count):
            chosen, rejected = (completion.text for completion in group.completions)
            row = {"prompt": [turn.message for turn in group.prompt.turns]}
            for name, text in (("chosen", chosen), ("rejected", rejected)):
                row[name] = [{"role": "assistant", "content": str(text)}]
            file.write(json.dumps(row) + "\n")


def read_pairs(path: Path, cache: Path) -> None:
    """Start once on the pairs of ``path``, up to the first batches, and print as JSON: the peak memory of the
    process (MiB) with its libraries alone and at the end, and the seconds."""
    with path.open() as file:
        tokenizer = trained_tokenizer(list(itertools.islice(file, 3000)), 8192)
    renderer = Renderer(
        tokenizer, max_length=512, max_prompt_length=256, template=DEFAULT_TEMPLATE.read_text()
    )
    local = {"name": "local", "source": "data.sources.local", "path": str(path), "eval_fraction": 0.001}
    settings = with_defaults(DataConfig, **local)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    train, evaluation = load_splits(settings)
    made = make_examples(train.groups, pairs, renderer, TokenCache(cache))
    DataReport.of(train, evaluation, made, dict(renderer.cuts))
    plan = Segment(made.groups, 64, made.count, seed=0)
    tokens = sum(token_count(plan.batch(i)) for i in range(10)) / 640
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = time.perf_counter() - began
    print(json.dumps({"before": before / 1024, "most": most / 1024, "seconds": took, "tokens": tokens}))


def memory(count: int, made_of: Path, format_: str) -> list[list[str]]:
    """Return the rows of the table of ``--memory``: the first start and the second, each in a process of its
    own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        write_pairs(path, count, made_of, format_)
        for name in ("first", "second"):
            command = [sys.executable, "-m", "benchmarks.startup", "--read", str(path)]
            said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            measurement = json.loads(said.splitlines()[-1])
            more = measurement["most"] - measurement["before"]
            rows.append(
                [
                    name,
                    f"{measurement['tokens']:.0f}",
                    f"{measurement['before']:.0f}",
                    f"{more:.0f}",
                    f"{more * 2**20 / count:.0f}",
                    f"{measurement['seconds']:.0f}",
                ]
            )
    return rows


def first_steps(starts: int = 2) -> list[float]:
    """Return the seconds from the command to its first line of metrics (which is written while the second
    step runs), for several starts in turn with the same cache_dir."""
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
    parser = options_of("python -m benchmarks.startup", __doc__)
    parser.add_argument("--pairs", type=int, default=60_000)
    parser.add_argument("--path", type=Path, default=SHARED / "hh_harmless_test.jsonl.gz")
    parser.add_argument("--format", default="hh")
    parser.add_argument("--no-command", action="store_true", help="leave out the run of train.py")
    parser.add_argument("--memory", action="store_true", help="measure memory, and nothing else")
    parser.add_argument("--read", type=Path, help="(one start of --memory, on this file)")
    args = parser.parse_args()
    if args.read is not None:
        read_pairs(args.read, args.read.parent / "cache")
        return
    if args.memory:
        head = ["start", "tokens a pair", "libraries, MiB", "more for the data, MiB", "bytes a pair", "s"]
        print(f"{machine()}\n\n{table(head, memory(args.pairs, args.path, args.format))}")
        return
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
