"""A second task (``retention.data``), whose held-out prompts show how much the model forgets."""

from __future__ import annotations

from common.errors import ConfigError
from config.files import group_file
from config.schema import RetentionConfig
from config.schema_data import DataConfig
from data.sources import check_found, load_groups
from data.types import Group

OWN = ("path", "eval_path", "verifier")
"""Settings of the set that ``retention`` may override."""


def second_task(config: RetentionConfig, early: bool = False) -> tuple[DataConfig, list[Group]]:
    """Return the settings of the set that ``config.data`` names, and its held-out groups that can be checked.
    ``early``: only look at its first rows, and return none.

    Raises ConfigError, about a setting of ``retention``, if the set is not a file of config/data, needs a
    path, cannot be read, or has no verifier or no held-out prompt with a reference answer. Raises DataError
    if none of its rows can be used.
    """
    assert config.data is not None, "asked for where a second task is named"
    settings = group_file("data", "retention.data", config.data)
    settings |= {key: value for key in OWN if (value := getattr(config, key)) is not None}
    if settings.get("path") == "???":
        raise ConfigError(
            "retention.path", None, f"retention.data={config.data} is a set of your own: name its file"
        )
    try:
        return _checkable(DataConfig(**settings), early)
    except ConfigError as error:
        section, _, key = error.key.partition(".")
        if section != "data":
            raise
        if key in OWN:
            raise ConfigError(f"retention.{key}", error.value, error.remedy) from error
        raise ConfigError("retention.data", config.data, f"{error}; choose another set") from error


def _checkable(data: DataConfig, early: bool) -> tuple[DataConfig, list[Group]]:
    if data.verifier is None:
        raise ConfigError(
            "data.verifier",
            None,
            f"config/data/{data.name}.yaml names no verifier, so its answers cannot be checked: name one, "
            "as in rollouts.rewards.verifier.accuracy",
        )
    if early:
        check_found(data, splits=("eval",))
        return data, []
    groups = [g for g in load_groups(data, "eval").groups if g.prompt.reference_answer is not None]
    if not groups:
        raise ConfigError(
            "retention.data",
            data.name,
            "has no held-out prompt with a reference answer; give retention.eval_path, or another set",
        )
    return data, groups
