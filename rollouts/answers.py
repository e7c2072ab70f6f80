"""The answers that an evaluation draws to its prompts, where each rank draws a share, and a cache of answers
on disk. Answers are stored as they are drawn, so an evaluation that was killed continues with the prompts
that are left. Another evaluation of the same weights with the same sampling draws nothing again, so runs that
start from the same weights measure those once.

``<cache_dir>/answers/<key>.jsonl`` has one line for each prompt, with its id and its samples. The key is a
digest of everything that the samples depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from common.files import open_own
from data.types import Prompt
from models.distributed import World, gather_objects, on_main
from reports.provenance import versions
from rollouts.samplers import EmbeddedSampler, Sample, SamplingSettings


class Answers:
    """``n`` answers to each of ``prompts``, always with the same seed. Every rank has an instance and makes
    the same calls."""

    def __init__(
        self,
        sampler: EmbeddedSampler,
        prompts: list[Prompt],
        n: int,
        settings: SamplingSettings,
        world: World,
        seed: int = 0,
    ) -> None:
        self.sampler, self.prompts, self.n = sampler, prompts, n
        self.settings, self.world, self.seed = settings, world, seed
        self.kept: AnswerCache | None = None

    @property
    def share(self) -> list[Prompt]:
        """This rank's prompts."""
        return self.prompts[self.world.rank :: self.world.size]

    def use_cache(self, cache_dir: Path, parts: Mapping[str, Any]) -> None:
        """Make calls with ``initial`` read the initial weights' answers from ``cache_dir`` and store them
        there. ``parts``: what answers depend on besides the sampling."""
        drawn = {"settings": asdict(self.settings), "n": self.n, "seed": self.seed}
        self.kept = AnswerCache(cache_dir, {**parts, **drawn})

    def mine(self, initial: bool) -> list[list[Sample]]:
        """Return the answers to this rank's share. ``initial``: whether the policy has its initial
        weights."""
        kept = self.kept if initial else None
        if kept is None:
            return self._drawn()
        known = self._known(kept)
        return [known[prompt.id] for prompt in self.share]

    def everywhere(self, initial: bool) -> dict[str, list[Sample]]:
        """Return prompt id -> answers for all prompts, on every rank."""
        if initial and self.kept is not None:
            return self._known(self.kept)
        return self._gathered()

    def _known(self, kept: AnswerCache) -> dict[str, list[Sample]]:
        """Return the cached answers, after drawing them if any is missing."""
        known: dict[str, list[Sample]] = on_main(kept.read)
        if not all(prompt.id in known for prompt in self.prompts):
            known |= self._gathered()
            on_main(lambda: kept.add(known))
        return known

    def _gathered(self) -> dict[str, list[Sample]]:
        parts = gather_objects({p.id: samples for p, samples in zip(self.share, self._drawn(), strict=True)})
        return {name: samples for part in parts for name, samples in part.items()}

    def _drawn(self) -> list[list[Sample]]:
        return self.sampler.sample(self.share, self.n, self.settings, self.seed)


@cache
def _code() -> str:
    """Return a digest of the code that determines the samples, committed or not."""
    root = Path(__file__).parents[1]
    files = (path for part in ("models", "rollouts") for path in sorted((root / part).rglob("*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class AnswerCache:
    """The answers to one request by one model, keyed by prompt id. One process adds to them."""

    def __init__(self, cache_dir: Path, parts: Mapping[str, Any]) -> None:
        """``parts``: everything that a sample depends on besides its prompt, this code and the libraries'
        versions, as plain data."""
        every = {"parts": parts, "code": _code(), "versions": versions()}
        key = hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_dir / "answers" / f"{key}.jsonl"

    def read(self) -> dict[str, list[Sample]]:
        """Return prompt id -> samples. A line that is not as it was written is left out, such as the last
        line of a process that was killed, or one on a damaged disk."""
        samples: dict[str, list[Sample]] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.is_file() else []
        for line in lines:
            try:
                raw = json.loads(line)
                if not isinstance(raw, dict) or raw.pop("sha256") != _digest(raw):
                    continue
                samples[raw["prompt_id"]] = [_sample(one) for one in raw["samples"]]
            except (ValueError, KeyError, TypeError):
                continue
        return samples

    def add(self, answers: Mapping[str, list[Sample]]) -> None:
        """Append the answers and sync them to the disk. If they cannot be written, a message says so, and
        they are drawn again another time."""
        lines = [
            {"prompt_id": name, "samples": [asdict(sample) for sample in samples]}
            for name, samples in answers.items()
        ]
        try:
            self._append([line | {"sha256": _digest(line)} for line in lines])
        except OSError as error:
            print(f"{self.path}: {error}; these answers are not kept", flush=True)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b") as stream:
            if stream.seek(0, os.SEEK_END) and stream.seek(-1, os.SEEK_END) and stream.read() != b"\n":
                stream.write(b"\n")  # ends a line that a killed process left unfinished
            stream.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            stream.flush()
            os.fsync(stream.fileno())


def _sample(one: Mapping[str, Any]) -> Sample:
    """Rebuild a sample from its ``asdict`` in JSON."""
    return Sample(tuple(one["token_ids"]), one["finished"], tuple(one["logprobs"]), one["stopped"])


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
