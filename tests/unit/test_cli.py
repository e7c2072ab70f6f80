"""The command line as people type it: one message, its exit code, and a word about settings that nothing will
read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import yaml

from common.errors import ConfigError, UserError
from common.files import LINK, open_own, write_whole
from common.secrets import scrub_text
from config import files
from config.arguments import as_settings
from config.cli import REFUSED, _settings_there, answered, compose, guarded, refuse_foreign
from config.composing import check_jobs
from reports.metrics import read_metrics
from tests.programs import HANG
from tests.tiny import ROOT
from trainers.assembly import make_loss


def test_a_wrong_command_line_gives_its_messages_and_code_2():
    words = "loss=grpo loss.shape=sapo loss.beta=0.2 sync_freq=4 correction.low=0.5 loss.epsilon=0.2"
    command = [sys.executable, "train.py", "dry_run=true", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    errors = done.stderr.splitlines()
    assert done.returncode == 2 and errors[0].startswith("error: sync_freq=4: nothing would read it")
    assert [line.split(":")[0].strip() for line in errors[1:]] == ["correction.low=0.5", "loss.epsilon=0.2"]


def test_a_file_that_yaml_cannot_read_is_named_with_the_line(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    broken = tmp_path / "experiment" / "mine.yaml"
    for text in ("model:\n  batch_size: 8\n seed: 1\n", "lr: 1e-4\nseed: 2\nlr: 1e-5\n"):
        broken.write_text(text)
        with pytest.raises(UserError, match=rf"^{broken}, line 3: [^\n]*$"):
            compose("--config-dir", str(tmp_path), "experiment=mine")
    monkeypatch.setattr(files, "FOLDER", tmp_path)  # and where another file's settings are looked up in it
    with pytest.raises(UserError, match=r"mine\.yaml, line 3: "):
        files.section(f"experiment/mine.yaml:{tmp_path.name}")


def test_something_else_in_the_place_of_a_file_or_ctrl_c_ends_a_program_with_one_message(tmp_path, capsys):
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "log").symlink_to(tmp_path / "thesis")
    for work, path in (
        (lambda: write_whole(folder, ""), f"{folder}: "),
        (lambda: read_metrics(pipe), f"{pipe}: "),
        (folder.mkdir, f"{folder}: "),
        (lambda: open_own(link), f"{link}: {LINK}; "),
    ):
        code, said = answered(work), capsys.readouterr().err
        assert code == REFUSED and said.startswith(f"error: {path}") and said.count("\n") == 1
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        with pytest.raises(SystemExit, match="130"):
            guarded(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, ours)
    assert capsys.readouterr().err.startswith("error: interrupted; ")


CHOICES = {
    **{f"{group}=null": f"{group}=null: choose a file of" for group in ("model", "data", "sampler", "loss")},
    "reward=armrom": "reward=armrom: there is no such file in config/reward; did you mean reward=armorm?",
    "trackers=[tensorbord]": "trackers=tensorbord: there is no such file in config/trackers; did you",
    "loss=./mine.yaml": "is a path, and loss= names a file of config/loss; type loss=mine",
    "model=qwen2.5-0.5b": "model=hub model.name_or_path=org/name",
    "data={here}/pairs.jsonl": "type data=local data.path={here}/pairs.jsonl",
    "reward=org/name": "type reward=classifier reward.classifier.name_or_path=org/name",
}


def test_a_choice_among_files_that_is_none_is_refused(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    for word, said in CHOICES.items():
        with pytest.raises(ConfigError) as caught:
            refuse_foreign(["dry_run=true", word.format(here=tmp_path)])
        message = said.format(here=tmp_path)
        assert message in str(caught.value)
        assert not said.startswith("type ") or str(caught.value).endswith(message)


def test_settings_of_ones_own_lie_in_a_folder_that_an_option_names(tmp_path):
    (folder := tmp_path / "ü, =1" / "experiment").mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\nlr: 3e-4\n")
    (folder.parent / "reward").mkdir()
    (folder.parent / "reward" / "mine.yaml").write_text("name: mine\n")
    words = ["--config-dir", str(folder.parent), "experiment=mine"]
    config, name = compose(*words, "seed=3")
    assert config.lr == 3e-4 and name == compose("-cd", words[1], "experiment=mine", "seed=3")[1]
    check_jobs(["-m", *words, "seed=1,2"], "train")
    for word in ("lrr=3", "+lrr=3"):
        with pytest.raises(UserError, match=r"^lrr=3: is not a setting.* did you mean lr\?$"):
            compose(*words, word)
    assert "trainer._target_" in _settings_there(words)
    refuse_foreign([*words, "reward=mine"])
    with pytest.raises(ConfigError, match=r"there are adder.*mine"):
        refuse_foreign([f"--config-dir={folder.parent}", "reward=yours"])
    with pytest.raises(ConfigError, match=r"^--config-dir=.*nowhere: is no folder"):
        refuse_foreign([f"--config-dir={tmp_path}/nowhere", "reward=mine"])


LOSS = "loss: {name: hinge, _target_: trainers.losses.dpo.dpo, reference: true, beta: 0.1}\n"
TRAINER, FIRST = "trainer: {_target_: trainers.paired.PairedPreferenceTrainer}\n", "# @package _global_\n"


def test_a_loss_whose_file_lacks_its_first_line_trainer_or_name_is_refused(tmp_path):
    (tmp_path / "loss").mkdir()
    file, words = tmp_path / "loss" / "hinge.yaml", ["--config-dir", str(tmp_path), "loss=hinge"]
    for text, said in {
        TRAINER + LOSS: "loss=hinge: its file loss/hinge.yaml must begin with the line '# @package",
        TRAINER + "model: {batch_size: 8}\n": "loss=hinge: its file loss/hinge.yaml must begin with",
        FIRST + LOSS: "loss=hinge: .* name its trainer, as in 'trainer: {_target_: trainers",
        FIRST + TRAINER + LOSS.replace("hinge", "dpo"): "loss.name=dpo: must be hinge, as its file",
    }.items():
        file.write_text(text)
        for check in (lambda: compose(*words), lambda: check_jobs(["-m", *words, "seed=1,2"], "train")):
            with pytest.raises(ConfigError, match=f"^{said}"):
                check()
    file.write_text(FIRST + TRAINER + LOSS)
    assert compose(*words)[0].loss["name"] == "hinge"


REFUSALS = yaml.safe_load((ROOT / "tests" / "unit" / "refusals.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", REFUSALS)
def test_every_refusal_says_key_value_and_remedy(line):
    with pytest.raises(UserError) as caught:
        make_loss(compose(*line.split())[0])
    message = scrub_text(str(caught.value))
    begins, *parts = (part.strip() for part in REFUSALS[line].split("…"))
    assert message.startswith(begins) and all(part in message for part in parts), message
    assert "hydra.cc" not in message


def test_several_settings_in_one_pair_of_quotes_are_refused():
    with pytest.raises(UserError, match="several settings within one pair of quotes; type each as a word"):
        compose("loss=kto humanline=true")


OPTIONS = {
    "--learning-rate 1e-5": ["learning_rate=1e-5"],
    "data.columns.prompt=q lr=1": ["++data.columns.prompt=q", "lr=1"],
    "--log_epsilon_P -1.5 --humanline": ["log_epsilon_P=-1.5", "humanline=true"],
    "--trackers a b --seed 3": ["trackers=[a,b]", "seed=3"],
    "--model.batch_size 8 -m seed=1,2": ["-m", "model.batch_size=8", "seed=1,2"],
    "loss=dpo -m seed=1,2 --cfg job lr=1": ["-m", "--cfg", "job", "loss=dpo", "seed=1,2", "lr=1"],
}


def test_options_are_settings() -> None:
    assert {typed: as_settings(typed.split(" ")) for typed in OPTIONS} == OPTIONS


JOBS = {
    "loss=dpo,kto exp_name=a": r"\(loss=dpo and loss=kto\) would both write to runs/a; name each by",
    "seed=1,2 exp_name=a,a-${loss.name},a resume=true": r"\(seed=1 and .*exp_name=mine-s",
    "loss=dpo,kto +callbacks.c.token=plain7": r"^callbacks\.c\.token=\[removed\]: has a secret",
    "seed=1,2 reward.http.base_url=http://me:pw7@host": r"^reward\.http\.base_url=\[removed\]",
    "hydra.output_subdir=x loss=dpo": r"^hydra\.output_subdir=\[removed\]: is Hydra's own",
    "seed=1,2 out=x.json overwrite_out=true": r"out=x\.json: two jobs .*, as in 'out=",
}


@pytest.mark.parametrize("line", JOBS)
def test_two_jobs_never_write_to_one_place_and_each_has_settings_that_work(line):
    for program in ("sample", "label") if "out=" in line else ("train",):
        words = [*line.split(), *(["in=y"] if program == "label" else [])]
        with pytest.raises(ConfigError, match=JOBS[line]):
            check_jobs([{"seed=1,2": "--multirun"}.get(words[0], "-m"), *words], program)
