"""A reward as its yaml describes it: the keys that every reward has, and one section, whose class its maker
names."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Annotated, Any

from common.errors import require
from common.imports import import_function, written_type
from config.sections import Share, Text, dataclass, typed


@dataclass
class _Keys:
    """The keys of a reward's yaml other than the section of its kind."""

    name: Text
    max_missing: Annotated[Share, "is the share of completions that may go without a verdict"]
    _target_: Text = dataclasses.field()
    needs_reference: bool = False


OWN_KEYS = tuple(item.name for item in fields(_Keys))


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """A reward as its yaml describes it: the import path of what makes it, and the settings of its kind,
    typed."""

    name: str
    max_missing: float
    needs_reference: bool
    target: str
    kind: str
    settings: Any

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RewardConfig:
        """Return the reward that the keys of a yaml describe. In addition to the keys below, the yaml has one
        section, whose name is the reward's kind. Raises ConfigError."""
        general = typed({key: tree[key] for key in OWN_KEYS if key in tree}, _Keys, "reward.")
        kinds = [key for key in tree if key not in OWN_KEYS]
        require(
            len(kinds) == 1 and isinstance(tree[kinds[0]], dict),
            "reward",
            " and ".join(map(str, kinds)) or None,
            "has exactly one section, the settings of its kind: choose a file of config/reward",
        )
        typing = written_type(general._target_)
        says = "must be a function whose first parameter is annotated with the dataclass of its settings"
        require(typing is not None, "reward._target_", general._target_, says)
        schema = import_function("reward._target_", str(typing))
        require(is_dataclass(schema), "reward._target_", general._target_, says)
        settings = typed(tree[kinds[0]], schema, f"reward.{kinds[0]}.")
        needs = general.needs_reference or _compares(settings)
        return cls(general.name, general.max_missing, needs, general._target_, kinds[0], settings)

    @property
    def needs_every_reference(self) -> bool:
        """Whether a prompt without a reference answer gets no verdict, as the reward's yaml says of its kind.
        A function, and a sum of rewards, may score one all the same."""
        return self.needs_reference and not _compares(self.settings)

    def models_alone(self) -> RewardConfig | None:
        """Return this reward with only the parts that load a model in the run's own processes; None if no
        part does."""
        if hasattr(self.settings, "models_alone"):  # a sum's parts
            settings = self.settings.models_alone()
            return None if settings is None else replace(self, settings=settings)
        return self if getattr(self.settings, "loads_model", False) else None


def _compares(settings: Any) -> bool:
    """Return whether the settings of a kind say that the reward compares with reference answers."""
    return bool(getattr(settings, "needs_reference", False))


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a reward's yaml, checked, with every default of its kind filled in. Raises
    ConfigError."""
    config = RewardConfig.from_tree(tree)
    return {key: tree[key] for key in OWN_KEYS if key in tree} | {config.kind: asdict(config.settings)}
