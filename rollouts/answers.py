"""Answers of a model to many prompts, for rounds, evaluations and sample.py, and their cache on disk.

Answers are kept as they are drawn, so a program that was killed continues with the prompts that are left. The
same model is not asked again in the same way, so runs that start from the same weights measure those once.

``<cache_dir>/answers/<key>.jsonl`` has one line for each prompt, with its key and its samples. The file's key
is a digest of everything else that the samples depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common.files import open_own
from common.progress import progress
from config.schema import Config
from data.chat import Renderer
from data.types import Prompt
from models.distributed import World, on_main
from models.fingerprint import architecture_digest
from reports.provenance import versions
from rollouts.samplers import Sample, Sampler, SamplingSettings, make_sampler
from rollouts.stop_strings import facts_of
from rollouts.weights import weights_digest


@dataclass(frozen=True)
class Request:
    """A request for ``n`` answers to every prompt, always with the same seed."""

    what: str
    """description that the progress bar shows"""
    n: int
    settings: SamplingSettings
    seed: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """What answers depend on besides the model and the prompt, as plain data."""
        return {"settings": asdict(self.settings), "n": self.n, "seed": self.seed}


def prompt_key(prompt: Prompt) -> str:
    """Return the identity of a prompt with all that a sampler gets of it: turns, tools and reference."""
    if prompt.reference_answer is None:
        return prompt.id
    reference = hashlib.sha256(prompt.reference_answer.encode(errors="surrogatepass"))
    return f"{prompt.id}-{reference.hexdigest()[:16]}"


def draw(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    request: Request,
    kept: AnswerCache | None = None,
    in_parts: bool = False,
    **bar_options: Any,
) -> list[list[Sample]]:
    """Return the answers to each prompt. Those in ``kept`` are not drawn again, and new ones are added to it.
    Called on rank 0, inside ``sampler.ranks.on_main``. ``in_parts``: keep some (``Sampler.part``) while
    others are left to draw. ``bar_options``: those of ``common.progress.progress``. Raises DataError,
    WorkerError."""
    every = {} if kept is None else kept.read()
    left = list({key: prompt for prompt in prompts if (key := prompt_key(prompt)) not in every}.values())
    size = sampler.part(len(left), request.n) if in_parts else max(1, len(left))
    done = len(prompts) - len(left)
    with progress(len(prompts), request.what, unit="prompt", done=done, **bar_options) as bar:
        for first in range(0, len(left), size):
            part = left[first : first + size]
            drawn = sampler.sample(part, request.n, request.settings, request.seed)
            new = {prompt_key(prompt): samples for prompt, samples in zip(part, drawn, strict=True)}
            if kept is not None:
                kept.add(new)
            every |= new
            bar.update(len(part))
    return [every[prompt_key(prompt)] for prompt in prompts]


def generate_answers(
    config: Config,
    renderer: Renderer,
    prompts: list[Prompt],
    requests: list[Request],
    world: World,
    log_dir: Path,
    name: str,
) -> list[list[list[Sample]]]:
    """Return [requests][prompts][n] answers of the settings' model, drawn with ``config.seed``. Every rank
    calls it and gets the same answers. If all are kept from before, no weights are loaded. ``name``: whose
    answers they are, for the progress bar.

    Raises WorkerError, and ConfigError for weights that cannot be obtained.
    """
    requests = [Request(f"{name}: {one.what}", one.n, one.settings, config.seed) for one in requests]
    kept: list[AnswerCache] = []  # on rank 0 alone

    def cached() -> list[list[list[Sample]]] | None:
        print(renderer.about_ends, flush=True)
        model = _facts_of_model(config, renderer)
        kept.extend(AnswerCache(Path(config.cache_dir), model | request.facts) for request in requests)
        answers = [of_request.answers(prompts) for of_request in kept]
        return [one for one in answers if one is not None] if None not in answers else None

    def drawn() -> list[list[list[Sample]]]:
        longest_first = sorted(prompts, key=lambda prompt: -len(renderer.prompt_ids(prompt)))
        keys, answers = [prompt_key(prompt) for prompt in longest_first], []
        for request, of_request in zip(requests, kept, strict=True):
            samples = draw(sampler, longest_first, request, of_request, in_parts=True)
            by_key = dict(zip(keys, samples, strict=True))
            answers.append([by_key[prompt_key(prompt)] for prompt in prompts])
        return answers

    answers: list[list[list[Sample]]] | None = on_main(cached)
    if answers is not None:
        return answers
    sampler = make_sampler(config, renderer, world, log_dir)
    try:
        sampler.load()
        answers = sampler.ranks.on_main(drawn)
    finally:
        sampler.close()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


def _facts_of_model(config: Config, renderer: Renderer) -> dict[str, Any]:
    """Return what answers depend on besides the prompt and the request, as plain data."""
    model, sampler = config.model, config.sampler
    return {
        "weights": weights_digest(config),
        "architecture": architecture_digest(model),
        "built": [model.from_config, model.quantization, asdict(model.peft) if model.use_peft else None],
        "text": [renderer.fingerprint, *renderer.stop_token_ids],
        "model": [model.dtype, model.attn_implementation, model.max_length, model.max_prompt_length],
        "sampler": [sampler.name, sampler.dtype, sampler.options],
        "logit_temperature": model.logit_temperature,
        **facts_of(config),
    }


class Answers:
    """The answers to an evaluation's prompts. Every rank has an instance and makes the same calls."""

    def __init__(self, sampler: Sampler, prompts: list[Prompt], request: Request) -> None:
        self.sampler, self.prompts, self.request = sampler, prompts, request
        self.kept: AnswerCache | None = None

    def use_cache(self, cache_dir: Path, parts: Mapping[str, Any]) -> None:
        """Make calls with ``initial`` read the initial weights' answers from ``cache_dir`` and store them
        there. ``parts``: what answers depend on besides the prompt and the request."""
        self.kept = AnswerCache(cache_dir, {**parts, **self.request.facts})

    def __call__(self, initial: bool) -> list[list[Sample]]:
        """Return the answers to each prompt, on every rank. ``initial``: whether the policy has its initial
        weights."""
        kept = self.kept if initial else None
        return self.sampler.ranks.on_main(
            lambda: draw(self.sampler, self.prompts, self.request, kept, shown=False)
        )


