"""``kind=accuracy``, the greedy accuracy and the pass@k of answers that can be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from common.errors import StoppedError, require
from common.imports import import_function
from config.schema_stages import EvalStage
from data.chat import Renderer
from data.types import Prompt
from evals import answers
from evals.answers import check_answering, described
from evals.base import Evaluation, Target, fingerprints
from evals.running import verifier_path
from models.distributed import World, on_main
from reports import statistics
from rollouts.answers import Request
from rollouts.samplers import Sample, SamplingSettings
from rollouts.verify import Verifier, say_failures, text_of, verdicts_of

Items = dict[str, dict[str, float]]
"""metric -> prompt id -> value"""


@dataclass(frozen=True)
class Checked:
    """One prompt's answers to one request, with their verdicts: 1.0 right, 0.0 wrong, None for no verdict."""

    prompt: Prompt
    samples: list[Sample]
    texts: list[str]
    verdicts: list[float | None]

    @property
    def decided(self) -> list[float]:
        return [v for v in self.verdicts if v is not None]


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError or DataError if the evaluation cannot be done.

    The reasons are: nothing checks the answers, no prompt has a reference answer, or the model cannot
    answer."""
    renderer = check_answering(target)
    import_function("accuracy.verifier", verifier_path(target.config.data, stage))
    require(
        target.config.sampler.temperature > 0 or stage.accuracy.samples <= 1,
        "sampler.temperature",
        0,
        f"makes all accuracy.samples={stage.accuracy.samples} answers the same: use accuracy.samples=0, "
        "greedy accuracy alone",
    )
    checkable(target, stage, renderer)


def checkable(target: Target, stage: EvalStage, renderer: Renderer) -> tuple[list[Prompt], Counter[str]]:
    """Return (the prompts that have a reference answer, the number of other prompts by reason).

    Raises ConfigError if no prompt has one."""
    every, left_out = answers.prompts(target, replace(stage, limit=None), renderer)
    prompts = [prompt for prompt in every if prompt.reference_answer is not None]
    if len(prompts) < len(every):
        left_out["no reference answer"] += len(every) - len(prompts)
    require(
        bool(prompts),
        "data",
        target.config.data.name,
        f"no prompt of split={stage.split} has a reference answer to check against",
    )
    return answers.limited(prompts, stage.limit), left_out


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Return greedy accuracy and pass@k of one target, with bootstrap intervals over problems.

    Raises StoppedError for verdicts that are neither 0 nor 1, and if there is no verdict at all."""
    renderer = check_answering(target)
    prompts, left_out = checkable(target, stage, renderer)
    options, drawn = stage.accuracy, SamplingSettings.from_config(target.config)
    requests = (
        {"greedy": Request("greedy answers", 1, replace(drawn, temperature=0.0))} if options.greedy else {}
    )
    if options.samples:
        requests["sampled"] = Request(f"{options.samples} samples each", options.samples, drawn)
    by_request = answers.sample(target, renderer, prompts, list(requests.values()), world)
    path = verifier_path(target.config.data, stage)

    def checked() -> dict[str, list[Checked]]:
        verifier: Verifier = import_function("accuracy.verifier", path)
        return {
            kind: verified(prompts, of_kind, verifier, renderer)
            for kind, of_kind in zip(requests, by_request, strict=True)
        }

    by_kind = on_main(checked)
    items, summaries = items_of(by_kind, options.k), {kind: summary(every) for kind, every in by_kind.items()}
    counts = {
        "prompts": len(prompts),
        "answers": sum(request.n for request in requests.values()) * len(prompts),
        "left_out": dict(left_out),
    }
    settings = described(target, stage) | {"samples": options.samples, "k": options.k, "verifier": path}
    title = f"{target.config.data.name}, {stage.split}, {len(prompts)} prompts"
    values, table = measured([items], summaries, stage, title, counts)
    digests = fingerprints(target, prompts, text=renderer.fingerprint) if world.is_main else {}
    return Evaluation(values, table, list(rows_of(by_kind)), settings, digests, items)


def verified(
    prompts: list[Prompt], of_prompt: list[list[Sample]], verifier: Verifier, renderer: Renderer
) -> list[Checked]:
    """Return every answer with its verdict. Raises StoppedError for a verdict that is neither 0 nor 1."""
    texts = [
        [text_of(sample, renderer) for sample in samples]
        for prompt, samples in zip(prompts, of_prompt, strict=True)
    ]
    flat = [
        (text, prompt.reference_answer) for prompt, each in zip(prompts, texts, strict=True) for text in each
    ]
    verdicts, reasons = verdicts_of(
        verifier, [text for text, _ in flat], [reference for _, reference in flat]
    )
    say_failures(reasons, len(flat), "answers")
    remaining = iter(verdicts)
    checked_prompts = [
        Checked(prompt, samples, each, [next(remaining) for _ in each])
        for prompt, samples, each in zip(prompts, of_prompt, texts, strict=True)
    ]
    partly = next((v for one in checked_prompts for v in one.decided if v not in (0.0, 1.0)), None)
    if partly is not None:
        raise StoppedError(
            f"the verifier gave {partly}: pass@k counts answers that are right (1.0) or wrong (0.0)"
        )
    return checked_prompts


