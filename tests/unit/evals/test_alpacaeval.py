"""AlpacaEval: the library's rates of judgements against independent ones, files that cannot be used, and all
stages in one run."""

from __future__ import annotations

import json
import logging
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
from tests.tiny import ROOT, make_config

pytestmark = pytest.mark.skipif(find_spec("alpaca_eval") is None, reason="make eval-tools installs it")
REAL = ROOT.parent / "shared" / "data" / "alpacaeval_annotations_gpt35_turbo_0301.json"
N = 805


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """No test waits for a network: the cache is empty, and the hub is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def stage(**own):
    return typed(OmegaConf.create({"kind": "alpacaeval", "alpacaeval": own}), EvalStage)


def target(out, *overrides):
    words = ["sampler.max_tokens=24", "model.max_length=64", "model.max_prompt_length=40"]
    return Target("mine", make_config(*words, f"cache_dir={out}/.cache", *overrides), Path(out))


def rates(tmp_path, rows, **own):
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(rows))
    found = stage(annotations=str(path), **own)
    alpacaeval.check(target(tmp_path), found)
    return alpacaeval.evaluate(target(tmp_path), found, start())


def row(i, preference, output_1="abc", output_2="abcd"):
    of = {"generator_1": "base", "generator_2": "mine", "annotator": "someone", "preference": preference}
    return {"instruction": f"question {i}", "output_1": output_1, "output_2": output_2} | of


# -- the plain rate --------------------------------------------------------------------------------


def test_the_plain_rate_by_hand(tmp_path):
    """0 is an old way to write a tie; null, nan and -1 are judgements that failed, which are counted and left
    out."""
    rng = np.random.default_rng(1)
    preferences = [*(1 + rng.random(200)).tolist(), *[1.5] * 3, *[0] * 4, *[1, 2, 2]]
    bad = [None, float("nan"), -1]
    made = rates(tmp_path, [row(i, p) for i, p in enumerate([*preferences[:50], *bad, *preferences[50:]])])
    wins = np.array([0.5 if p == 0 else p - 1 for p in preferences], dtype=np.float64)
    error = np.sqrt(((wins - wins.mean()) ** 2).sum() / (len(wins) - 1) / len(wins))
    found = made.values
    assert found["win_rate"] == pytest.approx(100 * wins.sum() / len(wins), rel=1e-12)
    assert found["standard_error"] == pytest.approx(100 * error, rel=1e-12)
    assert (found["n_total"], found["avg_length"], len(made.rows)) == (210, 4, 213)
    counts, sides = found["counts"], ((wins > 0.5).sum(), (wins < 0.5).sum(), 7)
    assert (counts["n_wins"], counts["n_wins_base"], counts["n_draws"]) == sides
    assert (counts["without_judgement"], counts["without_judgement_rows"]) == (3, [50, 51, 52])
    assert found["length_controlled_winrate"] is None
    assert "df_gamed.csv" in found["length_controlled_winrate_missing"]


@pytest.mark.skipif(
    not REAL.is_file(), reason="the real judgements are not beside the repository (../shared/data)"
)
def test_the_leaderboards_numbers_from_its_judgements(tmp_path):
    """Of gpt-3.5-turbo-0301: https://tatsu-lab.github.io/alpaca_eval, with all digits of its table."""
    found = alpacaeval.evaluate(target(tmp_path), stage(annotations=str(REAL)), start()).values
    assert found["win_rate"] == pytest.approx(9.622453295105588, rel=1e-12)
    assert found["standard_error"] == pytest.approx(0.9129656686751644, rel=1e-12)
    assert found["discrete_win_rate"] == pytest.approx(8.881987577639752, rel=1e-12)
    assert (found["n_total"], found["avg_length"]) == (805, 827)


# -- the length-controlled rate --------------------------------------------------------------------


