"""Uploading to the hub: what its client is given, and what a refusal costs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi, constants

from config.cli import compose
from export import main as export_main
from train import train

TOKEN = "hf_" + "t" * 20


class Hub:
    """Stands behind the hub's client, which is called as the real one or fails."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.client = create_autospec(HfApi, instance=True)
        self.client.create_repo.side_effect = self._create
        self.client.upload_folder.side_effect = self._upload

    def _create(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.private.setdefault(repo_id, private)

    def _upload(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.files[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.messages.append(commit_message)
        return SimpleNamespace(repo_url=f"https://hub.test/{repo_id}")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub.client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def run(tmp_path) -> Path:
    words = ("loss=dpo", "n_examples=4", "model.batch_size=2", "n_eval_examples=4", "data.verifier=null")
    folder = tmp_path / "my runs"
    places = (f"runs_dir='{folder}'", f"cache_dir='{folder}/cache'", "diagnostics=false", "report=false")
    config, _ = compose(*words, *places, "wandb.enabled=false")
    train(config, "run")
    return folder / "run"


def test_the_model_goes_up_private_with_its_card(run, hub, capsys):
    export_main([str(run), "--push-to-hub", "org/name"])
    sent = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert hub.files == {"org/name": sent} and hub.private == {"org/name": True}
    assert b"Trained with the humanline framework" in sent["README.md"] and "model.safetensors" in sent
    assert hub.messages[0].startswith("Trained with humanline")
    assert "https://hub.test/org/name" in capsys.readouterr().out
    export_main([str(run), "--push-to-hub", "org/open", "--public"])
    assert hub.private["org/open"] is False


def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(run, hub, capsys, monkeypatch):
    def refused(repository: str) -> str:
        with pytest.raises(SystemExit) as ended:
            export_main([str(run), "--push-to-hub", repository])
        assert ended.value.code and hub.files == {}
        return capsys.readouterr().err

    hub.client.create_repo.side_effect = ConnectionError(f"You may not write here with {TOKEN}")
    said = refused("org/name")
    assert "could not be uploaded to org/name" in said and "You may not write here" in said
    assert TOKEN not in said
    shutil.rmtree(run / "model")
    assert "--push-to-hub=name: names no owner: write it as org/name" in refused("name")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "needs a token that may write: `hf auth login`" in refused("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "with HF_HUB_OFFLINE=1: unset it" in refused("org/name")
    assert not (run / "model").exists(), "nothing is exported for a push that cannot be"
