"""The command line: one message, its exit code, and a word about settings that nothing will read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import export
from common.errors import ConfigError, UserError
from common.files import LINK, open_own, write_whole
from common.secrets import scrub_text
from config import files
from config.cli import REFUSED, _settings_there, answered, complain, compose, guarded, refuse_foreign
from config.multirun import check_jobs
from reports.metrics import read_metrics
from tests.programs import HANG
from tests.tiny import ROOT, make_config
from train import train

pytestmark = pytest.mark.usefixtures("quick_python")
WRONG = {
    "model.batchsize=8": "did you mean model.batch_size?",
    "loss=nope": "there is no such file in config/loss",
    "model.name_or_path=./nope": "model.name_or_path=./nope",
    "model=qwen2.5-0.5b": "model=hub model.name_or_path=org/name",
    "log_epsilon_P=e^-1.5": "log_epsilon_P=e^-1.5: cannot be read; a text with",
    "loss=null": "loss=null: choose a file of config/loss: bradley_terry, ",
    "loss=sft data=adder-sft data.subset=policy humanline=true": "loss=sft has no reference",
}


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "train.py", "dry_run=true", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gives_one_message_and_code_2(line):
    done = program(*line.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert WRONG[line] in errors[0]


@pytest.mark.parametrize(
    ("text", "line"), [("model:\n  batch_size: 8\n seed: 1\n", 3), ("lr: 1e-4\nseed: 2\nlr: 1e-5\n", 3)]
)
def test_a_file_that_yaml_cannot_read_is_named_with_the_line(tmp_path, monkeypatch, text, line):
    (tmp_path / "experiment").mkdir()
    (broken := tmp_path / "experiment" / "mine.yaml").write_text(text)
    done = program("--config-dir", str(tmp_path), "experiment=mine")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {broken}, line {line}: ") and done.stderr.count("\n") == 1
    monkeypatch.setattr(files, "FOLDER", tmp_path)  # and where another file's settings are looked up in it
    with pytest.raises(UserError, match=rf"mine\.yaml, line {line}: "):
        files.section(f"experiment/mine.yaml:{tmp_path.name}")


def test_a_message_is_printed_without_the_secrets_that_it_quotes(capsys):
    key = "sk-" + "proj-abcdefghijklmnop1234"
    assert complain(f"cannot parse a={key} b.api_key=plain", REFUSED) == 2
    assert capsys.readouterr().err == "error: cannot parse a=[removed] b.api_key=[removed]\n"


def test_a_link_in_the_place_of_a_file_that_is_written_ends_a_program_with_one_message(tmp_path, capsys):
    (tmp_path / "log").symlink_to(tmp_path / "thesis")
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: open_own(tmp_path / "log"))
    assert ended.value.code == REFUSED and capsys.readouterr().err == f"error: {tmp_path / 'log'} {LINK}\n"


def test_something_else_in_the_place_of_a_file_ends_a_program_with_one_message(tmp_path, capsys):
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(pipe := tmp_path / "pipe")
    for work, path in (
        (lambda: write_whole(folder, ""), folder),
        (lambda: read_metrics(folder), folder),
        (lambda: read_metrics(pipe), pipe),
        (folder.mkdir, folder),
    ):
        code, said = answered(work), capsys.readouterr().err
        assert code == REFUSED and said.startswith(f"error: {path}: ") and said.count("\n") == 1


def test_a_public_repository_that_nothing_is_pushed_to_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        export.main(["runs/any", "--public"])
    assert "--public=True: is a part of --push-to-hub" in capsys.readouterr().err


def test_ctrl_c_ends_every_program_with_one_message(capsys):
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        assert answered(lambda: signal.raise_signal(signal.SIGINT)) == 130
    finally:
        signal.signal(signal.SIGINT, ours)
    assert capsys.readouterr().err.startswith("error: interrupted; ")


@pytest.mark.parametrize(
    ("word", "said"),
    {
        **{f"{group}=null": f"{group}=null: choose a file of" for group in ("model", "data", "sampler")},
        "reward=null": "for none write ~reward",
        "experiment=null": "for none leave it out",
        "reward=armrom": "reward=armrom: there is no such file in config/reward; did you mean reward=armorm?",
        "reward=ultra": "reward=ultra: there is no such file in config/reward; there are adder, armorm",
        "trackers=none": "; for none write 'trackers=[]'",
        "trackers=[tensorbord]": "trackers=tensorbord: there is no such file in config/trackers; did you",
        "loss=": "loss=: choose a file",
        "loss=3": "loss=3: choose a file",
        "loss=[null]": "loss=null: choose a file",
        "loss=dpo,null": "loss=null: choose a file",
        "reward=armorm,armrom": "reward=armrom: there is no such file",
        "=3": "=3: has no setting before the =",
    }.items(),
)
def test_a_choice_among_files_that_is_none_is_refused(word, said):
    with pytest.raises(ConfigError) as caught:
        refuse_foreign(["dry_run=true", word])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["loss=kto", "reward=armorm", "~reward", "-m", "seed=1,2", "loss=dpo,kto"],
        [
            "lr=null",
            "exp_name=null",
            "loss={name: x}",
            "+in=samples.jsonl",
            "lr=(",
            "--cfg",
            "job",
        ],
    ],
)
def test_what_chooses_nothing_and_what_hydra_refuses_itself_passes(words):
    refuse_foreign(words)


def test_a_folder_of_ones_own_settings_may_have_the_reward(tmp_path):
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text("name: mine\n")
    refuse_foreign(["--config-dir", str(tmp_path), "reward=mine"])
    with pytest.raises(ConfigError, match=r"there are adder.*mine"):
        refuse_foreign([f"--config-dir={tmp_path}", "reward=yours"])
    with pytest.raises(ConfigError, match=r"^--config-dir=.*nowhere: is no folder"):
        refuse_foreign([f"--config-dir={tmp_path}/nowhere", "reward=mine"])


def test_ones_own_settings_lie_in_a_folder_that_an_option_names(tmp_path):
    (folder := tmp_path / "ü, =1" / "experiment").mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\nlr: 3e-4\n")
    words = ["--config-dir", str(folder.parent), "experiment=mine"]
    config, name = compose(*words, "seed=3")
    assert config.lr == 3e-4 and name == compose("-cd", words[1], "experiment=mine", "seed=3")[1]
    check_jobs(["-m", *words, "seed=1,2"], "train")
    for word in ("lrr=3", "+lrr=3"):
        with pytest.raises(UserError, match=r"^lrr=3: is not a setting.* did you mean lr\?$"):
            compose(*words, word)
    assert "trainer._target_" in _settings_there(words)


LOSS = "loss: {name: hinge, _target_: trainers.losses.dpo.dpo, reference: true, beta: 0.1}\n"
TRAINER, FIRST = (
    "trainer: {_target_: trainers.paired.PairedPreferenceTrainer}\n",
    "# @package _global_\n",
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            TRAINER + LOSS,
            "loss=hinge: its file loss/hinge.yaml must begin with the line '# @package _global_'",
        ),
        (TRAINER + "model: {batch_size: 8}\n", "loss=hinge: its file loss/hinge.yaml must begin with"),
        (FIRST + LOSS, "loss=hinge: .* name its trainer, as in 'trainer: {_target_: trainers"),
        (FIRST + TRAINER + LOSS.replace("hinge", "dpo"), "loss.name=dpo: must be hinge, as its file"),
    ],
)
def test_a_loss_whose_file_lacks_its_first_line_trainer_or_name_is_refused(tmp_path, text, said):
    (tmp_path / "loss").mkdir()
    (file := tmp_path / "loss" / "hinge.yaml").write_text(text)
    words = ["--config-dir", str(tmp_path), "loss=hinge"]
    for check in (lambda: compose(*words), lambda: check_jobs(["-m", *words, "seed=1,2"], "train")):
        with pytest.raises(ConfigError, match=f"^{said}"):
            check()
    file.write_text(FIRST + TRAINER + LOSS)
    assert compose(*words)[0].loss["name"] == "hinge"


@pytest.mark.parametrize("line", ["--config-dir {} experiment=mine lrr=3", "experiment=mine lrr=3 -cd {}"])
def test_an_options_value_is_no_setting(tmp_path, line):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nlr: 3e-4\n")
    done = program(*line.format(tmp_path).split(), "--cfg", "job")
    assert done.stderr == "error: lrr=3: is not a setting, nothing would read it; did you mean lr?\n"


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "lr=fast": "lr=fast",
        "+loss.betta=1": "loss.betta=1: loss=dpo does not take it",
        "loss.beta=-1": "loss.beta=-1: must be",
        "loss.beta=inf": "loss.beta=inf: must be finite",
        "loss=kto loss.desirable_weight=.inf": "loss.desirable_weight=inf: must be finite",
        "model.max_prompt_length=64": "model.max_prompt_length=64: must be less than model.max_length=64",
        "+humanlin=true": "did you mean humanline?",
        "loss=grpo loss.importance=tokn": "importance",
        "loss=grpo loss.advantage=mean": "loss.advantage=mean: use one of",
        "loss.beta=0": "loss.beta=0: must be above 0",
        "sync_freq=0": "sync_freq=0: must be",
        "lr=inf": "lr=inf: must be above 0, and finite",
        "loss.name=null": "loss.name=None: must be a text",
        "loss._target_=null": "loss._target_=None: must be a text",
        "loss.beta=null": "loss.beta=None: must be a number",
        "data=mix data.mix=[3]": "data.mix[0]=3: is one of mix: a mapping, as in {name: hh",
        "wandb=false": "wandb=False: is a section, not a setting; the settings of wandb are dir, enabled",
        "reward=weighted reward.weighted.parts=[adder]": "reward.weighted.parts=['adder']: is a mapping",
        "data.columns=[a]": "data.columns=['a']: is a mapping",
        "model.peft.target_modules=null": "model.peft.target_modules=None: name modules",
        "model.peft.target_modules=[]": "model.peft.target_modules=[]: name modules",
        "+loss.api_key=hidden": "loss.api_key=[removed]: loss=dpo does not take it",
        "resume=true overwrite=true": "give one",
        "model.batch_size=30 model.microbatches=4": "must divide",
        "log_epsilon_P=1": "log_epsilon_P=1.0: is the lower bound",
        "data.source=data.nope.f": "data.source=data.nope.f: cannot be imported",
    }.items(),
)
def test_every_refusal_says_key_value_and_remedy(line, said):
    with pytest.raises(ConfigError) as caught:
        train(make_config(*line.split(), "dry_run=true"), "run")
    assert said in str(caught.value)


def test_settings_that_nothing_will_read_are_refused_before_torch_is_imported():
    idle = ("sync_freq=4", "sampler.temperature=1.0", "correction.low=0.5", "loss.epsilon=0.2")
    done = program("loss=grpo", "loss.shape=sapo", "loss.beta=0.2", *idle)
    said = done.stderr.splitlines()
    assert done.returncode == 2 and [line.removeprefix("error:").split("=")[0].strip() for line in said] == [
        word.split("=")[0] for word in idle
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help"], "help: settings are written as lr=1e-6; python train.py --help shows the options"),
        (["exp_name=a=b"], "exp_name=a=b: mismatched input '='; a text with a space, a letter"),
        (["data.path=a(b).jsonl"], "is quoted twice, as in 'data.path=\"a=b\"'"),
        (
            ["data.path=~/a.jsonl"],
            "data.path=~/a.jsonl: the shell leaves ~ as it is here; type data.path=$HOME/a.jsonl",
        ),
        (["loss=dpo,", "humanline=true"], "loss=dpo,: mismatched input '<EOF>'; a text"),
        (["+lr=1e-4"], "+lr: is a setting already; write lr=value, without the +"),
        (["model.peft.rank=3"], "the settings of model.peft are lora_alpha, lora_r, target_modules"),
    ],
)
def test_what_hydra_cannot_read_is_said_in_our_words(words, said):
    with pytest.raises(UserError) as caught:
        compose(*words)
    assert said in scrub_text(str(caught.value)) and "hydra.cc" not in str(caught.value)