def world(tmp_path, length, slope=0.6, skill=-0.7):
    """(judgements by a known law, what the length-controlled rate estimates of each). The law: log-odds =
    length * tanh(length difference in its standard deviations) + slope * difficulty + skill; without the
    length for what is estimated. The baselines that the library's regression starts from are written where it
    looks for them."""

    def sigmoid(odds):
        return 1 / (1 + np.exp(-odds))

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
    """And a process's logging stays as it was. Without all instructions the rate is null, and says why."""
    before = (logging.getLogger().level, logging.root.manager.disable)
    rows, controlled = world(tmp_path, 1.5)
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
    assert (logging.getLogger().level, logging.root.manager.disable) == before


# -- what cannot be used ---------------------------------------------------------------------------


REFUSED = [
    ({"annotations": "nowhere.json"}, "alpacaeval.annotations=nowhere.json: there is no such file"),
    ({"annotator": "claude"}, "alpacaeval.annotator=claude: does not ask an OpenAI-compatible"),
    ({}, "alpacaeval.model=gpt-4.1: .*OPENAI_API_KEY, which is not set"),
]
OTHER = row(1, 1.2) | {"generator_2": "other"}
UNUSABLE = [
    ([], "must be a list"),
    ([row(0, 1.2), {"instruction": "q"}], "1 of 2 rows cannot be used; row 1: has no text under output_1, "),
    ([row(0, 1.2), OTHER], "one model against one baseline is rated; generator_2 is mine, other"),
    ("{", "is no JSON"),
]


def test_settings_and_judgements_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    for key in alpacaeval.KEYS:
        monkeypatch.delenv(key, raising=False)
    for own, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            alpacaeval.check(target(tmp_path), stage(**own))
    path = tmp_path / "annotations.json"
    for rows, message in UNUSABLE:
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        with pytest.raises(DataError, match=message):
            alpacaeval.check(target(tmp_path), stage(annotations=str(path)))


# -- all stages ------------------------------------------------------------------------------------

QUESTIONS = [f"{a:02d}+{b:02d}=" for a, b in [(37, 58), (12, 30), (99, 1), (45, 45), (7, 8), (61, 27)]]


KEY = "sk-very-" + "secret-key"
RNG = np.random.default_rng(0)
MINE, THEIRS = RNG.normal(size=40).round(2), RNG.normal(size=40).round(2)
EXPECTED = 1 + 1 / (1 + np.exp(-(MINE - THEIRS)))
"""What the judge thinks, in the library's scale: 2 where output_2, the model's, wins."""


class Judge(http_server.Server):
    """A judge that speaks the OpenAI protocol: of answers ``score=1.25`` it prefers the higher one with the
    probability sigmoid(difference), whichever it is shown first, and says so in log-probabilities of m and M.
    ``behave(handler, instruction) -> handled`` lets a test answer in its place."""

    behave = staticmethod(lambda handler, instruction: False)

    def __init__(self):
        super().__init__(Asked)
        self.asked = []  # (instruction, whether the first answer is better, body, key)


class Asked(http_server.Handler):
    def post(self):
        body = json.loads(self.body())
        prompt = body["messages"][-1]["content"]
        instruction = re.search(r'"instruction": """(.*?)"""', prompt, re.DOTALL)[1]
        scores = re.findall(r'"output": """score=(-?[\d.]+)"""', prompt) or (0.0, 0.0)
        apart = float(scores[0]) - float(scores[1])
        self.server.asked.append((instruction, apart > 0, body, self.headers["Authorization"]))
        if not self.server.behave(self, instruction):
            self.reply({"m": -math.log1p(math.exp(-apart)), "M": -math.log1p(math.exp(apart))})

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


def answers(scores, generator):
    of = {"generator": generator, "dataset": "made"}
    return [{"instruction": f"question {i}", "output": f"score={x}"} | of for i, x in enumerate(scores)]


def judged(tmp_path, **own):
    """The judge's opinion of given answers."""
    files = {"outputs": tmp_path / "mine.json", "reference": tmp_path / "theirs.json"}
    files["outputs"].write_text(json.dumps(answers(MINE, "mine")))
    files["reference"].write_text(json.dumps(answers(THEIRS, "theirs")))
    asked = stage(**{key: str(path) for key, path in files.items()}, **own)
    [found] = evaluate([target(tmp_path / "out")], asked, start())
    return found


