"""Every command of README.md and docs/*.md is typed in a copy of the repository.

A command keeps its words. What makes it small is added behind it; what it names (a model of the hub, a data set, a
run, an endpoint, a cluster) lies in the copy under that name, or was made by the commands before it. All that only
train.py is asked for happens in one process. A command that no rule fits fails: whoever writes a new one into the
docs says here how it is tried.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args

from tests import programs
from tests.docs import commands
from tests.docs_workspace import copy_of_the_repository, installed

NOT_RUN = {
    r"pip install|make torch-oldest|make (venv|eval-tools)": "would change the environment of the tests",
    r"make smollm2|python -m tools\.gguf": "would fetch a package; test_gguf.py converts files of its kind",
    r"make real": "is half an hour of training; tests/unit/test_benchmarks.py tries its parts",
    r"make (docs|torture|test|test-quick)$": "test_docs_site.py, test_torture.py and all tests do it",
    r"hf |wandb sync|python export\.py .*--push-to-hub": "asks a hub; tests/integration/test_hub.py is one",
    r"python -m launch\.results (\S+surface\.yaml --frontier|\S+claim\w*\.yaml|runs/pilot)": "wants more "
    "runs; tests/unit/launch/test_frontier.py has them",
    r"python -m launch\.sweep (sweeps/table3\.yaml --submit|.*--rate)": "unit/launch types it",
    r"(torchrun|accelerate launch)( .* train\.py …)?$": "is only named; tests/distributed starts ranks",
    r"python -m launch\.results sweeps/off_policy": "wants its 900 runs; unit/launch has others",
    r"export ": "is a shell's",
}
EVERY = "n_eval_examples=2 n_eval_prompts=1 wandb.enabled=false diagnostics=false report=false"
OFFLINE, ONLINE = f"n_examples=4 {EVERY}", f"rounds.contexts=2 rounds.contexts_per_round=2 {EVERY}"
TRAINED = re.compile(
    r".*(loss=(hinge|ppo loss)|optimizer=|callbacks|trackers=.csv|trainer\._target_|exp_name=foreign)"
)
"""What follows ``python train.py`` where the run is done and not only prepared: what is added as the docs say, what
a later command names, one with a critic."""  # noqa: E501
RULES = {  # pattern -> what is added behind the command, words -> others in their place
    r"make run$": (f"ARGS='{OFFLINE}'", {}),
    # Its server ends with a signal alone: what it would show is listed
    r"tensorboard ": ("--inspect", {"^tensorboard": "python -m tensorboard.main"}),
    # What is only named, and benchmarks, whose parts other tests try
    r"(python label\.py|python -m launch\.results|python train\.py) *$": ("--help", {}),
    r"python -m benchmarks\.": ("--help", {}),
    r"python -m pytest -m gpu": ("--collect-only", {}),
    r"python train\.py --cfg job$": ("", {}),
    r"python train\.py -m ": (f"{OFFLINE} dry_run=true", {"seed=1,2": "seed=1"}),
    r"python export\.py ": ("", {}),
    r"python sample\.py ": ("limit=4 overwrite_out=true", {r"limit=\d+": "limit=4"}),
    # The small model's own answers are all worth 0
    r"python label\.py in=constrained": (
        "overwrite_out=true",
        {"in=constrained": "in=labelled", "out=l": "out=scored-l"},
    ),
    r"python label\.py ": ("overwrite_out=true", {}),
    # With judges, harnesses and engines: tests/unit/evals, tests/integration/test_vllm.py
    r"python eval\.py .*(kind=(alpacaeval|lm_eval)|reward=|sampler=vllm|data=math)": ("--cfg job", {}),
    r"python eval\.py ": ("limit=4 resamples=100", {}),
    r"python -m launch\.sweep sweeps/claim": ("--script --only '*-plain-dpo*-s1*'", {"--local 2": ""}),
    r"python -m launch\.sweep sweeps/off_policy": (
        "--script --only '*-foreign-*-shapeppo-s1'",
        {"--local 2": ""},
    ),
    r"python -m launch\.sweep .*--local": (f"{OFFLINE} --only '*-dpo-*-s1'", {}),  # the second finds all done
    r"python -m launch\.sweep .*--submit": ("", {"--submit": "--script"}),
    r"python -m tools\.prospect_figure ": ("--prompts 4", {}),
    r"python -m (launch|reports)\.": ("", {}),
}
GIVEN = {
    command: next((why for rule, why in NOT_RUN.items() if re.match(rule, command)), "")
    for command in commands()
}
RUNS = [one for one in GIVEN if re.match(r"(python|torchrun .*) train\.py (?!-m|--cfg).*=", one)]
MINE = (
    "model=hub model.name_or_path=org/name data=local data.path=pairs.jsonl loss=dpo log_drift=false "
    "data.verifier=data.adder.accuracy model.batch_size=1 n_examples=81 save_every=80 "
    f"exp_name=mine {EVERY}"
)


def small(command: str, added: str) -> list[str]:
    """The command's words with what is added, except for settings that it has itself, or that nothing would
    read: SmolLM2 answers no prompts on a CPU where no verifier checks them."""
    words = shlex.split(command.replace("…", ""))
    keys = {word.partition("=")[0] for word in words}
    keys |= {"n_eval_prompts"} if "smollm2" in command and "data=local" in command else set()
    return words + [one for one in shlex.split(added) if "=" not in one or one.partition("=")[0] not in keys]


class Workspace:
    """A copy of the repository with everything that the docs name."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_of_the_repository(folder)
        installed(folder, programs.ROOT / ".venv" / "bin" / "python")
        (folder / "home").mkdir()
        outside = ("PYTEST_", "MAKE", "MFLAGS")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
        self.environment = kept | {
            "PATH": f"{folder}/.venv/bin:{programs.ROOT}/.venv/bin:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "WANDB_MODE": "offline",
            "TOKENIZERS_PARALLELISM": "false",
        }
        listed = [shlex.split(MINE), *map(self.settings, RUNS)]
        (folder / "runs.json").write_text(json.dumps(listed))
        self.do("-m", "tests.docs_workspace", "runs.json")
        mine, *said = json.loads((folder / "runs.json").read_text())
        assert mine == ""
        self.said = dict(zip(RUNS, said, strict=True))
        for seed, name in enumerate(("NAME", "a", "b", "mine-s1", "mine-s2"), 1):
            shutil.copytree(folder / "runs/mine", folder / "runs" / name)
            config = folder / "runs" / name / "config.yaml"
            config.write_text(config.read_text().replace("seed: 1", f"seed: {seed}"))

    def settings(self, command: str) -> list[str]:
        own = re.sub(r"n_examples=\d+", "n_examples=4", command.partition("train.py ")[2])
        trained = TRAINED.match(own) and "sampler=vllm" not in own
        more = ONLINE if re.search(r"online=true|-online", own) else OFFLINE
        return small(own, more + (" overwrite=true" * ("resume=" not in own) if trained else " dry_run=true"))

    def do(self, *words: str) -> str:
        """What a program says, which must end well."""
        done = programs.run(*words, cwd=self.folder, env=self.environment)
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 and "Traceback" not in said, said[-4000:]
        return said

    def type(self, command: str) -> None:
        command = command.replace("…", "")
        added, swapped = next(rule for pattern, rule in RULES.items() if re.match(pattern, command))
        for words, others in swapped.items():
            command = re.sub(words, others, command)
        if command.startswith("python "):
            own = self.shell(f"printf '%s\\0' {command}").split("\0")[
                1:-1
            ]  # which cuts words and finds files
            self.do(*own, *small(command, added)[len(shlex.split(command)) :])
        else:
            self.shell(f"{command} {added}" if "ARGS" in added else shlex.join(small(command, added)))

    def shell(self, line: str) -> str:
        settings: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "text": True}
        done = subprocess.run(["bash", "-c", line], capture_output=True, **settings)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return str(done.stdout)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("command", GIVEN)
