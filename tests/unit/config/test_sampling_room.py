"""How long samples may be: defaults that fit each other for every model file, and the numbers that were
accepted before."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from launch.composing import compose_config
from launch.grid import CONFIG_DIR

MODELS = sorted(
    path.stem for path in (CONFIG_DIR / "model").glob("*.yaml") if path.stem not in ("base", "hub")
)
HUB = ["model=hub", "model.name_or_path=org/name"]


@pytest.mark.parametrize("sampler", ["embedded", "vllm"])
@pytest.mark.parametrize("model", [*([f"model={name}"] for name in MODELS), HUB], ids=" ".join)
def test_the_defaults_of_every_model_go_online(model, sampler):
    config = compose_config([*model, f"sampler={sampler}", "online=true", "reward=adder"])
    assert 1 <= config.max_tokens <= config.model.max_length - config.model.max_prompt_length


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (HUB, 1024),
        ([*HUB, "model.max_length=3072"], 2048),
        ([*HUB, "model.max_length=8192"], 2048),  # the paper's, however much room there is
        ([*HUB, "model.max_prompt_length=2000"], 48),
        ([*HUB, "sampler.max_tokens=100"], 100),
        (["model=qwen2.5-1.5b-instruct"], 2048),
        (["experiment=dpo-online"], 2048),
        ([], 48),
    ],
)
def test_what_is_left_behind_the_longest_prompt_and_never_more_than_the_papers(overrides, expected):
    config = compose_config(overrides)
    assert config.max_tokens == expected
    config.check_room()


def test_a_number_that_does_not_fit_is_refused_and_never_changed():
    with pytest.raises(ConfigError, match=r"sampler\.max_tokens=2048.*sampler\.max_tokens=auto"):
        compose_config([*HUB, "sampler.max_tokens=2048", "online=true", "reward=adder"])


def test_one_answer_a_prompt_is_too_few_for_pairs_alone():
    """Only rounds compare a prompt's answers: sampling alone takes any number."""
    assert compose_config(["rounds.samples=1"]).rounds.samples == 1
    with pytest.raises(ConfigError, match=r"rounds\.samples=1"):
        compose_config(["rounds.samples=1", "online=true"])
    online = ["rounds.samples=1", "rounds.feedback=threshold", "loss=kto", "online=true"]
    assert compose_config(online).rounds.samples == 1
