"""A way from memory to memory where vLLM's ``ipc`` would be, for engines that only pretend to be."""

from __future__ import annotations

import pytest

from models.distributed import World
from rollouts.vllm import sampler as vllm_sampler
from rollouts.vllm.transfer import Client, WeightSource


class FakeTransfer:
    """Sends each weight's bytes as the engine is asked to take them."""

    lost = False
    """whether the engine does not find them, as memory of another container"""

    def __init__(self, backend: str, client: Client, source: WeightSource, world: World, workers: int):
        self.client, self.source, self.world = client, source, world
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        for name, tensor in self.source:
            if self.world.is_main:
                content = tensor.detach().cpu().contiguous().numpy().tobytes()
                self.client.update_weights({"name": name, "content": content, "lost": self.lost})
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


def use_fake_transfer(patch: pytest.MonkeyPatch) -> None:
    """From now on ``auto`` is ``ipc``, which is the fake."""
    patch.setattr(vllm_sampler, "make_transfer", FakeTransfer)
    chosen = lambda config, device: config.weight_transfer.replace("auto", "ipc")  # noqa: E731
    patch.setattr(vllm_sampler, "chosen", chosen)
