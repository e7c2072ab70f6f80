"""``kind=alpacaeval``, AlpacaEval 2 (Dubois et al. 2024), the instruction-following evaluation of the paper's
§5.1 and Tables 3 to 6.

It has three stages, each usable alone: the model answers the set's instructions (``outputs.json``), a judge
prefers its answer or the baseline's (``annotations.json``), and the judgements become a plain and a
length-controlled win rate. The alpaca_eval library does the judging and computes both rates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import require
from common.files import files_digest, write_whole
from config.schema_eval import EvalStage
from data.chat import Renderer
from data.types import Prompt, Turn
from evals import answers
from evals.alpaca_files import (
    Row,
    aligned,
    difficulty_path,
    judged,
    read_annotations,
    read_outputs,
    reference_path,
)
from evals.alpaca_judge import estimate, judge
from evals.alpaca_library import annotator_settings, length_controlled, win_rate
from evals.answers import check_answering, described
from evals.base import ROOT, Evaluation, Target, fingerprints
from evals.running import result_path
from models.distributed import World
from reports.metrics import plain
from reports.provenance import git_commit, versions
from rollouts.generate import Request, settings_of
from rollouts.rewards.endpoint import check_endpoint
from rollouts.verify import text_of

OUTPUTS, ANNOTATIONS, CACHE = "outputs.json", "annotations.json", "judged.json"
_NAMED = 3


def folder(target: Target, stage: EvalStage) -> Path:
    """Return the folder of the stages' files, which lies beside the result and has its name."""
    return result_path(target, stage).with_suffix("")


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError or DataError if the evaluation cannot be done.

    The reasons are: a file, the key or the annotator is missing, a file has the wrong contents,
    or the model cannot answer every instruction."""
    own = stage.alpacaeval
    difficulty_path(own.difficulty)
    if own.annotations is not None:
        read_annotations(Path(own.annotations))
        require(
            stage.limit is None,
            "limit",
            stage.limit,
            "chooses prompts to answer; alpacaeval.annotations is answered and judged",
        )
        return
    if own.model is not None:
        annotator_settings(own.annotator)
        require(
            own.api_key_env is None or bool(os.environ.get(own.api_key_env)),
            "alpacaeval.api_key_env",
            own.api_key_env,
            "is the environment variable of the judge's key, and is not set; set it, give off for an "
            "endpoint without a key, or "
            "alpacaeval.model=off to write the answers and judge them elsewhere",
        )
        key = os.environ.get(own.api_key_env or "", "").strip()
        check_endpoint("alpacaeval", own.base_url, own.api_key_env, key)
    reference = asked_of(target, stage)[0]
    if own.outputs is None:
        _renderer(target, reference)


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Make the answers, judgements and win rates, as far as the settings ask for them.

    With several ranks, all ranks answer; then rank 0 alone judges, and the others return an empty result.
    Raises StoppedError when the judge fails too often.
    """
    own, place = stage.alpacaeval, folder(target, stage)
    if own.annotations is not None:
        path = Path(own.annotations)
        return rated(
            read_annotations(path), stage, {"annotations": str(path)}, {"annotations": files_digest([path])}
        )
    reference, source = asked_of(target, stage)
    made = fingerprints_of(target, stage, reference)
    outputs = (
        read_outputs("alpacaeval.outputs", Path(own.outputs))
        if own.outputs
        else sampled(target, stage, reference, made, world)
    )
    if not world.is_main:
        return Evaluation({})
    settings = _settings(target, stage, source)
    cache = place / CACHE
    print(
        f"judging {len(outputs)} answers of {outputs[0]['generator']} against "
        f"{reference[0].get('generator')}'s by "
        f"{own.model or 'a model'}: {estimate(outputs, reference, own, cache)}",
        flush=True,
    )
    if own.model is None:
        title = f"{target.name}: answers to {len(outputs)} instructions, not judged"
        return Evaluation(
            {"avg_length": _length(outputs, "output"), "counts": {"answers": len(outputs)}},
            [
                [title, ""],
                ["characters an answer", str(_length(outputs, "output"))],
                ["answers", str(place / OUTPUTS)],
            ],
            [],
            settings,
            made,
        )
    rows, spent = judge(outputs, reference, own, cache, f"{target.name}: judged by {own.model}")
    write_whole(place / ANNOTATIONS, json.dumps(plain(rows), indent=1, ensure_ascii=False) + "\n")
    evaluation = rated(rows, stage, settings, made)
    evaluation.values["counts"] |= {
        "calls": spent.calls,
        "tokens": spent.tokens,
        "failures": dict(spent.failures),
    }
    return evaluation


