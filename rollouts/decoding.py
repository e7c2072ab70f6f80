"""Decoding of a batch of prompts by transformers' generate, each row with random numbers of its own.

A batch would be computed as a whole until its longest answer ends. So rows that have ended leave it: once a
quarter of them has, generate returns, the keys and values of the others are picked out of its cache, and it
continues with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from common.progress import pause, pause_together, stopping
from models.checks import reach
from models.distributed import gather_objects
from models.policy import Policy, causal_lm

ENDED = 0.25
"""Share of a batch's rows at which those that have ended leave it."""
FEWEST = 16
"""Rows of a batch that no row leaves: fewer are hardly faster."""


class Decoder:
    """Continues prompts with a policy's tokens."""

    def __init__(self, policy: Policy, device: torch.device, synced: bool) -> None:
        """``synced``: the policy is sharded over several ranks, which run the same number of forwards. Then
        no row leaves a batch early."""
        self.policy, self.device, self.synced = policy, device, synced
        self.tick: Callable[[], object] = lambda: None
        """Called for every token of a batch."""

    def decode(
        self,
        prompts: Sequence[np.ndarray],
        limits: Sequence[int],
        draws: Sequence[np.ndarray] | None,
        temperature: float,
        top_p: float,
        stops: tuple[int, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ([R, T] int64 tokens, [R, T] float32 log-probabilities in nats), which are meaningless
        behind a row's first stop token and beyond its limit.

        ``limits``: the most tokens of each row; T is the highest. ``draws``: each row's [T] random numbers in
        [0, 1); None for greedy decoding, without ``temperature`` and ``top_p``.

        A row's positions go on while others of its batch are continued. Where they would pass those that the
        model has, the batch ends before, and the rows that have not ended continue as a batch of their own.
        """
        most = np.array(limits)
        tokens = np.full((len(prompts), int(most.max())), stops[0], np.int64)
        logprobs = np.zeros(tokens.shape, np.float32)
        rows, done = np.arange(len(prompts)), 0  # that have not ended, and the tokens that they have got
        while steps := self._steps(prompts, most, rows, done):
            if len(rows):
                going = [np.concatenate([prompts[i], tokens[i, :done]]) for i in rows.tolist()]
                numbers = None if draws is None else [draws[i][done : done + steps] for i in rows.tolist()]
                left = np.minimum(most[rows] - done, steps)
                added, values = self._batch(going, left, numbers, temperature, top_p, stops)
                tokens[rows, done : done + added.shape[1]] = added
                logprobs[rows, done : done + added.shape[1]] = values
            else:  # other ranks have rows, and their forwards are this rank's too
                self._batch([np.array(stops[:1])], np.ones(1, int), None, temperature, top_p, stops)
            done += steps
            rows = rows[~np.isin(tokens[rows, :done], stops).any(axis=1) & (done < most[rows])]
        return tokens, logprobs

    def _steps(self, prompts: Sequence[np.ndarray], most: np.ndarray, rows: np.ndarray, done: int) -> int:
        """Return by how many tokens the ``rows`` may be continued as one batch, 0 once no rank has any.
        ``done``: the number of tokens that they have been continued by."""
        sizes = np.array([len(prompts[i]) + done for i in rows.tolist()] or [0])
        left = np.array([most[i] - done for i in rows] or [0])
        reached = reach(causal_lm(self.policy.model).config)
        if reached is None:
            return int(left.max())
        extents = (int(sizes.max()), int(left.max()), int((sizes + left).max()))
        # a rank that has ended runs the forwards of the others
        ranks = np.array(gather_objects(extents) if self.synced else [extents]).max(axis=0)
        size, longest, end = ranks.tolist()
        return min(longest, max(reached, end) - size)

    def _batch(
        self,
        prompts: Sequence[np.ndarray],
        most: np.ndarray,
        draws: Sequence[np.ndarray] | None,
        temperature: float,
        top_p: float,
        stops: tuple[int, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what ``decode`` does for rows that are continued as one batch, from which those that have
        ended may leave. ``most``: [R], the limits."""
        ids, mask = (one.to(self.device) for one in left_padded(prompts, stops[0]))
        width = ids.shape[1]
        longest = int(most.max())
        numbers = None if draws is None else torch.from_numpy(np.stack(draws)).to(self.device)
        tokens = np.full((len(ids), longest), stops[0], np.int64)
        logprobs = np.zeros((len(ids), longest), np.float32)
        cache = selectable_cache(self.policy)
        rows = np.arange(len(ids))  # that have not ended
        with without_generation_defaults(self.policy):
            if cache is not None:
                self._read_once(ids, mask, cache, stops[0])
            while len(rows):
                done = ids.shape[1] - width
                steps: list[LogitsProcessor] = []
                if numbers is not None:
                    draw = InverseCdfProcessor(numbers[torch.from_numpy(rows)], width)
                    truncation = [TopP(top_p)] if top_p < 1 else []
                    steps = [TemperatureLogitsWarper(temperature), *truncation, draw]
                chosen = ChosenLogprobs(steps, self.policy.temperature, self.tick)
                ids = self.policy.generate(
                    ids,
                    mask,
                    GenerationConfig(
                        max_new_tokens=longest - done,
                        do_sample=False,
                        eos_token_id=list(stops),
                        pad_token_id=stops[0],
                    ),
                    LogitsProcessorList([chosen]),
                    self.synced,
                    **self._leaving(cache, torch.tensor(stops), torch.from_numpy(most[rows] + width)),
                )
                if self.synced:
                    pause_together(now=True)
                else:  # one rank alone, or a thread of it beside the training
                    pause()
                added = ids[:, width + done :].cpu().numpy()
                now = done + added.shape[1]
                tokens[rows, done:now] = added
                logprobs[rows, done:now] = chosen.values()[:, : added.shape[1]]
                going = ~np.isin(added, stops).any(axis=1) & (now < most[rows])
                if self.synced or cache is None or not going.any():
                    break
                kept = torch.from_numpy(np.flatnonzero(going)).to(self.device)
                cache.batch_select_indices(kept)
                mask = torch.cat([mask, mask.new_ones(added.shape)], dim=1)[kept]
                ids, rows = ids[kept], rows[going]
        return tokens, logprobs

    def _read_once(self, ids: Tensor, mask: Tensor, cache: DynamicCache, pad: int) -> None:
        """Compute the keys and values of prompts that several rows have once, but for the last token. ``ids``
        and ``mask``: [R, P]. Does nothing where most rows have prompts of their own, on every rank."""
        distinct, places = torch.stack([ids, mask]).unique(dim=1, return_inverse=True)
        several = distinct.shape[1] <= len(ids) / 2 and ids.shape[1] > 1
        if not (any(gather_objects(several)) if self.synced else several):
            return
        once = GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=pad)
        if ids.shape[1] > 1:
            distinct_ids, distinct_mask = distinct[..., :-1]
            self.policy.generate(distinct_ids, distinct_mask, once, past_key_values=cache)
            cache.batch_select_indices(places)
        else:  # another rank's forward is this rank's too
            self.policy.generate(ids, mask, once)

    def _leaving(self, cache: DynamicCache | None, stops: Tensor, limits: Tensor) -> dict[str, Any]:
        """Return the arguments with which generate returns once many rows have ended, or all where none
        leaves early. ``limits``: [R], each row's most tokens, prompt and padding included."""
        share = 1.0 if self.synced or cache is None or len(limits) < FEWEST else ENDED
        ended = ManyEnded(stops.to(self.device), limits.to(self.device), share)
        criteria = StoppingCriteriaList([ended])
        return {"stopping_criteria": criteria} | ({} if cache is None else {"past_key_values": cache})


def selectable_cache(policy: Policy) -> DynamicCache | None:
    """Return an empty cache from which rows can be taken; None for a model that has another kind (Mamba)."""
    model = causal_lm(policy.model)
    supports = cast(Callable[[], bool], model._supports_default_dynamic_cache)
    if not supports():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):
    """A layer of a cache with room for tokens to come. Without it each token would copy the keys and values
    of all before it, which took two fifths of sampling's time on a CPU."""

    ROOM = 1.5  # of what is there when there is no more

    def __init__(self) -> None:
        super().__init__()
        self._rooms: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, new, D]; return all of them [B, H, S, D], views of larger tensors."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        self.keys = self._appended("keys", self.keys, before, key_states)
        self.values = self._appended("values", self.values, before, value_states)
        return self.keys, self.values

    def _appended(self, name: str, old: Tensor | None, before: int, new: Tensor) -> Tensor:
        assert old is not None
        room, after = self._rooms.get(name), before + new.shape[-2]
        # rows that were picked out lie elsewhere
        if room is None or room.data_ptr() != old.data_ptr() or room.shape[-2] < after:
            room = new.new_empty(*new.shape[:-2], max(after, int(self.ROOM * before)), new.shape[-1])
            if before:
                room[..., :before, :] = old
            self._rooms[name] = room
        room[..., before:after, :] = new
        return room[..., :after, :]


