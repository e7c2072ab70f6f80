"""Published data sets whose rows are of no common format: one small function each, named by ``data.format`` in its yaml.

Column names are the hub's own. Adding one: a function here (or anywhere importable) decorated with ``each_row``, and a yaml in
config/data.
"""

from __future__ import annotations

import re

from config.schema import DataConfig
from data.formats import RowError, Values, demonstration, each_row, number, pair, prompt_of, text
from data.types import Group, Turn

SYSTEM_PROMPTS = {
    "think_answer": (
        "You are a careful mathematician. First reason about the problem, then give the final answer alone. "
        "Write exactly in this form:\n<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>"
    ),
}
"""What ``data.system_prompt`` may name instead of spelling it out."""

_TRANSCRIPT_TURN = re.compile(r"\n\n(Human|Assistant):")


@each_row
def hh(values: Values, config: DataConfig) -> Group:
    """Anthropic HH (anthropics/hh-rlhf): ``chosen`` and ``rejected`` are whole transcripts that differ in the last answer."""
    *asked, chosen = transcript(text(values, "chosen"))
    *asked_too, rejected = transcript(text(values, "rejected"))
    if asked != asked_too:
        raise RowError("chosen and rejected answer different conversations")
    if chosen.role != "assistant" or rejected.role != "assistant":
        raise RowError("the transcript does not end with the assistant")
    return pair(prompt_of(tuple(asked)), chosen.content, rejected.content)


def transcript(found: str) -> list[Turn]:
    """The turns of ``\\n\\nHuman: … \\n\\nAssistant: …``, stripped. Raises RowError unless they alternate."""
    before, *pieces = _TRANSCRIPT_TURN.split(found)
    names, contents = pieces[::2], pieces[1::2]
    if before.strip() or not names:
        raise RowError("the transcript does not begin with a human turn")
    if any(name != ("Human", "Assistant")[i % 2] for i, name in enumerate(names)):
        raise RowError("the turns of the transcript do not alternate")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Turn(roles[name], content.strip()) for name, content in zip(names, contents, strict=True)]


@each_row
def alpacaeval(values: Values, config: DataConfig) -> Group:
    """AlpacaEval judgements: ``preference`` in [1, 2], 2 when output_2 wins. The winner first; a tie is no pair."""
    preference = number(values, "preference")
    if not 1 <= preference <= 2:
        raise RowError(f"the preference {preference} is not within [1, 2]")
    if preference == 1.5:
        raise RowError("a tie")
    outputs = text(values, "output_1"), text(values, "output_2")
    winner, loser = outputs if preference < 1.5 else outputs[::-1]
    return pair(prompt_of((Turn("user", text(values, "instruction")),)), winner, loser)


@each_row
def gsm8k(values: Values, config: DataConfig) -> Group:
    """GSM8K (openai/gsm8k): ``question``, ``answer`` whose final number follows ``####``: a checkable prompt and a solution."""
    reasoning, mark, final = text(values, "answer").rpartition("####")
    if not mark or not final.strip():
        raise RowError("the answer has no final number after ####")
    reference = final.strip().replace(",", "")
    return _worked(text(values, "question"), reasoning.strip(), reference, text(values, "answer"), config)


def _worked(question: str, reasoning: str, reference: str, solution: str, config: DataConfig) -> Group:
    """A worked problem; under the think-answer system prompt the demonstration has the form which that prompt asks for."""
    if config.system_prompt == "think_answer":
        solution = f"<think>\n{reasoning}\n</think>\n<answer>\n{reference}\n</answer>"
    return demonstration(prompt_of((Turn("user", question),), reference), solution)
