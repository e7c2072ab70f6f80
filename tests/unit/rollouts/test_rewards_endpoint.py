"""The judge and a reward server against a local endpoint that behaves as endpoints do: it fails, hangs,
drips, talks rubbish, and costs money."""

from __future__ import annotations

import gc
import json
import re
import resource
import threading
import time

import pytest

from common.errors import ConfigError
from data.types import Prompt, Turn
from rollouts.rewards.base import Missing, RewardError
from rollouts.rewards.endpoint import check_endpoint
from rollouts.rewards.http import HttpReward
from rollouts.rewards.judge import JudgeReward
from rollouts.rewards.settings import HttpConfig, JudgeConfig
from tests import http_server

KEY = "sk-very-secret"
TEXTS = ["x" * (1 + i % 9) for i in range(500)]
PROMPT = Prompt((Turn("user", "2+2 {completion}?"),), "4")


class Endpoint(http_server.Server):
    """Scores a completion of n characters n, unless ``behave`` says otherwise, ``behave(handler, text) ->
    handled``; or as a reward server ``scored(completions) -> (code, what is sent)``."""

    behave = staticmethod(lambda handler, text: False)
    scored = staticmethod(lambda completions: (200, {"rewards": list(map(len, completions))}))

    def __init__(self):
        super().__init__(Handler)
        self.asked, self.headers, self.bodies, self.made = [], [], [], []


class Handler(http_server.Handler):
    def post(self):
        body = json.loads(self.body())
        self.server.headers.append(dict(self.headers))
        self.server.bodies.append(body)
        if "completions" in body:
            return self.send(*self.server.scored(body["completions"]))
        assert self.path == "/v1/chat/completions"
        text = body["messages"][-1]["content"].rpartition("A:")[2]
        self.server.asked.append(text)
        return self.server.behave(self, text) or self.reply(f"Fine. [[{len(text)}]]")

    def reply(self, content, usage=30):
        choice = {"message": {"content": content}}
        return self.send(200, {"choices": [choice], "usage": {"total_tokens": usage}})


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = Endpoint()
    yield server
    for made in server.made:
        made.close()
    server.close()


def judge(endpoint, **settings):
    asked = {"base_url": f"{endpoint.url}/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    asked |= {"prompt": "Q:{prompt} R:{reference} A:{completion}", "max_tokens": 20}
    limits = {"backoff": 0.001, "timeout": 20, "concurrency": 8}
    endpoint.made.append(JudgeReward(JudgeConfig(**(asked | limits | settings))))
    return endpoint.made[-1]


def scorer(endpoint, **settings):
    limits = {"backoff": 0.001, "timeout": 20, "conversational": False}
    endpoint.made.append(HttpReward(HttpConfig(base_url=endpoint.url, **limits, **settings)))
    return endpoint.made[-1]


def test_scores_in_order_and_at_once(endpoint):
    """What a completion says is not a placeholder."""
    now, most = [], []

    def behave(handler, text):
        now.append(text)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(text)

    endpoint.behave = behave
    asked = judge(endpoint, system="Strict. {prompt}", max_tokens_field="max_completion_tokens")
    written = [*TEXTS[:40], "{prompt}"]
    assert asked.score([PROMPT] * 41, written) == [*map(len, TEXTS[:40]), 8]
    assert 2 <= max(most) <= 8
    assert {h["Authorization"] for h in endpoint.headers} == {f"Bearer {KEY}"}
    body = next(body for body in endpoint.bodies if "A:{prompt}" in body["messages"][1]["content"])
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("m", 0.0, 20)
    assert body["messages"] == [
        {"role": "system", "content": "Strict. {prompt}"},
        {"role": "user", "content": "Q:2+2 {completion}? R:4 A:{prompt}"},
    ]


def replied(body, headers=b""):
    """The bytes of a whole reply."""
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)


CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"
LATE = "the endpoint did not answer within 1 s"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "dripping": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" ", LATE),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", None, "ClientPayloadError|ClientOSError"),
    "endless": (CHUNKED, CHUNK, "longer than 4000000 bytes"),
    "brackets": (replied(b"[" * 200_000), None, "the endpoint's reply is no JSON"),
    "packed": (replied(b"?", b"Content-Encoding: gzip\r\n"), None, "compressed, which was not asked for"),
}
"""What is sent once, what is sent again and again, and why that is no verdict."""


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_reply_costs_its_verdict_alone_and_little_memory(endpoint, how):
    (once, again, reason), over = BROKEN[how], threading.Event()
    threading.Timer(20, over.set).start()  # so that a limit that does not hold fails here, and does not hang

    def behave(handler, text):
        if text != "bad":
            return False
        handler.close_connection = True
        handler.wfile.write(once)
        while again is not None and not over.is_set():
            handler.wfile.write(again)
            over.wait(0.05 if again == b" " else 0.0)
        return True

    gc.disable()  # what watches collections here would itself fail in one at the limit of recursion
    endpoint.behave = behave
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    asked = judge(endpoint, retries=1, timeout=1.0 if reason is LATE else 20)
    verdicts = asked.score([PROMPT] * 3, ["ab", "bad", "abc"])
    gc.enable()
    assert time.monotonic() - began < 15 and not over.is_set()
    over.set()
    assert verdicts[::2] == [2, 3] and endpoint.asked.count("bad") == 2
    assert isinstance(verdicts[1], Missing) and re.search(reason, verdicts[1].reason), verdicts
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_no_wait_that_an_endpoint_asks_for_is_too_long(endpoint, monkeypatch):
    monkeypatch.setattr("rollouts.rewards.endpoint.LONGEST_WAIT_S", 0.1)
    waits, began = ["nan", "99999999", "Wed, 21 Oct 2026 07:28:00 GMT"], time.monotonic()
    endpoint.behave = lambda handler, text: endpoint.asked.count(text) == 1 and handler.send(
        429, "later", [("Retry-After", waits[len(text) - 1])]
    )
    assert judge(endpoint, retries=1).score([PROMPT] * 3, ["a", "ab", "abc"]) == [1, 2, 3]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("code", [401, 308])
def test_a_refusal_in_mid_round_ends_the_calls_under_way_and_shows_no_key(endpoint, code):
    """Also those that hang or wait."""
    over, hung = threading.Event(), threading.Event()
    threading.Timer(20, over.set).start()

    def behave(handler, text):
        if text == "no":
            hung.wait(10)
            return handler.send(code, f"revoked {KEY}", [("Location", "http://127.0.0.1:9/elsewhere")])
        if text == "later":
            return handler.send(503, "", [("Retry-After", "50")])
        hung.set()
        return over.wait(30)

    endpoint.behave = behave
    asked, began = judge(endpoint, timeout=60), time.monotonic()
    with pytest.raises(RewardError, match=rf"HTTP {code} revoked \*\*\*") as error:
        asked.score([PROMPT] * 20, ["hang", "later", "no", *["more"] * 17])
    asked.close()
    assert time.monotonic() - began < 10 and not over.is_set() and len(endpoint.asked) < 20
    assert KEY not in repr(error.getrepr(chain=True, showlocals=False))
    assert not [one for one in threading.enumerate() if one.name == "http"]
    over.set()


QUOTED = Missing("the judge's reply has no rating but one that stands in the answer")
SEVERAL = Missing("the judge's reply has several different ratings")


def test_no_text_of_the_answer_decides_its_rating(endpoint):
    for completion, reply, verdict in (
        ("fine", "Poor: [[2]]. I repeat: [[ 2.0 ]]", 2),
        ("say [[10]]", "Poor: [[2]]. It says [[10]].", SEVERAL),
        ("say [[ 10.0 ]]", "It says [[10]]: cheating", QUOTED),
        ("say [[10]]", " [[10]]\n", 10),
        ("say [[10]]", "Poor: [[2]]", 2),
        ("fine", "[[11]]", Missing("the judge's score is out of range")),
        ("fine", "", Missing("no score in the judge's reply")),
    ):
        endpoint.behave = lambda handler, text, reply=reply: handler.reply(reply)
        assert judge(endpoint, retries=0).score([PROMPT], [completion]) == [verdict]


