"""A reward server: what it is sent, and what its replies are worth."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from config.schema_rewards import HttpConfig
from data.types import Prompt, Turn
from rollouts.rewards.base import Missing, make_reward
from rollouts.rewards.http import HttpReward
from tests import http_server
from tests.tiny import reward_of

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
    found = reward(server, batch_size=5).score([PROMPT] * 23, texts)
    assert found == [float(n) for n in range(1, 24)]
    assert {path for path, _ in server.bodies} == {"/score"}
    first = next(body for _, body in server.bodies if text(body["completions"][0]) == "x")
    assert first["prompts"][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    ]
    assert first["reference"] == ["4"] * 5 and len(first["completions"]) == 5


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"rewards": [None]}, Missing("the reward server gave null")),
        ({"rewards": [True]}, Missing("the reward server gave something that is no number")),
        ({"rewards": ["3"]}, Missing("the reward server gave something that is no number")),
        ('{"rewards": [' + "9" * 400 + "]}", Missing("the reward server gave an integer beyond every float")),
        ({"rewards": [1, 2]}, Missing('the reply is not {"rewards": [one a completion]}')),
        ([1], Missing('the reply is not {"rewards": [one a completion]}')),
    ],
)
def test_replies_that_are_none(server, given, found):
    asked = reward(server, retries=1)
    server.reply = lambda body: (200, given)
    assert asked.score([PROMPT], ["abc"]) == [found]


def test_a_number_that_is_not_finite_is_no_verdict(server):
    settings = HttpConfig(base_url=server.url, retries=0)
    checked = make_reward(reward_of("http", settings, max_missing=1.0))
    server.reply = lambda body: (200, '{"rewards": [NaN, 2, 1e999, -Infinity]}')
    assert checked.score([PROMPT] * 4, ["a", "b", "c", "d"]) == [None, 2.0, None, None]
    checked.close()


def test_a_server_that_cannot_score_is_refused_at_the_start(server):
    server.reply = lambda body: (200, {"scores": [1]})
    with pytest.raises(ConfigError, match=r'reward.http.base_url=.*does not answer .*{"rewards"'):
        reward(server, retries=0)
    server.reply = lambda body: (404, "no such page")
    with pytest.raises(ConfigError, match=r"base_url=\S+: refuses the call: HTTP 404 no such page"):
        reward(server)
