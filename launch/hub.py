"""The models and data that a run's settings may name on the Hugging Face hub, and whether the hub has
them."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError

from config.schema import Config
from config.schema_rewards import RewardModelConfig


@dataclass(frozen=True)
class Source:
    """A model or data set, named by a setting, that may lie on the hub."""

    key: str
    name: str
    revision: str | None
    kind: str = "model"

    def __str__(self) -> str:
        return f"{self.key}={self.name}"

    def cached(self) -> bool:
        """Whether the newest files fetched for it are in the hub's cache."""
        try:
            found = try_to_load_from_cache(
                self.name, "config.json", revision=self.revision, repo_type=self.kind
            )
        except HFValidationError:
            return False
        return isinstance(found, str)

    def problem(self, endpoint: str, seconds: float) -> str | None:
        """Return the error of the hub at ``endpoint`` for this source; None if the hub has it."""
        api = HfApi(endpoint=endpoint)
        try:
            api.repo_info(self.name, revision=self.revision, repo_type=self.kind, timeout=seconds)
        except (OSError, ValueError, HTTPError) as error:
            return (str(error).strip() or type(error).__name__).splitlines()[0]
        return None


def sources(config: Config) -> list[Source]:
    """Return the models, reward model and data that the settings name."""
    model, data = config.model, config.data
    found = [Source("model.name_or_path", model.name_or_path, model.revision)]
    if config.reward is not None:
        reward = config.reward_config
        if isinstance(own := reward.settings, RewardModelConfig):
            found.append(Source(f"reward.{reward.kind}.name_or_path", own.name_or_path, own.revision))
    if model.tokenizer_name_or_path is not None:
        found.append(Source("model.tokenizer_name_or_path", model.tokenizer_name_or_path, None))
    if data.path is not None:
        found.append(Source("data.path", data.path, data.revision, "dataset"))
    return found
