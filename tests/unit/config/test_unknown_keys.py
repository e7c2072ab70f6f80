"""What is answered to a setting that is none."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from common.errors import ConfigError, UserError
from config.cli import compose
from config.composing import composed
from config.elsewhere import known_elsewhere, sources
from config.files import section
from config.help import help_on
from config.load import load
from config.schema import Config
from config.unknown_keys import NEAR, NOTHING, names, names_of, nearest, no_file, remedy
from tests.tiny import compose_config

DPO = list(names_of(OmegaConf.to_container(composed([]), resolve=False)))
ROWS = [(whose, row) for whose, rows in sources().items() for row in rows]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learning_rate", "1e-5", "is TRL's name, nothing here would read it; here: lr=1e-5"),
        ("model.learning_rate", "1e-5", "here: lr=1e-5"),
        ("model.lr", "1e-5", f"{NOTHING}; here it is lr=1e-5"),
        ("beta", "0.1", f"{NOTHING}; here it is loss.beta=0.1"),
        ("batch_size", "8", "here it is model.batch_size=8 or sampler.batch_size=8"),
        ("epsilon", "0.2", "loss.epsilon is a setting of loss=cdpo, dr_grpo, grpo"),
        ("max_steps", "100", "here: n_examples=320 (steps times batch size)"),
        ("steps", "100", "here: n_examples=320 (steps times batch size)"),
        ("output_dir", "x", "here: runs_dir=runs exp_name=mine"),
        ("report_to", "none", "trackers"),
        ("num_generations", "8", "here: rounds.samples=8 (for loss=grpo online=true"),
        ("loss_type", "ipo", "here: loss=ipo"),
        ("loss_type", '"dr_grpo"', "here: loss=dr_grpo"),
        ("loss_type", "other", 'loss=ipo for "ipo", or'),
        ("model.load_from", "x", "HALOs' name"),
        ("logging_steps", "1", "nothing here would read it; none: every step has its line in metrics.jsonl"),
        ("model.batchsize", "8", "did you mean model.batch_size?"),
        ("humanlin", "true", "did you mean humanline?"),
        ("reward.judge.model", "x", f"{NOTHING} unless reward=judge is chosen"),
        ("reward.classifier.nam_or_path", "x", "reward=bradley_terry or reward=classifier is chosen"),
        ("loss.bet", "1", "did you mean loss.beta?"),
        ("gradient_accumulation_steps", "4", "there it makes the batch of an update larger"),
        ("model.gradient_accumulation_steps", "4", "here: model.microbatches=4 (the passes in which a rank"),
        ("loss_type", "apo_zero", "none: nearest is loss=kto"),
        ("datasets", "[ultrabin]", "here: data=ultrafeedback_binarized"),
        ("dataset_name", "mine.jsonl", "here: data=hub data.path=org/name, or data=local data.path="),
        ("use_vllm", "true", "here: sampler=vllm"),
        ("vllm_mode", "colocate", "here: sampler=vllm"),
        ("load_best_model_at_end", "true", "here: keep_best=eval_reward_margin"),
        ("datasets", "[shp,hh]", "is HALOs' name, nothing here would read it; here: data=shp"),
        ("wandb.mode", "offline", f"{NOTHING}; the settings of wandb are dir, enabled, entity, group"),
        ("peft", "true", f"{NOTHING}; the settings of model.peft are lora_alpha, lora_r"),
        ("model.peft.r", "4", f"{NOTHING}; the settings of model.peft are lora_alpha, lora_r"),
        ("LR", "1", "did you mean lr?"),
        ("load_in_4bit", "true", "here: model.use_peft=true model.quantization=nf4 ("),
    ],
)
def test_the_remedy_is_what_to_type(key: str, value: str, said: str) -> None:
    found = remedy(key, value, DPO)
    assert said in found
    assert "`" not in found


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("loss", "DPO", "did you mean loss=dpo?"),
        ("loss", "sigmoid_norm", "in TRL it is a loss_type; here: loss=dpo loss.length_normalized=true"),
        ("loss", "apo_zero", "in TRL it is a loss_type; none: nearest is loss=kto"),
        ("loss", "nothing", "there are dpo, kto"),
        ("model", "qwen", "there are dpo, kto; any other model is model=hub model.name_or_path=org/name"),
    ],
)
def test_a_choice_that_no_file_has(folder: str, name: str, said: str) -> None:
    assert said in no_file(folder, name, ["dpo", "kto"])


@pytest.mark.parametrize("key", ["foo.bar.baz", "zz", "maximum_steps_to_take", "x.y"])
def test_nothing_is_guessed_from_afar(key: str) -> None:
    assert remedy(key, "1", DPO) == NOTHING


def test_a_setting_with_one_letter_less_is_found() -> None:
    for key in names(Config):
        last = key.rpartition(".")[2]
        if len(last) > 3:
            missing = key[:-2] + key[-1]
            assert nearest(missing, [key]) == key, missing
    assert 0.75 <= NEAR < 1


def test_a_secret_is_not_repeated() -> None:
    assert "hidden" not in remedy("api_key", "hidden", ["reward.judge.api_key"])


@pytest.mark.parametrize(
    ("whose", "row"), ROWS, ids=lambda item: item if isinstance(item, str) else item.there[0]
)
def test_every_row_has_an_answer_that_composes(whose: str, row: object) -> None:
    """Every name, as a mistake: the answer names its settings here, or says why there is none."""
    found = known_elsewhere(row.names[0], row.there[0].partition("=")[2])
    assert found is not None or row.same
    assert row.here or row.note
    for here in row.here:
        loss = [] if "loss=" in here else ["loss=grpo"] if "loss." in here else []
        compose_config([*loss, *shlex.split(here)])


def test_no_row_is_about_a_setting_of_here_under_another_name() -> None:
    """A name that TRL has and that stands at the top here as well would never be asked for."""
    for name in (name for row in sources()["TRL"] for name in row.names):
        assert name not in section("config.yaml"), name


def test_what_is_added_to_the_settings_is_answered_alike() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate=3: is TRL's name.*here: lr=3"):
        load(composed(["+learning_rate=3"]))
    said = r"data.any_file=x: is not a setting.*the settings of data are apply_chat"
    with pytest.raises(ConfigError, match=said):
        load(composed(["+data.any_file=x"]))


TRL_NAMES = (Path(__file__).parent / "trl_names.txt").read_text().split()
"""The settings of TRL 1.16's configs of DPO, KTO, GRPO, RLOO, SFT and rewards."""
MODEL_NAMES = (  # noqa: SIM905
    "use_peft lora_r lora_alpha lora_modules_to_save use_dora use_rslora model_revision dtype "
    "attn_implementation trust_remote_code"
).split()
TYPES = (  # noqa: SIM905
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero "
    "apo_down discopop sft sigmoid_norm kto apo_zero_unpaired grpo bnpo dr_grpo dapo luspo vespo "
    "cispo sapo "
).split()


