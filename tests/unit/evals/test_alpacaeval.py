"""AlpacaEval: the library's rates of judgements against independent ones, files that cannot be used, and all
stages in one run."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf

from common.errors import ConfigError, DataError, StoppedError
from config.schema_stages import EvalStage
from config.sections import typed
from evals import alpacaeval
from evals.base import Target
from evals.running import evaluate
from models.distributed import start
from tests import http_server
from tests.tiny import make_config

pytestmark = pytest.mark.skipif(find_spec("alpaca_eval") is None, reason="make eval-tools installs it")
N = 805


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """No test waits for a network: the cache is empty, and the hub is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def stage(**own):
    return typed(OmegaConf.create({"kind": "alpacaeval", "alpacaeval": own}), EvalStage)


def target(out):
    words = ["sampler.max_tokens=24", "model.max_length=64", "model.max_prompt_length=40"]
    return Target("mine", make_config(*words, f"cache_dir={out}/.cache"), Path(out))


def rates(tmp_path, rows, **own):
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(rows))
    found = stage(annotations=str(path), **own)
    alpacaeval.check(target(tmp_path), found)
    return alpacaeval.evaluate(target(tmp_path), found, start())


def row(i, preference, output_1="abc", output_2="abcd"):
    of = {"generator_1": "base", "generator_2": "mine", "annotator": "someone", "preference": preference}
    return {"instruction": f"question {i}", "output_1": output_1, "output_2": output_2} | of


def sigmoid(odds):
    return 1 / (1 + np.exp(-odds))