def test_the_command_does_what_the_docs_promise(command: str, workspace: Workspace) -> None:
    if GIVEN[command]:
        pytest.skip(GIVEN[command])
    if command in RUNS:
        assert workspace.said[command] == ""
        launcher = shlex.split(command.partition("train.py")[0])[1:]
        assert parse_args([*launcher, "train.py"]).training_script == "train.py"
    else:
        workspace.type(command)


def test_what_is_added_as_the_docs_say_does_its_work(workspace: Workspace) -> None:
    """A loss passes the tests of every loss, a tracker writes its file, a callback ends its run."""
    every_loss = "tests/unit/trainers/losses/test_every_loss.py"
    said = workspace.do("-m", "pytest", "-n", "0", "-k", "hinge", every_loss)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) >= 4
    runs = workspace.folder / "runs"
    lines = (runs / "curve" / "curve.csv").read_text().splitlines()
    metrics = (runs / "curve" / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == "step,loss,margin" and len(lines) == len(metrics) + 1
    assert float(lines[1].split(",")[1]) == json.loads(metrics[0])["loss"]
    why = json.loads((runs / "lengths" / "summary.json").read_text())["stopped_why"]
    assert "callbacks.length asked for it: answers have" in why
    lengths = (runs / "lengths" / "lengths.txt").read_text().splitlines()
    assert [line.split()[0] for line in lengths] == ["0", "0"], "before the first step, and at the end"


def test_every_rule_is_used_and_every_command_is_a_kind_of_its_own() -> None:
    typed = [command.replace("…", "") for command in GIVEN if not GIVEN[command] and command not in RUNS]
    used = {next(pattern for pattern in RULES if re.match(pattern, command)) for command in typed}
    assert used == set(RULES) and set(GIVEN.values()) == {"", *NOT_RUN.values()} and len(RUNS) > 60
