"""The command line as people type it: one message, its exit code, and a word about settings that nothing will
read."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, UserError
from common.files import LINK, open_own, write_whole
from common.secrets import scrub_text
from config import files
from config.arguments import apart, as_settings
from config.cli import REFUSED, _settings_there, answered, compose, guarded, refuse_foreign
from config.composing import check_jobs
from reports.metrics import read_metrics
from tests.programs import HANG
from tests.tiny import ROOT
from trainers.assembly import make_loss

pytestmark = pytest.mark.usefixtures("quick_python")


def program(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "dry_run=true", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "model.batchsize=8": "did you mean model.batch_size?",
        "loss=null": "loss=null: choose a file of config/loss: bradley_terry, ",
        "model.name_or_path=./nope": "model.name_or_path=./nope",
        "loss=sft data=adder-sft data.subset=policy humanline=true": "loss=sft has no reference",
    }.items(),
)
def test_a_wrong_command_line_gives_one_message_and_code_2(line, said):
    done = program(*line.split())
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and said in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "line"), [("model:\n  batch_size: 8\n seed: 1\n", 3), ("lr: 1e-4\nseed: 2\nlr: 1e-5\n", 3)]
)
def test_a_file_that_yaml_cannot_read_is_named_with_the_line(tmp_path, monkeypatch, text, line):
    (tmp_path / "experiment").mkdir()
    (broken := tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"^{broken}, line {line}: [^\n]*$"):
        compose("--config-dir", str(tmp_path), "experiment=mine")
    monkeypatch.setattr(files, "FOLDER", tmp_path)  # and where another file's settings are looked up in it
    with pytest.raises(UserError, match=rf"mine\.yaml, line {line}: "):
        files.section(f"experiment/mine.yaml:{tmp_path.name}")


def test_something_else_in_the_place_of_a_file_ends_a_program_with_one_message(tmp_path, capsys):
    (folder := tmp_path / "folder").mkdir()
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "log").symlink_to(tmp_path / "thesis")
    for work, path in (
        (lambda: write_whole(folder, ""), f"{folder}: "),
        (lambda: read_metrics(folder), f"{folder}: "),
        (lambda: read_metrics(pipe), f"{pipe}: "),
        (folder.mkdir, f"{folder}: "),
        (lambda: open_own(link), f"{link}: {LINK}; "),
    ):
        code, said = answered(work), capsys.readouterr().err
        assert code == REFUSED and said.startswith(f"error: {path}") and said.count("\n") == 1


def test_ctrl_c_ends_every_program_with_one_message(capsys):
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        with pytest.raises(SystemExit, match="130"):
            guarded(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, ours)
    assert capsys.readouterr().err.startswith("error: interrupted; ")


CHOICES = {
    **{f"{group}=null": f"{group}=null: choose a file of" for group in ("model", "data", "sampler")},
    "reward=null": "for none write ~reward",
    "reward=armrom": "reward=armrom: there is no such file in config/reward; did you mean reward=armorm?",
    "reward=ultra": "reward=ultra: there is no such file in config/reward; there are adder, armorm",
    "trackers=none": "; for none write 'trackers=[]'",
    "trackers=[tensorbord]": "trackers=tensorbord: there is no such file in config/trackers; did you",
    "loss=dpo,null": "loss=null: choose a file",
    "=3": "=3: has no setting before the =",
    "loss=./mine.yaml": "is a path, and loss= names a file of config/loss; type loss=mine",
    "model=qwen2.5-0.5b": "model=hub model.name_or_path=org/name",
}


@pytest.mark.parametrize(("word", "said"), CHOICES.items())
def test_a_choice_among_files_that_is_none_is_refused(word, said):
    with pytest.raises(ConfigError) as caught:
        refuse_foreign(["dry_run=true", word])
    assert said in str(caught.value)


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRAINER + LOSS, "loss=hinge: its file loss/hinge.yaml must begin with the line '# @package"),
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


NUMBERS = {
    "lr=fast": "lr=fast: must be a number, as in lr=5e-06",
    "model.batch_size=3.5": "model.batch_size=3.5: must be a whole number, as in model.batch_size=32",
    'lr="1e-5"': "lr=1e-5: is a text: must be a number, as in lr=5e-06",
    "sampler=vllm sampler.devices=0": "sampler.devices=0: must be a list, as in sampler.devices=[0,1]",
    "wandb=false": "wandb=False: is a section, not a setting; the settings of wandb are dir, enabled",
    "model.chat_template_kwargs=3": "model.chat_template_kwargs=3: is a mapping, as in {enable_thinking",
    "rounds.lag=-1": "rounds.lag=-1: counts rounds: must be at least 0",
    "save_every=0": "save_every=0: must be at least 1, or auto",
    "patience=false keep_best=none": "keep_best=none: use one of off, eval_loss",
    "hub_private=true": "hub_private=True: nothing would read it: it needs push_to_hub!=off, and here",
    "online=true rounds.overlong=0": "rounds.overlong=0: counts tokens: must be at least 1, or off for",
    "data.eval_fraction=1": "data.eval_fraction=1.0: is the share of the prompts held out for evaluation",
    "data=mix data.mix=[{name:adder,weight:0}]": "data.mix[0].weight=0.0: must be above 0",
    "loss.beta=0,1": "loss.beta=0,1: a decimal has a point, as in loss.beta=0.1",
    "model.max_prompt_length=64": "model.max_prompt_length=64: must be less than model.max_length=64",
    "log_epsilon_P=1": "log_epsilon_P=1.0: is the lower bound",
    "loss.name=null": "loss.name=None: must be dpo, as its file",
    "reward=weighted reward.weighted.parts=[adder]": "reward.weighted.parts=['adder']: is a mapping",
    "model.peft.target_modules=[]": "model.peft.target_modules=[]: name modules",
    "resume=true overwrite=true": "overwrite=True: cannot go with resume=true",
    "model.batch_size=30 model.microbatches=4": "model.microbatches=4: must divide",
    "+loss.betta=1": "loss.betta=1: loss=dpo does not take it",
    "+loss.api_key=hidden": "loss.api_key=[removed]: loss=dpo does not take it",
    "loss=kto loss.desirable_weight=.inf": "loss.desirable_weight=inf: must be finite",
    "loss.beta=0": "loss.beta=0: must be above 0",
}
READING = {
    "help": "help: settings are written as lr=1e-6; python train.py --help shows the options",
    "exp_name=a=b": "exp_name=a=b: mismatched input '='; a text with a space, a letter",
    "log_epsilon_P=e^-1.5": "log_epsilon_P=e^-1.5: cannot be read; a text with",
    "data.path=a(b).jsonl": "data.path=a(b).jsonl: mismatched input",
    "data.path=~/a.jsonl": "data.path=~/a.jsonl: the shell leaves ~ as it is here; type data.path=$HOME/a",
    "loss=dpo, humanline=true": "loss=dpo,: ends in a comma; settings stand apart by spaces",
    "lr=1e−5": "lr=1e−5: has a sign that a word processor wrote; type lr=1e-5",
    "exp_name=“mine”": "exp_name=“mine”: has a sign that a word processor wrote; type 'exp_name=",
    "seed=1 data.columns={prompt: q, chosen: a} lr=1": "data.columns={prompt:: the shell took it apart at "
    "its spaces; type it in quotes: 'data.columns={prompt: q, chosen: a}'",
    "data=local data.columns=prompt:q": "data.columns=prompt:q: is a mapping; in quotes, as in 'data",
    "data.columns={prompt:q} data.columns.chosen=a": "data.columns.chosen=a: is not a setting",
    "~wandb": "~wandb=: takes away no setting, its default would count; type wandb.enabled=false",
    "~model.peft.lora_r": "~model.peft.lora_r=: takes away no setting, its default would count; type model",
    "-loss=dpo": "-loss=dpo: is no option; type loss=dpo",
    "--config-name=mine": "--config-name=mine: settings begin with config.yaml; a file of",
    "wandb=false": "wandb=False: is a section, not a setting; type wandb.enabled=false",
    "data.path=mine.csv": "data.path=mine.csv: would be read as sums of the embedded task; type data=local",
    "data.path=org/set": "data.path=org/set: would be read as sums of the embedded task; type data=hub",
    "reward=my_rewards.py": "reward=my_rewards.py: is a path, and reward= names a file of config/reward; "
    "type reward=function reward.function.path=my_rewards.py:NAME",
    "base_model=x micro_batch_size=2 lora_r=8": "lora_r=8: is not a setting, nothing would read it; here it "
    "is model.peft.lora_r=8\n       base_model, micro_batch_size: no settings here, nor names of TRL",
    "+lr=1e-4": "+lr: is a setting already; write lr=value, without the +",
    "+humanlin=true": "humanlin=true: is not a setting, nothing would read it; did you mean humanline?",
}


@pytest.mark.parametrize(("line", "said"), (NUMBERS | READING).items())
def test_every_refusal_says_key_value_and_remedy(line, said):
    with pytest.raises(UserError) as caught:
        make_loss(compose(*line.split())[0])
    message = scrub_text(str(caught.value))
    assert message.startswith(said) and "hydra.cc" not in message


def test_several_settings_within_one_pair_of_quotes_are_refused():
    with pytest.raises(UserError, match="several settings within one pair of quotes; type each as a word"):
        compose("loss=kto humanline=true")


@pytest.mark.parametrize("module", ["launch/sweep", "launch/results", "launch/status", "reports/report"])
def test_a_module_that_is_started_by_its_path_names_its_command(module):
    done = subprocess.run(
        ["python3", "-S", f"{ROOT}/{module}.py"], capture_output=True, text=True, timeout=HANG
    )
    assert done.stderr == f"error: type python -m {module.replace('/', '.')}\n"


def test_settings_that_nothing_will_read_are_refused_before_torch_is_imported():
    idle = ("sync_freq=4", "sampler.temperature=1.0", "correction.low=0.5", "loss.epsilon=0.2")
    done = program("loss=grpo", "loss.shape=sapo", "loss.beta=0.2", *idle)
    said = [line.removeprefix("error:").split("=")[0].strip() for line in done.stderr.splitlines()]
    assert done.returncode == 2 and said == [word.split("=")[0] for word in idle]


@pytest.mark.parametrize("name", ["train", "eval", "sample", "label"])
def test_help_has_examples_and_the_files_to_choose_from(name):
    help_ = composed_help(name)
    assert f"usage: python {name}.py [SETTING=VALUE" in help_ and "$APP_CONFIG_GROUPS" in help_
    assert re.findall(r"^  python (\w+)\.py \w+=", help_, re.MULTILINE)[0] == name


def composed_help(name: str) -> str:
    with initialize_config_dir(str(files.FOLDER), version_base="1.3", job_name=name):
        cfg = hydra_compose("config" if name == "train" else name, return_hydra_config=True)
    return str(cfg.hydra.help.template)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr 1e-5", ["lr=1e-5"]),
        ("data.columns.prompt=q lr=1 data.columns.chosen=a", ["data.columns={prompt: q, chosen: a}", "lr=1"]),
        ("--learning-rate 1e-5", ["learning_rate=1e-5"]),
        ("--log_epsilon_P -1.5 --humanline", ["log_epsilon_P=-1.5", "humanline=true"]),
        ("--resume loss=dpo", ["resume=true", "loss=dpo"]),
        ("--trackers a b --seed 3", ["trackers=[a,b]", "seed=3"]),
        ("--model.batch_size 8 -m seed=1,2", ["-m", "model.batch_size=8", "seed=1,2"]),
        ("loss=dpo -m seed=1,2 --cfg job lr=1", ["-m", "--cfg", "job", "loss=dpo", "seed=1,2", "lr=1"]),
        ("--", ["--"]),
    ],
)
def test_options_are_settings(typed: str, meant: list[str]) -> None:
    assert as_settings(typed.split(" ")) == meant


@given(st.lists(st.from_regex(r"(\+|\+\+|~)?[a-z_.]+=[^ ]*|-m|-cd|[a-z/.]+", fullmatch=True)))
def test_what_has_hydras_form_stays(words: list[str]) -> None:
    options, others = apart(words)
    assert as_settings(words) == [*options, *others] and sorted(options + others) == sorted(words)
    parser = get_args_parser()
    parser.exit_on_error = False  # type: ignore[attr-defined]
    with contextlib.suppress(argparse.ArgumentError):
        assert parser.parse_args(as_settings(words)) == get_args_parser().parse_intermixed_args(words)
    assert as_settings(as_settings(["--lr", "3", *words])) == as_settings(["--lr", "3", *words])


@pytest.mark.parametrize(
    ("word", "type_instead"),
    {
        "data={here}/pairs.jsonl": "type data=local data.path={here}/pairs.jsonl",
        "data=pairs.csv": "type data=local data.path=pairs.csv",
        "data={here}": "type data=local data.path={here}",
        "data=./not/there": "type data=local data.path=./not/there",
        "data=org/name": "type data=hub data.path=org/name",
        "model={here}": "type model=hub model.name_or_path={here}",
        "model=org/name-1.5B": "type model=hub model.name_or_path=org/name-1.5B",
        "data='a b,ü.csv'": "type data=local 'data.path='\"'\"'a b,ü.csv'\"'\"''",
        "reward=org/name": "type reward=classifier reward.classifier.name_or_path=org/name",
    }.items(),
)
def test_a_path_where_a_file_of_config_is_asked_for(tmp_path, word: str, type_instead: str) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        refuse_foreign([word.format(here=tmp_path)])
    assert str(caught.value).endswith(type_instead.format(here=tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "loss=dpo,kto exp_name=a": r"\(loss=dpo and loss=kto\) would both write to runs/a; name each by",
        "seed=1,2 exp_name=a,a-${loss.name},a resume=true": r"\(seed=1 and .*exp_name=mine-s",
        "loss=dpo,kto lr=1e-5,-1": r"lr=-1.0: must be above 0",
        "wandb.tags=[a],[b]": r"would both write to runs/dpo-adder",
        "model.name_or_path=a/b,c/d model=hub data=hh exp_name=x": "to runs/x; name",
        "loss=dpo,kto +callbacks.c.token=plain7": r"^callbacks\.c\.token=\[removed\]: has a secret",
        "seed=1,2 reward.http.base_url=http://me:pw7@host": r"^reward\.http\.base_url=\[removed\]",
        "hydra/sweeper=basic seed=1 reward.http.api_key=plain7": r"^reward\.http\.api_key=\[removed\]: has a",
        "hydra.output_subdir=x loss=dpo": r"^hydra\.output_subdir=\[removed\]: is Hydra's own",
        "+hydra.run.dir=x loss=dpo": r"^hydra\.run\.dir=\[removed\]: is Hydra's own",
        "loss=dpo seed=range(1,3) exp_name=x-${loss.name}": r"\(seed=1 and seed=2\)",
        "seed=1,2 out=x.json overwrite_out=true": r"out=x\.json: two jobs .*, as in 'out=",
    }.items(),
)
def test_two_jobs_never_write_to_one_place_and_each_has_settings_that_work(line, said):
    for program in ("sample", "label") if "out=" in line else ("train",):
        words = [*line.split(), *(["in=y"] if program == "label" else [])]
        with pytest.raises(ConfigError, match=said):
            check_jobs([{"seed=1,2": "--multirun"}.get(words[0], "-m"), *words], program)