@cache
def _code() -> str:
    """Return a digest of the code that determines the samples, committed or not."""
    root = Path(__file__).parents[1]
    files = (path for part in ("models", "rollouts") for path in sorted((root / part).rglob("*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class AnswerCache:
    """The answers to one request by one model, by ``prompt_key``. One process adds to them."""

    def __init__(self, cache_dir: Path, parts: Mapping[str, Any]) -> None:
        """``parts``: everything that a sample depends on besides its prompt, this code and the libraries'
        versions, as plain data."""
        every = {"parts": parts, "code": _code(), "versions": versions()}
        key = hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_dir / "answers" / f"{key}.jsonl"

    def read(self) -> dict[str, list[Sample]]:
        """Return ``prompt_key`` -> samples. A line that is not as it was written is left out, such as the
        last line of a process that was killed, or one on a damaged disk."""
        samples: dict[str, list[Sample]] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.is_file() else []
        for line in lines:
            try:
                raw = json.loads(line)
                if not isinstance(raw, dict) or raw.pop("sha256") != _digest(raw):
                    continue
                samples[raw["prompt"]] = [
                    Sample(tuple(one["token_ids"]), one["finished"], tuple(one["logprobs"]), one["stopped"])
                    for one in raw["samples"]
                ]
            except (ValueError, KeyError, TypeError):
                continue
        return samples

    def answers(self, prompts: Sequence[Prompt]) -> list[list[Sample]] | None:
        """Return the samples of each prompt; None if any is missing."""
        samples, keys = self.read(), [prompt_key(prompt) for prompt in prompts]
        return [samples[key] for key in keys] if all(key in samples for key in keys) else None

    def add(self, answers: Mapping[str, list[Sample]]) -> None:
        """Append the answers and sync them to the disk. If they cannot be written, a message says so, and
        they are drawn again another time."""
        lines = [
            {"prompt": name, "samples": [asdict(sample) for sample in samples]}
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


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