def test_preferences_are_the_judges_whichever_answer_is_shown_first(endpoint, tmp_path):
    endpoint.behave = lambda handler, instruction: instruction == "question 5" and handler.reply({"x": 0.0})
    found = judged(tmp_path, model="m-1")
    assert [row["instruction"] for row in found.rows] == [f"question {i}" for i in range(40)]
    preferences = [row["preference"] for row in found.rows]
    assert preferences.pop(5) is None, "a reply that names neither answer"
    assert found.values["counts"]["without_judgement_rows"] == [5] and found.values["n_total"] == 39
    np.testing.assert_allclose(preferences, np.delete(EXPECTED, 5), atol=1e-9)
    _, firsts, bodies, keys = zip(*endpoint.asked, strict=True)
    assert 5 < sum(firsts) < 35 and len(firsts) == 40, "the order really is drawn"
    assert {*keys} == {f"Bearer {KEY}"}
    body = bodies[0]
    assert (body["model"], body["max_tokens"], body["logprobs"]) == ("m-1", 1, True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY in path.read_text()]


def test_what_every_call_would_get_stops_and_the_key_is_nowhere(endpoint, tmp_path, capfd, caplog):
    said = json.dumps({"error": {"message": f"no: {KEY}"}})
    endpoint.behave = lambda handler, instruction: handler.send(401, said)
    with pytest.raises(StoppedError, match=r"the judge gpt-4.1: .*401") as error:
        judged(tmp_path)
    printed = repr(error.getrepr(chain=True, showlocals=False)) + "".join(capfd.readouterr()) + caplog.text
    assert KEY not in printed + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def baseline(tmp_path, questions=QUESTIONS):
    path, of = tmp_path / "baseline.json", {"generator": "base", "dataset": "sums"}
    path.write_text(json.dumps([{"instruction": q, "output": "I do not know."} | of for q in questions]))
    return str(path)


def test_answers_judgements_and_rates_in_one_run_that_goes_on_where_it_stopped(
    tmp_path, endpoint, monkeypatch
):
    cut = r"model.max_prompt_length=40: would cut 1 of AlpacaEval's 7 instructions"
    with pytest.raises(ConfigError, match=cut):
        alpacaeval.check(target(tmp_path), stage(reference=baseline(tmp_path, [*QUESTIONS, "1+" * 60])))
    endpoint.behave = lambda handler, question: handler.send(400, "{}") if question == QUESTIONS[2] else None
    own, out = {"reference": baseline(tmp_path)}, tmp_path / "out"
    with pytest.raises(StoppedError, match=r"the judge gpt-4.1: BadRequestError"):
        evaluate([target(out)], stage(**own), start())
    assert not (out / "alpacaeval.json").exists()
    outputs = json.loads((out / "alpacaeval" / "outputs.json").read_text())
    assert [o["instruction"] for o in outputs] == QUESTIONS
    assert {tuple(sorted(o)) for o in outputs} == {("dataset", "generator", "instruction", "output")}
    assert len({o["generator"] for o in outputs}) == 1
    assert all(o["output"].count(";") == 2 for o in outputs)  # the model's form, without special tokens
    endpoint.behave = Judge.behave
    monkeypatch.setattr("rollouts.answers.make_sampler", None)  # what was answered is not sampled again
    [found] = evaluate([target(out)], stage(**own), start())
    assert found.values["win_rate"] == pytest.approx(50)  # this judge knows scores alone
    assert found.values["n_total"] == 6
    written = json.loads((out / "alpacaeval.json").read_text())
    assert written["win_rate"] == pytest.approx(50) and written["settings"]["judge"]["model"] == "gpt-4.1"
    assert len((out / "alpacaeval.jsonl").read_text().splitlines()) == 6
    again = stage(annotations=str(out / "alpacaeval" / "annotations.json"))
    assert alpacaeval.evaluate(target(out), again, start()).values["win_rate"] == found.values["win_rate"]
    assert KEY not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