def test_every_name_of_trl_and_every_loss_type_has_an_answer() -> None:
    asked = [name for name in (*TRL_NAMES, *MODEL_NAMES) if name not in section("config.yaml")]
    assert [name for name in asked if remedy(name, "x", DPO) == NOTHING] == [] and len(asked) > 200
    assert [name for name in TRL_NAMES if not known_elsewhere(name, "x") and name in asked] == []
    several = remedy("loss_type", "no such", DPO)
    assert [name for name in TYPES if remedy("loss_type", name, DPO) == several] == []


HALOS_NAMES = (Path(__file__).parent / "halos_names.txt").read_text().split()
"""The settings of HALOs' config/, and the arguments of its train.sample and train.label."""


def test_every_name_of_halos_is_a_setting_here_or_has_an_answer() -> None:
    kto, ppo = (OmegaConf.to_container(composed([f"loss={loss}"])) for loss in ("kto", "ppo"))
    own = {key for made in (kto, ppo) for key in keys_of(made)} | {"loss.epsilon"}
    silent = [name for name in HALOS_NAMES if name not in own and remedy(name, "x", DPO) == NOTHING]
    assert silent == [] and len(HALOS_NAMES) > 100


def keys_of(tree, before=""):
    for key, value in tree.items():
        yield f"{before}{key}"
        yield from keys_of(value, f"{before}{key}.") if isinstance(value, dict) else ()


