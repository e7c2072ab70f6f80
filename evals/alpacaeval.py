"""``kind=alpacaeval``, AlpacaEval 2 (Dubois et al. 2024), the instruction-following evaluation of the paper's
§5.1 and Tables 3 to 6.

The model answers the set's instructions (``outputs.json``), a judge prefers its answer or the baseline's
(``annotations.json``), and the judgements become a plain and a length-controlled win rate. The alpaca_eval
library asks the judge and computes both rates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import ConfigError, StoppedError, require
from common.files import files_digest, write_whole
from config.schema_stages import EvalStage
from data.types import Prompt, Turn
from evals import alpaca_library as alpaca
from evals import answers
from evals.base import Evaluation, Target, fingerprints
from evals.running import result_path
from models.distributed import World
from rollouts.answers import Request
from rollouts.samplers import SamplingSettings
from rollouts.verify import text_of

KEYS = ("OPENAI_API_KEY", "OPENAI_API_KEYS", "OPENAI_CLIENT_CONFIG_PATH")
"""The library's environment variables for the judge's key; OPENAI_API_BASE has its address."""


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError or DataError for a file, key or annotator that is missing, a file with the wrong
    contents, and a model that cannot answer every instruction."""
    options = stage.alpacaeval
    file = options.annotations or options.outputs
    require(stage.limit is None or not file, "limit", stage.limit, f"chooses prompts; {file} is answered")
    if options.annotations is not None:
        annotations_of(stage)
        return
    alpaca.annotator_settings(options.annotator)
    why = "is asked with the key in OPENAI_API_KEY, which is not set (any word will do without a key)"
    require(any(map(os.environ.get, KEYS)), "alpacaeval.model", options.model, why)
    reference, _ = reference_of(stage)
    if options.outputs is not None:
        outputs_of(stage, reference)
        return
    renderer, model = answers.check_answering(target), target.config.model
    rendered = renderer.prompts([prompt_of(row) for row in reference])
    refused = sorted({reason for reason in rendered if isinstance(reason, str)})
    why = f"cannot render all of AlpacaEval's instructions: {'; '.join(refused[:3])}"
    require(not refused, "model.chat_template", model.chat_template, why)
    cut = renderer.cuts.total()  # a win rate over instructions that are cut would not be comparable
    why = f"would cut {cut} of AlpacaEval's {len(reference)} instructions: raise it, with model.max_length"
    require(cut == 0, "model.max_prompt_length", model.max_prompt_length, why)


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Make the answers, judgements and win rates, as far as no file has them. All ranks answer; then rank 0
    alone judges, and the others return an empty result. Raises StoppedError where the judge fails."""
    options, place = stage.alpacaeval, result_path(target, stage).with_suffix("")
    if options.annotations is not None:
        digest = {"annotations": files_digest([Path(options.annotations)])}
        return rated(annotations_of(stage), {"annotations": options.annotations}, digest)
    reference, source = reference_of(stage)
    side = target if options.outputs is None else replace(target, answers=Path(options.outputs))
    digests, settings = fingerprints(side, reference=files_digest([source])), {"outputs": options.outputs}
    if options.outputs is None:
        settings = answers.described(target, stage)
        outputs = sampled(target, reference, digests["weights"], world)
    else:
        outputs = outputs_of(stage, reference)
    if not world.is_main:
        return Evaluation({})
    write_whole(place / "outputs.json", json.dumps(outputs, indent=1, ensure_ascii=False) + "\n")
    rows = alpaca.ask_judge(outputs, reference, options, place)
    judge = {key: getattr(options, key) for key in ("model", "annotator")}
    judge["base_url"] = os.environ.get("OPENAI_API_BASE")
    return rated(rows, settings | {"reference": str(source), "judge": judge}, digests)


def reference_of(stage: EvalStage) -> tuple[list[alpaca.Row], Path]:
    """Return (the baseline's answers to the instructions that are asked, in the set's order; their file).
    Raises ConfigError, DataError."""
    reference = stage.alpacaeval.reference
    path = Path(reference) if reference is not None else alpaca.hub_file(alpaca.BASELINE)
    if isinstance(path, str):
        why = f"{path}; fetch it where there is a network and give its path"
        raise ConfigError("alpacaeval.reference", None, why)
    rows = alpaca.read_outputs("alpacaeval.reference", path)
    prompts = answers.limited([prompt_of(row) for row in rows], stage.limit)
    wanted = {prompt.turns[-1].content for prompt in prompts}
    return [row for row in rows if row["instruction"] in wanted], path


def outputs_of(stage: EvalStage, reference: Sequence[alpaca.Row]) -> list[alpaca.Row]:
    key = "alpacaeval.outputs"
    return in_order(key, alpaca.read_outputs(key, Path(stage.alpacaeval.outputs or "")), reference)


def annotations_of(stage: EvalStage) -> list[alpaca.Row]:
    """Return the given judgements, in the order of ``alpacaeval.reference`` if that is given too."""
    options = stage.alpacaeval
    rows = alpaca.read_annotations(Path(options.annotations or ""))
    return in_order("alpacaeval.annotations", rows, reference_of(stage)[0]) if options.reference else rows


def in_order(key: str, rows: Sequence[alpaca.Row], reference: Sequence[alpaca.Row]) -> list[alpaca.Row]:
    """Return ``rows`` in the order of ``reference``. Raises ConfigError for an instruction that is not there
    character for character: the library would drop it."""
    place = {row["instruction"]: i for i, row in enumerate(reference)}
    strange = [row["instruction"] for row in rows if row["instruction"] not in place]
    why = f"{len(strange)} of {len(rows)} instructions are none of alpacaeval.reference's, as {strange[:1]}"
    require(not strange, key, "…", f"{why}: answer its instructions as they are")
    return sorted(rows, key=lambda row: place[row["instruction"]])


def prompt_of(row: alpaca.Row) -> Prompt:
    """Return a prompt with exactly the instruction's text, because judgements are matched by it."""
    return Prompt((Turn("user", row["instruction"]),))