# -- answers ---------------------------------------------------------------------------------------


def asked_of(target: Target, stage: EvalStage) -> tuple[list[Row], Path]:
    """Return (the baseline's answers to the instructions that are used, in file order; their file).

    Raises ConfigError, DataError."""
    own = stage.alpacaeval
    path = reference_path(own.reference)
    reference = read_outputs("alpacaeval.reference", path)
    if own.outputs is not None:
        outputs = read_outputs("alpacaeval.outputs", Path(own.outputs))
        aligned(outputs, reference, "alpacaeval.outputs", own.outputs)
        require(
            stage.limit is None,
            "limit",
            stage.limit,
            "chooses prompts to answer; alpacaeval.outputs is answered",
        )
        wanted = {row["instruction"] for row in outputs}
    else:
        wanted = {
            prompt.turns[-1].content
            for prompt in answers.limited([prompt_of(row) for row in reference], stage.limit)
        }
    return [row for row in reference if row["instruction"] in wanted], path


def prompt_of(row: Row) -> Prompt:
    """Return a prompt with exactly the instruction's text, because judgements are matched by it."""
    return Prompt((Turn("user", row["instruction"]),))


def sampled(
    target: Target, stage: EvalStage, reference: list[Row], made: dict[str, Any], world: World
) -> list[Row]:
    """Sample the target's answers, write them, and return them in AlpacaEval's format."""
    renderer = _renderer(target, reference)
    request = Request("answers to AlpacaEval", 1, settings_of(target.config))
    prompts = [prompt_of(row) for row in reference]
    [drawn] = answers.sample(target, renderer, prompts, [request], world)
    texts = [text_of(sample, renderer) for p, [sample] in zip(prompts, drawn, strict=True)]
    name = f"{target.name}-{made['weights'][:8]}"
    outputs = [
        {
            "dataset": row.get("dataset", "alpaca_eval"),
            "instruction": row["instruction"],
            "output": text.strip(),
            "generator": name,
        }
        for row, text in zip(reference, texts, strict=True)
    ]
    if world.is_main:
        write_whole(folder(target, stage) / OUTPUTS, json.dumps(outputs, indent=1, ensure_ascii=False) + "\n")
    return outputs


def _renderer(target: Target, reference: Sequence[Row]) -> Renderer:
    """Return the target's renderer.

    Raises ConfigError if it cannot render every instruction uncut, because the win rate would no longer be
    comparable."""
    renderer = check_answering(target)
    refused = {
        reason
        for reason in renderer.prompts([prompt_of(row) for row in reference])
        if isinstance(reason, str)
    }
    require(
        not refused,
        "model.chat_template",
        target.config.model.chat_template,
        "cannot render all of AlpacaEval's instructions: " + "; ".join(sorted(refused)[:_NAMED]),
    )
    cut = renderer.cuts.total()
    require(
        cut == 0,
        "model.max_prompt_length",
        target.config.model.max_prompt_length,
        f"would cut {cut} of AlpacaEval's {len(reference)} instructions: raise it, and model.max_length "
        "with it",
    )
    return renderer


# -- rates -----------------------------------------------------------------------------------------


