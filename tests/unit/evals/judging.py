"""A judge on this machine that speaks the OpenAI protocol, and AlpacaEval files to judge. The texts are
``score=1.25``: the judge prefers the higher one with the probability sigmoid(difference), whichever it is
shown first, and says so in log-probabilities of m and M."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter

from tests import http_server

SCORE = re.compile(r'"output": """score=(-?[\d.]+)"""')


class Judge(http_server.Server):
    """``behave(handler, instruction) -> handled`` lets a test answer in its place."""

    behave = staticmethod(lambda handler, instruction: False)

    def __init__(self):
        super().__init__(_Handler)
        self.asked, self.firsts, self.keys, self.bodies = Counter(), Counter(), set(), []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"{super().url}/v1"


class _Handler(http_server.Handler):
    def post(self):
        server, body = self.server, json.loads(self.body())
        prompt = body["messages"][-1]["content"]
        instruction = re.search(r'"instruction": """(.*?)"""', prompt, re.DOTALL)[1]
        first, second = map(float, SCORE.findall(prompt)) if SCORE.search(prompt) else (0.0, 0.0)
        with server.lock:
            server.asked[instruction] += 1
            server.firsts[first > second] += 1
            server.keys.add(self.headers["Authorization"])
            server.bodies.append(body)
        try:
            if not server.behave(self, instruction):
                self.reply(
                    {"m": -math.log1p(math.exp(second - first)), "M": -math.log1p(math.exp(first - second))}
                )
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def reply(self, logprobs):
        """Say the likelier of the words; ``logprobs``: word -> log-probability."""
        top = [{"token": word, "logprob": value, "bytes": None} for word, value in logprobs.items()]
        content = {"content": [top[0] | {"top_logprobs": top}]}
        message = {"role": "assistant", "content": max(logprobs, key=logprobs.get)}
        choice = {"index": 0, "finish_reason": "length", "message": message, "logprobs": content}
        made = {"id": "1", "object": "chat.completion", "created": 1, "model": "x", "choices": [choice]}
        tokens = {"prompt_tokens": 99, "completion_tokens": 1, "total_tokens": 100}
        return self.send(200, made | {"usage": tokens})


def answers(scores, generator):
    of = {"generator": generator, "dataset": "made"}
    return [{"instruction": f"question {i}", "output": f"score={x}"} | of for i, x in enumerate(scores)]
