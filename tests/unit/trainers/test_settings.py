"""Checks of a loss's numbers before torch is imported."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from common.errors import ConfigError
from config import files
from tests.tiny import make_config
from trainers import settings


def test_only_a_loss_whose_own_file_has_an_infinite_number_takes_one(tmp_path, monkeypatch):
    def bounded(*, beta: float, bound: float) -> None: ...

    config = make_config("loss=dpo")
    loss = {"name": "mine", "_target_": "a.b", "beta": 0.1, "bound": float("inf")}
    config = dataclasses.replace(config, loss=loss)
    (tmp_path / "loss").mkdir()
    file = tmp_path / "loss" / "mine.yaml"
    for module in (files, settings):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    for text, refused in (("{bound: .inf}", False), ("{bound: 2.0}", True)):
        files.section.cache_clear()
        file.write_text(f"loss: {text}\n")
        if refused:
            with pytest.raises(ConfigError, match=r"^loss\.bound=inf: must be finite$"):
                settings.check_numbers(config, inspect.signature(bounded))
        else:
            settings.check_numbers(config, inspect.signature(bounded))
    files.section.cache_clear()
