"""Speaks the vLLM worker's protocol without vLLM. A sample is (the prompt's tokens, the seed's last digits,
the process)."""

import os
from collections.abc import Callable
from typing import Any

from common.worker_process import serve
from rollouts.vllm.messages import EngineOptions, Generated, GenerateRequest, TokenRow


class FakeEngine:
    def __init__(self) -> None:
        self.version = ""
        self.weights: dict[str, bytes] = {}
        self.connected = False

    def start(self, options: EngineOptions, folder: str | None, version: str) -> tuple[str, None]:
        return (self.version, None) if folder is None else self.load(folder, version)

    def load(self, folder: str, version: str) -> tuple[str, None]:
        if folder.endswith("broken"):
            raise FileNotFoundError(folder)
        self.version = self.version if folder.endswith("ignored") else version
        return version, None

    def needs_head(self) -> tuple[str, bool]:
        return self.version, True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> tuple[str, None]:
        self.connected = True
        return self.version, None

    def start_weight_update(self) -> tuple[str, None]:
        if not self.connected:
            raise RuntimeError("weight transfer not initialized")
        self.version, self.weights = "", {}
        return self.version, None

    def update_weights(self, info: dict[str, Any]) -> tuple[str, None]:
        if info["lost"]:
            raise FileNotFoundError("No such file")
        self.weights[info["name"]] = info["content"]
        return self.version, None

    def finish_weight_update(self, version: str) -> tuple[str, None]:
        self.version = version
        return self.version, None

    def sleep(self) -> tuple[str, None]:
        self.version = ""
        return self.version, None

    def generate(self, requests: list[GenerateRequest]) -> tuple[str, list[Generated]]:
        return self.version, [
            Generated((*one.prompt, one.seed % 1000, os.getpid()), True, (-0.5,)) for one in requests
        ]

    def logprobs(self, rows: list[TokenRow]) -> tuple[str, list[list[float]]]:
        return self.version, [[-float(token) for token in row[1:]] for row in rows]

    def handlers(self) -> dict[str, Callable[..., Any]]:
        names = [name for name in dir(self) if not name.startswith("_") and name != "handlers"]
        return {name: method for name in names if callable(method := getattr(self, name))}


if __name__ == "__main__":
    serve(FakeEngine().handlers())