def rated(rows: list[Row], stage: EvalStage, settings: dict[str, Any], made: dict[str, Any]) -> Evaluation:
    """Return the library's win rates of the judgements, in percent.

    Where there is a length-controlled rate, ``rows`` get their length-controlled preferences."""
    own = stage.alpacaeval
    plain_rates = win_rate(rows)
    controlled = _controlled(rows, own.difficulty, own.reference)
    bad = [i for i, row in enumerate(rows) if not judged(row)]
    values: dict[str, Any] = {
        key: plain_rates[key] for key in ("win_rate", "standard_error", "discrete_win_rate", "n_total")
    }
    values |= {"length_controlled_winrate": None, "lc_standard_error": None}
    if isinstance(controlled, str):
        values["length_controlled_winrate_missing"] = controlled
    else:
        values |= controlled[0]
        for row, value in zip(rows, controlled[1], strict=True):
            row["glm_preference"] = value
    values["avg_length"] = _length(rows, "output_2")
    values["counts"] = {key: plain_rates[key] for key in ("n_wins", "n_wins_base", "n_draws")} | {
        "rows": len(rows),
        "without_judgement": len(bad),
        "without_judgement_rows": bad[:100],
    }
    table = [
        [
            f"{rows[0].get('generator_2')} against {rows[0].get('generator_1')}, {len(rows)} instructions",
            "percent",
            "std. error",
        ],
        ["win rate", _percent(values["win_rate"]), _percent(values["standard_error"])],
        [
            "length-controlled win rate",
            _percent(values["length_controlled_winrate"]),
            _percent(values["lc_standard_error"]),
        ],
        ["judgements", str(values["n_total"])],
        ["characters an answer", str(values["avg_length"])],
    ]
    if isinstance(controlled, str):
        print(f"no length-controlled rate: {controlled}", flush=True)
    if bad:
        named = ", ".join(map(str, bad[:_NAMED])) + " …" * (len(bad) > _NAMED)
        print(f"left out, without a judgement: {len(bad)} rows, {named}", flush=True)
    kept = (
        "dataset",
        "instruction",
        "output_1",
        "output_2",
        "generator_1",
        "generator_2",
        "annotator",
        "preference",
        "glm_preference",
    )
    lines = [{key: row[key] for key in kept if key in row} for row in rows]
    return Evaluation(values, table, lines, settings | {"alpaca_eval": version("alpaca_eval")}, made)


def _controlled(
    rows: list[Row], difficulty: str | None, reference: str | None
) -> tuple[dict[str, float], list[float]] | str:
    gamed = difficulty_path(difficulty)
    if isinstance(gamed, str):
        return gamed
    positions = None
    if reference is not None:  # an instruction's number is its place in this file
        order = {
            row["instruction"]: i
            for i, row in enumerate(read_outputs("alpacaeval.reference", Path(reference)))
        }
        aligned(
            rows, [{"instruction": text} for text in order], "alpacaeval.annotations", f"{len(rows)} rows"
        )
        positions = [order[row["instruction"]] for row in rows]
    return length_controlled(rows, gamed, positions)


def _length(rows: Sequence[Row], key: str) -> int:
    """Return the mean number of characters, truncated to an integer as the leaderboard does."""
    return int(fmean(len(row[key]) for row in rows))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# -- what it was -----------------------------------------------------------------------------------


def fingerprints_of(target: Target, stage: EvalStage, reference: Sequence[Row]) -> dict[str, Any]:
    """Return digests of the weights (or of the given answers) and of the baseline's answers."""
    asked = hashlib.sha256(
        json.dumps([[row["instruction"], row["output"]] for row in reference]).encode()
    ).hexdigest()
    if stage.alpacaeval.outputs is None:
        return fingerprints(target, reference=asked)
    return {
        "outputs": files_digest([Path(stage.alpacaeval.outputs)]),
        "code": git_commit(ROOT),
        "versions": versions(),
        "reference": asked,
    }


def _answering(target: Target, stage: EvalStage) -> dict[str, Any]:
    """Return what the answers depend on in addition to the fingerprints."""
    if stage.alpacaeval.outputs is not None:
        return {"outputs": stage.alpacaeval.outputs}
    every = described(target, stage)
    kept = {
        key: value for key, value in every.items() if key not in ("data", "part", "resamples", "confidence")
    }
    return kept | {"data": {key: every["data"][key] for key in ("system_prompt", "apply_chat_template")}}


def _settings(target: Target, stage: EvalStage, source: Path) -> dict[str, Any]:
    """Return what the numbers depend on in addition to the fingerprints.

    ``source``: the file of the baseline's answers."""
    own = stage.alpacaeval
    judged_by = (
        {key: getattr(own, key) for key in ("model", "base_url", "annotator")}
        if own.model is not None
        else None
    )
    return _answering(target, stage) | {"reference": str(source), "judge": judged_by}
