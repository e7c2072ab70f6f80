"""The resources of a run on a Slurm cluster (``Job``), the script made from them, and the queue's state of
submitted runs.

A sweep is one job array, or several if the cluster's MaxArraySize requires it. Every task is one run, with
one command line for the first start and every later one. The script is complete in itself (Slurm keeps a
copy), so editing a sweep afterwards does not change queued runs.
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Annotated, Any

import jinja2
from pydantic import AfterValidator, BeforeValidator, Field

from common.errors import ConfigError, StoppedError, require
from common.files import lines_of, write_whole
from common.secrets import REMOVED, scrub
from config.files import walk
from config.removed import refuse_removed
from config.schema import card_memory
from config.sections import Count, Natural, Text, dataclass, must, typed
from launch.grid import Run, Settings, read_yaml

ROOT = Path(__file__).parent.parent
RECORD = "submitted.jsonl"
"""File in a sweep's log folder with one line per submission, which maps each task of the array to its run."""


class SlurmError(StoppedError):
    """Slurm refused or could not be asked; the message is its own."""


def _check_shell(text: str) -> str:
    """Raise ValueError unless ``text`` is a whole shell command, whose exit code can be checked."""
    checked = subprocess.run(["bash", "-n"], input=text + "\n", capture_output=True, text=True, check=False)
    if checked.returncode or checked.stderr or text.rstrip().endswith("\\"):
        why = checked.stderr.strip().rpartition("\n")[2] or "it ends with a backslash"
        raise ValueError(
            f"is no whole shell command ({why}); what belongs together is one item, a block after |"
        )
    return text


ONE_LINE = must(lambda text: "\n" not in text, "must be one line")
Line = Annotated[str, BeforeValidator(lambda text: str(text) if type(text) is int else text), ONE_LINE]
"""One line, which yaml may have read as a number (``mem: 0``)."""
Lines = list[Annotated[Text, ONE_LINE]]


@dataclass
class Job:
    """What one run needs of the cluster. A site file and a sweep's ``slurm:`` set it; sites/example.yaml
    explains every key."""

    nodes: Count = 1
    gpus_per_node: Natural = 1
    ranks_per_node: Count | None = None
    """Training processes a node; None: one a GPU (one in all without GPUs). With fewer ranks than GPUs, the
    last GPUs are left to a sampler."""
    card: Line | None = None
    """The GPU, for the memory plan; None: not known, and no plan is made."""
    cpus_per_rank: Count = 8
    mem: Line | None = None
    time: Line = "24:00:00"
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    exclude: Line | None = None
    exclusive: bool = False
    signal_lead: Annotated[int, Field(ge=10), "must be at least 10"] = 600
    """Seconds before the time limit at which a run is told to save and make room; it then goes on in a new
    allocation."""
    max_requeues: Natural = 100
    retries: Natural = 1
    """How often a failed run (other than by its settings) is started again at once, from its last
    checkpoint."""
    running_at_once: Count | None = None
    modules: Lines = field(default_factory=list)
    setup: list[Annotated[Text, AfterValidator(_check_shell)]] = field(default_factory=list)
    """Shell commands run on the first node before training, such as to source an environment or unpack data.

    A command that fails ends the job.
    """
    python: Line | None = None
    """The Python interpreter; None: the Python that submits, or ``python`` in a container."""
    container: Line | None = None
    """A command put before python on every rank, such as ``apptainer exec --nv image.sif``."""
    srun: Lines = field(default_factory=list)
    sbatch: Lines = field(default_factory=list)
    environment: dict[str, Text] = field(default_factory=dict)
    hf_home: Line | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.card is not None:
            card_memory("slurm.card", self.card)
        kept = "has a secret, and is written into the jobs' script: export it in the shell that submits"
        for key, value in walk(asdict(self), lists=True):
            text = str(value) if key.startswith("environment.") else re.sub(r"\$\W?", "${", str(value))
            inside = isinstance(value, str) and scrub(text, key, show=False) != text
            require(not inside, f"slurm.{key}", REMOVED, kept)
        for name in self.environment:
            good = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None
            require(good, "slurm.environment", name, "is not the name of an environment variable")
        long = f"must be longer than slurm.signal_lead={self.signal_lead} seconds, or a run is told to stop "
        require(seconds(self.time) > self.signal_lead, "slurm.time", self.time, f"{long}before it starts")
        few = f"must not be above slurm.gpus_per_node={self.gpus_per_node}: a rank has a GPU of its own"
        fits = not self.gpus_per_node or self.ranks <= self.gpus_per_node
        require(fits, "slurm.ranks_per_node", self.ranks_per_node, few)

    @property
    def ranks(self) -> int:
        """Training processes on one node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def interpreter(self) -> str:
        """The interpreter that runs train.py on every rank."""
        return self.python or ("python" if self.container else sys.executable)

    @property
    def world_size(self) -> int:
        """Training processes in all."""
        return self.nodes * self.ranks

    @property
    def exports(self) -> dict[str, str]:
        """The environment of every rank, without the variables for rendezvous."""
        variables = {"OMP_NUM_THREADS": str(self.cpus_per_rank)}
        if self.hf_home is not None:
            variables["HF_HOME"] = self.hf_home
        if self.offline:
            variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
        return variables | self.environment


def seconds(time: str) -> int:
    """Return the seconds of a duration in one of Slurm's forms (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s).
    Raises ConfigError for any other form."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        form = "must be written as Slurm does, such as 12:00:00 or 2-00:00:00 (quoted in yaml)"
        raise ConfigError("slurm.time", time, form)
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return (first * 60 + second) * 60 + third if match[4] is not None else first * 60 + second


