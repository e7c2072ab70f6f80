"""Reward models: conversations rendered by the model's own tokenizer, batched by length, right padded.

A row's reward depends on the row alone, not on what shares its batch: padding is to the right of causal attention, or masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.errors import ConfigError, require
from config.schema_rewards import ClassifierConfig, RewardModelConfig
from data.chat import Renderer, load_template
from data.types import Completion, Prompt
from data.types import Sequence as Row
from rollouts.rewards.base import Missing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_MARK = "humanline-probe"


class RewardHead(Protocol):
    """What makes one kind of reward model differ from another."""

    def load(self, config: RewardModelConfig) -> PreTrainedModel:
        """The model on the CPU, in eval mode. Raises ConfigError for weights that are not such a model's."""

    def rewards(self, model: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Tensor:
        """[R] float32 rewards of R rows."""


class Conversations:
    """Prompts and completions as a reward model's tokenizer writes them."""

    def __init__(self, config: RewardModelConfig, *, key: str, rendering: str = "template") -> None:
        """``key``: the config section, for messages. ``rendering``: ``template`` ends a row where the chat template ends an answer,
        ``turn`` with the end-of-turn token. Raises ConfigError."""
        tokenizer = AutoTokenizer.from_pretrained(config.name_or_path, revision=config.revision)
        require(
            rendering == "turn" or tokenizer.chat_template is not None,
            f"{key}.name_or_path",
            config.name_or_path,
            "its tokenizer has no chat template; use a reward model with one, or reward=bradley_terry for one trained here",
        )
        self.max_length = config.max_length
        self._renderer = Renderer(
            tokenizer,
            max_length=config.max_length,
            max_prompt_length=config.max_prompt_length,
            template=load_template(tokenizer, None),
        )
        self.end_id = self._renderer.end_id
        """the end-of-turn token"""
        self._tail = _tail(tokenizer, self.end_id) if rendering == "template" else []

    def rows(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Row | Missing]:
        """The tokens that are scored. A completion whose end does not fit has no verdict: its reward would be another text's."""
        rendered = self._renderer.sequences(
            zip(prompts, (Completion(text=text) for text in completions), strict=True)
        )
        return [self._whole(row) for row in rendered]

    def _whole(self, row: Row | str) -> Row | Missing:
        if isinstance(row, str):
            return Missing(row)
        if row.completion_ids[-1] != self.end_id:
            return Missing(f"longer than max_length={self.max_length} of the reward model")
        return Row(row.prompt_ids, np.append(row.completion_ids, self._tail).astype(np.int32))


class ModelReward:
    """A reward model, loaded at the first ``score`` and moved off its device by ``release``."""

    def __init__(
        self,
        config: RewardModelConfig,
        conversations: Conversations,
        head: RewardHead,
        device: torch.device | str,
    ) -> None:
        self.config, self.conversations, self.head, self.device = (
            config,
            conversations,
            head,
            torch.device(device),
        )
        self.metrics: dict[str, float] = {}
        self.log_dir: Path | None = None
        self._model: PreTrainedModel | None = None

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        model = self._loaded()
        verdicts: list[float | Missing] = []
        real: list[tuple[int, Row]] = []
        for i, row in enumerate(self.conversations.rows(prompts, completions)):
            verdicts.append(row if isinstance(row, Missing) else Missing("not scored"))
            if isinstance(row, Row):
                real.append((i, row))
        for batch in by_length(real, self.config.batch_tokens):
            values = self.head.rewards(model, [row for _, row in batch], self.device).float().cpu().tolist()
            for (i, _), value in zip(batch, values, strict=True):
                verdicts[i] = value
        return verdicts

    def release(self) -> None:
        if self._model is not None:
            self._model.to("cpu")  # type: ignore[arg-type]  # a wrapper of transformers loses the signature
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        self._model = None

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            self._model = self.head.load(self.config)
        return self._model.to(self.device)  # type: ignore[arg-type]


class Classifier:
    """Any sequence classifier with one label, as transformers computes it: pooled at the last token that is no padding."""

    def load(self, config: RewardModelConfig) -> PreTrainedModel:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            config.name_or_path,
            revision=config.revision,
            dtype=DTYPES[config.dtype],
            output_loading_info=True,
        )
        refuse_missing(info["missing_keys"], "reward.classifier.name_or_path", config.name_or_path)
        require(
            model.config.num_labels == 1,
            "reward.classifier.name_or_path",
            config.name_or_path,
            f"has {model.config.num_labels} labels: a reward model has one",
        )
        return model.eval()

    def rewards(self, model: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Tensor:
        settings = model.config.get_text_config()
        given = settings.pad_token_id
        pad = given if given is not None else _absent(rows)
        ids, mask = padded(rows, pad, device)
        settings.pad_token_id = (
            pad  # transformers pools at the last token that is not this one, and refuses batches without it
        )
        try:
            return model(input_ids=ids, attention_mask=mask).logits[:, 0]
        finally:
            settings.pad_token_id = given


def make(config: ClassifierConfig, device: torch.device | str, log_dir: Path | None = None) -> ModelReward:
    """A sequence classifier of the hub, or a Bradley-Terry model that this project exported."""
    return ModelReward(
        config,
        Conversations(config, key="reward.classifier", rendering=config.rendering),
        Classifier(),
        device,
    )


def padded(rows: Sequence[Row], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[R, L] int64 ids, right padded with ``pad``, and [R, L] int64 attention mask."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids]))
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), mask.long().to(device)


def by_length(rows: Sequence[tuple[int, Row]], batch_tokens: int) -> Iterator[list[tuple[int, Row]]]:
    """Batches of rows of like length, longest first (what does not fit in memory shows at once), of at most ``batch_tokens`` tokens
    with their padding; a row longer than that goes alone."""
    batch: list[tuple[int, Row]] = []
    for i, row in sorted(rows, key=lambda item: len(item[1]), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0][1]) > batch_tokens:
            yield batch
            batch = []
        batch.append((i, row))
    if batch:
        yield batch


def refuse_missing(missing: Sequence[str] | set[str], key: str, name: str) -> None:
    """Raise ConfigError for weights that the checkpoint lacks: transformers would draw them at random."""
    if missing:
        raise ConfigError(
            key, name, f"is no such reward model: its checkpoint lacks {', '.join(sorted(missing)[:3])}"
        )


def _absent(rows: Sequence[Row]) -> int:
    """The smallest token id that no row has."""
    used = {int(token) for row in rows for token in (*row.prompt_ids, *row.completion_ids)}
    return next(token for token in range(len(used) + 1) if token not in used)


def _tail(tokenizer: PreTrainedTokenizerBase, end_id: int) -> list[int]:
    """What the chat template writes after the end-of-turn token of an answer (Qwen's newline)."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    ids: list[int] = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"]
    return ids[ids.index(end_id) + 1 :] if end_id in ids else []
