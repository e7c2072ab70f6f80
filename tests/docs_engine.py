"""Speaks the vLLM worker's protocol without vLLM: an answer is the prompt's last token, and its end."""

from __future__ import annotations

from common.worker_process import serve
from rollouts.vllm_messages import Generated, GenerateRequest
from tests.fake_engine import FakeEngine


class ShortEngine(FakeEngine):
    def generate(self, requests: list[GenerateRequest]) -> tuple[str, list[Generated]]:
        return self.version, [
            Generated((each.prompt[-1], each.stop_token_ids[0]), True, (-0.5, -0.5)) for each in requests
        ]


if __name__ == "__main__":
    serve(ShortEngine().handlers())
