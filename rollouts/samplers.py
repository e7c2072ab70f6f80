"""Sampling answers from the policy: the protocol, and the embedded sampler on transformers' own generation.

Prompts are rendered by the function that renders them for training, every sampling field is explicit, and
samples are token ids. Each token comes with its log-probability under the policy that drew it, at
``model.logit_temperature`` and before top-p: what the policy thought of it, not with which chance it was
drawn. The trainer scores samples itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from common.errors import require
from data.chat import Renderer, vocabulary_fingerprint
from data.types import Completion, Prompt, Turn
from models.distributed import gather_objects, reshard
from models.policy import Policy, causal_lm


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. Nothing else decides it: a model's generation_config.json is not read. Raises
    ConfigError."""

    temperature: float
    """0: greedy"""
    top_p: float
    """the next token comes from the smallest set of tokens with this probability; 1: from all"""
    max_tokens: int
    """a sample is cut after so many tokens"""

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "sampler.temperature", self.temperature, "must be 0 (greedy) or more")
        require(0 < self.top_p <= 1, "sampler.top_p", self.top_p, "must lie in (0, 1]")
        require(self.max_tokens >= 1, "sampler.max_tokens", self.max_tokens, "must be at least 1")


@dataclass(frozen=True)
class Sample:
    """One sampled answer, or a conversation with an environment."""

    token_ids: tuple[int, ...]
    """ends with the stop token if ``finished``"""
    finished: bool
    """False when it was cut by max_tokens: it has no stop token then"""
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    """log mu: what the sampling policy thought of each token, nats, at model.logit_temperature and without
    top-p; nan of an environment's tokens; () where the sampler cannot say"""
    loss_mask: tuple[bool, ...] | None = None
    """which tokens the policy wrote; None: all"""
    turns: tuple[Turn, ...] = ()
    """``Completion.turns``"""

    @property
    def own_tokens(self) -> int:
        """How many of the tokens the policy wrote."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    def completion(self, tokenizer: PreTrainedTokenizerBase, temperature: float = 1.0) -> Completion:
        """As the record of a groups file: the ids, which are trained on as they are, and the text, for
        verifiers and readers. ``temperature``: the one that ``logprobs`` are at."""
        return Completion(
            str(tokenizer.decode(list(self.token_ids), skip_special_tokens=True)),
            self.token_ids,
            self.finished,
            vocabulary_fingerprint(tokenizer),
            self.logprobs or None,
            temperature if self.logprobs else 1.0,
            self.loss_mask,
            turns=self.turns,
        )


class Sampler(Protocol):
    """What rounds and evaluation ask for answers. The same weights, prompts, settings and seed give the same
    answers."""

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """``n`` answers to each prompt, in the order of the prompts."""
        ...


Answered = Callable[[int, list[Sample]], None]
"""(which of the prompts, its samples): told as soon as they are all there."""


@dataclass(frozen=True)
class Row:
    """One sample to be drawn."""

    key: str
    """what its random numbers belong to, with ``index`` and the seed: its prompt's id"""
    index: int
    ids: np.ndarray
    """[P] int32: the tokens that it goes on behind"""
    max_tokens: int


Draw = Callable[[list[Row], SamplingSettings, int, tuple[int, ...]], list[Sample]]
"""(rows, settings, seed, the tokens that end a sample) -> their samples, in order."""


class Player(Protocol):
    """Who answers the policy while it is sampled (``rollouts.conversations``)."""

    def play(
        self, draw: Draw, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int, synced: bool
    ) -> list[list[Sample]]:
        """``n`` conversations from each prompt on. ``synced``: every rank plays a share, and calls ``draw``
        as often as the others."""
        ...


class EmbeddedSampler:
    """The policy itself, by transformers' generate with a KV cache.

    A sample depends on the weights, its prompt, its index, the settings and the seed alone (to rounding): not
    on the batch in which it is computed, the number of ranks, or the state of any random number generator. So
    equal prompts get equal samples.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        device: torch.device,
        *,
        batch_size: int,
        synced: bool,
        player: Player | None = None,
    ) -> None:
        """``batch_size``: rows generated at once. ``synced``: the policy is sharded over several ranks, each
        of which samples a share of its own: every rank runs as many forwards as the slowest, and must call
        ``sample`` even if its share is empty. ``player``: who answers the policy; None: nobody."""
        self.player = player
        self.policy, self.renderer, self.device = policy, renderer, device
        self.batch_size, self.synced = batch_size, synced

    def sample(
        self, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sample]]:
        """``n`` answers to each prompt. Raises DataError for a prompt that cannot be rendered."""
        if self.player is not None:
            return self.player.play(self.draw, prompts, n, settings, seed, self.synced)
        rows = rows_of(self.renderer, prompts, n, settings)
        drawn = self.draw(rows, settings, seed, self.renderer.stop_token_ids)
        return [drawn[i : i + n] for i in range(0, len(drawn), n)]

    def draw(
        self, rows: list[Row], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        """A sample of each row, which ends with one of ``stops`` or at its own ``max_tokens``."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        rounds = max(gather_objects(len(batches))) if self.synced else len(batches)
        out = [Sample((), False)] * len(rows)
        for batch in batches:
            drawn = self._generate([rows[i] for i in batch], settings, seed, stops)
            for i, sample in zip(batch, drawn, strict=True):
                out[i] = sample
        for _ in range(rounds - len(batches)):
            self._generate([Row("", 0, np.array(stops[:1]), settings.max_tokens)], settings, seed, stops)
        return out

    def _generate(
        self, rows: list[Row], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        input_ids, attention_mask = left_padded([row.ids for row in rows], stops[0])
        width, longest = input_ids.shape[1], max(row.max_tokens for row in rows)
        config = GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=list(stops), pad_token_id=stops[0]
        )
        draws = (
            [] if settings.temperature == 0 else [uniforms(seed, row.key, row.index, longest) for row in rows]
        )
        logprobs = ChosenLogprobs(self.policy.temperature)
        with without_generation_defaults(self.policy):
            tokens = self.policy.generate(
                input_ids.to(self.device),
                attention_mask.to(self.device),
                config,
                logits_processor=logprobs.around(processors(settings, draws, width, self.device)),
                synced_gpus=self.synced,
            )
        reshard(self.policy)
        return [
            _ended(made, values, set(stops), row.max_tokens)
            for row, made, values in zip(rows, tokens[:, width:].tolist(), logprobs.values(), strict=True)
        ]


