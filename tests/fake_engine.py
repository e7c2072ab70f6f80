"""Speaks the vLLM worker's protocol without vLLM. A sample is (the prompt's tokens, the seed's last digits,
the version, the process)."""

import os

from common.worker_process import serve
from rollouts.vllm_messages import EngineOptions, Generated, GenerateRequest, TokenRow


class FakeEngine:
    def __init__(self) -> None:
        self.version: int | None = None

    def start(self, options: EngineOptions, folder: str, version: int) -> tuple[int | None, None]:
        return self.load(folder, version)

    def load(self, folder: str, version: int) -> tuple[int | None, None]:
        if folder.endswith("broken"):
            raise FileNotFoundError(folder)
        self.version = self.version if folder.endswith("ignored") else version
        return version, None

    def sleep(self) -> tuple[None, None]:
        self.version = None
        return None, None

    def generate(self, requests: list[GenerateRequest]) -> tuple[int | None, list[Generated]]:
        return self.version, [
            Generated((*each.prompt, each.seed % 1000, os.getpid()), True, (-0.5,)) for each in requests
        ]

    def logprobs(self, rows: list[TokenRow]) -> tuple[int | None, list[list[float]]]:
        return self.version, [[-float(token) for token in row[1:]] for row in rows]


if __name__ == "__main__":
    engine = FakeEngine()
    serve(
        {
            "start": engine.start,
            "load": engine.load,
            "sleep": engine.sleep,
            "generate": engine.generate,
            "logprobs": engine.logprobs,
        }
    )
