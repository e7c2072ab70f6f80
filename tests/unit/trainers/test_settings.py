"""Checks of a loss's numbers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from contextlib import nullcontext

import pytest

from common.errors import ConfigError
from config import files
from tests.tiny import make_config
from trainers import settings


@pytest.mark.parametrize("future", ["from __future__ import annotations", ""])
def test_the_numbers_of_a_users_loss_are_typed_however_it_is_annotated(future):
    module: dict[str, object] = {}
    exec(f"{future}\ndef mine(scores, *, beta: float, kind: str | None = None): ...", module)
    signature = inspect.signature(module["mine"])
    config = make_config("loss=dpo")
    for numbers, message in (
        ({"beta": 0.1, "kind": "a"}, None),
        ({"beta": "0.1"}, "loss.beta=0.1: must be a number"),
        ({"beta": 0.1, "kind": 2}, "loss.kind=2: must be a text"),
        ({}, "loss.beta=???: loss=mine needs it"),
        ({"beta": 0.1, "tau": 1}, "loss.tau=1: loss=mine does not take it; it takes beta, kind"),
    ):
        loss = {"name": "mine", "_target_": "a.b"} | numbers
        with nullcontext() if message is None else pytest.raises(ConfigError, match=re.escape(message)):
            settings.check_numbers(dataclasses.replace(config, loss=loss), signature)


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
