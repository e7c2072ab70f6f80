"""Check a run's rounds: every file against its recorded checksum, and the samples against the weights that
generated them where ``rounds.keep_weights`` kept these.

    python -m jobs.audit runs/NAME
    python -m jobs.audit runs/NAME --rounds 0,7 --prompts 64

Transformers alone loads the weights and scores the samples; no code of the trainer or sampler is involved.
The exit code is 1 if a file differs from what was written, or if the weights did not generate the samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import ConfigError, DataError, StoppedError, require
from common.options import options_of
from config.cli import guarded
from config.load import load_run
from config.schema import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from data.chat import Renderer
    from rollouts.ledger import Line, RoundFolder

TOKENS = 8192
"""Tokens, padding included, that are scored at once, approximately."""
_ROUND = re.compile(r"[0-9]{3}|[1-9][0-9]{3,}")


@dataclass(frozen=True)
class ScoredSample:
    """A sample: the tokens of its prompt, its own tokens, and the log-probabilities the sampler reported."""

    prompt_ids: np.ndarray
    """[P]"""
    token_ids: tuple[int, ...]
    """[T]"""
    said: np.ndarray
    """[T] log-probabilities that the sampler reported, nats; nan for a token that the policy did not write"""
    temperature: float


@dataclass(frozen=True)
class Audit:
    """The result of checking one round."""

    index: int
    faults: tuple[str, ...]
    """Messages about files that differ from what was recorded; each names the file and what to do."""
    tokens: int = 0
    """Number of sampled tokens that were scored again; 0 where no weights were kept."""
    largest: float = math.nan
    """Largest absolute difference of a token's log-probability, nats; nan if a weight is nan."""
    mean: float = math.nan
    """Mean absolute difference of a token's log-probability, nats."""


def rounds_of(run: Path) -> tuple[dict[int, Path], list[Path]]:
    """Return (the folders of a run's rounds by index, in order; the other entries beside them).

    Raises ConfigError where there is no round."""
    folders: dict[int, Path] = {}
    others: list[Path] = []
    for path in sorted((run / "rounds").glob("[!.]*")):
        if path.is_dir() and _ROUND.fullmatch(path.name):
            folders[int(path.name)] = path
        else:
            others.append(path)
    require(bool(folders), "run", run, "has no rounds: it was trained offline, or stopped before the first")
    return dict(sorted(folders.items())), others


def audit(
    run: Path, config: Config, chosen: Sequence[int] | None = None, prompts: int | None = None
) -> Iterator[Audit]:
    """Check the rounds of a run in order, or only the ``chosen`` ones, and yield one result per round.

    ``prompts``: at most so many prompts of each samples file are scored. Raises ConfigError."""
    require(prompts is None or prompts >= 1, "prompts", prompts, "must be at least 1")
    folders, _ = rounds_of(run)
    missing = sorted(set(chosen or ()) - set(folders))
    require(not missing, "rounds", missing, f"there are rounds {min(folders)} to {max(folders)}")
    from data.chat import make_renderer
    from models.pretrained import load_tokenizer
    from rollouts.ledger import RoundFolder

    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    for index in folders if chosen is None else chosen:
        yield _of_round(RoundFolder(folders[index]), index, config, renderer, prompts)


def _of_round(
    folder: RoundFolder, index: int, config: Config, renderer: Renderer, prompts: int | None
) -> Audit:
    faults: list[str] = []
    stages: list[str] = []
    rows: list[ScoredSample] = []
    model = None
    with _noted(faults):
        stages = _stages(folder)
    for stage in stages:
        with _noted(faults):
            rows += [row for line in _checked(folder, stage)[:prompts] for row in _rows(line, renderer)]
    if rows and folder.weights.is_dir():
        with _noted(faults):
            model = _load(folder.weights, config)
    if model is None:
        return Audit(index, tuple(faults))
    differences = np.abs(np.concatenate(list(_differences(model, rows))))
    if not differences.size:
        return Audit(index, tuple(faults))
    largest, mean = float(differences.max()), float(differences.mean())
    return Audit(index, tuple(faults), differences.size, largest, mean)


@contextmanager
def _noted(faults: list[str]) -> Iterator[None]:
    """Append a DataError raised inside the context to ``faults``, so that the audit continues."""
    try:
        yield
    except DataError as error:
        faults.append(str(error))


def _stages(folder: RoundFolder) -> list[str]:
    """Return the stages that the round's record lists.

    Raises DataError if it lists none although files lie beside it."""
    stages = list(folder.record.get("stages", {}))
    if not stages and any(folder.path.glob("*.jsonl*")):
        raise folder.not_as_written(folder.path / "round.json", "it says nothing of the files beside it")
    return stages


