"""A teacher as a reward (on-policy distillation; Agarwal et al. 2023, arXiv 2306.13649, with the reverse KL
on the student's own samples): token t of a sample is worth ``log pi_teacher(y_t) - log mu(y_t)``, nats, mu
the policy that sampled it.

Its mean over a sample's tokens is an estimate of -KL(mu || teacher) a token. The teacher reads the tokens
that the student read and wrote, so their tokenizers must be the same; it is asked at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import require
from config.defaults import with_defaults
from config.schema_model import ModelConfig
from config.schema_rewards import TeacherConfig
from data.batches import collate
from data.chat import vocabulary_fingerprint
from data.types import Completion, Prompt
from data.types import Sequence as Row
from models.policy import Policy, causal_lm
from models.pretrained import check_model, load_policy, load_tokenizer
from models.reference import score
from rollouts.rewards.base import Missing

KEY = "reward.teacher.name_or_path"
WHOLE = "reward=teacher scores the tokens of a run's own rounds; a text has none"
UNKNOWN = "its log-probabilities under the policy that sampled it are not known (docs/off-policy.md)"


class Teacher:
    """Loads when it is first asked."""

    log_dir: Path | None = None

    def __init__(self, settings: TeacherConfig, device: torch.device | str) -> None:
        """Raises ConfigError for a model that cannot be had, or is no causal language model."""
        self.settings, self.device = settings, torch.device(device)
        self.metrics: dict[str, float] = {}
        self.config = with_defaults(
            ModelConfig,
            name="teacher",
            name_or_path=settings.name_or_path,
            revision=settings.revision,
            dtype=settings.dtype,
            max_length=2,
            max_prompt_length=1,
        )
        text = check_model(self.config).get_text_config()
        self.positions = getattr(text, "max_position_embeddings", None) or math.inf
        self.tokenizer = load_tokenizer(self.config)
        self._policy: Policy | None = None

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError unless ``tokenizer``, the student's, is the teacher's too."""
        ours, theirs = vocabulary_fingerprint(tokenizer), vocabulary_fingerprint(self.tokenizer)
        require(
            ours == theirs,
            KEY,
            self.settings.name_or_path,
            f"has another tokenizer ({theirs}) than the model that is trained ({ours}): its "
            "log-probabilities would be of other tokens; use a teacher of the same family",
        )

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float | Missing]:
        return [Missing(WHOLE)] * len(completions)

    @torch.no_grad()
    def score_tokens(
        self, samples: Sequence[tuple[np.ndarray, Completion]]
    ) -> list[tuple[float, ...] | Missing]:
        """What each token of each completion is worth behind its [P] prompt tokens, nats."""
        verdicts: list[tuple[float, ...] | Missing] = [self._refused(*sample) for sample in samples]
        left = [i for i, verdict in enumerate(verdicts) if not verdict]
        left.sort(key=lambda i: -len(samples[i][1].token_ids or ()))
        for first in range(0, len(left), self.settings.batch_size):
            part = left[first : first + self.settings.batch_size]
            rows = [Row(samples[i][0], np.array(samples[i][1].token_ids, np.int32)) for i in part]
            values = score(self._loaded(), collate(rows, self.device)).float().cpu().numpy()
            for i, found in zip(part, values, strict=True):
                known = samples[i][1].behavior_logprobs or ()
                verdicts[i] = tuple(float(v - mu) for v, mu in zip(found, known, strict=False))
        return verdicts

    def _refused(self, prompt: np.ndarray, completion: Completion) -> tuple[float, ...] | Missing:
        """The reason why a sample has no verdict, or () where it may get one."""
        known, ids = completion.behavior_logprobs, completion.token_ids
        if not ids or known is None or any(math.isnan(value) for value in known):
            return Missing(UNKNOWN)
        if len(prompt) + len(ids) > self.positions:
            return Missing(
                f"prompt and completion have more tokens than the teacher has positions ({self.positions})"
            )
        return ()

    def release(self) -> None:
        if self._policy is not None:
            self._policy.to("cpu")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        self._policy = None

    def _loaded(self) -> Policy:
        if self._policy is None:
            self._policy = load_policy(self.config, torch.device("cpu"))
            causal_lm(self._policy.model).to(getattr(torch, self.settings.dtype))
        return self._policy.to(self.device)


def make(config: TeacherConfig, device: torch.device | str, log_dir: Path | None = None) -> Teacher:
    """A causal language model as a teacher. Raises ConfigError."""
    return Teacher(config, device)
