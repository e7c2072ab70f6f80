"""Forms of rows that published data sets have and no library defines, with one small function for each.

Column names are those on the hub. To add a set, write a function here (or in any importable module) decorated
with ``each_row``, and a yaml in config/data.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from common.errors import require
from config.schema_data import DataConfig
from data.columns import Values
from data.formats import (
    answered,
    demonstration,
    each_row,
    listed,
    number,
    pair,
    prompt_of,
    question,
    text,
    truth,
    turns,
    value,
)
from data.rows import Dropped, LeftOutError, Row, RowError
from data.types import Completion, Group, Prompt, Turn

SYSTEM_PROMPTS = {
    "think_answer": (
        "You are a careful mathematician. First reason about the problem, then give the final answer alone. "
        "Write exactly in this form:\n<think>\nyour reasoning\n</think>\n<answer>\nthe final "
        "answer\n</answer>"
    ),
}
"""Names that ``data.system_prompt`` may give instead of the full text."""

SHP_SCORE_RATIO = 2
SHP_PAIRS_PER_PROMPT = 5


@each_row
def gsm8k(values: Values, config: DataConfig) -> Group:
    """GSM8K (openai/gsm8k): ``question``, and ``answer`` with the final number after ``####``. A row becomes
    a prompt whose answer can be checked, and a solution."""
    reasoning, mark, final = text(values, "answer").rpartition("####")
    if not mark or not final.strip():
        raise RowError("the answer has no final number after ####")
    reference = final.strip().replace(",", "")
    return _worked(text(values, "question"), reasoning.strip(), reference, text(values, "answer"), config)


SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""The four models that wrote GSM8K's example solutions."""


@each_row
def gsm8k_solutions(values: Values, config: DataConfig) -> Group:
    """GSM8K's example model solutions (openai/grade-school-math, example_model_solutions.jsonl): a problem
    with one answer of each of four models. The reward is 1.0 if ``is_correct``, else 0.0."""
    final = text(values, "ground_truth").rpartition("A:")[2].strip().replace(",", "")
    prompt = prompt_of((Turn("user", text(values, "question")),), final or None)
    completions, rewards = [], []
    for name in SOLVERS:
        solution = value(values, name)
        if not isinstance(solution, Mapping):
            raise RowError(f"{name!r} is a {type(solution).__name__}, not an object")
        completions.append(Completion(text(solution, "solution")))
        rewards.append(float(truth(solution, "is_correct")))
    return Group(prompt, tuple(completions), tuple(rewards))


@each_row
def math(values: Values, config: DataConfig) -> Group:
    """MATH and MATH-500 (nlile/hendrycks-MATH-benchmark, HuggingFaceH4/MATH-500): ``problem``, ``solution``,
    ``answer``."""
    solution = text(values, "solution")
    return _worked(text(values, "problem"), solution, text(values, "answer"), solution, config)


def _worked(question: str, reasoning: str, reference: str, solution: str, config: DataConfig) -> Group:
    """Return the demonstration of a worked problem. Under the think-answer system prompt, the demonstration
    has the form that this prompt asks for."""
    if config.system_prompt == "think_answer":
        solution = think_answer(reasoning, reference)
    return demonstration(prompt_of((Turn("user", question),), reference), solution)


def think_answer(reasoning: str, answer: str) -> str:
    """Return an answer in the form of the think-answer system prompt."""
    return f"<think>\n{reasoning.strip()}\n</think>\n<answer>\n{answer.strip()}\n</answer>"


@each_row
def s1k(values: Values, config: DataConfig) -> Group:
    """s1K-1.1 (simplescaling/s1K-1.1): ``question``, R1's ``deepseek_thinking_trajectory`` and
    ``deepseek_attempt``."""
    shown = think_answer(text(values, "deepseek_thinking_trajectory"), text(values, "deepseek_attempt"))
    return demonstration(prompt_of((Turn("user", text(values, "question")),)), shown)


@each_row
def wildbench(values: Values, config: DataConfig) -> Group:
    """WildBench (allenai/WildBench): evaluation prompts from ``conversation_input``, with GPT-4's answer from
    ``references``."""
    prompt = prompt_of(turns(value(values, "conversation_input"), "conversation_input"))
    references = values.get("references") or {}
    if not isinstance(references, Mapping):
        raise RowError(f"'references' is a {type(references).__name__}, not an object")
    return demonstration(prompt, text(references, "gpt-4")) if references.get("gpt-4") else Group(prompt)