def rows_of(renderer: Renderer, prompts: list[Prompt], n: int, settings: SamplingSettings) -> list[Row]:
    """``n`` rows of each prompt, those of one prompt together. Raises DataError for a prompt that cannot be
    rendered."""
    ids = [renderer.prompt_ids(prompt) for prompt in prompts]
    return [
        Row(prompt.id, i, of_prompt, settings.max_tokens)
        for prompt, of_prompt in zip(prompts, ids, strict=True)
        for i in range(n)
    ]


def left_padded(rows: list[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """([B, P] int64 token ids, [B, P] int64 mask) with every row at the right edge, where generation goes on.
    Transformers counts positions from the mask, so a row's positions begin at its own first token."""
    width = max(len(row) for row in rows)
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for r, row in enumerate(rows):
        ids[r, width - len(row) :], mask[r, width - len(row) :] = row, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def uniforms(seed: int, prompt_id: str, index: int, n: int) -> np.ndarray:
    """[n] float32 in [0, 1): the random numbers of one sample, one a token."""
    key = hashlib.blake2b(f"{seed}/{prompt_id}/{index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key))).random(n, dtype=np.float32)


def processors(
    settings: SamplingSettings, draws: list[np.ndarray], width: int, device: torch.device
) -> LogitsProcessorList:
    """What turns logits into scores of which generate takes the highest: if greedy nothing, else temperature,
    top-p, draw."""
    if settings.temperature == 0:
        return LogitsProcessorList()
    steps = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_p < 1:
        steps.append(TopPLogitsWarper(settings.top_p))
    steps.append(InverseCdfProcessor(torch.from_numpy(np.stack(draws)).to(device), width))
    return steps


class InverseCdfProcessor(LogitsProcessor):
    """Draws each row's next token by inverting its distribution function at the row's own random number, and
    leaves only that token possible. (generate's own sampling draws from the global generator, so that a row's
    tokens depend on its neighbours.)"""

    def __init__(self, uniforms: Tensor, width: int) -> None:
        """uniforms: [B, max_tokens] in [0, 1); width: the prompts' padded length."""
        self.uniforms, self.width = uniforms, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[B, V] scores -> [B, V], 0 at the token drawn and -inf elsewhere."""
        # float64: a running sum in float32 is off by what an unlikely token is worth, and on a GPU it need
        # not even rise steadily.
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        step = input_ids.shape[1] - self.width
        token = torch.searchsorted(cumulative, self.uniforms[:, step, None] * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


class ChosenLogprobs:
    """The log-probability of each token that is generated, under the logits as the model gives them, divided
    by ``temperature``."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._logits: Tensor | None = None
        self._chosen: list[Tensor] = []

    def around(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """``processors`` with what looks at the logits before them and at their choice behind them."""
        return LogitsProcessorList([self._before, *processors, self._behind])

    def _before(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._logits = scores
        return scores

    def _behind(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """generate takes the highest of these scores."""
        assert self._logits is not None, "called behind _before"
        token = scores.argmax(-1, keepdim=True)
        logits = self._logits if self.temperature == 1.0 else self._logits.float() / self.temperature
        self._chosen.append(logits.log_softmax(-1, dtype=torch.float32).gather(-1, token))
        return scores

    def values(self) -> np.ndarray:
        """[B, steps] float32, nats."""
        return torch.cat(self._chosen, dim=-1).cpu().numpy()


@contextmanager
def without_generation_defaults(policy: Policy) -> Iterator[None]:
    """The policy without the generation settings it was published with: transformers fills every unset field
    from them without a word (a repetition penalty, a top-k)."""
    model = causal_lm(policy.model)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _ended(tokens: list[int], logprobs: np.ndarray, stops: set[int], max_tokens: int) -> Sample:
    """A generated row up to its first stop token; behind it is padding."""
    end = next((i for i, token in enumerate(tokens[:max_tokens]) if token in stops), None)
    kept = max_tokens if end is None else end + 1
    # The shortest text that is the same float32: half of what the float64 would take in a file.
    values = tuple(float(str(value)) for value in logprobs[:kept])
    return Sample(tuple(tokens[:kept]), end is not None, values)
