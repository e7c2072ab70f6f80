"""What is answered to a setting that is none."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError, UserError
from config.arguments import override_in
from config.cli import compose
from config.composing import composed
from config.files import FOLDER, section, walk
from config.unknown_keys import NOTHING, foreign, no_file, remedy, sources

DPO = [key for key, _ in walk(OmegaConf.to_container(composed([]), resolve=False))]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learning_rate", "1e-5", "is TRL's name, nothing here would read it; here, for example: lr=1e-6"),
        ("beta", "0.1", f"{NOTHING}; here it is loss.beta=0.1"),
        ("reward_funcs", "my.reward", "example: online=true reward=function reward.function.path=my_"),
        ("scale_rewards", "False", "here: loss=grpo loss.advantage=group_mean"),
        ("loss_type", '"dr_grpo"', "here: loss=dr_grpo"),
        ("logging_steps", "1", "nothing here would read it; none: every step has its line in metrics.jsonl"),
        ("model.batchsize", "8", "did you mean model.batch_size?"),
        ("reward.judge.model", "x", f"{NOTHING} unless reward=judge is chosen"),
        ("dataset_name", "mine.jsonl", "for example: data=hub data.path=org/name, or data=local data.path="),
        ("datasets", "[shp,hh]", "is HALOs' name, nothing here would read it; here, for example: data=shp"),
    ],
)
def test_the_remedy_is_what_to_type(key: str, value: str, said: str) -> None:
    found = remedy(key, value, DPO)
    assert said in found
    assert "`" not in found


CHOICES = {
    "loss=DPO": "did you mean loss=dpo?",
    "loss=sigmoid_norm": "in TRL it is a loss_type; here: loss=dpo loss.length_normalized=true",
    "loss=nothing": "there are dpo, kto",
    "model=qwen": "there are dpo, kto; any other model is model=hub model.name_or_path=org/name",
}


def test_a_choice_that_no_file_has_and_nothing_is_guessed_from_afar() -> None:
    for word, said in CHOICES.items():
        assert said in no_file(*word.split("="), ["dpo", "kto"])
    for key in ("foo.bar.baz", "zz", "maximum_steps_to_take", "x.y"):
        assert remedy(key, "1", DPO) == NOTHING


GROUPS = {path.name for path in FOLDER.iterdir() if path.is_dir()}


@cache
def settings_where(*choices: str) -> set[str]:
    """The keys of the settings with these files of config/ chosen."""
    return {key for key, _ in walk(OmegaConf.to_container(composed(choices), resolve=False))}


def free(key: str, known: set[str]) -> bool:
    """Whether the key is one of a mapping that takes any."""
    section = key.rpartition(".")[0]
    return section in known and not any(other.startswith(f"{section}.") for other in known)


@pytest.mark.parametrize("whose", sources())
def test_every_row_has_an_answer_that_composes(whose: str) -> None:
    """Every name, as a mistake: the answer names its settings here, or says why there is none."""
    for row in sources()[whose]:
        value = row.there[0].partition("=")[2] or "0.5"
        found = foreign(row.names[0], value)
        assert found is not None or row.same
        assert row.here or row.note
        said = "" if row.same else found[1].answer
        proposed = re.findall(r"here(?:, for example)?: (.+?)(?: \(|$)", said)
        for here in (*row.here, *(line for lines in proposed for line in lines.split(", or "))):
            words = shlex.split(here)
            assert all(override_in(word) is not None for word in words), here
            parts = [word.lstrip("+").partition("=") for word in words]
            loss = [] if "loss=" in here else ["loss=grpo"] if "loss." in here else []
            choices = [f"{key}={value}" for key, _, value in parts if key in GROUPS and "." not in value]
            known = settings_where(*sorted({*loss, *choices}))
            typed = [key for key, _, _ in parts if key not in GROUPS]
            assert [key for key in typed if key not in known and not free(key, known)] == [], here


TRL_NAMES = (Path(__file__).parent / "trl_names.txt").read_text().split()
"""The settings of TRL 1.16's configs of DPO, KTO, GRPO, RLOO, SFT and rewards."""
TYPES = (  # noqa: SIM905
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero "
    "apo_down discopop sft sigmoid_norm kto apo_zero_unpaired grpo bnpo dr_grpo dapo luspo vespo "
    "cispo sapo "
).split()


HALOS_NAMES = (Path(__file__).parent / "halos_names.txt").read_text().split()
"""The settings of HALOs' config/, and the arguments of its train.sample and train.label."""


def test_every_name_of_trl_and_halos_and_every_loss_type_has_an_answer() -> None:
    asked = [name for name in TRL_NAMES if name not in section("config.yaml")]
    assert [name for name in asked if remedy(name, "x", DPO) == NOTHING] == [] and len(asked) > 200
    assert [name for name in TRL_NAMES if not foreign(name, "x") and name in asked] == []
    several = remedy("loss_type", "no such", DPO)
    assert [name for name in TYPES if remedy("loss_type", name, DPO) == several] == []
    own = settings_where("loss=kto") | settings_where("loss=ppo") | {"loss.epsilon"}
    silent = [name for name in HALOS_NAMES if name not in own and remedy(name, "x", DPO) == NOTHING]
    assert silent == [] and len(HALOS_NAMES) > 100


def test_all_are_named_at_once_and_a_limit_that_was_not_typed_follows_the_one_that_was(capsys) -> None:
    words = ["learning_rate=3", "++model.load_from=org/x", "seed=2", "loss_type=apo_zero"]
    with pytest.raises(UserError) as caught:
        compose(*words)
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0].strip() for line in lines] == ["learning_rate", "model.load_from", "loss_type"]
    assert lines[0].endswith("is TRL's name, nothing here would read it; here, for example: lr=1e-6")
    model = ["model=hub", "model.name_or_path=x", "data=hub", "data.path=a/b"]
    config, _ = compose(*model, "model.max_length=1024", "reward=none")
    assert (config.model.max_length, config.model.max_prompt_length, config.reward) == (1024, 512, None)
    assert "model.max_prompt_length=512, because model.max_length=1024 was typed" in capsys.readouterr().err
    assert compose(*model, "model.max_length=4096")[0].model.max_prompt_length == 1024
    assert compose("online=true", "rounds.contexts=64")[0].rounds.contexts_per_round == 64
    with pytest.raises(ConfigError, match=r"model\.max_prompt_length=1024: must be less"):
        compose(*model, "model.max_length=1024", "model.max_prompt_length=1024")
    assert compose("humanline=true", "--sync-freq", "2")[0].humanline