def shp(rows: Iterable[Row], config: DataConfig) -> Iterator[Group | Dropped]:
    """Stanford Human Preferences (stanfordnlp/SHP): ``history``, ``human_ref_A``/``_B`` and scores;
    ``labels`` is 1 when A wins.

    As its authors advise, the winner's score must be at least twice the loser's, and a prompt has at most
    five pairs (the first five).
    """
    pairs: Counter[str] = Counter()

    def convert(values: Values, config: DataConfig) -> Group:
        scores = number(values, "score_A"), number(values, "score_B")
        if max(scores) < SHP_SCORE_RATIO * min(scores):
            raise LeftOutError(f"the scores are less than {SHP_SCORE_RATIO} to 1 apart")
        answers = text(values, "human_ref_A"), text(values, "human_ref_B")
        better, worse = answers if truth(values, "labels") else answers[::-1]
        group = pair(prompt_of((Turn("user", text(values, "history")),)), better, worse)
        if pairs[group.prompt.id] == SHP_PAIRS_PER_PROMPT:
            raise LeftOutError(f"the prompt has {SHP_PAIRS_PER_PROMPT} pairs already")
        pairs[group.prompt.id] += 1
        return group

    return each_row(convert)(rows, config)


def oasst(rows: Iterable[Row], config: DataConfig) -> Iterator[Group | Dropped]:
    """OpenAssistant (OpenAssistant/oasst1): one message per row, trees by ``parent_id``; ``rank`` 0 is the
    best of its siblings.

    Each answer is paired with the next worse sibling. Only English is used, as in HALOs.
    """
    messages: dict[str, Row] = {}
    siblings: dict[str, list[Row]] = {}
    for row in rows:
        try:
            if text(row.values, "lang") != "en":
                raise LeftOutError("not in English")
            messages[text(row.values, "message_id")] = row
            if text(row.values, "role") == "assistant" and row.values.get("rank") is not None:
                number(row.values, "rank")
                siblings.setdefault(text(row.values, "parent_id"), []).append(row)
        except RowError as error:
            yield error.dropped(row)
    for parent, answers in siblings.items():
        answers.sort(key=lambda row: number(row.values, "rank"))
        for better, worse in itertools.pairwise(answers):
            try:
                prompt = prompt_of(_thread(parent, messages))
                yield pair(prompt, text(better.values, "text"), text(worse.values, "text"))
            except RowError as error:
                yield error.dropped(worse)


def _thread(leaf: str, messages: dict[str, Row]) -> tuple[Turn, ...]:
    """Return the conversation from the root of the tree to the message ``leaf``."""
    thread: list[Turn] = []
    step: str | None = leaf
    while step is not None:
        if step not in messages:
            raise RowError("a message of the conversation is missing")
        if len(thread) > len(messages):
            raise RowError("the conversation is a circle: a message answers one that comes after it")
        values = messages[step].values
        thread += turns([{"role": value(values, "role"), "content": value(values, "text")}], "text")
        step = text(values, "parent_id") if values.get("parent_id") is not None else None
    return tuple(reversed(thread))


RATINGS = ("overall_score", "fine-grained_score", "score", "rating", "reward", "rank")
"""Keys under which one of several answers may have its score; the first one found is used. A rank counts from
the best on."""
ANSWERS = ("response", "answer", "completion", "output", "text", "content")
"""Keys under which it may have its text, or messages."""


def rated(one: Any) -> tuple[Completion, float] | None:
    """Return one of several answers with its score; None if it has no score. Raises RowError."""
    if not isinstance(one, Mapping):
        raise RowError("'completions' is not a list of objects with a response")
    key = next((key for key in ANSWERS if isinstance(one.get(key), str | list)), "response")
    score = next((key for key in RATINGS if one.get(key) is not None), None)
    if score is None:
        return None
    return answered((), value(one, key), key)[1], number(one, score) * (-1 if score == "rank" else 1)


@each_row
def ultrafeedback(values: Values, config: DataConfig) -> Group:
    """Answers that have their scores or ranks themselves (openbmb/UltraFeedback): a question and
    ``completions`` (``rated``)."""
    found = [one for one in map(rated, listed(values, "completions")) if one is not None]
    if len(found) < 2:
        raise LeftOutError("fewer than two of the completions have a score")
    answers, scores = zip(*found, strict=True)
    return Group(prompt_of(question(values), values.get("reference")), answers, scores)


_WORDS = re.compile(r"\s*\S+")


@each_row
def language_modelling(values: Values, config: DataConfig) -> Group:
    """``text``, a document. Its first word becomes the prompt, and the rest the completion. Raises
    ConfigError if a chat template would turn the text into an answer."""
    why = "rows are texts without a prompt (language modelling), which no chat template is for: type "
    why += "data.apply_chat_template=false to train on them as they are"
    require(not config.apply_chat_template, "data.apply_chat_template", True, why)
    document = text(values, "text")
    first = _WORDS.match(document)
    if first is None or not document[first.end() :].strip():
        raise RowError("'text' has fewer than two words")
    return demonstration(Prompt((Turn("user", document[: first.end()]),)), document[first.end() :])