def items_of(by_kind: Mapping[str, list[Checked]], ks: Iterable[int]) -> Items:
    """Return the values that are averaged over prompts, as metric -> prompt id -> value.

    A prompt with fewer verdicts than k has no pass@k."""
    items: Items = {}
    if "greedy" in by_kind:
        items["greedy.accuracy"] = {one.prompt.id: one.decided[0] for one in by_kind["greedy"] if one.decided}
    for k in sorted(set(ks)) if "sampled" in by_kind else []:
        items[f"sampled.pass@{k}"] = {
            one.prompt.id: statistics.pass_at_k(len(one.decided), int(sum(one.decided)), k)
            for one in by_kind["sampled"]
            if len(one.decided) >= k
        }
    return items


def summary(every: list[Checked]) -> dict[str, float]:
    """Return statistics of the answers by name.

    ``length``: mean tokens that the policy wrote, the stop token included; ``finished``: share not cut by
    max_tokens; ``no_verdict``: share without a verdict; with several answers per prompt also ``distinct``:
    mean share of different texts among a prompt's answers."""
    samples = [sample for one in every for sample in one.samples]
    metrics = {
        "length": fmean(len(s.token_ids) for s in samples),
        "finished": fmean(s.finished for s in samples),
        "no_verdict": 1 - sum(len(one.decided) for one in every) / len(samples),
    }
    if len(every[0].samples) > 1:
        metrics["distinct"] = fmean(len(set(one.texts)) / len(one.texts) for one in every)
    return metrics


def rows_of(by_kind: Mapping[str, list[Checked]]) -> Iterable[dict[str, Any]]:
    """Yield one record per answer."""
    for kind, every in by_kind.items():
        for one in every:
            messages = [turn.message for turn in one.prompt.turns]
            for i, (sample, text, verdict) in enumerate(
                zip(one.samples, one.texts, one.verdicts, strict=True)
            ):
                yield {
                    "prompt_id": one.prompt.id,
                    "prompt": messages,
                    "reference": one.prompt.reference_answer,
                    "drawn": kind,
                    "sample_id": i,
                    "output": text,
                    "verdict": verdict,
                    "tokens": len(sample.token_ids),
                    "finished": sample.finished,
                }


# -- one run or several ----------------------------------------------------------------------------


def pool(parts: list[Evaluation], stage: EvalStage) -> Evaluation:
    """Combine several runs into one result, with means over all runs and intervals by a bootstrap over runs
    and problems."""
    kinds = parts[0].values.keys() & {"greedy", "sampled"}
    summaries = {
        kind: {
            key: fmean(part.values[kind][key] for part in parts)
            for key in ("length", "finished", "no_verdict", "distinct")
            if all(key in part.values[kind] for part in parts)
        }
        for kind in sorted(kinds)
    }
    counts = {"runs": len(parts), "prompts": parts[0].values["counts"]["prompts"]}
    title = f"mean of {len(parts)} runs"
    values, table = measured([part.items for part in parts], summaries, stage, title, counts)
    settings, digests = ([getattr(part, name) for part in parts] for name in ("settings", "fingerprints"))
    return Evaluation(values, table, [], {"runs": settings}, {"runs": digests})


def measured(
    runs: list[Items],
    summaries: dict[str, dict[str, float]],
    stage: EvalStage,
    title: str,
    counts: dict[str, Any],
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the numbers and the printed table from the items of one or several runs.

    Raises StoppedError where no answer got a verdict."""
    tables = {metric: statistics.table_of([run[metric] for run in runs]) for metric in runs[0]}
    if not any(np.isfinite(table).any() for table in tables.values()):
        raise StoppedError(
            "the verifier gave no verdict on any answer: look at the reference answers of the data"
        )
    spread = statistics.intervals(tables, stage.resamples, stage.confidence)
    values: dict[str, Any] = {kind: {} for kind in summaries}
    printed = [[title, "mean", f"{stage.confidence:.0%} interval"]]
    for metric, table in tables.items():
        kind, _, name = metric.partition(".")
        mean, interval = statistics.mean_of(table), spread[metric]
        values[kind] |= {name: mean, f"{name}_ci": list(interval) if interval else None}
        printed.append(
            [
                f"{kind} {name}" if kind == "greedy" else name,
                _percent(mean),
                f"[{_percent(interval[0])}, {_percent(interval[1])}]" if interval else "–",
            ]
        )
    for kind, numbers in summaries.items():
        values[kind] |= numbers
        printed += [
            [f"{kind}: {words}", form.format(numbers[key])]
            for key, words, form in SHOWN
            if key in numbers and (key != "no_verdict" or numbers[key])
        ]
    return values | {"counts": counts}, printed


SHOWN = (
    ("length", "tokens an answer", "{:.1f}"),
    ("finished", "finished answers", "{:.1%}"),
    ("no_verdict", "without a verdict", "{:.1%}"),
    ("distinct", "different answers of a prompt", "{:.1%}"),
)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
