"""Reward models that score conversations rendered by their own tokenizer. Batches hold rows of similar
length, right padded.

A row's reward depends on the row alone and not on the rest of its batch, because padding lies to the right
under causal attention, or is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from accelerate import init_empty_weights
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from common.errors import ConfigError, require
from data.chat import Renderer
from data.templates import load_template
from data.types import Completion, Prompt
from data.types import Sequence as Row
from models.distributed import Ranks, map_locally
from models.pretrained import not_found, reachable
from models.weight_files import CONFIG, read_tensors, weights_are_there
from rollouts.rewards.base import Missing, Scorer
from rollouts.rewards.settings import ClassifierConfig, RewardModelConfig


class RewardHead(Protocol):
    """The part in which kinds of reward model differ."""

    def empty(self, hf_config: PretrainedConfig) -> PreTrainedModel:
        """Build a model of this architecture, within ``init_empty_weights``. Raises ConfigError if there is
        none."""

    def load(self, path: str, config: RewardModelConfig) -> tuple[PreTrainedModel, set[str]]:
        """Return (the model on the CPU, names of weights that its checkpoint lacks). Raises what transformers
        raises."""

    def rewards(self, model: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Tensor:
        """Return the [R] rewards of R rows, which the caller converts to float32."""


class HostWeights:
    """The weights of a model that scores now and then. They stay in the host's memory while a copy is on the
    device, so that nothing is copied back. Weights in the dtype of their files lie in these, mapped: the
    ranks of a node have one copy, in the page cache."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
        self._away = False

    def go_to(self, device: torch.device) -> None:
        """Copy the weights to ``device`` unless they are there."""
        for tensor, held in () if self._away else self._held:
            tensor.data = held.to(device)
        self._away = True

    def leave(self) -> None:
        """Free the device's memory."""
        for tensor, held in self._held:
            tensor.data = held
        self._away = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Place:
    """The location of a reward model, which renders prompts and completions with its tokenizer."""

    def __init__(self, config: RewardModelConfig, key: str, rendering: str = "template") -> None:
        """``key``: the config section. ``rendering``: ``template`` ends a row where the chat template ends an
        answer, ``turn`` ends it with the end-of-turn token. Raises ConfigError."""
        self.key, self.name = f"{key}.name_or_path", config.name_or_path
        self.path = reachable(self.key, self.name, config.revision)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, revision=config.revision)
        except Exception as error:  # tokenizers raises bare Exceptions for a file that it cannot read
            raise not_found(self.key, self.name, error) from error
        require(
            rendering == "turn" or tokenizer.chat_template is not None,
            self.key,
            self.name,
            "its tokenizer has no chat template; use a reward model with one, or reward=bradley_terry for "
            "one trained here",
        )
        self.max_length = config.max_length
        self._renderer = Renderer(
            tokenizer,
            max_length=config.max_length,
            max_prompt_length=config.max_prompt_length,
            template=load_template(tokenizer),
        )
        self.end_id = self._renderer.end_id
        """the end-of-turn token"""
        rest = self._renderer.chat.rest if rendering == "template" and self._renderer.chat else ""
        self._tail = self._renderer.encoder.inside([rest])[0]
        """the tokens that the chat template writes after an answer's end-of-turn token (Qwen's newline)"""

    def rows(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Row | Missing]:
        """Return the tokens that are scored for each completion. A completion whose end does not fit has no
        verdict, because its reward would be that of another text."""
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


class ModelReward(Scorer):
    """A reward model, which loads when it is first needed and is moved off its device by ``release``. The
    batches are the same for any number of ranks, so that scores are identical to the bit."""

    def __init__(
        self, config: RewardModelConfig, place: Place, head: RewardHead, device: torch.device | str
    ) -> None:
        """Raises ConfigError for a model that is not of this kind. The check uses its architecture and the
        names of its weights, before the weights load."""
        self.device = torch.device(device)
        self._model: PreTrainedModel | None = None
        self._weights: HostWeights | None = None
        self._of_batches = map_locally(self._of_batch)
        self._free: Callable[[None], None] = self._off_device
        self.config, self.place, self.head = config, place, head
        self._check()

    def share_over(self, ranks: Ranks) -> None:
        """Share the scoring as in ``Reward.share_over``."""
        self._of_batches, self._free = (
            ranks.map_over_ranks(self._of_batch),
            ranks.collective(self._off_device),
        )

    def release(self) -> None:
        self._free(None)

    def _off_device(self, _: None) -> None:
        if self._weights is not None:
            self._weights.leave()

    def close(self) -> None:
        self._model = self._weights = None

    def _loaded(self) -> PreTrainedModel:
        """Return the model on its device."""
        if self._model is None or self._weights is None:
            self._model = self._load()
            self._weights = HostWeights(self._model)
        self._weights.go_to(self.device)
        return self._model

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        verdicts: list[float | Missing] = []
        real: list[tuple[int, Row]] = []
        for i, row in enumerate(self.place.rows(prompts, completions)):
            verdicts.append(row if isinstance(row, Missing) else Missing("not scored"))
            if isinstance(row, Row):
                real.append((i, row))
        batches = list(by_length(real, self.config.batch_tokens))
        batch_scores = self._of_batches([[row for _, row in batch] for batch in batches])
        for batch, values in zip(batches, batch_scores, strict=True):
            for (i, _), value in zip(batch, values, strict=True):
                verdicts[i] = value
        return verdicts

    @torch.no_grad()
    def _of_batch(self, rows: list[Row]) -> list[float]:
        values: list[float] = self.head.rewards(self._loaded(), rows, self.device).float().cpu().tolist()
        return values

    def _check(self) -> None:
        """Raise ConfigError if the architecture or the checkpoint does not belong to this kind of reward
        model."""
        try:
            model_config = AutoConfig.from_pretrained(self.place.path, revision=self.config.revision)
            names = tensor_names(self.place.path, self.config.revision)
        except (OSError, ValueError) as error:
            raise not_found(self.place.key, self.place.name, error) from error
        with init_empty_weights():
            model = self.head.empty(model_config)
        of_head = [
            name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")
        ]
        if names is not None and not any(name.endswith(tuple(of_head)) for name in names):
            refuse_missing(of_head, self.place.key, self.place.name)
        require(
            model.config.num_labels == 1 or not isinstance(self.head, Classifier),
            self.place.key,
            self.place.name,
            f"has {model.config.num_labels} labels: a reward model has one",
        )

    def _load(self) -> PreTrainedModel:
        """Return the model in the host's memory. Raises ConfigError."""
        try:
            model, missing = self.head.load(self.place.path, self.config)
        except Exception as error:  # whatever its own code raises
            raise not_found(self.place.key, self.place.name, error) from error
        refuse_missing(missing, self.place.key, self.place.name)
        return model.eval()