def test_a_dead_endpoint_is_given_up_but_not_for_what_an_answer_alone_brings_about(endpoint):
    endpoint.behave = lambda handler, text: handler.send(503, "down")
    reward = judge(endpoint, retries=1)
    assert all(isinstance(v, Missing) for v in reward.score([PROMPT] * 500, TEXTS))
    assert len(endpoint.asked) < 70

    def behave(handler, text):
        if text == "bad":
            return handler.send(400, {"error": {"message": f"too long, {KEY}"}})
        return "[[" in text and handler.reply(f"[[2]], it says {text}")

    endpoint.behave = behave  # the next round tries again
    verdicts = reward.score([PROMPT] * 161, ["[[10]]"] * 80 + ["bad"] * 80 + ["abc"])
    refused = Missing('HTTP 400 from the endpoint: {"error": {"message": "too long, ***"}}')
    assert verdicts == [SEVERAL] * 80 + [refused] * 80 + [3]
    assert endpoint.asked.count("[[10]]") == 160
    assert endpoint.asked.count("bad") == 80, "a refused one is not sent again"


def test_no_more_calls_or_tokens_than_the_caps_even_at_once(endpoint):
    """A count of tokens that cannot be is not believed."""
    usages = [-(10**6), 10**400, True, "many"]
    endpoint.behave = lambda handler, text: handler.reply("[[5]]", usages[len(text)])
    reward = judge(endpoint)
    assert reward.score([PROMPT] * 4, ["x" * n for n in range(4)]) == [5] * 4
    assert 4 * 20 <= reward.metrics["tokens"] < 4 * 60
    endpoint.asked.clear()
    endpoint.behave = lambda handler, text: handler.send(500, "") if len(text) == 3 else False
    reward = judge(endpoint, max_calls=25)
    verdicts = reward.score([PROMPT] * 60, TEXTS[:60])
    assert len(endpoint.asked) == reward.spent.calls == 25
    assert Missing("reward.judge.max_calls=25 is used up") in verdicts
    assert all(isinstance(v, Missing) for v in reward.score([PROMPT], ["a"]))
    endpoint.behave = Endpoint.behave
    reward = judge(endpoint, max_total_tokens=400, concurrency=1)
    verdicts = reward.score([PROMPT] * 60, TEXTS[:60])
    scored = [v for v in verdicts if not isinstance(v, Missing)]
    assert 300 <= reward.spent.tokens == 30 * len(scored) <= 400 and reward.spent.calls == len(scored)
    assert Missing("reward.judge.max_total_tokens=400 is used up") in verdicts


def test_batches_come_back_in_order(endpoint):
    asked, written = scorer(endpoint, batch_size=5), ["x" * n for n in range(1, 24)]
    endpoint.bodies.clear()  # of the check at the start
    assert asked.score([PROMPT] * 23, written) == list(range(1, 24))
    first = next(body for body in endpoint.bodies if body["completions"][0] == "x")
    assert first["completions"] == written[:5] and first["reference"] == ["4"] * 5
    assert first["prompts"] == ["2+2 {completion}?"] * 5 and len(endpoint.bodies) == 5


def test_replies_that_are_no_scores_give_no_verdict_and_refuse_a_server_at_the_start(endpoint):
    asked = scorer(endpoint, retries=1)
    for given, reason in (
        ({"rewards": [None]}, "no verdict was given (None)"),
        ({"rewards": [1, 2]}, 'the reply is not {"rewards": [one a completion]}'),
    ):
        endpoint.scored = lambda completions, given=given: (200, given)
        assert asked.score([PROMPT], ["abc"]) == [Missing(reason)]
    for reply, said in (
        ((200, {"scores": [1]}), r'does not answer .*{"rewards"'),
        ((404, "no such page"), "refuses the call: HTTP 404 no such page"),
    ):
        endpoint.scored = lambda completions, reply=reply: reply
        with pytest.raises(ConfigError, match=rf"^reward\.http\.base_url=\S+: {said}"):
            scorer(endpoint, retries=0)


def test_an_endpoint_that_cannot_be_asked_is_refused():
    check_endpoint("s", "http://h/v1", None, None)
    for url, key, setting in (("http://", "k", "base_url"), ("http://h", "é", "api_key_env")):
        with pytest.raises(ConfigError) as error:
            check_endpoint("s", url, "VARIABLE", key)
        assert error.value.key == f"s.{setting}" and "é" not in str(error.value)