def sampled(target: Target, reference: list[alpaca.Row], weights: str, world: World) -> list[alpaca.Row]:
    """Return the target's answers in AlpacaEval's format, sampled by the settings' sampler."""
    renderer = answers.check_answering(target)
    request = Request("answers to AlpacaEval", 1, SamplingSettings.from_config(target.config))
    prompts = [prompt_of(row) for row in reference]
    [drawn] = answers.sample(target, renderer, prompts, [request], world)
    texts = [text_of(sample, renderer).strip() for [sample] in drawn]
    kept = [{key: row[key] for key in ("dataset", "instruction") if key in row} for row in reference]
    generator = {"generator": f"{target.name}-{weights[:8]}"}
    return [row | {"output": text} | generator for row, text in zip(kept, texts, strict=True)]


def rated(rows: list[alpaca.Row], settings: dict[str, Any], digests: dict[str, Any]) -> Evaluation:
    """Return the library's win rates of the judgements, in percent; ``rows`` get their length-controlled
    preferences. Raises StoppedError if no judgement counts."""
    preferences = [row.get("preference") for row in rows]  # 0 is an old way to write a tie
    bad = [i for i, p in enumerate(preferences) if p is None or not (p == 0 or 1 <= p <= 2)]
    if len(bad) == len(rows):
        raise StoppedError(f"none of the {len(rows)} judgements counts: there is nothing to rate")
    rates, missing = alpaca.win_rates(rows)
    shown = ("win_rate", "standard_error", "discrete_win_rate", "n_total")
    controlled = ("length_controlled_winrate", "lc_standard_error")
    values: dict[str, Any] = {key: rates.get(key) for key in (*shown, *controlled)}
    if missing is not None:
        values["length_controlled_winrate_missing"] = missing
        print(f"no length-controlled rate: {missing}", flush=True)
    values["avg_length"] = int(fmean(len(row["output_2"]) for row in rows))  # cut, as the leaderboard's
    values["counts"] = {key: rates[key] for key in ("n_wins", "n_wins_base", "n_draws")}
    left_out = {"without_judgement": len(bad), "without_judgement_rows": bad[:100]}
    values["counts"] |= {"rows": len(rows)} | left_out
    sides = f"{rows[0].get('generator_2')} against {rows[0].get('generator_1')}, {len(rows)} instructions"
    table = [[sides, "percent", "std. error"]]
    for label, keys in (("win rate", shown[:2]), ("length-controlled win rate", controlled)):
        table.append([label, *("–" if values[key] is None else f"{values[key]:.2f}" for key in keys)])
    table += [["judgements", str(values["n_total"])], ["characters an answer", str(values["avg_length"])]]
    if bad:
        print(f"left out, without a judgement: {len(bad)} rows, the first {bad[0]}", flush=True)
    lines = [{key: value for key, value in row.items() if not key.startswith("preference_")} for row in rows]
    return Evaluation(values, table, lines, settings | {"alpaca_eval": version("alpaca_eval")}, digests)
