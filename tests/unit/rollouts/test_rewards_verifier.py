"""The verifier: right answers get 1, wrong ones 0, and what cannot be told gets no verdict; format and tags
are Open-R1's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.published import think_answer
from data.types import Prompt, Turn
from rollouts.rewards.base import Missing, make_reward
from rollouts.rewards.mathverify import check
from rollouts.rewards.settings import VerifierConfig
from rollouts.rewards.verifier import VerifierReward, format_reward, tag_count_reward
from tests.tiny import reward_of

DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def verifier():
    reward = VerifierReward(VerifierConfig(workers=2))
    yield reward
    reward.close()


ANSWERS = [
    (r"\frac{1}{2}", r"It is $\frac{2}{4}$.", 1.0),
    (r"\frac{1}{2}", "<answer>0.5</answer>", 1.0),
    ("(1,2)", "<answer>(2,1)</answer>", 0.0),
    (r"\text{Evelyn}", "Evelyn", 1.0),
    ("72", "72 or 73", 0.0),
    ("72", "<answer>72</answer> <answer>71</answer>", 0.0),
    ("72", r"\frac{", 0.0),
    ("1200", "<think>\n3 * 400\n</think>\n<answer>\n$1,200.00\n</answer>", 1.0),
    ("-3", "#### 3", 0.0),
    ("-2125.5", "#### -2,125.50", 1.0),
    ("1234567", r"It is $1{,}234{,}567$.", 1.0),
    ("2125", r"It costs \$3, so the answer is 2,1251.", 0.0),
    ("2125", "<answer>2,125,1</answer>", 0.0),
    ("12.5", "12,5", 1.0),
    ("1.2", "1,2,3", 0.0),
    ("1,2,3", "3, 1, 2", 1.0),
    ("1,2,3", "(3,1,2)", 0.0),
    ("1,2,3", r"They are $1,2,3$.", 1.0),
    ("$4.00 + $2.00 = $<<4+2=6.00>>6.00\nA: 6", "fee: $4.00 + $2.00 = $<<4+2=6.00>>6.00\nA: 6", 1.0),
    ("5x=2*2\n26+15=41>>41 points\nA: 41", "26+15=41\n10+20+25 = <<10+20+25=55>>55 points\nA: 55", 0.0),
    ("6", "It is $4 and $2.\n**Final answer:** 6", 1.0),
    ("7", "n = 7.", 1.0),
    ("Half of that is 7\nA: 7", "He has 7 of them.\nA: 7", 1.0),
    ("7", "It is 7i.", 0.0),
    ("x=5", "5", 1.0),
    (None, "72", None),
    ("", "72", None),
    ("yes", "The answer is yes.", 1.0),
    ("yes", "#### yes", 1.0),
    ("yes", "The answer is no.", 0.0),
    ("yes", "yes or no", None),
    ("(B)", "B) city 1", 1.0),
    ("(B)", r"\boxed{B}", 1.0),
    ("(B)", "Answer: C", 0.0),
    ("(B)", "I like B and C", None),
    ("A", "The correct option is A: city 0", 1.0),
    ("A", "The correct option is B: city A", 0.0),
    ("A", "A thing", None),
    (r"\text{east}", "$\\text{east}$", 1.0),
    (r"\text{east}", r"\boxed{west}", 0.0),
    ("infinity", r"$\infty$", 1.0),
    ("infinity", "it diverges quickly", None),
]
"""A reference, an answer to it, and the verdict: None where it is not plainly it, nor another."""


def test_answers(verifier):
    found = verifier.accuracy([row[0] for row in ANSWERS], [row[1] for row in ANSWERS])
    verdicts = [None if isinstance(one, Missing) else one for one in found]
    assert [(*row, v) for row, v in zip(ANSWERS, verdicts, strict=True) if v != row[2]] == []


MATH = {
    r"288 \pi": ("288", r"-288 \pi"),
    r"6 - 5i": ("5", "6 + 5i", "6", "6 - 5"),
    r"11,\! 111,\! 111,\! 100": ("100", r"11,\! 111,\! 111"),
    "5x - 7y + 11z + 4 = 0": ("0", "4", "5x + 7y + 11z + 4 = 0", "5x - 7y + 11z = 0"),
    r"\left( 3, \frac{\pi}{2} \right)": (r"\left( 3, -\frac{\pi}{2} \right)", "2"),
    r"3\sqrt{13}": ("13", "3", r"-3\sqrt{13}"),
    r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}": ("5", r"-\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}"),
    "6r^2-4r-24": ("24", "-6r^2+4r+24", "6r^2-4r", "6-4-24"),
    "(-\\infty,-2)\\cup(-2,3)": ("3", "(-2,3)", "(-\\infty,2)\\cup(2,3)"),
    "1,-2": ("-2", "1", "1,2"),
    r"\$32,\!348": ("348", "-32348"),
    "7": (r"7\pi", r"7\sqrt{2}", "7x"),
}
"""References of MATH-500 (openai/prm800k, MIT) and wrong answers to each: a number of it alone, a sign
turned, pi or a variable left out or put in, a term left out."""
TAGS = "<think>\nx = 12\n</think>\n<answer>\n{}\n</answer>"
FORMULAS = ("{}", "So it is $\\boxed{{{}}}$.", "\\boxed{{{}}}", TAGS, "The answer is ${}$.")
SENTENCES = (
    "{}",
    "The answer is {}.",
    "So it is **{}**",
    r"\boxed{{{}}}",
    "<answer>{}</answer>",
    "答案是{}。",
)
QUANTITIES = {
    "34": ("34 km/h", "34 m/s^2", "34 ft^3", "34 N*m", "34 J/(kg*K)", "34 m", "34 mph", "34 °C", "３４"),
    r"34\text{ m/s}": ("34", "34 m/s"),
    "50%": (r"50\%", "50 %", "50%", "0.5", "50 percent"),
    r"12.5\%": ("12.5%", "0.125"),
}
WRONG = {"34": ("35 km/h", "34 x", "34x", "34 x/y"), "50%": ("5%", "60%", "0.05")}


@pytest.mark.parametrize("right", ["itself", "quantities"])
def test_a_reference_is_read_whole_and_units_per_cent_and_other_scripts_as_people_write_them(verifier, right):
    """Each accepts what is right and none of its wrong answers, however they are written."""
    itself, wrong = right == "itself", MATH if right == "itself" else WRONG
    same = {ref: (ref,) for ref in MATH} if itself else QUANTITIES
    asked = [(ref, one, 1.0) for ref, of in same.items() for one in of]
    asked += [(ref, one, 0.0) for ref, of in wrong.items() for one in of]
    for sentence in FORMULAS if itself else SENTENCES:
        found = verifier.accuracy([ref for ref, *_ in asked], [sentence.format(said) for _, said, _ in asked])
        assert [(*one, v) for one, v in zip(asked, found, strict=True) if v != one[2]] == [], sentence


def test_verdicts_on_answers_of_models_are_the_published_ones(verifier):
    path = DATA / "gsm8k_model_solutions.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no answers of models in {DATA}")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    answers = [(row["ground_truth"], of) for row in rows for of in row.values() if isinstance(of, dict)]
    verdicts = verifier.accuracy([truth for truth, _ in answers], [of["solution"] for _, of in answers])
    assert verdicts == [float(of["is_correct"]) for _, of in answers]


@settings(max_examples=25)
@given(st.from_regex(r"[1-9][0-9,]{0,9}[0-9]", fullmatch=True))
def test_commas_are_thousands_separators_in_groups_of_three_alone(text):
    without = text.replace(",", "")
    grouped = text in (without, f"{int(without):,}")
    assert check((without, text)) == check((without, f"The answer is {text}.")) == float(grouped)


def test_what_hangs_has_no_verdict_and_the_rest_has():
    tower = r"<answer>10^{10^{10^{10}}} + 9^{9^{9^{9}}}</answer>"
    quick = VerifierReward(VerifierConfig(workers=1, timeout=1.0))
    verdicts = quick.accuracy([r"10^{9^{9^{9}}}", "5"], [tower, "#### 5"])
    quick.close()
    assert verdicts == [Missing("took longer than 1 s and was killed"), 1.0]


def test_weights_and_parts():
    reward = make_reward(reward_of("verifier", VerifierConfig(workers=1), 0.5))
    ask = [Prompt((Turn("user", "q"),), reference) for reference in ("4", "4", "4", None)]
    texts = [think_answer("2+2", "4"), think_answer("2+2", "5"), "4", think_answer("", "4")]
    assert reward.score(ask, texts) == [10.0, 2.0, 8.0, None]
    assert reward.metrics["accuracy"] == pytest.approx(2 / 3)
    assert reward.metrics["format"] == 0.75
    reward.close()


GOOD = "<think>\na\nb\n</think>\n<answer>\nc\n</answer>"


def test_format_and_tags():
    """Open-R1's, whose ``$`` is the end of a line: text after the last one costs nothing, a tag that comes
    twice costs its quarter."""
    for text, form, tags in (
        (GOOD, 1, 1),
        (" " + GOOD, 0, 1),
        (GOOD + "\nmore", 1, 1),
        (GOOD + " more", 0, 1),
        (GOOD.replace("<think>\n", ""), 0, 0.75),
        (GOOD + "\n" + GOOD, 1, 0),
    ):
        assert (format_reward(text), tag_count_reward(text)) == (form, tags)
