"""The gates on a real model, as far as they need none."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.real import BAND, PAIRS, PROMPTS, Suite, engine, memory, sanity_pairs, speed
from data.constraints import all_met
from data.types import Completion, Prompt, Turn
from rollouts.rounds import SampledPrompt


def sampled(i: int, right: int, of: int = 8) -> SampledPrompt:
    prompt = Prompt((Turn("user", f"Describe {i}. Do not use any commas."),), json.dumps({"no_comma": None}))
    texts = ["no comma"] * right + ["one, here"] * (of - right)
    return SampledPrompt(prompt, tuple(Completion(text=text) for text in texts))


def test_the_sanity_set_has_the_prompts_that_are_solved_now_and_then() -> None:
    pairs = list(sanity_pairs([sampled(i, i % 9) for i in range(40)]))
    assert len({pair.prompt.id for pair in pairs}) == PROMPTS
    for pair in pairs:
        texts = [completion.text or "" for completion in pair.completions]
        assert all_met(texts, [pair.prompt.reference_answer] * 2) == [1.0, 0.0] and pair.rewards == (1.0, 0.0)
        solved = int(pair.prompt.turns[0].content.split()[1].rstrip(".")) % 9 / 8
        assert BAND[0] <= solved <= BAND[1]
    assert max(sum(one.prompt == pair.prompt for one in pairs) for pair in pairs) == PAIRS


def test_each_gate_passes_by_what_the_run_found(tmp_path: Path) -> None:
    """The largest gap of engine and trainer; speed over the figure of its dtype; a peak beside its
    estimate."""
    (tmp_path / "config.yaml").write_text("model:\n  dtype: float32\n")
    suite = Suite(tmp_path, [], jobs=1)
    for vllm, largest, passed in ((True, 1e-6, True), (True, 0.5, False), (False, 0.5, None)):
        suite.vllm = vllm
        record = {"step": 0, "round_probe_largest": largest, "round_probe_mean": 1e-7}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        assert engine(suite, tmp_path).passed is passed
    suite.dtype, suite.threads = "float32", "4"
    for tokens, share, passed in ((256.0, "1.00", True), (84.0, "0.33", False)):
        gate = speed(suite, tokens)
        assert share in gate.measured and gate.passed is passed
    suite.program = lambda *words, **of: ("  the process takes about 3.00 GiB\n", 0.0)
    for peak, passed in ((4.4, True), (2.1, True), (4.6, False), (1.9, False)):
        assert memory(suite, [], peak).passed is passed