class Classifier:
    """Any sequence classifier with one label, as transformers computes it: pooled at the last token that is
    not padding."""

    def empty(self, hf_config: PretrainedConfig) -> PreTrainedModel:
        require(
            type(hf_config) in AutoModelForSequenceClassification._model_mapping,
            "reward.classifier.name_or_path",
            hf_config.name_or_path,
            f"is a {hf_config.model_type}, of which transformers has no sequence classifier",
        )
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(hf_config)
        return model

    def load(self, path: str, config: RewardModelConfig) -> tuple[PreTrainedModel, set[str]]:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, revision=config.revision, dtype=getattr(torch, config.dtype), output_loading_info=True
        )
        return model, set(info["missing_keys"])

    def rewards(self, model: PreTrainedModel, rows: Sequence[Row], device: torch.device) -> Tensor:
        settings = model.config.get_text_config()
        original = settings.pad_token_id
        pad = original if original is not None else _absent(rows)
        ids, mask = padded(rows, pad, device)
        settings.pad_token_id = (
            pad  # transformers pools at the last token that is not this one, and refuses batches without it
        )
        try:
            return model(input_ids=ids, attention_mask=mask).logits[:, 0]
        finally:
            settings.pad_token_id = original


def make(config: ClassifierConfig, device: torch.device | str, log_dir: Path | None = None) -> ModelReward:
    """Return a sequence classifier from the hub, or a Bradley-Terry model exported by this project, as a
    reward. Raises ConfigError."""
    return ModelReward(config, Place(config, "reward.classifier", config.rendering), Classifier(), device)


def tensor_names(path: str, revision: str | None) -> set[str] | None:
    """Return the names of the tensors in a checkpoint's safetensors files, from their headers; None without
    such files, and where not all of a model of the hub are on this machine yet. Raises OSError, ValueError
    for a folder's files that cannot be read."""
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, CONFIG, revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
        if not weights_are_there(folder):
            return None
    return set(read_tensors(folder)) if any(folder.glob("*.safetensors")) else None


def padded(rows: Sequence[Row], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [R, L] int64 ids, right padded with ``pad``, and the [R, L] int64 attention mask."""
    whole = [torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids])).long() for row in rows]
    ids = pad_sequence(whole, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones_like(row) for row in whole], batch_first=True)
    return ids.to(device), mask.to(device)


def by_length(rows: Sequence[tuple[int, Row]], batch_tokens: int) -> Iterator[list[tuple[int, Row]]]:
    """Yield batches of rows of similar length, with at most ``batch_tokens`` tokens each, padding included. A
    longer row is a batch by itself. The longest rows come first, so that running out of memory shows at
    once."""
    batch: list[tuple[int, Row]] = []
    for i, row in sorted(rows, key=lambda item: len(item[1]), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0][1]) > batch_tokens:
            yield batch
            batch = []
        batch.append((i, row))
    if batch:
        yield batch


def refuse_missing(missing: Sequence[str] | set[str], key: str, name: str) -> None:
    """Raise ConfigError for weights that the checkpoint lacks, because transformers would initialise them at
    random."""
    if missing:
        raise ConfigError(
            key, name, f"is no such reward model: its checkpoint lacks {', '.join(sorted(missing)[:3])}"
        )


def _absent(rows: Sequence[Row]) -> int:
    """Return the smallest token id that occurs in no row."""
    used = {int(token) for row in rows for token in (*row.prompt_ids, *row.completion_ids)}
    return next(token for token in range(len(used) + 1) if token not in used)