def read_site(path: Path | None) -> Settings:
    """Return the settings of a site file; none without one. Raises ConfigError if it cannot be read."""
    if path is None:
        return {}
    return read_yaml("--site", path, "is not a file; copy launch/sites/example.yaml and fill it in")


def make_job(settings: Settings) -> Job:
    """Make a Job from yaml values. Raises ConfigError for a key that is not known or a value of the wrong
    form."""
    refuse_removed((f"slurm.{key}", value) for key, value in settings.items())
    names = [item.name for item in fields(Job)]
    unknown = (
        f"is not a setting of a job; known: {', '.join(names)}. A setting of the runs is typed behind "
        "the sweep's file, without --set"
    )
    for key, value in settings.items():
        require(key in names, f"slurm.{key}", value, unknown)
    time: Any = settings.get("time", "")  # yaml reads 12:00:00 as a number, in base 60
    require(isinstance(time, str), "slurm.time", time, "must be a text (quote it in yaml)")
    return typed(settings, Job, "slurm.")


def command(run: Run) -> list[str]:
    """Return the arguments of python for ``run``."""
    return ["train.py", *run.overrides()]


def script(job: Job, sweep: str, runs: Sequence[Run], logs: Path, after: str | None = None) -> str:
    """Return the sbatch script of a job array with one task a run, in the order given.

    ``logs`` is the sweep's log folder; ``after`` is an array that has to end first.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = shlex.quote
    tasks = [(run.name, shlex.join(command(run))) for run in runs]
    context = {"logs": str(logs), "root": str(ROOT), "after": after}
    return environment.get_template("job.sh.j2").render(job=job, sweep=sweep, tasks=tasks, **context)


def largest_array() -> int | None:
    """Return how many tasks this cluster allows in a job array; None if it does not say. Raises
    SlurmError."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    return int(match[1]) or None if match else None


def parts(runs: Sequence[Run], most: int | None) -> list[Sequence[Run]]:
    """Split ``runs``, in order, into parts of at most ``most`` runs."""
    return [runs[at : at + most] for at in range(0, len(runs), most)] if most else [runs]


def submit(job: Job, sweep: str, runs: Sequence[Run], logs: Path) -> list[str]:
    """Submit the runs to Slurm in as few arrays as it allows; return their job ids.

    Slurm limits ``running_at_once`` per array only, so with that limit each array begins when the one before
    it has ended. Raises SlurmError with sbatch's own words and the number of runs submitted before it.
    """
    (logs / "slurm").mkdir(parents=True, exist_ok=True)
    arrays: list[str] = []
    done = 0
    for part in parts(runs, largest_array()):
        path = logs / "slurm" / "array.sh"
        after = arrays[-1] if arrays and job.running_at_once else None
        write_whole(path, script(job, sweep, part, logs, after))
        try:
            arrays.append(ask(["sbatch", "--parsable", str(path)]).split(";")[0].strip())
        except SlurmError as error:
            submitted = f"{done} of {len(runs)} runs were submitted, as {', '.join(arrays)}; the next array: "
            raise SlurmError(f"{submitted if arrays else ''}{error}") from error
        path.rename(path.with_name(f"{arrays[-1]}.sh"))
        record = logs / RECORD
        before = record.read_text(encoding="utf-8") if record.exists() else ""
        line = json.dumps({"array": arrays[-1], "runs": [run.name for run in part]})
        write_whole(record, f"{before}{line}\n")
        done += len(part)
    return arrays


def submitted(logs: Path) -> dict[str, str]:
    """Return a task of an array, such as ``123_4`` -> the run that it was submitted for, in the order of
    submission. Raises ConfigError for a damaged line: without it, queued runs would be submitted again."""
    path = logs / RECORD
    runs_by_task: dict[str, str] = {}
    for number, line in enumerate(lines_of(path.read_text(encoding="utf-8")) if path.exists() else (), 1):
        try:
            record = json.loads(line)
            runs_by_task |= {
                f"{record['array']}_{task}": str(name) for task, name in enumerate(record["runs"])
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                "--logs",
                path,
                f"line {number} is damaged, and does not say which runs an array was submitted for; see in "
                "squeue that none of the sweep is queued, then remove the line",
            ) from error
    return runs_by_task


def queued(logs: Path) -> dict[str, str]:
    """Return run -> its job that is waiting, running or about to be requeued, as ``123_4 RUNNING``. Raises
    SlurmError."""
    runs = submitted(logs)
    if not runs:
        return {}
    listing = ask(["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F_%K %T"])
    jobs = [line.split() for line in listing.splitlines()]
    return {runs[job]: f"{job} {state}" for job, state in jobs if job in runs}


def ask(words: list[str]) -> str:
    """Return the output of one of Slurm's commands. Raises SlurmError."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    except FileNotFoundError as error:
        here = "is not on this machine; go to a login node, or run here with --local"
        raise SlurmError(f"{words[0]} {here}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]} did not answer in a minute") from error
    except subprocess.CalledProcessError as error:
        raise SlurmError(f"{words[0]}: {error.stderr.strip()}") from error


def describe(job: Job) -> str:
    """Return one line about a run's resources."""
    devices = f"{job.ranks * job.cpus_per_rank} CPUs"
    if job.gpus_per_node:
        devices = f"{job.gpus_per_node} {job.card or 'GPU'}s"
    parts = [f"{job.nodes} x {devices} a run", f"{job.world_size} ranks", f"limit {job.time}"]
    where = [f"{key} {value}" for key in ("partition", "account", "qos") if (value := vars(job)[key])]
    return ", ".join([*parts, *where])
