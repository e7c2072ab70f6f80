"""Jobs and the script made of them. That the script does what it says is
tests/integration/test_slurm.py's."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from common.errors import ConfigError
from launch.grid import Run
from launch.slurm import (
    RECORD,
    ROOT,
    Job,
    SlurmError,
    command,
    make_job,
    read_site,
    script,
    seconds,
    submit,
    submitted,
)
from tests.full_disk import full_disk

RUNS = [Run("s", f"s-c{i}", 1, {"loss": "dpo", "data.path": "it's a file"}, None) for i in range(3)]
HOSTILE = Run("s", "s-$(echo no) `echo no`; echo 'no", 1, {}, None)
"""A name that a sweep refuses; the script would be sound with it all the same."""


def options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))


def test_eight_nodes_of_eight_gpus(tmp_path: Path) -> None:
    sizes = {"nodes": 8, "gpus_per_node": 8, "mem": "900G", "time": "2-00:00:00", "running_at_once": 2}
    places = {"partition": "gpu", "account": "lab", "constraint": "h100", "modules": ["cuda/12.8"]}
    places |= {"container": "apptainer exec --nv a.sif", "offline": True, "hf_home": "/cache dir"}
    job = make_job(sizes | places | {"environment": {"NCCL_DEBUG": "WARN"}})
    assert "#SBATCH --mem=0\n" in script(make_job({"mem": 0}), "s", RUNS, tmp_path)  # all of a node's
    fewer = make_job({"nodes": 2, "ranks_per_node": 6, "gpus_per_node": 8})  # the others are a sampler's
    assert (job.world_size, fewer.world_size) == (64, 12)
    text = script(job, "s", RUNS, tmp_path)
    found = options(text)
    wanted = {"array": "0-2%2", "nodes": "8", "ntasks-per-node": "8", "gpus-per-node": "8", "mem": "900G"}
    wanted |= {"cpus-per-task": "8", "time": "2-00:00:00", "signal": "B:USR1@600", "requeue": ""}
    wanted |= {"constraint": "h100", "open-mode": "append", "output": f"{tmp_path}/slurm/%A_%a.out"}
    assert {key: found.get(key) for key in wanted} == wanted
    for line in ("module load cuda/12.8", "export HF_HOME='/cache dir'", "export HF_HUB_OFFLINE=1"):
        assert line in text.splitlines()
    assert {"export NCCL_DEBUG=WARN", "export OMP_NUM_THREADS=8"} <= set(text.splitlines())
    assert 'apptainer exec --nv a.sif python "${run[@]}"' in text
    assert "\n#SBATCH" not in text[text.index("case") :], "sbatch stops at the first command"
    text = script(Job(gpus_per_node=0), "s", RUNS, tmp_path)
    assert "gpus-per-node" not in options(text) and "MASTER_ADDR=127.0.0.1" in text


JOBS = [
    *(Job(), Job(nodes=2, gpus_per_node=0)),
    Job(retries=0, container="c", srun=["--x=a b"], setup=["a", "b"]),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_script_is_a_sound_shell_script_that_gives_each_task_its_run(tmp_path: Path, job: Job) -> None:
    runs = [*RUNS, HOSTILE]
    text = script(job, "s", runs, tmp_path / "a folder")
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    words = ["bash", "-c", text[text.index("case") : text.index("esac") + 4]]
    words[2] += '\nprintf "%s\\n" "$name" "${run[@]}"'
    for task, run in enumerate(runs):
        env = os.environ | {"SLURM_ARRAY_TASK_ID": str(task)}
        told = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
        assert told == [run.name, *command(run)], "what bash makes of it is what the run asks for"


REFUSED = [
    ({"gpus": 8}, "gpus_per_node"),
    ({"ranks_per_node": 4, "gpus_per_node": 2}, "above"),
    ({"time": 3600}, "quote"),
    ({"sbatch": ["--comment=a\ntouch x"]}, "one line"),
    ({"environment": {"A=1; touch x": "1"}}, "name"),
    ({"environment": {"HF_TOKEN": "plain7"}}, r"^slurm\.environment\.HF_TOKEN=\[removed\]: has a secret"),
    ({"environment": {"PROXY": "http://me:plain7@host"}}, r"^slurm\.environment\.PROXY=\[removed\]: has a"),
    ({"setup": ["module load x", "export HF_TOKEN=plain7"]}, r"^slurm\.setup\.1=\[removed\]: has a secret"),
    ({"sbatch": ["--export=ALL,A_KEY=plain7"]}, r"^slurm\.sbatch\.0=\[removed\]: has a secret"),
    ({"setup": ["if [ -d x ]; then"]}, "block"),
]
TIMES = {"90": 5400, "1:30": 90, "12:00:00": 43200, "2-0": 172800, "1-12:30": 131400, "1-00:00:01": 86401}


def test_jobs_that_make_no_sense_are_refused_and_the_example_site_explains_every_setting() -> None:
    for settings, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            make_job(settings)
    assert {text: seconds(text) for text in TIMES} == TIMES
    settings = read_site(ROOT / "launch" / "sites" / "example.yaml")
    assert set(settings) == set(vars(Job())), "every setting is shown once"
    assert make_job(settings).gpus_per_node == 8


def test_an_array_that_is_refused_says_what_was_submitted_before_it(tmp_path: Path, monkeypatch) -> None:
    """More runs than a user may submit, or than fit into one array."""
    once = f"[ -e {tmp_path}/once ] && {{ echo too many jobs >&2; exit 1; }}; touch {tmp_path}/once; echo 7"
    fakes(tmp_path, monkeypatch, scontrol="echo 'MaxArraySize = 2'", sbatch=once)
    with pytest.raises(SlurmError, match=r"2 of 3 runs were submitted, as 7; .*too many jobs"):
        submit(Job(running_at_once=1), "s", RUNS, tmp_path)
    assert submitted(tmp_path) == {"7_0": RUNS[0].name, "7_1": RUNS[1].name}
    assert "dependency" not in options((tmp_path / "slurm" / "7.sh").read_text())
    assert options((tmp_path / "slurm" / "array.sh").read_text())["dependency"] == "afterany:7"


def fakes(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Commands of Slurm's, for what the real ones (tests/integration/test_slurm.py) cannot be made to do."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, code in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_a_line_torn_by_a_kill_is_named_and_a_record_is_written_whole(tmp_path: Path, monkeypatch) -> None:
    """Without the line, runs that wait in the queue would be submitted again."""
    fakes(tmp_path, monkeypatch, scontrol="echo 'MaxArraySize = 9'", sbatch="echo 7")
    record = tmp_path / RECORD
    record.write_text(json.dumps({"array": "6", "runs": ["x" * 50_000]}) + "\n")
    submit(Job(), "s", RUNS[:2], tmp_path)
    whole = record.read_text()
    with full_disk(len(whole) + 20), pytest.raises(OSError, match="too large"):
        submit(Job(), "s", RUNS[2:], tmp_path)
    assert record.read_text() == whole and len(submitted(tmp_path)) == 3
    record.write_text(whole + '{"array": "7", "ru')
    with pytest.raises(ConfigError, match=rf"{RECORD}: line 3 is damaged"):
        submitted(tmp_path)
