"""Columns of public sets: what should have been read stops the run, and nothing else does; what is proposed
works."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
import yaml

from common.errors import ConfigError, DataError, UserError
from data.rows import Loaded
from tests.unit.data.people import load, said

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "m")]


def rows(make: Callable[[Callable[[int], str], int], dict], n: int = 30) -> list[dict]:
    """Rows of texts of invented words; ``make`` gets a function from a number of words to a new text."""
    draw = random.Random(0)
    return [make(lambda words: " ".join(draw.choices(WORDS, k=words)), i) for i in range(n)]


def pair(t: Callable[[int], str], question: str) -> dict:
    return {"chosen": said(question, t(30)), "rejected": said(question, t(30))}


def shared(*contents: str) -> list[dict]:
    return said(*contents, role="from", content="value", names=("human", "gpt"))


def hh(t: Callable[[int], str], i: int) -> dict:
    start = f"\n\nHuman: {t(9)}\n\nAssistant: {t(12)}\n\nHuman: {t(7)}\n\nAssistant: "
    return {"chosen": start + t(20), "rejected": start + t(15)}


def ultrafeedback(t: Callable[[int], str], i: int) -> dict:
    rated = [
        {"response": t(20), "overall_score": 5.0 + k, "model": f"m{k}", "critique": t(30)} for k in range(4)
    ]
    return {"source": "flan", "instruction": t(15), "models": ["a b", "c d"], "completions": rated} | {
        "correct_answers": ["None"], "incorrect_answers": ["None"]}  # fmt: skip


def orca(t: Callable[[int], str], i: int) -> dict:
    asked, one, two = t(20), t(30), t(25)
    return {"system": t(12), "input": asked, "chosen": one, "rejected": two, "generations": [one, two],
            "order": ["chosen", "rejected"], "labelling_model": "gpt-4-1106-preview",
            "labelling_prompt": said(t(20), f"{asked} {one} {two}"), "rating": [9.0, 8.0], "rationale": t(40),
            "status": "unchanged", "chosen_score": 9.0, "in_gsm8k_train": False}  # fmt: skip


def nectar(t: Callable[[int], str], i: int) -> dict:
    answers = [{"answer": t(20), "model": f"m{k}", "rank": k + 1.0} for k in range(7)]
    return {"prompt": f"\n\nHuman: {t(9)}\n\nAssistant: ", "answers": answers, "turns": 1, "num_responses": 7,
            "source": ["lmsys-chat-1m"], "good_natured": True}  # fmt: skip


def helpsteer3(t: Callable[[int], str], i: int) -> dict:
    each = {"score": i % 7 - 3, "reasoning": t(20), "feedback1": t(20), "feedback2": t(20)}
    return {"domain": "general", "language": "english", "context": said(t(12)), "response1": t(30),
            "response2": t(30), "overall_preference": i % 7 - 3, "individual_preference": [each]}  # fmt: skip


def openr1(t: Callable[[int], str], i: int) -> dict:
    problem, answer = t(20), f"{t(60)} {i}7"
    return {"problem": problem, "solution": t(30), "answer": f"{i}7", "problem_type": "Algebra",
            "source": "olympiads", "uuid": f"u{i}", "generations": [answer, t(40)],
            "correctness_math_verify": [True, False], "finish_reasons": ["stop", "length"],
            "messages": said(problem, answer)}  # fmt: skip


def capybara(t: Callable[[int], str], i: int) -> dict:
    first, answer, second, given = t(12), t(15), t(9), t(20)
    asked = [*said(first, answer, second)]
    turns = [{"input": first, "output": answer}, {"input": second, "output": given}]
    return {"source": "Dove", "conversation": turns, "original_response": given,
            "prompt": asked, "chosen": [*asked, *said("", given)[1:]],
            "rejected": [*asked, *said("", t(20))[1:]],
            "rating_chosen": 5, "chosen_model": "m"}  # fmt: skip


def magpie(t: Callable[[int], str], i: int) -> dict:
    asked, answer = t(15), t(30)
    return {"uuid": f"u{i}", "instruction": asked, "response": answer, "conversations": shared(asked, answer),
            "gen_input_configs": {"temperature": 1.0, "input_generator": "llama"}, "intent": t(12),
            "knowledge": t(15), "difficulty": "easy", "task_category": "Math", "other_task": ["Editing"],
            "quality_explanation": t(20), "language": "EN"}  # fmt: skip


def oasst(t: Callable[[int], str], i: int) -> dict:
    parent, rank = (f"m{i - i % 3}", i % 3 - 1) if i % 3 else (None, None)
    return {"message_id": f"m{i}", "parent_id": parent, "rank": rank, "lang": "en",
            "role": "assistant" if i % 3 else "prompter", "text": t(20)}  # fmt: skip


def shp(t: Callable[[int], str], i: int) -> dict:
    return {"post_id": f"p{i}", "domain": "askbaking", "history": t(30), "c_root_id_A": "x",
            "human_ref_A": t(20), "human_ref_B": t(20), "labels": 1, "score_A": 9, "score_B": 3}  # fmt: skip


def trajectory(t: Callable[[int], str], i: int) -> dict:
    return {"task": "Math", "dataset": "m", "trajectory": shared(f"solve {i}"), "chosen": f"Step 1: {t(9)}",
            "rejected": f"Step 1: {t(9)}", "id": f"x{i}", "parent_id": "p"}  # fmt: skip


def hermes(t: Callable[[int], str], i: int) -> dict:
    row = pair(t, asked := t(12))
    answers = [row["chosen"][1]["content"], row["rejected"][1]["content"], t(12)]
    return {"source": "airoboros", "category": "orca", "prompt": asked, "candidates_completions": answers,
            "candidate_policies": ["teknium/a", "org/b", "org/c"], "ranks": [0, 1, 2]} | row  # fmt: skip


PUBLIC: dict[str, tuple[Callable[[Callable[[int], str], int], dict], str]] = {
    "Anthropic/hh-rlhf": (hh, ""),
    "stanfordnlp/SHP": (shp, ""),
    "openbmb/UltraFeedback": (ultrafeedback, ""),
    "nvidia/HelpSteer2": (
        lambda t, i: {"prompt": t(12), "response": t(20), "helpfulness": i % 5}, "response"),
    "nvidia/HelpSteer3": (helpsteer3, "context"),
    "nvidia/HelpSteer2, preference": (
        lambda t, i: {"split": "train", "prompt": t(12), "response_1": t(20), "response_2": t(20),
                      "preference_strength": i % 7 - 3, "preference_statement": t(12)}, "response_1"),
    "berkeley-nest/Nectar": (nectar, "answers"),
    "argilla/distilabel-intel-orca-dpo-pairs": (orca, "input"),
    "allenai/tulu-3-sft-mixture": (
        lambda t, i: {"id": f"a{i}", "messages": said(t(9), t(20)), "source": "x"}, ""),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        lambda t, i: {"id": f"a{i}", "prompt": (q := t(12)), "chosen_model": "m"} | pair(t, q), ""),
    "PKU-Alignment/PKU-SafeRLHF": (
        lambda t, i: {"prompt": t(12), "prompt_source": "x", "response_0": t(20), "response_1": t(20),
                      "is_response_0_safe": True, "better_response_id": i % 2, "safer_response_id": 1}, ""),
    "open-r1/OpenR1-Math-220k": (openr1, "solution"),
    "openai/gsm8k": (lambda t, i: {"question": t(20), "answer": f"{t(20)}\n#### {i}"}, "answer"),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        lambda t, i: {"data_source": "math_dapo", "prompt": said(t(20)), "ability": "MATH",
                      "reward_model": {"ground_truth": str(i), "style": "rule"}, "extra_info": {"index": i}},
        "reward_model.ground_truth"),
    "SynthLabsAI/Big-Math-RL-Verified": (
        lambda t, i: {"problem": t(20), "answer": str(i), "source": "x", "domain": ["Mathematics -> Algebra"],
                      "llama8b_solve_rate": 0.5}, "problem"),
    "GAIR/lima": (lambda t, i: {"conversations": [t(12), t(30)], "source": "stackexchange"}, ""),
    "databricks/databricks-dolly-15k": (
        lambda t, i: {"instruction": t(12), "context": "" if i % 3 else t(30), "response": t(20),
                      "category": "closed_qa"}, "context"),
    "argilla/OpenHermesPreferences": (hermes, ""),
    "openai/webgpt_comparisons": (
        lambda t, i: {"question": {"dataset": "eli5", "id": f"{i}", "full_text": t(15)}, "answer_0": t(30),
                      "quotes_0": {"title": [t(4)], "extract": [t(20)]}, "score_0": 0.5, "answer_1": t(30),
                      "score_1": -0.5}, "question"),
    "argilla/distilabel-capybara-dpo-7k-binarized": (capybara, ""),
    "Magpie-Align/Magpie-Pro-300K-Filtered": (magpie, ""),
    "lmarena-ai/arena-hard-auto": (
        lambda t, i: {"question_id": f"q{i}", "category": "arena-hard", "cluster": "ABC Sequence Puzzles",
                      "turns": [{"content": t(20)}]}, "turns"),
    "OpenAssistant/oasst1": (oasst, ""),
    "openbmb/UltraInteract_pair": (trajectory, "trajectory"),
    "simplescaling/s1K": (
        lambda t, i: {"solution": t(20), "question": t(20), "cot_type": "math", "source_type": "x",
                      "metadata": "{}", "thinking_trajectories": [t(60)], "attempt": t(20)}, "attempt"),
    "tatsu-lab/alpaca": (
        lambda t, i: {"instruction": (q := t(9)), "input": "", "output": (a := t(20)), "text": q + a}, ""),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": (
        lambda t, i: {"id": f"a{i}", "conversations": shared(t(9), t(20), t(8), t(20))}, ""),
}  # fmt: skip
"""Columns as the sets lie on the hub -> rows, and the column because of which they are refused; "" where all
that should be read is. OpenR1's alone has a second worked solution, for which the run stops in vain."""


