"""Answers that end where a string of ``sampler.stop`` is complete.

The engines end at token ids alone, and the same text can be spelt by many tokens. So an answer is drawn in
parts, each as long as what there is already, and is cut behind the first token with which its text holds one
of the strings. That token is the policy's and stays, with all of its text: what is trained on, scored and
shown is what was drawn. No end token is added to it (``Completion.stopped``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import ConfigError
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import gather_objects
from rollouts.samplers import Continuation, Sample, SamplingSettings, rows_of

FIRST = 128
"""Tokens of the first part."""
Draw = Callable[[list[Continuation], SamplingSettings, int, tuple[int, ...]], list[Sample]]
"""Function (rows, settings, seed, stop token ids) -> the rows' samples, in order."""


@dataclass
class _Answer:
    """One answer, as far as it has been drawn."""

    row: Continuation
    sample: Sample = field(default_factory=lambda: Sample((), False))
    parts: int = 0
    open: bool = True

    @property
    def room(self) -> int:
        return self.row.max_tokens - len(self.sample.token_ids)

    def next(self, longest: int | None) -> Continuation:
        """Return the row that draws the next part. The first is drawn as if there were no strings."""
        drawn = self.sample.token_ids
        key = self.row.key if self.parts == 0 else f"{self.row.key}/{self.parts}"
        ids = np.concatenate([self.row.ids, np.array(drawn, np.int32)])
        return Continuation(key, self.row.index, ids, min(self.room, longest or max(FIRST, len(drawn))))


class StopStrings:
    """Draws answers in parts, and ends them."""

    def __init__(self, strings: list[str], renderer: Renderer) -> None:
        """Raises ConfigError for a string that no text can hold."""
        for text in strings:
            whole = "\ufffd" not in text
            if not whole:
                raise ConfigError("sampler.stop", text, "has U+FFFD, which stands for a part of a character")
        self.strings, self.renderer = strings, renderer
        added = renderer.tokenizer.get_added_vocab()
        tokens = [added[text] for text in strings if text in added]
        self.ends = tuple(dict.fromkeys((*renderer.stop_token_ids, *tokens)))
        self.longest = 2**31 if len(tokens) == len(strings) else None
        """most tokens of a part: any number where each string is a token of its own, at which engines end"""

    def sample(
        self, draw: Draw, prompts: list[Prompt], n: int, settings: SamplingSettings, seed: int, synced: bool
    ) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt. ``synced``: every rank samples a share, and calls ``draw`` as
        often as the others. Raises DataError for a prompt that cannot be rendered."""
        every = [_Answer(row) for row in rows_of(self.renderer, prompts, n, settings)]
        while True:
            live = [one for one in every if one.open]
            if not (any(gather_objects(bool(live))) if synced else live):
                break
            drawn = draw([one.next(self.longest) for one in live], settings, seed, self.ends)
            for one, part in zip(live, drawn, strict=True):
                self._take(one, part)
        samples = [one.sample for one in every]
        return [samples[i : i + n] for i in range(0, len(samples), n)]

    def _take(self, one: _Answer, part: Sample) -> None:
        before, one.parts = len(one.sample.token_ids), one.parts + 1
        ids, logprobs = one.sample.token_ids + part.token_ids, one.sample.logprobs + part.logprobs
        stop_string = self._found(ids)
        if stop_string:
            size = bisect_left(range(before + 1, len(ids)), True, key=lambda n: bool(self._found(ids[:n])))
            ids = ids[: before + 1 + size]
            stop_string = self._found(ids)
        ended = ids[-1] in self.renderer.stop_token_ids
        one.sample = Sample(
            ids, bool(stop_string) or ended, logprobs[: len(ids)], stopped="" if ended else stop_string
        )
        one.open = not one.sample.finished and one.room > 0

    def _found(self, ids: tuple[int, ...]) -> str:
        """Return the string that comes first in the text of these tokens; "" if it holds none."""
        text = str(
            self.renderer.tokenizer.decode(
                np.array(ids, np.int64), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        return min((s for s in self.strings if s in text), key=text.index, default="")


def stop_strings_of(config: Config, renderer: Renderer) -> StopStrings | None:
    """Return what ends answers at ``sampler.stop``; None for answers that only an end token ends. Raises
    ConfigError."""
    return StopStrings(config.sampler.stop, renderer) if config.sampler.stop else None


def facts_of(config: Config) -> dict[str, Any]:
    """Return the stop strings, on which samples depend, as plain data; {} without any."""
    return {"stop": config.sampler.stop} if config.sampler.stop else {}