def _checked(folder: RoundFolder, stage: str) -> list[Line]:
    """Return the lines of a samples file; [] for any other file, which is only compared with its checksum.

    Raises DataError."""
    if stage.startswith("samples"):
        return folder.read(stage)
    if not folder.done(stage):
        raise folder.not_as_written(folder.file(stage))
    return []


def _rows(line: Line, renderer: Renderer) -> Iterator[ScoredSample]:
    from rollouts.ledger import sampled_of

    sampled = sampled_of(line)
    ids = renderer.prompt_ids(sampled.prompt)
    for one in sampled.completions:
        if one.token_ids and one.behavior_logprobs is not None:
            said = np.array(one.behavior_logprobs)
            yield ScoredSample(ids, one.token_ids, said, one.behavior_temperature)


def _load(folder: Path, config: Config) -> PreTrainedModel:
    """Load the weights that were kept. Raises DataError for files that are missing or damaged."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from models.checkpoint import FAILURES, FOREIGN
    from models.checkpoint_reading import reason

    at = folder
    try:
        for at in sorted(folder.glob("*.safetensors")):
            safe_open(at, "pt")  # transformers would not say which file is damaged
        at = folder
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, config.model.dtype),
            use_safetensors=True,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (*FAILURES, *FOREIGN, StrictDataclassError) as error:
        raise DataError(
            f"{at} is not as it was written ({reason(error)}); put it back from a copy, or delete {folder}: "
            "then the round's other files are checked alone"
        ) from error
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    return model.eval()


def _differences(model: PreTrainedModel, rows: list[ScoredSample]) -> Iterator[np.ndarray]:
    """Yield for each row the sampler's log-probabilities minus those of ``model``, nats.

    Only the tokens that the policy wrote are compared."""
    import torch

    rows = sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.token_ids), reverse=True)
    longest = len(rows[0].prompt_ids) + len(rows[0].token_ids)
    at_once = max(1, TOKENS // longest)
    for first in range(0, len(rows), at_once):
        batch = rows[first : first + at_once]
        whole = [torch.tensor([*row.prompt_ids.tolist(), *row.token_ids]) for row in batch]
        ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in whole], batch_first=True)
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
        for row, line in zip(batch, logits, strict=True):
            begin = len(row.prompt_ids) - 1
            own = line[begin : begin + len(row.token_ids)].float() / row.temperature
            picked = own.log_softmax(-1).gather(-1, torch.tensor(row.token_ids, device=own.device)[:, None])
            yield (row.said - picked[:, 0].cpu().numpy())[~np.isnan(row.said)]


def report(round_audit: Audit, dtype: str) -> tuple[str, bool]:
    """Return (a line about a round, whether the round has no fault).

    ``dtype``: the coarser of the sampler's and the model's dtypes; it sets the tolerance for rounding."""
    from rollouts.probe import NOISE

    largest, mean = NOISE[dtype]
    faults = list(round_audit.faults)
    if round_audit.tokens and not (
        round_audit.largest <= largest and round_audit.mean <= mean
    ):  # nan fails both comparisons
        faults.append(f"these weights did not write these samples (rounding explains {mean:g} nats)")
    scored = "nothing to score: no weights were kept, or they or the samples are not whole"
    if round_audit.tokens:
        scored = (
            f"{round_audit.tokens:,} tokens scored, differences {round_audit.mean:.1e} nats in the mean, "
            f"{round_audit.largest:.1e} at most"
        )
    return "; ".join([f"round {round_audit.index}: {scored}", *faults]), not faults


def main(words: Sequence[str] | None = None) -> None:
    parser = options_of("python -m jobs.audit", __doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--rounds", help="these alone, as in 0,7")
    parser.add_argument("--prompts", type=int, help="at most so many of a sampling's prompts are scored")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with the run's model, if it has any",
    )
    given = parser.parse_args(words)

    def work() -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # transformers draws a bar for the weights of every round
        config, chosen, well = load_run(given.run, given.trust_remote_code), _numbers(given.rounds), True
        for other in rounds_of(given.run)[1] if chosen is None else ():
            print(f"{other} is no round's folder; move it out of {other.parent}", flush=True)
            well = False
        for round_audit in audit(given.run, config, chosen, given.prompts):
            line, sound = report(round_audit, _coarser(config))
            print(line, flush=True)
            well &= sound
        if not well:
            raise StoppedError(f"{given.run}: its rounds are not all what they say")

    guarded(work)


def _numbers(given: str | None) -> list[int] | None:
    try:
        return None if given is None else [int(number) for number in given.split(",")]
    except ValueError:
        raise ConfigError("rounds", given, "must be numbers with commas between them, as in 0,7") from None


def _coarser(config: Config) -> str:
    dtypes = ("float32", "float16", "bfloat16")
    return max(config.model.dtype, config.sampler.dtype or config.model.dtype, key=dtypes.index)


if __name__ == "__main__":
    main()