def outcome(records: list[dict], **settings: object) -> Loaded | UserError:
    try:
        loaded = load(*records, **settings)
    except (ConfigError, DataError) as error:
        return error
    if loaded.groups:
        return loaded.refusal or loaded
    return DataError(
        f"none usable: {[d.reason for d in loaded.dropped[:1]]}; {loaded.propose(loaded.unused)}"
    )


def typed_lines(error: UserError) -> list[dict]:
    """The settings of each line that a refusal says to type; two that belong together are one."""
    lines = re.findall(r'"data\.[^"]*"(?: "data\.[^"]*")*', str(error))
    return [
        {key: yaml.safe_load(value) for key, value in re.findall(r'"data\.(\w+)=(.*?)"', line)}
        for line in lines
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_rows_are_read_or_refused_and_every_line_to_type_works(name: str) -> None:
    make, column = PUBLIC[name]
    found = outcome(rows(make))
    assert isinstance(found, Loaded) == (not column), found
    assert column in str(found) if column else not found.dropped
    for settings in typed_lines(found) if isinstance(found, UserError) else ():
        if "…" not in str(settings):
            assert isinstance(outcome(rows(make), **settings), Loaded), settings


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("reasoning_content", "Red?", {"reasoning_content": "Red?"}),
        ("reasoning", "Red?", {"reasoning": "Red?"}),
        ("thinking", "Red?", {"thinking": "Red?"}),
        ("thought", "Red?", {"reasoning_content": "Red?"}),
        ("thinking_content", "Red?", {"reasoning_content": "Red?"}),
        ("reasoning_details", [{"type": "reasoning.text", "text": "Red?"}], {"reasoning_content": "Red?"}),
        ("reasoning_effort", "high", "nothing of the key 'reasoning_effort' of messages"),
        ("mood", "glad", "nothing of the key 'mood' of messages"),
        ("thought", 5, "in a message of 'messages' 'reasoning_content' is a int, not a string"),
        ("reasoning_details", [{"data": "x"}], "'reasoning_content' is a NoneType, not a string"),
    ],
)
def test_a_thought_reaches_the_template_whatever_its_name(key: str, value: object, read: dict | str) -> None:
    messages = said("Name a colour.", "Blue.")
    loaded = load({"messages": [messages[0], messages[1] | {key: value}]})
    if isinstance(read, str):
        assert read in str([*loaded.read_back, *loaded.dropped])
    else:
        assert json.loads(loaded.groups[0].completions[0].keys) == read and not loaded.read_back


@pytest.mark.parametrize("name", ["thinking", "thought", "reasoning"])
def test_a_column_of_thoughts_is_mapped(name: str) -> None:
    row = {"prompt": "Name a colour.", name: "Red?", "completion": "Blue."}
    with pytest.raises(ConfigError) as error:
        load(row)
    (settings, *_) = typed_lines(error.value)
    assert settings == {"columns": {"reasoning_content": name}}
    (group,) = load(row, **settings).groups
    assert json.loads(group.completions[0].keys) == {"reasoning_content": "Red?"}
