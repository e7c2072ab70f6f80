"""A teacher model as a reward, for on-policy distillation. The method is that of Agarwal et al. 2023 (arXiv
2306.13649), with the reverse KL on the student's own samples. Token t of a sample is worth ``log
pi_teacher(y_t) - log mu(y_t)`` nats, where mu is the policy that sampled it.

The mean over a sample's tokens estimates -KL(mu || teacher) per token. The teacher reads the tokens that the
student read and wrote, so their tokenizers must be the same. The teacher is evaluated at temperature 1. It is
loaded in this process, or queried through the completions endpoint of a vLLM server, which returns the
log-probabilities of a prompt's tokens (``prompt_logprobs``).
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import require
from config.schema_model import ModelConfig
from config.schema_rewards import TeacherConfig
from config.typed import with_defaults
from data.batches import collate
from data.chat import vocabulary_fingerprint
from data.types import Completion, Prompt
from data.types import Sequence as Row
from models.policy import Policy, causal_lm
from models.pretrained import check_model, load_policy, load_tokenizer
from models.reference import score
from models.stored import check_finite, stored_alike
from rollouts.rewards.base import Missing, Scorer
from rollouts.rewards.endpoint import Endpoint, FailedError, is_logprob
from rollouts.rewards.models import HostModel

Sample = tuple[np.ndarray, Completion]
"""[P] prompt tokens, and the completion sampled after them."""

KEY = "reward.teacher.name_or_path"
WHOLE = "reward=teacher scores the tokens of a run's own rounds; a text has none"
_MAX_REPLY_BYTES = 256_000_000
"""Largest reply with the log-probabilities of one completion's tokens. vLLM writes about 100 bytes per
token."""
UNKNOWN = "its log-probabilities under the policy that sampled it are not known (docs/off-policy.md)"


class Teacher(Scorer):
    """The common part of all teachers: the check of the tokenizer, and token rewards from
    log-probabilities."""

    positions: float = math.inf
    """Most tokens of prompt and completion together that the teacher can read."""

    def __init__(self, settings: TeacherConfig) -> None:
        """Raises ConfigError for a tokenizer that cannot be loaded."""
        self.settings = settings
        self.config = with_defaults(
            ModelConfig,
            name="teacher",
            name_or_path=settings.name_or_path,
            revision=settings.revision,
            dtype=settings.dtype,
            max_length=2,
            max_prompt_length=1,
        )
        self.tokenizer = load_tokenizer(self.config)

    @abstractmethod
    def logprobs(self, samples: Sequence[Sample]) -> list[Sequence[float] | Missing]:
        """Return the log-probability of each token of each completion after its [P] prompt tokens, nats."""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError unless ``tokenizer``, the student's, is also the teacher's."""
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

    def score_tokens(self, samples: Sequence[Sample]) -> list[tuple[float, ...] | Missing]:
        """Return the reward of each token of each completion after its [P] prompt tokens, nats."""
        verdicts: list[tuple[float, ...] | Missing] = [self._refused(*sample) for sample in samples]
        left = [i for i, verdict in enumerate(verdicts) if not verdict]
        for i, logprobs in zip(left, self.logprobs([samples[i] for i in left]), strict=True):
            known, own = samples[i][1].behavior_logprobs or (), _own(samples[i][1])
            verdicts[i] = (
                logprobs
                if isinstance(logprobs, Missing)
                else tuple(
                    float(v - mu) if mine else 0.0 for v, mu, mine in zip(logprobs, known, own, strict=True)
                )
            )
        return verdicts

    def _refused(self, prompt: np.ndarray, completion: Completion) -> tuple[float, ...] | Missing:
        """Return the reason why a sample has no verdict, or () if it may get one."""
        known, ids = completion.behavior_logprobs, completion.token_ids
        if (
            not ids
            or known is None
            or any(mine and math.isnan(value) for value, mine in zip(known, _own(completion), strict=True))
        ):
            return Missing(UNKNOWN)
        if len(prompt) + len(ids) > self.positions:
            return Missing(
                f"prompt and completion have more tokens than the teacher has positions ({self.positions})"
            )
        return ()


