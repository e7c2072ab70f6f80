"""The experiment files against Tables 2 and 3 of the paper, after composing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from config.files import FOLDER
from config.load import flat
from config.schema import Config
from tests.tiny import compose_config

CHATML = "config/templates/chatml.jinja"
OPEN_R1 = (
    "You are a helpful AI Assistant that provides well-reasoned and detailed responses. You first think "
    "about the reasoning process as an internal monologue and then provide the user with the answer. Respond "
    "in the following format: <think>\n...\n</think>\n<answer>\n...\n</answer>"
)

#                objective, online, humanline: learning rate, loss numbers, max grad norm
KTO, DPO = {"beta": 0.25, "desirable_weight": 1.1, "undesirable_weight": 1.0}, {"beta": 0.10}
TABLE_3 = {
    ("kto", False, False): (5.0e-6, KTO, 1.0),
    ("kto", False, True): (5.0e-6, KTO, 4.0),
    ("kto", True, False): (2.5e-6, KTO, 0.5),
    ("kto", True, True): (2.5e-6, KTO, 0.1),
    ("dpo", False, False): (5.0e-6, DPO, 1.0),
    ("dpo", False, True): (5.0e-6, DPO, 1.0),
    ("dpo", True, False): (2.5e-6, DPO, 0.5),
    ("dpo", True, True): (2.5e-6, DPO, 1.0),
    ("grpo", False, False): (5.0e-6, {"beta": 0.01, "epsilon": 0.50}, 1.0),
    ("grpo", False, True): (5.0e-6, {"beta": 0.01, "epsilon": 0.15}, 1.0),
    ("grpo", True, False): (5.0e-6, {"beta": 0.01, "epsilon": 0.15}, 1.0),
    ("grpo", True, True): (5.0e-6, {"beta": 0.01, "epsilon": 0.15}, 0.5),
}


def name(loss: str, online: bool, humanline: bool) -> str:
    return "-".join([loss, "online" if online else "offline", *(["humanline"] if humanline else [])])


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: name(*row))
def test_row_of_table_3(row: tuple[str, bool, bool]) -> None:
    config = compose_config([f"experiment={name(*row)}"])
    lr, numbers, norm = TABLE_3[row]
    assert (config.loss["name"], config.online, config.humanline) == row
    assert config.lr == lr and config.model.max_grad_norm == norm
    assert {key: config.loss[key] for key in numbers} == numbers
    assert config.model.name_or_path == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert config.data.path == "princeton-nlp/llama3-ultrafeedback-armorm"
    assert config.model.batch_size == (32 if row[0] == "dpo" else 64)
    assert (config.log_epsilon_P, config.log_epsilon_R, config.sync_freq) == (-1.5, 1.5, 1)
    assert adam(config) == (0.9, 0.999, 1e-5, 1e-2) and (config.warmup, config.scheduler) == (0.1, "constant")
    if config.online:
        rounds, sampler = config.rounds, config.sampler
        assert (rounds.contexts, rounds.contexts_per_round, rounds.samples) == (12288, 1024, 8)
        assert (rounds.feedback, rounds.tau, config.n_examples) == ("pair", 0.01, None)
        assert (sampler.temperature, sampler.top_p, sampler.max_tokens) == (0.7, 0.95, 2048)
        assert config.reward_config.kind == "armorm"
        assert config.reward_config.settings.name_or_path == "RLHFlow/ArmoRM-Llama3-8B-v0.1"
    else:
        assert config.n_examples == (10_000 if row[0] == "dpo" else 20_000), "10K pairs are 20K sequences"


MATHS_RECIPES = [
    ("math-grpo-online", False, 32),
    ("math-grpo-64x", False, 64 * 32),
    ("math-grpo-64x-humanline", True, 64 * 32),
]


@pytest.mark.parametrize(("experiment", "humanline", "contexts"), MATHS_RECIPES)
def test_maths_recipe(experiment: str, humanline: bool, contexts: int) -> None:
    config = compose_config([f"experiment={experiment}"])
    assert (config.online, config.humanline, config.loss["name"]) == (True, humanline, "grpo")
    assert config.model.name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.data.system_prompt == "think_answer" and adam(config) == (0.9, 0.999, 1e-8, 0.0)
    assert (config.lr, config.warmup, config.model.max_grad_norm) == (1e-6, 0.1, 1.0)
    assert (config.model.batch_size, config.rounds.samples, config.rounds.feedback) == (256, 8, "group")
    assert config.rounds.contexts_per_round == contexts
    assert config.rounds.contexts * config.rounds.samples == 1600 * config.model.batch_size
    assert config.rounds.contexts % config.rounds.contexts_per_round == 0, "no short round"
    assert (config.sampler.temperature, config.sampler.top_p, config.sampler.max_tokens) == (0.7, 1.0, 2048)
    assert config.reward_config.kind == "verifier"
    weights = config.reward_config.settings
    assert (weights.accuracy, weights.format, weights.tag_count) == (8, 1, 1)
    assert config.loss["beta"] == 1e-4 and config.rounds.keeps_equal
    assert not humanline or 12 <= config.sync_freq <= 24


def adam(config: Config) -> tuple[float, float, float, float]:
    return config.beta1, config.beta2, config.eps, config.weight_decay


def test_every_experiment_file_is_in_these_tables() -> None:
    files = (FOLDER / "experiment").glob("*.yaml")
    shipped = {path.stem for path in files if not path.stem.startswith("_")}
    tables = {name(*row) for row in TABLE_3} | {row[0] for row in MATHS_RECIPES}
    assert shipped == tables | {f"{recipe}-authors" for recipe in tables}


MATHS = {
    "seed": 42,
    "save_every": 400 * 256,
    "keep_checkpoints": 5,
    "model.max_prompt_length": 512,
    "model.max_length": 2560,
    "model.logit_temperature": 0.7,
    "data.path": "simplescaling/openaimath",
    "data.system_prompt": OPEN_R1,
}
HALOS: dict[str, dict[str, Any]] = {"dpo": {}, "kto": {}, "grpo": {"loss.advantage_epsilon": 0.01}}
CHAT = {"model.max_prompt_length": 625, "model.max_length": 1250, "model.chat_template": CHATML}
CHANGED = {
    **dict.fromkeys(("math-grpo-online", "math-grpo-64x"), MATHS | {"loss.kl_anchor": "initial"}),
    "math-grpo-64x-humanline": MATHS | {"rounds.reset_reference": False},
    **{name(*row): CHAT | HALOS[row[0]] | ({"sampler.max_tokens": 625} if row[1] else {}) for row in TABLE_3},
}


@pytest.mark.parametrize("recipe", CHANGED)
def test_the_authors_recipe_differs_in_these_settings_and_no_other(recipe):
    ours, theirs = (flat(asdict(compose_config([f"experiment={recipe}{end}"]))) for end in ("", "-authors"))
    assert {key: value for key, value in theirs.items() if value != ours[key]} == CHANGED[recipe]
