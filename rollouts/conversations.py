"""Conversations of the policy with an environment, generated turn by turn for all open conversations in one
batch.

The policy's tokens are kept as they were sampled, and each of its next turns continues from all tokens before
it. The environment's tokens lie between them and are marked as not the policy's (``loss_mask``). Random
numbers depend on (seed, prompt, sample, turn), so that the same weights play the same games whatever else is
sampled with them, and also in a round that was killed.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, require
from common.imports import import_function
from common.worker_process import WorkerError
from config.schema import Config
from config.schema_environment import EnvironmentConfig
from data.chat import Renderer
from data.turns import AddedTurns
from data.types import Prompt, Turn
from models.distributed import gather_objects
from rollouts.environments.process import Call, EnvironmentProcess
from rollouts.samplers import Continuation, Draw, Sample, SamplingSettings, rows_of
from rollouts.stop_strings import StopStrings


@dataclass
class _Conversation:
    """One conversation, as far as it has come."""

    prompt: Prompt
    row: Continuation
    """the prompt's tokens, and how many may follow them"""
    turns: list[Turn] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    taken: int = 0
    """number of turns that the policy has had"""
    begin: int = 0
    """position in ``tokens`` at which the message of the policy's last turn begins"""
    open: bool = True
    finished: bool = False

    @property
    def room(self) -> int:
        return self.row.max_tokens - len(self.tokens)

    def take(self, sample: Sample) -> None:
        """Append the policy's next turn."""
        self.tokens += sample.token_ids
        self.own += [True] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.taken += 1

    def add(self, ids: list[int], known: bool) -> None:
        """Append tokens of the environment. ``known``: whether the sampler reports log-probabilities."""
        self.tokens += ids
        self.own += [False] * len(ids)
        self.logprobs += [math.nan] * len(ids) if known else []

    def sample(self) -> Sample:
        mask = None if all(self.own) else tuple(self.own)
        turns = tuple(self.turns) if len(self.turns) > 1 else ()
        return Sample(tuple(self.tokens), self.finished, tuple(self.logprobs), mask, turns)


class Conversations:
    """A ``rollouts.samplers.Player`` that plays the environment named by the settings."""

    def __init__(self, config: EnvironmentConfig, renderer: Renderer, log_dir: Path) -> None:
        """Raises ConfigError for a chat template without such turns, stops that are not single tokens, or a
        function that cannot be imported."""
        self.config, self.renderer = config, renderer
        self.added: dict[str, AddedTurns] = {config.role: AddedTurns(renderer, config.role)}
        self.stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *self._markers())))
        self.process = EnvironmentProcess(config, log_dir)

    def _markers(self) -> list[int]:
        token_ids = [self.renderer.encode_inside([text])[0] if text else [] for text in self.config.stops]
        for text, ids in zip(self.config.stops, token_ids, strict=True):
            require(
                len(ids) == 1,
                "environment.stops",
                text,
                f"is {len(ids)} tokens of the model's tokenizer: only single tokens can interrupt it",
            )
        return [ids[0] for ids in token_ids]

    def close(self) -> None:
        """End the environment's processes."""
        self.process.close()

    def play(
        self, draw: Draw, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int, synced: bool
    ) -> list[list[Sample]]:
        """Return ``n`` conversations that start from each prompt, with at most ``settings.max_tokens`` tokens
        after it. Raises DataError for a prompt that cannot be rendered, and WorkerError."""
        rows = rows_of(self.renderer, prompts, n, settings)
        every = [_Conversation(prompts[i // n], row) for i, row in enumerate(rows)]
        while True:
            live = [one for one in every if one.open]
            if not (any(gather_objects(bool(live))) if synced else live):
                break
            drawn = draw([self._row(one) for one in live], settings, seed, self.stops)
            for one, sample in zip(live, drawn, strict=True):
                self._take(one, sample)
            self._answer([one for one in live if one.open], seed)
        samples = [one.sample() for one in every]
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def _row(self, one: _Conversation) -> Continuation:
        """Return the row that is drawn next in a conversation. The first turn is drawn exactly as without an
        environment."""
        first, limit = one.row, self.config.max_turn_tokens
        key = first.key if one.taken == 0 else f"{first.key}/{one.taken}"
        ids = np.concatenate([first.ids, np.array(one.tokens, np.int32)])
        return Continuation(key, first.index, ids, one.room if limit is None else min(one.room, limit))

    def _take(self, one: _Conversation, sample: Sample) -> None:
        one.take(sample)
        inside = self.config.role == "assistant"
        if inside and one.turns:
            one.turns.pop()
        one.turns.append(Turn("assistant", self.renderer.said(one.tokens[one.begin :])))
        ended = bool(sample.token_ids) and sample.token_ids[-1] in self.renderer.stop_token_ids
        one.finished = ended
        last = one.taken == self.config.max_turns or not sample.finished
        one.open = not (last or (inside and ended))

    def _answer(self, asked: list[_Conversation], seed: int) -> None:
        """Ask the environment for the next turn of each conversation, and append it."""
        calls = [self._call(one, seed) for one in asked]
        for one, answer in zip(asked, self.process.answers(calls) if calls else [], strict=True):
            if answer is None:
                one.open = False
            else:
                self._add(one, Turn(answer["role"], answer["content"]))

    def _call(self, one: _Conversation, seed: int) -> Call:
        own = hashlib.blake2b(f"{seed}/{one.prompt.id}/environment".encode(), digest_size=8).digest()
        return {
            "conversation": [turn.message for turn in (*one.prompt.turns, *one.turns)],
            "reference": one.prompt.reference_answer,
            "prompt_id": one.prompt.id,
            "seed": int.from_bytes(own) >> 1,
            "turn": one.taken,
        }

    def _add(self, one: _Conversation, turn: Turn) -> None:
        """Append the environment's turn. A conversation that has no room for this turn and one more token is
        cut."""
        if turn.role not in self.added:
            try:
                self.added[turn.role] = AddedTurns(self.renderer, turn.role)
            except ConfigError as error:
                raise WorkerError(f"environment.path={self.config.path}: {error}") from error
        ids = self.added[turn.role].ids(turn.content, closed=one.finished)
        one.finished = False
        if one.room <= len(ids):
            one.open = False
            return
        one.add(ids, known=len(one.logprobs) == len(one.tokens))
        if turn.role != "assistant":
            one.turns.append(turn)
            one.begin = len(one.tokens)


def make_player(config: Config, renderer: Renderer, log_dir: Path) -> Conversations | StopStrings | None:
    """Return what answers the policy, or ends its answers at ``sampler.stop``; None for answers that only an
    end token ends. Raises ConfigError."""
    if config.environment.plays:
        return Conversations(config.environment, renderer, log_dir)
    return StopStrings(config.sampler.stop, renderer) if config.sampler.stop else None


def facts_of(config: Config) -> dict[str, Any]:
    """Return the settings of a player, on which samples depend, as plain data; {} without one."""
    if config.environment.plays:
        return {"environment": asdict(config.environment)}
    return {"stop": config.sampler.stop} if config.sampler.stop else {}


def source_digest(config: Config) -> dict[str, str]:
    """Return a digest of the file with the environment's code, for the keys of caches that outlive a run; {}
    without an environment. Raises ConfigError."""
    if not config.environment.plays:
        return {}
    function = import_function("environment.path", str(config.environment.path))
    file = inspect.getsourcefile(function)
    content = b"" if file is None else Path(file).read_bytes()
    return {"environment_code": hashlib.sha256(content).hexdigest()}