def _own(completion: Completion) -> tuple[bool, ...]:
    """Return for each token whether the policy wrote it. All other tokens are worth 0."""
    return completion.loss_mask or (True,) * len(completion.token_ids or ())


class LocalTeacher(HostModel, Teacher):
    """A teacher in the run's own processes, which loads when it is first needed."""

    def __init__(self, settings: TeacherConfig, device: torch.device | str) -> None:
        """Raises ConfigError for a model that cannot be found, or is not a causal language model."""
        HostModel.__init__(self, device)
        Teacher.__init__(self, settings)
        text = check_model(self.config).get_text_config()
        self.positions = getattr(text, "max_position_embeddings", None) or math.inf

    def logprobs(self, samples: Sequence[Sample]) -> list[Sequence[float] | Missing]:
        logprobs: list[Sequence[float] | Missing] = [()] * len(samples)
        longest_first = sorted(range(len(samples)), key=lambda i: -len(samples[i][1].token_ids or ()))
        size = self.settings.batch_size
        parts = [longest_first[first : first + size] for first in range(0, len(samples), size)]
        batches = [
            [Row(samples[i][0], np.array(samples[i][1].token_ids, np.int32)) for i in part] for part in parts
        ]
        for part, values in zip(parts, self._of_batches(batches), strict=True):
            for i, of_row in zip(part, values, strict=True):
                logprobs[i] = of_row
        return logprobs

    @torch.no_grad()
    def _of_batch(self, rows: list[Row]) -> list[Any]:
        """Return the [T] float32 log-probabilities of each row's completion tokens, nats."""
        values = score(self._loaded(), collate(rows, self.device)).float().cpu().numpy()
        return [of_row[: len(row.completion_ids)] for row, of_row in zip(rows, values, strict=True)]

    def _load(self) -> Policy:
        dtype, cpu = getattr(torch, self.settings.dtype), torch.device("cpu")
        as_stored = stored_alike(self.config) == dtype
        policy = load_policy(self.config, cpu, stored=dtype if as_stored else None)
        causal_lm(policy.model).to(dtype)
        check_finite(policy, self.config)
        return policy


class EndpointTeacher(Teacher):
    """A teacher behind a vLLM server, with one completion per call. Each call also samples one token, which
    is ignored, because the endpoint has no call without one."""

    def __init__(self, settings: TeacherConfig) -> None:
        """Raises ConfigError for a server that does not answer, or does not have the model."""
        super().__init__(settings)
        assert settings.base_url is not None, "make chooses"
        self.model = settings.model or settings.name_or_path
        self.endpoint = Endpoint(
            "reward.teacher", settings.base_url, "/completions", settings, _MAX_REPLY_BYTES
        )
        self._calls = self.endpoint.calls(self._ask)
        self.endpoint.check(self._ask, (np.zeros(1, np.int32), Completion("", (0,))))

    def logprobs(self, samples: Sequence[Sample]) -> list[Sequence[float] | Missing]:
        return self._calls.map(samples)

    def close(self) -> None:
        self.endpoint.close()

    async def _ask(self, sample: Sample) -> Sequence[float]:
        """Return the [T] log-probabilities of one completion's tokens, nats. Raises FailedError,
        RewardError."""
        prompt, ids = sample[0].tolist(), list(sample[1].token_ids or ())
        asked = {
            "model": self.model,
            "prompt": prompt + ids,
            "max_tokens": 1,
            "temperature": 1,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        reply = await self.endpoint.post(json.dumps(asked).encode())
        try:
            given = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
            logprobs = [
                position_logprobs[str(token)]["logprob"]
                for position_logprobs, token in zip(given, ids, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise FailedError(
                "the endpoint's reply has no prompt_logprobs of these tokens (vLLM's completions have)",
                again=True,
            ) from None
        if not all(map(is_logprob, logprobs)):
            reason = "the endpoint's log-probabilities are none: above 0, or no finite numbers"
            raise FailedError(reason, again=False, endpoint=True)
        return logprobs


def make(config: TeacherConfig, device: torch.device | str, log_dir: Path | None = None) -> Teacher:
    """Return a causal language model as a teacher. Raises ConfigError."""
    return LocalTeacher(config, device) if config.base_url is None else EndpointTeacher(config)
