"""A reward server: what it is sent, and what its replies are worth; and the client under it. What endpoints
do to judges is in the tests of those."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from config.schema_rewards import HttpConfig
from data.types import Prompt, Turn
from rollouts.rewards.base import Missing
from rollouts.rewards.endpoint import check_endpoint
from rollouts.rewards.http import HttpReward
from tests import http_server

PROMPT = Prompt((Turn("system", "Be brief."), Turn("user", "2+2?")), "4")


class Server(http_server.Server):
    """Rewards a completion with its length. ``reply(body) -> (code, what is sent)`` says otherwise."""

    def __init__(self):
        super().__init__(Handler)
        self.bodies, self.made = [], []
        self.reply = lambda body: (200, {"rewards": [len(text(c)) for c in body["completions"]]})


def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


class Handler(http_server.Handler):
    def post(self):
        body = json.loads(self.body())
        self.server.bodies.append((self.path, body))
        self.send(*self.server.reply(body))


@pytest.fixture
def server():
    found = Server()
    yield found
    for one in found.made:
        one.close()
    found.close()


def reward(server, **settings):
    server.made.append(
        HttpReward(
            HttpConfig(**{"base_url": f"{server.url}/score", "backoff": 0.001, "timeout": 5} | settings)
        )
    )
    return server.made[-1]


def test_batches_come_back_in_order(server):
    texts = ["x" * n for n in range(1, 24)]
    assert reward(server, batch_size=5).score([PROMPT] * 23, texts) == [float(n) for n in range(1, 24)]
    assert {path for path, _ in server.bodies} == {"/score"}
    first = next(body for _, body in server.bodies if text(body["completions"][0]) == "x")
    turns = [{"role": turn.role, "content": turn.content} for turn in PROMPT.turns]
    assert first["prompts"] == [turns] * 5 and first["reference"] == ["4"] * 5
    assert len(first["completions"]) == 5


NO_LIST = 'the reply is not {"rewards": [one a completion]}'


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rewards": [None]}, "no verdict was given (None)"),
        ({"rewards": ["3"]}, "'3' was given, not a number"),
        ('{"rewards": [' + "9" * 400 + "]}", "int was given, not a number"),
        ({"rewards": [1, 2]}, NO_LIST),
        ([1], NO_LIST),
    ],
)
def test_replies_that_are_none(server, given, reason):
    asked = reward(server, retries=1)
    server.reply = lambda body: (200, given)
    assert asked.score([PROMPT], ["abc"]) == [Missing(reason)]


def test_a_server_that_cannot_score_is_refused_at_the_start(server):
    server.reply = lambda body: (200, {"scores": [1]})
    with pytest.raises(ConfigError, match=r'reward.http.base_url=.*does not answer .*{"rewards"'):
        reward(server, retries=0)
    server.reply = lambda body: (404, "no such page")
    with pytest.raises(ConfigError, match=r"base_url=\S+: refuses the call: HTTP 404 no such page"):
        reward(server)


# -- the client ------------------------------------------------------------------------------------


def test_a_proxy_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "elsewhere.invalid:1")
    assert reward(server, base_url="http://no.such.host.invalid").score([PROMPT], ["abc"]) == [3]
    with pytest.raises(ConfigError, match="Client"):
        reward(server, base_url="http://elsewhere.invalid:1", retries=0)


@pytest.mark.parametrize(
    ("url", "key", "setting"),
    [("http://", "k", "base_url"), ("http://h:port", "k", "base_url"), ("http://h", "é", "api_key_env")],
)
def test_an_endpoint_that_cannot_be_asked_is_refused(url, key, setting):
    check_endpoint("s", "http://h/v1", None, None)
    with pytest.raises(ConfigError) as error:
        check_endpoint("s", url, "VARIABLE", key)
    assert error.value.key == f"s.{setting}" and "é" not in str(error.value)
