"""Speaks the vLLM worker's protocol without vLLM: an answer is the prompt's last token, and its end."""

from __future__ import annotations

from common.worker_process import serve
from rollouts.vllm_messages import Drawn, DrawRequest
from tests.unit.rollouts.fake_engine import FakeEngine


class ShortEngine(FakeEngine):
    def draw(self, requests: list[DrawRequest]) -> tuple[int | None, list[Drawn]]:
        return self.version, [
            Drawn((each.prompt[-1], each.stop_token_ids[0]), True, (-0.5, -0.5)) for each in requests
        ]


if __name__ == "__main__":
    engine = ShortEngine()
    serve(
        {
            "start": engine.start,
            "load": engine.load,
            "sleep": engine.sleep,
            "draw": engine.draw,
            "logprobs": engine.logprobs,
        }
    )