def world(tmp_path, length=1.5, slope=0.6, skill=-0.7):
    """(judgements by a known law, what the length-controlled rate estimates of each). The law: log-odds =
    length * tanh(length difference in its standard deviations) + slope * difficulty + skill; without the
    length for what is estimated. The baselines that the library's regression starts from are written where it
    looks for them."""
    rng = np.random.default_rng(2)
    difficulty, lengths = rng.normal(size=N), rng.integers(20, 400, size=(2, N))
    difference = (lengths[0] - lengths[1]).astype(np.float64)
    odds = slope * difficulty + skill
    preferences = 1 + sigmoid(odds + length * np.tanh(difference / difference.std(ddof=1)))
    texts = zip(preferences, *lengths, strict=True)
    rows = [row(i, p, "x" * int(a), "y" * int(b)) for i, (p, a, b) in enumerate(texts)]
    lines = ["model,preference,index,std_delta_len,instruction_difficulty,not_gamed_baseline"]
    for name in ("concise", "verbose"):  # without skill: what the regression is regularised to
        off = rng.normal(size=N)
        rates = sigmoid(slope * difficulty + length * np.tanh(off))
        lines += [f"{name},{rates[i]},{i},{off[i]},{difficulty[i]},False" for i in range(N)]
    root = tmp_path / "hub" / "datasets--tatsu-lab--alpaca_eval"
    for folder in ("refs", "snapshots/abc"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    (root / "snapshots" / "abc" / "df_gamed.csv").write_text("\n".join(lines) + "\n")
    return rows, sigmoid(odds)


def test_each_row_gets_its_own_controlled_preference_whatever_the_order(tmp_path):
    """Without all instructions the rate is null, and says why."""
    rows, controlled = world(tmp_path)
    order = np.random.default_rng(3).permutation(N)
    straight = rates(tmp_path, rows)
    given = tmp_path / "reference.json"
    keys = {"instruction": "instruction", "output": "output_1", "generator": "generator_1"}
    given.write_text(json.dumps([{key: r[of] for key, of in keys.items()} for r in rows]))
    shuffled = rates(tmp_path, [rows[i] for i in order], reference=str(given))
    np.testing.assert_allclose([r["glm_preference"] for r in straight.rows], controlled, atol=0.02)
    by_question = {r["instruction"]: r["glm_preference"] for r in shuffled.rows}
    assert by_question == {r["instruction"]: r["glm_preference"] for r in straight.rows}
    rate = straight.values["length_controlled_winrate"]
    assert rate == shuffled.values["length_controlled_winrate"]
    assert rate == pytest.approx(100 * controlled.mean(), abs=0.3)
    few = rates(tmp_path, rows[:100]).values
    assert few["length_controlled_winrate"] is None and few["n_total"] == 100
    assert "all 805 instructions" in few["length_controlled_winrate_missing"]


def test_settings_and_judgements_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    for key in alpacaeval.KEYS:
        monkeypatch.delenv(key, raising=False)
    for own, message in (
        ({"annotator": "claude"}, "alpacaeval.annotator=claude: does not ask an OpenAI-compatible"),
        ({}, "alpacaeval.model=gpt-4.1: .*OPENAI_API_KEY, which is not set"),
    ):
        with pytest.raises(ConfigError, match=message):
            alpacaeval.check(target(tmp_path), stage(**own))
    for rows, message in (
        ([], "must be a list"),
        ([row(0, 1.2), {"instruction": "q"}], "1 of 2 rows cannot be used; row 1: has no text under"),
        ([row(0, 1.2), row(1, 1.2) | {"generator_2": "other"}], "generator_2 is mine, other"),
    ):
        with pytest.raises(DataError, match=message):
            rates(tmp_path, rows)


QUESTIONS = [f"{a:02d}+{b:02d}=" for a, b in zip(range(37, 49), range(58, 10, -4), strict=True)]
THEIRS = ["so " * (i + 1) for i in range(len(QUESTIONS))]
KEY = "sk-very-" + "secret-key"


class Judge(http_server.Server):
    """A judge that speaks the OpenAI protocol: it prefers the longer answer with the probability
    sigmoid(characters / 10), whichever it is shown first, and says so in log-probabilities of m and M.
    ``behave(handler, instruction) -> handled`` lets a test answer in its place."""

    behave = staticmethod(lambda handler, instruction: False)

    def __init__(self):
        super().__init__(Asked)
        self.asked = []  # (instruction, whether the baseline's answer comes first, body, key)


class Asked(http_server.Handler):
    def post(self):
        body = json.loads(self.body())
        prompt = body["messages"][-1]["content"]
        instruction = re.search(r'"instruction": """(.*?)"""', prompt, re.DOTALL)[1]
        first, second = re.findall(r'"output": """(.*?)"""', prompt, re.DOTALL)
        self.server.asked.append((instruction, first in THEIRS, body, self.headers["Authorization"]))
        apart = (len(first) - len(second)) / 10
        if not self.server.behave(self, instruction):
            self.reply({"m": math.log(sigmoid(apart)), "M": math.log(sigmoid(-apart))})

    def reply(self, logprobs):
        """Say the likelier of the words; ``logprobs``: word -> log-probability."""
        top = [{"token": word, "logprob": value, "bytes": None} for word, value in logprobs.items()]
        content = {"content": [top[0] | {"top_logprobs": top}]}
        message = {"role": "assistant", "content": max(logprobs, key=logprobs.get)}
        choice = {"index": 0, "finish_reason": "length", "message": message, "logprobs": content}
        made = {"id": "1", "object": "chat.completion", "created": 1, "model": "x", "choices": [choice]}
        tokens = {"prompt_tokens": 99, "completion_tokens": 1, "total_tokens": 100}
        return self.send(200, made | {"usage": tokens})


@pytest.fixture
def endpoint(monkeypatch):
    server = Judge()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_BASE", f"{server.url}/v1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "alpaca_eval"]:
        monkeypatch.delitem(sys.modules, name)  # it reads them when it is imported
    yield server
    server.close()


def baseline(tmp_path, questions, answers):
    path, of = tmp_path / "baseline.json", {"generator": "base", "dataset": "sums"}
    pairs = zip(questions, answers, strict=True)
    path.write_text(json.dumps([{"instruction": q, "output": answer} | of for q, answer in pairs]))
    return str(path)