class ManyEnded(StoppingCriteria):
    """Ends generate for all rows as soon as ``share`` of them have drawn a stop token or reached their
    limit."""

    def __init__(self, stops: Tensor, limits: Tensor, share: float = ENDED) -> None:
        self.stops, self.limits, self.share = stops, limits, share
        self.ended = torch.zeros(len(limits), dtype=torch.bool, device=limits.device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        """Return [R] bool, all alike."""
        self.ended |= torch.isin(input_ids[:, -1], self.stops) | (input_ids.shape[1] >= self.limits)
        enough = self.ended.sum() >= self.share * len(self.ended)
        return (enough | stopping()).expand(len(self.ended))


def left_padded(rows: Sequence[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """Return ([B, P] int64 token ids, [B, P] int64 mask) with every row at the right edge, where generation
    continues. Transformers counts positions from the mask, so a row's positions begin at its own first
    token."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    left = partial(pad_sequence, batch_first=True, padding_side="left")
    return left(ids, padding_value=pad), left([torch.ones_like(row) for row in ids])


def cumulated(probabilities: Tensor) -> Tensor:
    """Return the sums of ``probabilities`` [B, V] up to each token. With deterministic=true they are sums of
    whole numbers of 2^-52: of floats torch has none on a GPU whose order of additions does not vary."""
    if not torch.are_deterministic_algorithms_enabled():
        return probabilities.cumsum(-1)
    return (probabilities.double() * 2**52).long().cumsum(-1).double() / 2**52


class TopP(LogitsProcessor):
    """Leaves the most likely tokens, with the probability ``top_p`` together. The same as transformers'
    TopPLogitsWarper, whose sums are not deterministic on a GPU."""

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Map [B, V] scores to [B, V] scores that are -inf at the other tokens."""
        ordered, tokens = scores.sort(descending=False)
        left_out = cumulated(ordered.softmax(-1)) <= 1 - self.top_p
        left_out[..., -1] = False
        return scores.masked_fill(left_out.scatter(1, tokens, left_out), -torch.inf)


class InverseCdfProcessor(LogitsProcessor):
    """Draws each row's next token by inverting its cumulative distribution at the row's own random number,
    and leaves only that token possible. (generate's own sampling draws from the global generator, so that a
    row's tokens would depend on its neighbours.)"""

    def __init__(self, uniforms: Tensor, width: int) -> None:
        """``uniforms``: [B, max_tokens] in [0, 1). ``width``: the prompts' padded length."""
        self.uniforms, self.width = uniforms, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Map [B, V] scores to [B, V] scores that are 0 at the token drawn and -inf elsewhere."""
        # float64: the error of a cumulative sum in float32 is as large as the probability of an unlikely
        # token, and on a GPU the sum need not even be monotonic.
        cumulative = cumulated(scores.softmax(-1, dtype=torch.float64))
        step = input_ids.shape[1] - self.width
        token = torch.searchsorted(cumulative, self.uniforms[:, step, None] * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


class ChosenLogprobs(LogitsProcessor):
    """Applies other processors, and records the log-probability of each generated token under the model's
    unprocessed logits, divided by ``temperature``."""

    def __init__(
        self,
        steps: Sequence[LogitsProcessor],
        temperature: float = 1.0,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        # One processor that calls the others: generate asks Python for the signature of each, at each token.
        self.steps, self.temperature, self.tick = steps, temperature, tick
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Map [B, V] logits to the last step's [B, V] scores, of which generate takes the highest."""
        self.tick()
        logits = scores if self.temperature == 1.0 else scores.float() / self.temperature
        for step in self.steps:
            scores = step(input_ids, scores)
        token = scores.argmax(-1, keepdim=True)
        self._chosen.append(logits.log_softmax(-1, dtype=torch.float32).gather(-1, token))
        return scores

    def values(self) -> np.ndarray:
        """Return the [B, steps] float32 log-probabilities, nats."""
        return torch.cat(self._chosen, dim=-1).cpu().numpy()


@contextmanager
def without_generation_defaults(policy: Policy) -> Iterator[None]:
    """Remove the generation settings that the policy was published with while the context lasts. Otherwise
    transformers silently fills every unset field from them (a repetition penalty, a top-k)."""
    model = causal_lm(policy.model)
    published = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = published
