"""Speaks the vLLM worker's protocol without vLLM: a sample is one token and its end, and there is one more
every tenth of a second, the last ones first."""

from __future__ import annotations

import time
from collections.abc import Generator

from common.worker_process import serve
from rollouts.vllm.messages import Generated, GenerateRequest
from tests.fake_engine import FakeEngine


class SlowEngine(FakeEngine):
    def generate(
        self, requests: list[GenerateRequest]
    ) -> Generator[list[tuple[int, Generated]], None, tuple[str, None]]:
        for i in reversed(range(len(requests))):
            time.sleep(0.1)
            tokens = (10 + requests[i].seed % 20, requests[i].stop_token_ids[0])
            yield [(i, Generated(tokens, True, (-0.5, -0.5)))]
        return self.version, None


if __name__ == "__main__":
    serve(SlowEngine().handlers())