def test_all_are_named_at_once() -> None:
    words = ["learning_rate=3", "++model.load_from=org/x", "seed=2", "loss_type=apo_zero"]
    with pytest.raises(UserError) as caught:
        compose(*words)
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0].strip() for line in lines] == ["learning_rate", "model.load_from", "loss_type"]
    assert lines[0].endswith("is TRL's name, nothing here would read it; here: lr=3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ref_model_sync_steps=64", "here: sync_mode=trust_region sync_freq=64"),
        ("loss=kto rpo_alpha=2", "here: loss=dpo loss.nll_weight=2"),
        ("data_path=a.jsonl learning_rate=1", "here it is data.path=a.jsonl"),
        (
            "++config.model.max_length=9",
            "config.model.max_length=9: is not a setting, nothing would read it; here it is model.m",
        ),
        ("loss_type=[sigmoid,ipo]", 'loss=dpo for "sigmoid", or loss=ipo for "ipo"'),
        (
            "model=llama trainer=KTO datasets=[shp]",
            "trainer=KTO: is HALOs' name, nothing here would read it; the",
        ),
        ("trainer=KTO", "trainer=KTO: is HALOs' name, nothing here would read it; the loss's file chooses"),
        ("loss=./mine.yaml", "is a path, and loss= names a file of config/loss; type loss=mine"),
    ],
)
def test_a_command_of_elsewhere_is_answered_with_the_names_here(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(*words.split())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lr=fast", "lr=fast: must be a number, as in lr=5e-06"),
        ("humanline=maybe", "humanline=maybe: must be true or false, as in humanline=true"),
        ("model.batch_size=3.5", "model.batch_size=3.5: must be a whole number, as in model.batch_size=32"),
        ("seed=3.0", "seed=3.0: must be a whole number, as in seed=3"),
        ("resume=yes", "resume=yes: must be true or false, as in resume=true"),
        ('lr="1e-5"', "lr=1e-5: is a text: must be a number, as in lr=5e-06"),
        ("sampler=vllm sampler.devices=0", "sampler.devices=0: must be a list, as in sampler.devices=[0,1]"),
        ("wandb.tags=[a,[b]]", "wandb.tags[1]=['b']: must be a text"),
        ("optimizer=null", "optimizer=None: must be a text"),
        ("wandb=true", "wandb=True: is a section, not a setting; the settings of wandb are dir, enabled"),
        (
            "model.chat_template_kwargs=3",
            "model.chat_template_kwargs=3: is a mapping, as in {enable_thinking",
        ),
        ("rounds.lag=-1", "rounds.lag=-1: counts rounds: must be at least 0"),
        ("save_every=0", "save_every=0: must be at least 1, or auto"),
        ("n_examples=auto", "n_examples=auto: must be a whole number, as in n_examples=1, or all"),
        ("patience=false keep_best=none", "keep_best=none: use one of off, eval_loss"),
        ("sync_mode=all", "sync_mode=all: use one of auto, humanline"),
        ("model.packing=off", "model.packing=off: must be true or false, as in model.packing=true, or auto"),
        (
            "hub_private=true",
            "hub_private=True: nothing would read it: it needs push_to_hub!=off, and here",
        ),
        ("online=true rounds.overlong=0", "rounds.overlong=0: counts tokens: must be at least 1, or off for"),
        (
            "data.eval_fraction=1",
            "data.eval_fraction=1.0: is the share of the prompts held out for evaluation",
        ),
        ("data=mix data.mix=[{name:adder,weight:0}]", "data.mix[0].weight=0.0: must be above 0"),
        ("loss.beta=0,1", "loss.beta=0,1: a decimal has a point, as in loss.beta=0.1"),
    ],
)
def test_a_wrong_value_is_answered_with_a_right_one(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(*words.split())
    assert str(caught.value).startswith(said)


def test_a_limit_that_was_not_typed_follows_the_one_that_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["model=hub", "model.name_or_path=x", "data=hub", "data.path=a/b"]
    config, _ = compose(*model, "model.max_length=1024")
    assert (config.model.max_length, config.model.max_prompt_length) == (1024, 512)
    assert "model.max_prompt_length=512, because model.max_length=1024 was typed" in capsys.readouterr().err
    assert compose(*model, "model.max_length=4096")[0].model.max_prompt_length == 1024
    assert compose("online=true", "rounds.contexts=64")[0].rounds.contexts_per_round == 64
    with pytest.raises(ConfigError, match=r"model\.max_prompt_length=1024: must be less"):
        compose(*model, "model.max_length=1024", "model.max_prompt_length=1024")
    assert compose(*model, "reward=none")[0].reward is None
    assert compose("humanline=true", "--sync-freq", "2")[0].humanline


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("train", "usage: python train.py [SETTING=VALUE"),
        ("train", "  loss=        bradley_terry, "),
        ("eval", "Its own settings: config/eval.yaml. Of a run's it reads model, data, "),
        ("sample", "  python sample.py run=runs/mine split=eval"),
    ],
)
def test_help(program: str, said: str) -> None:
    assert said in help_on(program)
