"""What accuracy and comparison make of answers, verdicts and rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.errors import ConfigError, StoppedError
from config.schema_stages import EvalStage
from data import adder
from data.chat import Renderer
from evals import accuracy, compare
from evals.answers import limited
from evals.base import Target
from evals.running import check_early
from rollouts.samplers import Sample
from tests.tiny import ROOT, make_config

PROMPTS = [adder.addition(a, 98) for a in range(1, 7)]
STAGE = EvalStage(resamples=200)
MATHS = "rollouts.rewards.verifier.accuracy"
VERIFIERS = {"gsm8k": MATHS, "math": MATHS, "adder": "data.adder.accuracy"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")
    return Renderer(tokenizer, max_length=64, max_prompt_length=16, template=tokenizer.chat_template)


def answers(renderer: Renderer, texts: list[list[str]]) -> list[list[Sample]]:
    return [
        [Sample((*renderer.tokenizer(text)["input_ids"], renderer.end_id), True) for text in each]
        for each in texts
    ]


def test_no_verdict_is_not_wrong_and_pass_at_k_needs_k_of_them(renderer):
    verdicts = {"1": 1.0, "2": 0.0, "3": None}
    drawn = answers(renderer, [["1", "1"], ["1", "2"], ["2", "2"], ["3", "1"], ["3", "2"], ["3", "3"]])
    found = accuracy.verified(PROMPTS, drawn, lambda each, _: [verdicts[text] for text in each], renderer)
    items = accuracy.items_of({"sampled": found}, [1, 2])
    ids = [prompt.id for prompt in PROMPTS]
    assert items["sampled.pass@1"] == {ids[0]: 1.0, ids[1]: 0.5, ids[2]: 0.0, ids[3]: 1.0, ids[4]: 0.0}
    assert items["sampled.pass@2"] == {ids[0]: 1.0, ids[1]: 1.0, ids[2]: 0.0}
    about = accuracy.summary(found)
    assert about["no_verdict"] == pytest.approx(4 / 12)
    assert (about["length"], about["finished"]) == (2.0, 1.0)
    assert about["distinct"] == pytest.approx((0.5 + 1 + 0.5 + 1 + 1 + 0.5) / 6)


@pytest.mark.parametrize(("verdict", "says"), [(0.3, "0.3"), (None, "no verdict on any")])
def test_what_cannot_be_counted_stops(renderer, verdict, says):
    drawn = answers(renderer, [["1"]] * 6)

    def measure() -> None:
        found = accuracy.verified(PROMPTS, drawn, lambda texts, _: [verdict] * len(texts), renderer)
        accuracy.measured([accuracy.items_of({"greedy": found}, [])], {}, STAGE, "t", {})

    with pytest.raises(StoppedError, match=says):
        measure()
    paths = {data: accuracy.verifier_path(make_config(f"data={data}").data, STAGE) for data in VERIFIERS}
    assert paths == VERIFIERS, "a data set says what checks its answers"


def compared(items: dict[str, float], tie: float = 0.0) -> dict[str, float]:
    """The numbers of a comparison whose differences these are."""
    stage = replace(STAGE, compare=replace(STAGE.compare, tie=tie))
    rewards = {"reward": items, "reward_against": dict.fromkeys(items, 0.0), "mean_difference": items}
    return compare.measured(rewards, stage)


def test_the_other_way_round_wins_are_losses():
    differences = dict(enumerate(np.random.default_rng(0).normal(0.3, 1, 40).round(1)))
    ours, theirs = (compared({str(i): sign * float(d) for i, d in differences.items()}) for sign in (1, -1))
    assert (ours["win"], ours["loss"]) == (theirs["loss"], theirs["win"])
    assert ours["win"] + ours["tie"] + ours["loss"] == pytest.approx(1)
    assert ours["win_rate"] == pytest.approx(1 - theirs["win_rate"])
    assert ours["win_rate"] == pytest.approx(ours["win"] + ours["tie"] / 2)
    assert ours["mean_difference"] == pytest.approx(-theirs["mean_difference"])
    assert all(ours[p] == pytest.approx(theirs[p]) for p in ("p_t", "p_wilcoxon", "p_sign"))
    near = compared({"a": 1.0, "b": 0.4, "c": -0.4, "d": -1.0}, tie=0.5)
    assert (near["win"], near["tie"], near["loss"]) == (0.25, 0.5, 0.25)
    high, low = theirs["mean_difference_ci"]
    assert ours["mean_difference_ci"] == pytest.approx([-low, -high])


def test_limited_prompts_are_a_draw_that_does_not_depend_on_the_order():
    some = limited(PROMPTS, 3)
    assert {p.id for p in some} == {p.id for p in limited(PROMPTS[::-1], 3)} and len(some) == 3
    assert some == [prompt for prompt in PROMPTS if prompt in some] and limited(PROMPTS, None) == PROMPTS


def test_a_result_is_not_written_over_somebody_s_file(tmp_path):
    """The answers stand beside the result: ``name.jsonl`` without ``name.json`` is not of an evaluation."""
    (tmp_path / "prompts.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: is there already"):
        check_early([Target("a", make_config(), tmp_path)], EvalStage(out=str(tmp_path), name="prompts"))
    for name in ("..", "a/b"):
        with pytest.raises(ConfigError, match="letters"):
            EvalStage(name=name)
