"""A way from memory to memory where vLLM's ``ipc`` would be, for engines that only pretend to be."""

from __future__ import annotations

import pytest

from data.chat import Renderer
from data.types import Prompt, Turn
from rollouts.vllm import handover
from rollouts.vllm.transfer import Client, WeightSource
from tests.tiny_tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer("llama3")
RENDERER = Renderer(TOKENIZER, max_length=64, max_prompt_length=48, template=TOKENIZER.chat_template)
PROMPTS = [Prompt((Turn("user", text),)) for text in "abcde"]


class FakeTransfer:
    """Sends each weight's bytes as the engine is asked to take them."""

    lost = False
    """whether the engine does not find them, as memory of another container"""

    def __init__(
        self, backend: str, client: Client, source: WeightSource, rank: int, workers: int, largest: int
    ):
        self.client, self.source, self.sends = client, source, rank == 0
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        for name, tensor in self.source:
            if self.sends:
                content = tensor.detach().cpu().contiguous().numpy().tobytes()
                self.client.update_weights({"name": name, "content": content, "lost": self.lost})
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


def use_fake_transfer(patch: pytest.MonkeyPatch) -> None:
    """From now on ``auto`` is ``ipc``, which is the fake."""
    patch.setattr(handover, "make_transfer", FakeTransfer)
    chosen = lambda config, device: config.weight_transfer.replace("auto", "ipc")  # noqa: E731
    patch.setattr(handover, "chosen", chosen)
