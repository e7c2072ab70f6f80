"""A second task (``retention.data``): how its held-out prompts are answered tells what the model forgets."""

from __future__ import annotations

from common.errors import ConfigError
from config.files import data_file
from config.schema_data import DataConfig
from config.schema_retention import RetentionConfig
from data.sources import load_groups
from data.types import Group


def second_task(config: RetentionConfig) -> tuple[DataConfig, list[Group]]:
    """The settings of the set that ``config.data`` names, and its held-out groups.

    Raises ConfigError where it is no file of config/data, needs a path, has no verifier or no held-out prompt
    with a reference answer; DataError where its files cannot be used.
    """
    assert config.data is not None, "asked for where a second task is named"
    settings = data_file("retention.data", config.data)
    given = {key: getattr(config, key) for key in ("path", "eval_path", "verifier")}
    settings |= {key: value for key, value in given.items() if value is not None}
    if settings.get("path") == "???":
        raise ConfigError(
            "retention.path", None, f"retention.data={config.data} is a set of your own: name its file"
        )
    data = DataConfig(**settings)
    if data.verifier is None:
        raise ConfigError(
            "retention.verifier",
            None,
            f"config/data/{config.data}.yaml names no verifier, so its answers cannot be checked: name one, "
            "as in rollouts.rewards.verifier.accuracy",
        )
    checkable = [g for g in load_groups(data, "eval").groups if g.prompt.reference_answer is not None]
    if not checkable:
        raise ConfigError(
            "retention.data",
            config.data,
            "has no held-out prompt with a reference answer; give retention.eval_path, or another set",
        )
    return data, checkable
