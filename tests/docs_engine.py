"""Speaks the vLLM worker's protocol without vLLM: an answer is the prompt's last token, and its end."""

from __future__ import annotations

from collections.abc import Generator

from common.worker_process import serve
from rollouts.vllm.messages import Generated, GenerateRequest
from tests.fake_engine import FakeEngine


class ShortEngine(FakeEngine):
    def generate(
        self, requests: list[GenerateRequest]
    ) -> Generator[list[tuple[int, Generated]], None, tuple[str, None]]:
        yield [
            (i, Generated((each.prompt[-1], each.stop_token_ids[0]), True, (-0.5, -0.5)))
            for i, each in enumerate(requests)
        ]
        return self.version, None


if __name__ == "__main__":
    serve(ShortEngine().handlers())
