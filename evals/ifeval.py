"""``kind=ifeval``, IFEval (Zhou et al., 2023, arXiv 2311.07911): the share of 541 prompts, and of their
instructions, that answers follow, by the checkers of lm-eval.

The answers are drawn by the settings' own sampler, greedily, where ``kind=lm_eval`` has its own in
transformers alone. Nothing is fetched: without nltk's ``punkt_tab`` the instructions that count sentences,
or split words by it, are left out, and the result says how many.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import ConfigError, DataError
from config.schema_eval import EvalStage
from data.rows import Row, read_rows
from data.types import Prompt, Turn
from evals import answers
from evals.answers import check_answering, described
from evals.base import Evaluation, Target, fingerprints
from models.distributed import World, on_main
from rollouts.generate import Request
from rollouts.samplers import SamplingSettings
from rollouts.verify import text_of

HUB = "google/IFEval"
PUNKT = Path(".venv/punkt/llama_index/core/_static/nltk_cache")
"""Where ``make eval-tools`` puts nltk's data, which a package of the index brings."""
NEEDS_PUNKT = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
LONGEST_PROMPT = 1024
LEVELS = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")


def check(target: Target, stage: EvalStage) -> None:
    """Raise ConfigError or DataError if the prompts are missing, or the model cannot answer."""
    check_answering(_with_room(target, stage))
    questions(stage)


def questions(stage: EvalStage) -> dict[str, dict[str, Any]]:
    """Return prompt id -> the set's row, at most ``limit`` of them. Raises ConfigError, DataError."""
    path = stage.ifeval.path
    if path is None:
        from datasets import load_dataset

        try:
            rows = [dict(row) for row in load_dataset(HUB, split="train")]
        except (OSError, ValueError) as error:
            raise ConfigError(
                "ifeval.path", None, f"{HUB} cannot be had from the hub: give its input_data.jsonl ({error})"
            ) from error
    else:
        rows = [dict(row.values) for row in read_rows(Path(path), "ifeval.path") if isinstance(row, Row)]
    for row in rows:
        if not {"key", "prompt", "instruction_id_list", "kwargs"} <= row.keys():
            raise DataError(f"{path or HUB}: a row lacks what IFEval's have: it has {', '.join(sorted(row))}")
    every = {_prompt(row).id: row for row in rows}
    kept = answers.limited([_prompt(row) for row in every.values()], stage.limit)
    return {prompt.id: every[prompt.id] for prompt in kept}


def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation:
    """Return the four rates and their mean, in [0, 1]."""
    target = _with_room(target, stage)
    renderer, rows = check_answering(target), questions(stage)
    asked = [_prompt(row) for row in rows.values()]
    request = Request("answers to IFEval", 1, SamplingSettings(0.0, 1.0, stage.ifeval.max_tokens))
    [drawn] = answers.sample(target, renderer, asked, [request], world)
    texts = [text_of(sample, renderer) for p, [sample] in zip(asked, drawn, strict=True)]
    checked, left_out = on_main(lambda: followed(list(rows.values()), texts))
    rates = rates_of(checked)
    counts = {
        "prompts": len(rows),
        "instructions": sum(len(one["strict"]) for one in checked),
        "left_out": dict(left_out),
    }
    printed = [[f"IFEval, {len(rows)} prompts, {counts['instructions']} instructions", "followed"]]
    printed += [[name.replace("_", ", "), f"{rates[name]:.1%}"] for name in (*LEVELS, "mean")]
    if left_out:
        printed.append([f"left out, without nltk's punkt_tab: {', '.join(left_out)}", str(left_out.total())])
    length = fmean(len(sample.token_ids) for [sample] in drawn)
    finished = fmean(sample.finished for [sample] in drawn)
    printed += [["tokens an answer", f"{length:.1f}"], ["finished answers", f"{finished:.1%}"]]
    records = [
        {"prompt": row["prompt"], "output": text, "instructions": row["instruction_id_list"]} | one
        for row, text, one in zip(rows.values(), texts, checked, strict=True)
    ]
    return Evaluation(
        rates | {"length": length, "finished": finished, "counts": counts},
        printed,
        records,
        described(target, stage) | {"path": stage.ifeval.path or HUB, "temperature": 0.0},
        fingerprints(target, asked, text=renderer.fingerprint) if world.is_main else {},
    )


def followed(rows: list[dict[str, Any]], texts: list[str]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return (for each prompt ``strict`` and ``loose``, whether each of its instructions is followed; how
    many instructions of which kind were left out because their checker has no data).

    lm-eval draws what a prompt leaves open and lets '#' be any letter: here the same one each time."""
    library, has_punkt = _library()
    drawn = random.getstate()  # other code of this process draws on as if nothing had happened
    verdicts: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for row, text in zip(rows, texts, strict=True):
        ids = row["instruction_id_list"]
        kept = [i for i, name in enumerate(ids) if has_punkt or name not in NEEDS_PUNKT]
        left_out.update(name for i, name in enumerate(ids) if i not in kept)
        asked = library.InputExample(
            row["key"], [ids[i] for i in kept], row["prompt"], [row["kwargs"][i] for i in kept]
        )
        verdict = {}
        for how in ("strict", "loose"):
            random.seed(0)
            check = getattr(library, f"test_instruction_following_{how}")
            verdict[how] = check(asked, text).follow_instruction_list
        verdicts.append(verdict)
    random.setstate(drawn)
    return verdicts, left_out


def rates_of(checked: list[dict[str, Any]]) -> dict[str, float]:
    """Return the rates by name. A prompt is followed if all of its instructions are; one whose instructions
    were all left out does not count."""
    some = [one for one in checked if one["strict"]]
    rates = {}
    for how in ("strict", "loose"):
        rates[f"prompt_{how}"] = fmean(all(one[how]) for one in some)
        rates[f"instruction_{how}"] = fmean(value for one in some for value in one[how])
    return {name: rates[name] for name in LEVELS} | {"mean": fmean(rates.values())}


def _library() -> tuple[Any, bool]:
    """Return (lm-eval's checkers, seeded; whether nltk has what some of them need). Nothing is downloaded."""
    import langdetect
    import nltk

    if PUNKT.is_dir() and str(PUNKT) not in nltk.data.path:
        nltk.data.path.append(str(PUNKT))
    langdetect.DetectorFactory.seed = 0
    try:
        nltk.data.find("tokenizers/punkt_tab/english")
        has_punkt = True
    except LookupError:
        has_punkt = False
    fetch = nltk.download
    nltk.download = lambda *_, **__: False  # lm-eval calls it while it is imported
    try:
        return importlib.import_module("lm_eval.tasks.ifeval.utils"), has_punkt
    finally:
        nltk.download = fetch


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt((Turn("user", row["prompt"]),))


def _with_room(target: Target, stage: EvalStage) -> Target:
    """Return the target with room for the longest prompt and answer, whatever it was trained with."""
    longest = stage.ifeval.max_tokens
    config = target.config
    model = replace(config.model, max_length=LONGEST_PROMPT + longest, max_prompt_length=LONGEST_PROMPT)
    sampler = replace(config.sampler, max_tokens=longest, temperature=0.0, top_p=1.0)
    return replace(target, config=replace(config, model=model, sampler=sampler))