def test_answers_judgements_and_rates_in_one_run_that_goes_on_where_it_stopped(
    tmp_path, endpoint, monkeypatch, capfd, caplog
):
    """What the judge refuses stops it, and the key is nowhere. A reply that names neither answer is none."""
    cut = r"model.max_prompt_length=40: would cut 1 of AlpacaEval's 13 instructions"
    long = stage(reference=baseline(tmp_path, [*QUESTIONS, "1+" * 60], [*THEIRS, "?"]))
    with pytest.raises(ConfigError, match=cut):
        alpacaeval.check(target(tmp_path), long)
    own, out = {"reference": baseline(tmp_path, QUESTIONS, THEIRS), "model": "m-1"}, tmp_path / "out"
    refusal = json.dumps({"error": {"message": f"no: {KEY}"}})
    endpoint.behave = lambda handler, question: question == QUESTIONS[2] and handler.send(401, refusal)
    with pytest.raises(StoppedError, match=r"the judge m-1: .*401") as error:
        evaluate([target(out)], stage(**own), start())
    printed = repr(error.getrepr(chain=True, showlocals=False)) + "".join(capfd.readouterr()) + caplog.text
    assert KEY not in printed and not (out / "alpacaeval.json").exists()
    outputs = json.loads((out / "alpacaeval" / "outputs.json").read_text())
    assert [o["instruction"] for o in outputs] == QUESTIONS
    assert {tuple(sorted(o)) for o in outputs} == {("dataset", "generator", "instruction", "output")}
    assert all(o["output"].count(";") == 2 for o in outputs)  # the model's form, without special tokens

    endpoint.behave = lambda handler, question: question == QUESTIONS[5] and handler.reply({"x": 0.0})
    monkeypatch.setattr("rollouts.answers.make_sampler", None)  # what was answered is not sampled again
    [found] = evaluate([target(out)], stage(**own), start())
    assert [row["instruction"] for row in found.rows] == QUESTIONS
    apart = [(len(o["output"]) - len(theirs)) / 10 for o, theirs in zip(outputs, THEIRS, strict=True)]
    wins = sigmoid(np.delete(apart, 5))
    preferences = [row["preference"] for row in found.rows]
    assert preferences.pop(5) is None
    np.testing.assert_allclose(preferences, 1 + wins, atol=1e-9)
    assert found.values["counts"]["without_judgement_rows"] == [5] and found.values["n_total"] == 11
    assert found.values["win_rate"] == pytest.approx(100 * wins.mean())
    _, firsts, bodies, keys = zip(*endpoint.asked, strict=True)
    assert 2 < sum(firsts) < len(firsts) - 2, "the order really is drawn"
    assert {*keys} == {f"Bearer {KEY}"}
    assert {body["model"] for body in bodies} == {"m-1"}
    written = json.loads((out / "alpacaeval.json").read_text())
    assert written["win_rate"] == found.values["win_rate"] and written["settings"]["judge"]["model"] == "m-1"

    given = stage(outputs=f"{out}/alpacaeval/outputs.json", **own)
    [again] = evaluate([target(tmp_path / "files")], given, start())
    assert [row["preference"] for row in again.rows] == [row["preference"] for row in found.rows]
    annotations = json.loads((out / "alpacaeval" / "annotations.json").read_text())
    annotations[0]["preference"] = 0  # an old way to write a tie
    annotations[1]["preference"] = -1
    counted, kept = rates(tmp_path, annotations).values, np.array([0.5, *wins[2:]])
    assert counted["win_rate"] == pytest.approx(100 * kept.mean())
    assert counted["standard_error"] == pytest.approx(100 * kept.std(ddof=1) / len(kept) ** 0.5)
    assert counted["counts"]["without_judgement_rows"] == [1, 5] and counted["counts"]["n_draws"] == 1
    assert counted["avg_length"] == int(np.mean([len(o["output"]) for o in outputs]))
    assert "df_gamed.csv" in counted["length_controlled_winrate_missing"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY in path.read_text()]
